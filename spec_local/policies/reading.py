"""Whether the draft model reads a long part of the history, which the rest of the answer must repay."""

from collections.abc import Sequence

from spec_local.core.proposal import CallLoad
from spec_local.policies.base import WINDOWS, DraftReading
from spec_local.policies.choice import best_chain
from spec_local.policies.cost_model import CallCosts, chain_seconds
from spec_local.policies.experience import Experience
from spec_local.policies.sharing import SharedCosts

# Tokens of an answer too short to repay the reading of its prompt, and between two times that it is
# considered.
_SHORT = 8
_MAX_TRIAL = 16  # tokens that the draft model may read although only this step is known to repay it
# Times the cost of reading a prompt that its expected gain must be. With 1, simulated answers are up to 14 %
# slower than without drafts.
_DOUBT = 2.0
_DEFAULT_ACCEPTANCE = 0.85  # of an untried draft model: 0.5B for 1.5B Qwen2.5-Coder at temperature 0
# Of that, what a draft model reaches that has read the last tokens only: of a 0.5B's
# agreement with a 1.5B's greedy answers on 14 held-out prompts, three parts of ordinary ones and one of
# summaries.
_BY_WINDOW = {0: 1.0, 32: 0.75, 128: 0.80, 512: 0.98, 2048: 1.0}


class ReadingChoice:
    """Chooses what the draft model reads in an answer, by what it gained in earlier ones.

    Args:
        main, draft: seconds a call.
        known: of earlier answers, and of this one.
        max_draft: maximum number of draft tokens in a row.
        max_tokens: of the answer, if known.
    """

    def __init__(
        self,
        main: SharedCosts,
        draft: CallCosts,
        known: Experience,
        max_draft: int,
        max_tokens: int | None,
    ) -> None:
        self._main, self._draft, self._known = main, draft, known
        self._max_draft, self._max_tokens = max_draft, max_tokens
        self._considered = 0  # tokens of the answer when reading was last considered

    def usual_gain(self, n_running: int, window: int = 0) -> float:
        """Plain steps that a usual draft model saves per token, at least 0: see `PastAnswers.gains`."""
        main, acceptance = self._main.at(CallLoad(n_running)), _DEFAULT_ACCEPTANCE * _BY_WINDOW[window]
        return 1.0 - 1.0 / (best_chain(acceptance, main, self._draft, self._max_draft).rate * main.plain)

    @staticmethod
    def is_long(reading: DraftReading) -> bool:
        """Return whether later steps must repay it, too."""
        return reading.n_unread > _MAX_TRIAL

    def invest(self, reading: DraftReading, plain: float) -> float:
        """Account for reading that later steps repay; returns its seconds. plain: seconds of a plain step."""
        if not self.is_long(reading):
            return 0.0
        seconds = self._seconds(reading)
        self._known.budget.invest(seconds / plain)
        return seconds

    def _seconds(self, reading: DraftReading) -> float:
        """Seconds that the draft model takes to read what it has not read of it."""
        return float(chain_seconds(self._draft, reading.n_unread, 1)[1])

    def best(self, readings: Sequence[DraftReading], n_running: int) -> DraftReading | None:
        """Return the part of the history to draft from; None: reading none of them is expected to gain.

        n_running: answers at the same time.
        """
        if len(readings) == 1 and not self.is_long(readings[0]):
            return readings[0]
        known = self._known
        if known.n_tokens < self._considered + _SHORT:
            return None
        self._considered = known.n_tokens
        # An answer that is already longer than usual is expected to double.
        left = max(known.answers.length - known.n_tokens, known.n_tokens)
        if self._max_tokens is not None:
            left = min(left, self._max_tokens - known.n_tokens)
        plain = self._main.at(CallLoad(n_running)).plain
        best, most = None, 0.0
        for reading in readings:
            seconds = self._seconds(reading)
            per_token = known.answers.gain(n_running, _window(reading), self.usual_gain)
            gain = per_token * left * plain - _DOUBT * seconds
            if gain > most and seconds <= known.budget.may_invest * plain:
                best, most = reading, gain
        known.n_running = n_running
        if best:
            known.window = _window(best)
        return best


def _window(reading: DraftReading) -> int:
    """The one of `WINDOWS` that a part of the history has at least; 0: it is all of it."""
    return max((w for w in WINDOWS if w <= reading.window), default=WINDOWS[0]) if reading.window else 0
