"""State carried between answers."""

from collections.abc import Callable
from dataclasses import dataclass, field

from spec_local.policies.acceptance_model import AcceptanceModel
from spec_local.policies.loss_budget import LossBudget

_LENGTH_RATE = 0.3  # weight of the last answer's length: three answers make two thirds of the estimate
_GAIN_RATE = 0.25  # weight of its gain: a pair of models changes less than the length of its answers
_RETRY_RATE = 0.01  # the same where the draft was not asked: a bad record fades in a hundred answers

GainOf = Callable[[int, int], float]
"""Expected gain by number of answers at the same time, and by window: see `PastAnswers.gains`."""


@dataclass(slots=True)
class PastAnswers:
    """What whole answers have taught, in all slots.

    Attributes:
        length: expected tokens of an answer.
        gains: plain steps that the draft model saves per token of an answer, not counting the prompt, by
            number of answers at the same time and by window, the one of `WINDOWS` that the draft model read
            at least (0: the whole history); unknown at first.
    """

    length: float = 200.0
    gains: dict[tuple[int, int], float] = field(default_factory=dict)

    def gain(self, n_running: int, window: int, usual: GainOf) -> float:
        """The expected one of `gains`; one that is unknown differs from `usual` as the known ones do.

        To find out costs the time of reading, which no loss budget bounds: 24 plain steps for 512 tokens.
        """
        known = self.gains.get((n_running, window))
        if known is not None:
            return known
        others = [gain - usual(*key) for key, gain in self.gains.items() if key[0] == n_running]
        return usual(n_running, window) + sum(others) / max(1, len(others))


AnswerKind = tuple[bool, str, bool]
"""Of an answer: whether it is greedy, its shape, and whether it is constrained."""


@dataclass(slots=True)
class PairExperience:
    """What all answers of a pair of models share, by kind of answer; kept on disk between runs."""

    acceptance: dict[AnswerKind, AcceptanceModel] = field(default_factory=dict)
    answers: dict[AnswerKind, PastAnswers] = field(default_factory=dict)


@dataclass(slots=True)
class Experience:
    """The state that the adaptive policy carries between answers.

    Attributes:
        acceptance: how often draft tokens are accepted.
        answers: what whole answers have taught.
        budget: what speculation may lose.
        n_running: answers at the same time, this one included, when the draft model was last considered.
        window: of the draft model: see `PastAnswers.gains`.
        n_tokens: generated in this answer.
        gained: plain steps that the draft model has saved in this answer; None: it was not asked.
    """

    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    answers: PastAnswers = field(default_factory=PastAnswers)
    budget: LossBudget = field(default_factory=LossBudget)
    n_running: int = 1
    window: int = 0
    n_tokens: int = 0
    gained: float | None = None
    _usual_gain: GainOf = field(default=lambda n_running, window: 0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if any(gain > 0.0 for gain in self.answers.gains.values()):
            self.budget.trust()

    def start(self, usual_gain: GainOf) -> None:
        """Begin an answer, after the last one has ended.

        Args:
            usual_gain: of a draft model with usual acceptance; the gain begins there, and returns to it while
                the draft is not asked.
        """
        self.end()
        self.budget.start()
        self._usual_gain = usual_gain

    def end(self) -> None:
        """Learn from an answer as a whole."""
        if self.n_tokens:
            known, n, usual_gain = self.answers, self.n_running, self._usual_gain
            known.length += _LENGTH_RATE * (self.n_tokens - known.length)
            if self.gained is not None:
                before = known.gain(n, self.window, usual_gain)
                seen = self.gained / self.n_tokens
                known.gains[n, self.window] = before + _GAIN_RATE * (seen - before)
            else:
                for key, before in known.gains.items():
                    if key[0] == n:
                        known.gains[key] = before + _RETRY_RATE * (usual_gain(*key) - before)
        self.n_tokens, self.gained = 0, None
