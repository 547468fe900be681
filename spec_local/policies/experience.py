"""What one answer teaches the next."""

from dataclasses import dataclass, field

from spec_local.policies.acceptance_model import AcceptanceModel
from spec_local.policies.loss_budget import LossBudget

_LENGTH_RATE = (
    0.3  # weight of the last answer's length: the last three answers make two thirds of the estimate
)
_GAIN_RATE = (
    0.25  # weight of the last answer's gain: a pair of models changes less than the length of its answers
)
_RETRY_RATE = 0.01  # the same where the draft was not asked: a bad record fades in a hundred answers


@dataclass(slots=True)
class Experience:
    """What the adaptive policy keeps from answer to answer.

    Attributes:
        acceptance: how often draft tokens are accepted.
        budget: what speculation may lose.
        length: expected tokens of an answer.
        gain: plain steps that the draft model saves per token of an answer, not counting the prompt; None:
            unknown.
        n_tokens: generated in this answer.
        gained: plain steps that the draft model has saved in this answer; None: it was not asked.
    """

    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    budget: LossBudget = field(default_factory=LossBudget)
    length: float = 200.0
    gain: float | None = None
    n_tokens: int = 0
    gained: float | None = None

    def start(self, expected_gain: float) -> None:
        """Begin an answer, and learn from the last one as a whole.

        Args:
            expected_gain: of a draft model with usual acceptance; `gain` returns to it while the draft is
                not asked.
        """
        self.budget.start()
        if self.gain is None:
            self.gain = expected_gain
        if self.n_tokens:
            self.length += _LENGTH_RATE * (self.n_tokens - self.length)
            if self.gained is None:
                self.gain += _RETRY_RATE * (expected_gain - self.gain)
            else:
                self.gain += _GAIN_RATE * (self.gained / self.n_tokens - self.gain)
        self.n_tokens, self.gained = 0, None
