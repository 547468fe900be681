"""Model calls shared by several coroutines.

Reading the weights takes most of the time of a small call: what several requests need of a model is
therefore evaluated together. Code that needs a model's output is a coroutine that awaits a `Call`:

    logits = await sequence.call(tokens, n_logits=1)

`together` runs several such coroutines: it collects the calls that all of them await, makes one call of the
model, and resumes each with its logits. `run` runs one alone. There is no event loop.
"""

from collections.abc import Awaitable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from spec_local.core.timer import Timer
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


Calls = Coroutine[Call[Any], Logits, _Result]
"""A coroutine that awaits calls of models, and nothing else."""


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

    def result(self) -> _Result:
        """Its result; only after its end.

        Raises:
            Exception: what it raised.
        """
        if self._error:
            raise self._error
        return self._results[0]

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
    lap = timer.lap if timer else _no_lap
    tasks: list[Task[_Result]] = []
    try:
        for coroutine in coroutines:
            tasks.append(Task(coroutine))
        waiting = [task for task in tasks if task.call]
        while waiting:
            # Logits are views: resume these tasks before the model's next call.
            group, waiting = _that_fit(waiting)
            calls = [task.call for task in group if task.call]
            answers: Sequence[Logits | SpecLocalError]
            lap("propose")
            try:
                answers = calls[0].sequence.context.decode(calls)
            except SpecLocalError as error:
                answers = [error] * len(group)
            lap("draft model", sum(len(call.tokens) for call in calls))
            for task, answer in zip(group, answers, strict=True):
                task.resume(answer)
            waiting += [task for task in group if task.call]
    except BaseException:  # an interrupt, or an unexpected error of a call
        for task in tasks:
            task.close()
        raise
    lap("propose")
    return [task.outcome for task in tasks]


def _no_lap(part: str, n: int = 0) -> None:
    pass


def _that_fit(waiting: Sequence[Task[_Result]]) -> tuple[list[Task[_Result]], list[Task[_Result]]]:
    """Split tasks into those whose calls can be made together with that of the first one, and the others."""
    context, n_tokens, n_logits = None, 0, 0
    group: list[Task[_Result]] = []
    rest: list[Task[_Result]] = []
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
            n_tokens += len(call.tokens)
            n_logits += call.n_logits
        else:
            rest.append(task)
    return group, rest
