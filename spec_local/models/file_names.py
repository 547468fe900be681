"""What the name of a GGUF file tells: its model, its quantization, and whether it is a projector.

Projectors are named as llama.cpp finds them: ``mmproj`` is somewhere in the name, as in ``mmproj-F16.gguf``,
``mmproj-gemma-3-4b-it-f16.gguf`` and ``gemma-3-4b-it.mmproj-Q8_0.gguf``.
"""

import re
from collections.abc import Iterable

QUANT = re.compile(r"(?<![A-Z0-9])(I?Q\d\w*|B?F16|F32|MXFP4\w*|TQ\d\w*)(?![A-Z0-9])", re.IGNORECASE)
"""The quantization in a file's name."""
HEAD = re.compile(r"(mtp|eagle3|dflash|dspark)-", re.IGNORECASE)
"""The beginning of the name of a head that is beside its main model, in the same quantizations."""
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""The end of the name of a part of a split model."""
SAME, ALIKE, ANY, OTHER = 3, 2, 1, 0
"""How a projector's name fits a main model's: the same; one begins like the other; no model; another."""
_PROJECTOR = re.compile(r"mmproj", re.IGNORECASE)
_NO_NAME = {"model", "vision", "gguf", "ud", "i1", "fp16"}  # words that do not tell models apart
_BEST = ("F16", "BF16", "F32", "Q8_0")  # of a projector: a quantized one sees worse, and saves little


def base_name(name: str) -> str:
    """A file name without the folders of its repository."""
    return name.rpartition("/")[2]


def letters(name: str) -> str:
    """The letters and digits of a name, in lower case: what names that differ otherwise have in common."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def is_projector(name: str) -> bool:
    """Return whether a file has the name of a projector."""
    return name.endswith(".gguf") and _PROJECTOR.search(base_name(name)) is not None


def series(name: str) -> str:
    """The model in a file's name, as letters and digits; "": it names none, as ``mmproj-model-f16.gguf``."""
    stem = PART.sub("", base_name(name)).removesuffix(".gguf")
    words = re.findall(r"[a-z0-9]+", QUANT.sub(" ", _PROJECTOR.sub(" ", stem)).lower())
    return "".join(word for word in words if word not in _NO_NAME)


def likeness(main: str, projector: str) -> int:
    """How well a projector's name fits that of a main model: SAME, ALIKE, ANY or OTHER."""
    mine, its = series(main), series(projector)
    if not its:
        return ANY
    if its == mine:
        return SAME
    return ALIKE if mine and (mine.startswith(its) or its.startswith(mine)) else OTHER


def depth(main: str, projector: str) -> int | None:
    """The number of folders that a projector shares with its main model; None: it is in another one."""
    mine, its = main.split("/")[:-1], projector.split("/")[:-1]
    return len(its) if mine[: len(its)] == its else None


def rank(quantization: str) -> int:
    """The place of a projector's quantization among those to prefer; 0 is the best."""
    return _BEST.index(quantization) if quantization in _BEST else len(_BEST)


def best_projector(names: Iterable[str], main: str) -> str | None:
    """Choose the projector for a main model among the files of its repository; None: it has none.

    As llama.cpp, this takes one in the main model's folder, or in one that contains it; of several, the one
    with its name, and then the first of F16, BF16, F32, Q8_0 and others.
    """
    found = []
    for name in filter(is_projector, names):
        if (shared := depth(main, name)) is not None:
            quant = (QUANT.findall(base_name(name)) or [""])[-1].upper()
            found.append((-likeness(main, name), -shared, rank(quant), name))
    return min(found)[-1] if found else None
