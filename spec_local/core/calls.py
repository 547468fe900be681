"""Model calls shared by several coroutines.

Reading the weights takes most of the time of a small call: what several requests need of a model is
therefore evaluated together. Code that needs a model's output is a coroutine that awaits a `Call`:

    logits = await sequence.call(tokens, n_logits=1)

`together` runs several such coroutines: it collects the calls that all of them await, makes one call of the
model, and resumes each with its logits. `run` runs one alone. There is no event loop.
"""

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from spec_local.errors import SpecLocalError

Logits = NDArray[np.float32]

_Sequence = TypeVar("_Sequence", covariant=True)
_Result = TypeVar("_Result")


@dataclass(slots=True)
class Call(Generic[_Sequence]):
    """A sequence's part of a model call. Create it with `ModelSequence.call`.

    Awaited, it gives its logits, or raises the error of the call. The logits are a view, which the next call
    of the same model overwrites: they are used before the next ``await``.

    Attributes:
        sequence: what evaluates the tokens; its context knows what kind of sequence it is.
        tokens: their ids. parents: of each as a node of the tree. n_logits: number of the last ones whose
            logits are wanted.
        positions: of each token; None: those after their parents'.
        appends: once awaited, the tokens are committed; else they remain nodes of the tree.
    """

    sequence: _Sequence
    tokens: Sequence[int]
    parents: Sequence[int]
    n_logits: int
    positions: Sequence[int] | None = None
    appends: bool = False

    def __await__(self) -> Generator["Call[_Sequence]", Logits, Logits]:
        logits = yield self
        if self.appends:
            self.sequence.commit(range(len(self.tokens)))  # type: ignore[attr-defined]
        return logits


class TimedCall(NamedTuple):
    """A model's call. part: whose, as in `Timer.parts`. n: tokens, of all requests that share it."""

    part: str
    n: int
    seconds: float


class Timer:
    """Divides time among parts: each `lap` adds what has passed since the last one.

    Args:
        clock: seconds.

    Attributes:
        parts: seconds by part, since `start`.
        calls: calls of models since `start`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.parts: dict[str, float] = defaultdict(float)
        self.calls: list[TimedCall] = []
        self._last = 0.0

    def start(self) -> None:
        """Reset all parts, and start timing."""
        self.parts.clear()
        self.calls = []
        self._last = self.clock()

    def lap(self, part: str, n: int = 0) -> None:
        """Add the time since the last lap, or the start, to a part; n: tokens, if it was a model's call."""
        now = self.clock()
        self.parts[part] += now - self._last
        if n:
            self.calls.append(TimedCall(part, n, now - self._last))
        self._last = now

    @property
    def seconds(self) -> float:
        """The time from the start to the last lap."""
        return sum(self.parts.values())


class Task(Generic[_Result]):
    """A coroutine, or a call, suspended at a model call.

    Attributes:
        call: the one that it awaits; None: it has ended.
    """

    def __init__(self, coroutine: Awaitable[_Result]) -> None:
        self._steps: Any = coroutine.__await__()
        self._results: list[_Result] = []
        self._error: Exception | None = None
        self.call: Call[Any] | None = None
        self.resume(None)

    def resume(self, answer: Logits | SpecLocalError | None) -> None:
        """Continue up to the next call, or the end.

        Args:
            answer: the logits of the call that it awaits, or the error of that call; None: begin.
        """
        self.call = None
        try:
            if isinstance(answer, SpecLocalError):
                self.call = self._steps.throw(answer)
            else:
                self.call = self._steps.send(answer)
        except StopIteration as end:
            self._results = [end.value]
        except Exception as error:
            self._error = error

    @property
    def outcome(self) -> _Result | Exception:
        """Its result or error; only after its end."""
        return self._error or self._results[0]

    def close(self) -> None:
        """Close the coroutine."""
        self._steps.close()
        self.call = None


def run(awaited: Awaitable[_Result]) -> _Result:
    """Run a coroutine, or a call, alone, and return its result."""
    (outcome,) = together([awaited])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def together(
    coroutines: Iterable[Awaitable[_Result]], timer: Timer | None = None
) -> list[_Result | Exception]:
    """Run coroutines of several requests: one call for all that await the same model.

    Args:
        coroutines: a generator may create each one right before it starts.
        timer: calls are recorded as ``draft model``, everything else as ``propose``.

    Returns:
        the result of each, or its error, which does not affect the others.
    """
    tasks: list[Task[_Result]] = []
    waiting: list[Task[_Result]] = []
    timer = timer or Timer()
    try:
        for coroutine in coroutines:
            tasks.append(task := Task(coroutine))
            if task.call:
                waiting.append(task)
        while waiting:
            # Logits are views: resume these tasks before the model's next call.
            group, waiting, calls, n_tokens = _that_fit(waiting)
            answers: Sequence[Logits | SpecLocalError]
            timer.lap("propose")
            try:
                answers = calls[0].sequence.context.decode(calls)
            except SpecLocalError as error:
                answers = [error] * len(group)
            timer.lap("draft model", n_tokens)
            for task, answer in zip(group, answers, strict=True):
                task.resume(answer)
                if task.call:
                    waiting.append(task)
    except BaseException:  # an interrupt, or an unexpected error of a call
        for task in tasks:
            task.close()
        raise
    timer.lap("propose")
    return [task.outcome for task in tasks]


def _that_fit(
    waiting: Sequence[Task[_Result]],
) -> tuple[list[Task[_Result]], list[Task[_Result]], list[Call[Any]], int]:
    """Split tasks into those whose calls can be made together with that of the first one, and the others.

    Returns:
        both, and the calls of the first ones with their number of tokens.
    """
    context, n_tokens, n_logits = None, 0, 0
    group: list[Task[_Result]] = []
    rest: list[Task[_Result]] = []
    calls: list[Call[Any]] = []
    for task in waiting:
        call = task.call
        assert call
        context = context or call.sequence.context
        fits = (
            call.sequence.context is context
            and n_tokens + len(call.tokens) <= context.max_tokens
            and n_logits + call.n_logits <= context.max_logits
        )
        if fits or not group:
            group.append(task)
            calls.append(call)
            n_tokens += len(call.tokens)
            n_logits += call.n_logits
        else:
            rest.append(task)
    return group, rest, calls, n_tokens
