"""Choose which products the kernels compute, from the time of each: what makes a session shortest.

A type of weights has one packed layout for calls of all sizes, so that a few per cent at one token must be
weighed against a multiple at eight. This module has no measurements of its own: `measure` makes them, and
the tests replay those of other processors.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from spec_local.system.json_file import JsonRecord

PACKED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
)
"""Types whose layout is the kernels' own: they are used for all sizes of calls or for none."""
FLOATS = ("F16", "BF16", "F32")
"""Types that are read as they are in the file: the kernels are used up to some number of tokens."""

_GENERATING = (1, 2, 3, 4, 6, 8, 16)
SIZES = (*_GENERATING, 64, 512)
"""Tokens of the calls that must be known of a packed type; the largest stands for prompts."""
FLOAT_SIZES = (*_GENERATING, 24, 32, 48, 64)
"""The same of floating-point types. Larger calls, and so prompts, are always left to llama.cpp."""
MOST_FLOAT_TOKENS = FLOAT_SIZES[-1]

# Tokens that one call of the main model generates, for calls of `_GENERATING` tokens of which all but one are
# drafted: the recorded answers of traces.json, six of each kind (benchmarks/processors.py --session).
_TOKENS_PER_CALL = {
    "chat": (1, 1.64, 2.06, 2.31, 2.61, 2.72, 2.82),
    "code writing": (1, 1.88, 2.63, 3.38, 4.44, 5.41, 7.31),
    "code editing": (1, 1.97, 2.92, 3.82, 5.61, 7.31, 13.24),
    "summarising": (1, 1.81, 2.44, 3.03, 3.71, 4.42, 5.42),
    "translation": (1, 1.62, 2.01, 2.29, 2.53, 2.66, 2.74),
    "extraction": (1, 1.95, 2.83, 3.62, 5.15, 6.30, 10.11),
    "maths": (1, 1.89, 2.65, 3.35, 4.49, 5.37, 7.18),
    "retrieval answer": (1, 1.90, 2.71, 3.39, 4.54, 5.33, 7.31),
}
_DRAFT_TOKEN = 0.2  # calls of one token of llama.cpp's main model that a draft token costs: a 0.5B for a 1.5B
_PLAIN = 0.25  # of the answers, for which nothing is drafted: no draft model, and nothing to look up
_PROMPT, _ANSWER = 270, 128  # mean tokens of the recorded prompts, and of an answer
# Each size is used a little, by several answers at the same time and by trees: of a session's time.
_OTHER_CALLS = 0.01
_NEARLY = 1.02  # times whose ratio is below this are equal: medians of repeated measurements differ so much
_SLOWER = 0.95  # speed at a size alone, beside llama.cpp's
_CLEARLY = 0.98  # of the time: medians of equal rounds of reading differ by as much
_Seconds = Annotated[float, Field(gt=1e-9, lt=86_400)]  # of one product: others are no measurements


class Times(JsonRecord):
    """Median seconds of products with one type of weights.

    sizes: tokens per call, ascending, at least `SIZES` or `FLOAT_SIZES`. kernels, llama_cpp: for each of
    them, with the kernels and with what llama.cpp uses without them, of the same matrices.
    """

    sizes: tuple[int, ...]
    kernels: tuple[_Seconds, ...]
    llama_cpp: tuple[_Seconds, ...]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not set(_GENERATING) <= set(self.sizes) or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("sizes are missing or not ascending")
        if not len(self.sizes) == len(self.kernels) == len(self.llama_cpp):
            raise ValueError("each size must have two times")
        return self

    def speed(self, n: int) -> float:
        """The kernels' speed in calls of n tokens, relative to llama.cpp's."""
        i = self.sizes.index(n)
        return self.llama_cpp[i] / self.kernels[i]

    def with_kernels_up_to(self, most: int | None) -> dict[int, float]:
        """Seconds by number of tokens if the kernels compute calls of at most so many; None: all calls."""
        both = zip(self.sizes, self.kernels, self.llama_cpp, strict=True)
        return {n: ours if most is None or n <= most else theirs for n, ours, theirs in both}


