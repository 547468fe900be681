"""Names of options: of the settings in messages, and what to do about an unknown one."""

import difflib
import re
from collections.abc import Callable, Iterable

_OF_OTHERS = {
    "context": "ctx",
    "ctx-size": "ctx",
    "draft-n": "draft-max",
    "grammar": "grammar-file",
    "max-new-tokens": "max-tokens",
    "model": "main",
    "model-draft": "draft",
    "n-gpu-layers": "gpu-layers",
    "n-predict": "max-tokens",
    "predict": "max-tokens",
    "system-prompt": "system",
    "temperature": "temp",
}
"""Names in llama.cpp and other programs."""
_SETTINGS = {"kind": "type", "n_ctx": "ctx", "target": "output"} | {
    name: name.replace("_", "-")
    for name in (
        "cache_type", "device", "disk", "draft", "draft_device", "force", "gpu_layers", "host", "kernels",
        "learn", "minutes", "mmproj", "no_spec", "output", "parallel", "port", "raw", "reproducible", "shape",
        "system", "tokens", "torch_device", "workers",
    )
}  # fmt: skip
"""Options of the settings that the library's messages name, in backquotes."""
_SETTING = re.compile(rf"`({'|'.join(_SETTINGS)})(?:=([^`]+))?`")
_CLOSE = 0.75  # similarity of a mistyped name (difflib's ratio): one letter in three is too far off
_AS_GOOD = 0.05  # difference of two similarities that says nothing
_BEGINNING = 0.85  # similarity of a name and its beginning, at least
_SHORTEST = 3  # letters of such a beginning
_N_MOST = 2


def with_options(message: str) -> str:
    """Return a message of the library as users of the command know it: --ctx for `n_ctx`, and so on."""
    return _SETTING.sub(lambda found: f"--{_SETTINGS[found[1]]} {found[2] or ''}".rstrip(), message)


def hint(name: str, known: Iterable[str], spelled: Callable[[str], str] = str) -> str:
    """Return what to do about an unknown name, such as "did you mean top-k?"; "" if no known name is close.

    Args:
        name: of an option without dashes, or of a command.
        spelled: spells a known name as the user has to type it.
    """
    known, name = list(known), name.replace("_", "-")
    if (new := _OF_OTHERS.get(name)) in known:
        return f"use {spelled(new)}"
    near = " or ".join(map(spelled, close(name, known)))
    return f"did you mean {near}?" if near else ""


def nearest(name: str, known: Iterable[str], spelled: Callable[[str], str] = str) -> str:
    """Return the hint in brackets, to append to an error about an unknown name; "" if there is none."""
    text = hint(name, known, spelled)
    return f" ({text})" if text else ""


def close(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that are most like a name: in their letters, or their beginning."""
    likeness = {each: _likeness(name, each) for each in known}
    least = max(_CLOSE, max(likeness.values(), default=0.0) - _AS_GOOD)
    found = [each for each in likeness if likeness[each] >= least]
    return sorted(found, key=lambda each: -likeness[each])[:_N_MOST]


def _likeness(name: str, known: str) -> float:
    ratio = difflib.SequenceMatcher(None, name, known).ratio()
    shorter, longer = sorted((name, known), key=len)
    is_beginning = len(shorter) >= _SHORTEST and longer.startswith(shorter)
    return max(ratio, _BEGINNING) if is_beginning else ratio
