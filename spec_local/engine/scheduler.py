"""The scheduler: in each step, one call of the main model for all rows.

1. Propose: the draft model drafts for all rows in the same calls.
2. Evaluate: the main model evaluates the proposals of all rows in ONE call, and in it a chunk of the prompt
   of rows that have just started.
3. Verify and commit: each row by itself, with its own rng.

Rows advance at different rates. A row that fails or ends disturbs no other.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from spec_local.core.language_model import Call, Calls, Logits, run_together
from spec_local.core.proposal import Proposal
from spec_local.engine.events import Event, Failed, Finished, Prefilled, Statistics
from spec_local.engine.row import Row
from spec_local.errors import InvalidRequest, SpecLocalError

_CHUNK = 32  # prompt tokens per call while other rows generate: they wait for them


class Planner(Protocol):
    """Decides how much of the rows' proposals is verified: `spec_local.policies.sharing.SharedCalls`."""

    def begin(self, n_rows: int, n_read: int, n_others: int, n_running: int) -> None:
        """Before the rows propose, and the draft model reads prompts.

        Args:
            n_rows: rows that share a call; as long as all read their prompts, those that will.
            n_read: tokens that this call will evaluate besides: prompts, and accepted tokens again.
            n_others: rows that are evaluated in calls of their own meanwhile.
            n_running: rows that share a call as soon as all prompts have been read.
        """

    def choose(self, proposals: Sequence[Proposal], spent: float) -> Sequence[Proposal]:
        """The parts of the rows' proposals to verify, `spent` seconds after the step began."""

    def observe(self, n_drafted: int, seconds: float) -> None:
        """Learn how long a call of all rows took, with so many draft tokens, up to the commits."""


