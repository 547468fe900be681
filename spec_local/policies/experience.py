"""State carried between answers."""

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
class Answers:
    """State carried between whole answers: of all rows, if as many are generated at the same time.

    Attributes:
        n_rows: maximum number of answers at the same time.
        length: expected tokens of an answer.
        gain: plain steps that the draft model saves per token of an answer, not counting the prompt; None:
            unknown.
    """

    n_rows: int = 1
    length: float = 200.0
    gain: float | None = None


@dataclass(slots=True)
class Experience:
    """The state that the adaptive policy carries between answers.

    Attributes:
        acceptance: how often draft tokens are accepted.
        answers: what whole answers have taught.
        budget: what speculation may lose.
        n_tokens: generated in this answer.
        gained: plain steps that the draft model has saved in this answer; None: it was not asked.
    """

    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    answers: Answers = field(default_factory=Answers)
    budget: LossBudget = field(default_factory=LossBudget)
    n_tokens: int = 0
    gained: float | None = None

    def start(self, expected_gain: float) -> None:
        """Begin an answer, and learn from the last one as a whole.

        Args:
            expected_gain: of a draft model with usual acceptance; the gain returns to it while the draft is
                not asked.
        """
        self.budget.start()
        known = self.answers
        if known.gain is None:
            known.gain = expected_gain
        if self.n_tokens:
            known.length += _LENGTH_RATE * (self.n_tokens - known.length)
            if self.gained is None:
                known.gain += _RETRY_RATE * (expected_gain - known.gain)
            else:
                known.gain += _GAIN_RATE * (self.gained / self.n_tokens - known.gain)
        self.n_tokens, self.gained = 0, None