def session_time(times: Times, most: int | None) -> float:
    """Time of a session if the kernels compute calls of at most `most` tokens (None: all), else llama.cpp.

    A session reads prompts and generates answers of eight kinds, each with the best number of draft tokens
    for these times, and a quarter without any. Returns it relative to a session that llama.cpp computes.
    """
    unit = times.llama_cpp[0]
    seconds = {n: s / unit for n, s in times.with_kernels_up_to(most).items()}
    theirs = {n: s / unit for n, s in times.with_kernels_up_to(0).items()}
    others = sum(seconds[n] / theirs[n] for n in seconds) / len(seconds)
    return (1 - _OTHER_CALLS) * _session(seconds) / _session(theirs) + _OTHER_CALLS * others


def _session(seconds: Mapping[int, float]) -> float:
    """Time of a prompt and an answer, in calls of one token by llama.cpp."""
    drafted = [
        min(
            (seconds[n] + (n - 1) * _DRAFT_TOKEN) / generated
            for n, generated in zip(_GENERATING, kind, strict=True)
        )
        for kind in _TOKENS_PER_CALL.values()
    ]
    of_token = _PLAIN * seconds[1] + (1 - _PLAIN) * sum(drafted) / len(drafted)
    prompt = _PROMPT * seconds[512] / 512 if 512 in seconds else 0.0
    return prompt + _ANSWER * of_token


def most_tokens(name: str, times: Times) -> int | None:
    """The most tokens of a call for which the kernels compute products with a type; None: there is no limit.

    Without a limit, the kernels compute all calls with a packed type, and those of up to 64 tokens with a
    floating-point type. 0: all are left to llama.cpp. Where sessions take equally long, the kernels are used,
    since their results do not depend on the size of a call.
    """
    last = times.sizes[-1]
    candidates = (0, last) if name in PACKED else (0, *times.sizes)
    taken = {most: session_time(times, most) for most in candidates}
    chosen = [most for most in candidates if taken[most] < _NEARLY * min(taken.values())]
    if name in FLOATS:  # sizes that sessions hardly use may be slow without making a session slower
        while len(chosen) > 1 and times.speed(chosen[-1]) < _SLOWER:
            chosen.pop()
    return None if chosen[-1] == last else chosen[-1]


def limits(known: Mapping[str, Times]) -> dict[str, int]:
    """`most_tokens` of the types that have a limit."""
    chosen = {name: most_tokens(name, times) for name, times in known.items()}
    return {name: most for name, most in chosen.items() if most is not None}


class OtherReading(JsonRecord):
    """Time of products that read weights in the other way, relative to the first (`Native.read_as`)."""

    packed: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    floats: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    @property
    def chosen(self) -> tuple[int, int]:
        """The ways to use, of packed and of floating-point weights."""
        return int(self.packed < _CLEARLY), int(self.floats < _CLEARLY)


def is_clear(name: str, rounds: Sequence[Times]) -> bool:
    """Whether each round of a measurement alone would lead to the same choice."""
    return len({most_tokens(name, times) for times in rounds}) == 1


def describe(times: Times, most: int | None) -> str:
    """What was measured and chosen for a type, and what the choice is worth, in one line.

    Args:
        most: the choice (`most_tokens`).
    """
    speeds = [f"{times.speed(1):.2f} at one token", f"{times.speed(8):.2f} at eight"]
    if 512 in times.sizes:
        speeds.append(f"{times.speed(512):.2f} in prompts")
    whose = "llama.cpp's" if most == 0 else "specdec's" if most is None else f"specdec's up to {most} tokens"
    share = session_time(times, most)
    return f"{', '.join(speeds)}: {whose}, {share:.2f} of the time"