class Engine:
    """Rows that advance together.

    Args:
        planner: divides calls among rows; None: what the rows propose is verified.
        statistics: receives the counts over all rows. Times are those of the engine's steps: its rate is the
            total, and `prompt_s` the time of the steps in which no row generated.

    Attributes:
        rows: those that have not ended, in the order in which they were added.
        n_calls: calls of the main model.
    """

    def __init__(
        self,
        planner: Planner | None = None,
        clock: Callable[[], float] = time.perf_counter,
        statistics: Statistics | None = None,
    ) -> None:
        self.rows: list[Row] = []
        self.statistics, self.n_calls = statistics or Statistics(), 0
        self.planner, self._clock = planner, clock

    def add(self, row: Row) -> None:
        """Start a row; its prompt is read in the next steps.

        Raises:
            InvalidRequest: the main model cannot evaluate so many rows in one call.
        """
        shared = row.main.shared
        n = 1 + sum(other.main.shared is shared for other in self.rows)
        if n > min(shared.max_tokens, shared.max_logits):
            raise InvalidRequest(f"{n} rows exceed the batch size of {shared.max_tokens}: start fewer")
        self.rows.append(row)
        row.start()

    def remove(self, row: Row) -> None:
        """End a row: its caches then contain only its history."""
        if row in self.rows:
            self.rows.remove(row)
            row.roll_back()

    def close(self) -> None:
        """End all rows."""
        for row in list(self.rows):
            self.remove(row)

    def step(self) -> list[tuple[Row, Event]]:
        """Advance all rows by one call of the main model, and return what happened.

        Returns:
            for a row, one `Prefilled` when its prompt has been read, a `Step` for each call after it, and one
            `Finished` or `Failed`, after which it is no longer in `rows`.

        Raises:
            BackendError: a call of the main model failed; the rows have not advanced.
        """
        events: list[tuple[Row, Event]] = []
        for row in list(self.rows):
            if reason := row.reason_to_end():
                self.remove(row)
                events.append((row, Finished(reason, row.statistics)))
        if not self.rows:
            return events
        started = self._clock()
        generating = self._generating()
        reading = self._readers()
        events += self._draft(generating, reading)
        failed = {row for row, event in events if isinstance(event, Failed)}
        going_on = [row for row in generating if row not in failed]
        self._shorten(going_on, started)
        events += self._evaluate(going_on, [row for row in reading if row.n_unread])
        seconds = self._clock() - started
        for row in generating:
            row.count_seconds(seconds)
        if generating:
            self.statistics.predicted_s += seconds
        else:
            self.statistics.prompt_s += seconds
        for row, event in events:
            if isinstance(event, Failed | Finished):
                self.remove(row)
        return events

    def _generating(self) -> list[Row]:
        """The rows that generate in this step: all, unless they have more to evaluate than fits in a call."""
        left = {row.main.shared: row.main.shared.max_tokens for row in self.rows}
        found: list[Row] = []
        for row in self.rows:
            if not row.is_reading and row.n_unevaluated <= left[row.main.shared]:
                left[row.main.shared] -= row.n_unevaluated
                found.append(row)
        return found

    def _readers(self) -> list[Row]:
        """The rows that read their prompt in this step: one may wait for what another one is reading."""
        reading = [row for row in self.rows if row.is_reading]
        found = [row for i, row in enumerate(reading) if not any(map(row.waits_for, reading[:i]))]
        for row in found:
            row.reuse_cache()
        return found

    def _draft(self, generating: Sequence[Row], reading: Sequence[Row]) -> list[tuple[Row, Event]]:
        """Draft for all rows, and let the draft model read prompts that the main model has read."""
        n_rows = Counter(row.main.shared for row in self.rows)
        if self.planner:
            n_running = max(n_rows.values())
            together = n_running > 1  # otherwise each has its own model
            n = (len(generating) or n_running) if together else 1
            n_unread = sum(row.n_unread for row in reading) if together and generating else 0
            n_read = min(_CHUNK, n_unread)
            n_read += sum(row.n_unevaluated - 1 for row in (generating if together else generating[:1]))
            self.planner.begin(n, n_read, len(self.rows) - n, n_running)
        tasks: list[Calls[bool]] = []
        for row in generating:
            shared = row.main.shared
            share = min(shared.max_tokens, shared.max_logits) // n_rows[shared]
            tasks.append(row.propose(share))
        with_draft = [row for row in reading if not row.n_unread]
        tasks += [row.read_with_draft(with_draft[:i]) for i, row in enumerate(with_draft)]
        with_head = [row for row in reading if row.n_unread and row.has_head]
        tasks += [row.read_with_head() for row in with_head]
        events: list[tuple[Row, Event]] = []
        drafting = [*generating, *with_draft, *with_head]
        for row, result in zip(drafting, run_together(tasks), strict=True):
            if isinstance(result, SpecLocalError):
                events.append((row, Failed(result, row.statistics)))
            elif result and row.is_reading:
                row.end_reading()
                events.append((row, Prefilled(row.statistics)))
        return events

    def _shorten(self, generating: Sequence[Row], started: float) -> None:
        if self.planner and len({row.main.shared for row in generating}) == 1 < len(generating):
            proposals = self.planner.choose([row.proposal for row in generating], self._clock() - started)
            for row, proposal in zip(generating, proposals, strict=True):
                row.shorten(proposal)

    def _evaluate(self, generating: Sequence[Row], reading: Sequence[Row]) -> list[tuple[Row, Event]]:
        """Call the main model, once for all rows that share it, and commit the result."""
        events: list[tuple[Row, Event]] = []
        for shared in dict.fromkeys(row.main.shared for row in [*generating, *reading]):
            started = self._clock()
            steps = [(row, row.verify_call()) for row in generating if row.main.shared is shared]
            n_tokens = sum(len(call.tokens) for _, call in steps)
            n_drafted = n_tokens - len(steps)  # or tokens that are evaluated again
            n_free = min(shared.max_tokens - n_tokens, _CHUNK if steps else shared.max_tokens)
            prompts: list[tuple[Row, Call]] = []
            for row in reading:
                if row.main.shared is shared and n_free > 0:
                    prompts.append((row, row.prompt_call(n_free)))
                    n_free -= len(prompts[-1][1].tokens)
            answers = shared.decode([call for _, call in [*steps, *prompts]])
            self.n_calls += 1
            for (row, call), logits in zip(steps, answers, strict=False):
                events += self._commit(row, call, logits)
            for row, call in prompts:
                row.commit_prompt(call)
                self.statistics.prompt_n += len(call.tokens)
            if self.planner and len(steps) > 1 and not prompts:
                self.planner.observe(n_drafted, self._clock() - started)
        return events

    def _commit(self, row: Row, call: Call, logits: Logits) -> list[tuple[Row, Event]]:
        proposal = row.proposal
        try:
            step = row.commit(call, logits)
        except SpecLocalError as error:  # the grammar allows no token
            return [(row, Failed(error, row.statistics))]
        self.statistics.count_step(len(step.tokens), proposal, step.n_accepted)
        if row.has_ended:
            return [(row, step), (row, Finished("stop", row.statistics))]
        return [(row, step)]
