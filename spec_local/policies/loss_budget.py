"""A budget of the time that speculation may lose: it bounds what wrong estimates cost.

All amounts are in plain steps: the time of one call without speculation.
"""

from dataclasses import dataclass
from typing import Literal

DrafterKind = Literal["lookup", "draft"]

_FIRST = 2.0  # plain steps that a session may lose at first: 1 % of 200 tokens
_SHARE = 0.008  # of the time that it may lose later; 0.2 % are left for the searches of lookups
_MOST = 3.0  # plain steps that the balance is filled to: it forgives three bad steps in a row
# Plain steps that reading a prompt may cost, at most and at first. Simulated sessions with 6 at first are as
# fast as with 12, and their slowest kind of answers is faster; with 4, some draft models are never tried.
_MOST_CREDIT, _FIRST_CREDIT = 48.0, 6.0
_RISK = 1.5  # plain steps of the balance that one step may lose
_SAFETY = 6.0  # times the expected loss is charged: in full unless 5 of 6 tokens are accepted


@dataclass(slots=True)
class _Session:
    """What all answers of a session share.

    balance: plain steps that steps may lose. credit: those that reading prompts may cost: what the balance
    could not take of gains and income. elapsed: plain steps since the start.
    """

    balance: float = _FIRST
    credit: float = _FIRST_CREDIT
    elapsed: float = 0.0


class LossBudget:
    """The balance of a session, plus what each drafter has gained in the answer at hand for itself.

    A step may be chosen if the budget survives its failure. So texts that cannot be predicted cost the first
    balance and then 0.8 % of the time, however wrong the estimates are and however short the answers; and
    lookups that fail cannot spend what the draft model gains.

    Reading a prompt costs more than a step, and gains repay it later if at all. What it may cost grows with
    the gains of earlier answers: a draft model that is new reads little.
    """

    def __init__(self) -> None:
        self._session = _Session()
        self._gains: dict[DrafterKind, float] = {"lookup": 0.0, "draft": 0.0}
        self._invested = 0.0

    def of_another_answer(self) -> "LossBudget":
        """The budget of answers that are generated at the same time, in the same session."""
        found = LossBudget()
        found._session = self._session
        return found

    def start(self) -> None:
        """Begin an answer: what the last one gained repays its reading, and is then the session's."""
        gains = sum(self._gains.values())
        repaid = min(gains, self._invested)
        self._session.credit += repaid
        self._add(gains - repaid)
        self._gains, self._invested = {"lookup": 0.0, "draft": 0.0}, 0.0

    def trust(self) -> None:
        """Begin a session with models that gained in earlier ones: reading has all the credit."""
        if not self._session.elapsed:
            self._session.credit = _MOST_CREDIT

    def restore(self) -> None:
        """Forgive losses: they were measured against costs that have changed."""
        self._session.balance = max(self._session.balance, _FIRST)

    @property
    def may_invest(self) -> float:
        """Plain steps that reading a prompt may take."""
        return max(0.0, self._session.credit) if self._session.balance > 0.0 else 0.0

    def invest(self, n_steps: float) -> None:
        """Account for plain steps spent on reading, which gains in this answer are to repay."""
        self._invested += n_steps
        self._session.credit -= n_steps

    def may_lose(self, kind: DrafterKind, p_loss: float = 1.0) -> float:
        """Plain steps that a step may cost beyond a plain one.

        p_loss: probability that nothing is accepted. Where it is small, only `_SAFETY` times the expected
        loss is charged, so that a long lookup after a long match need not be saved up for.
        """
        return max(0.0, min(_RISK, self._session.balance) + self._gains[kind]) / min(1.0, _SAFETY * p_loss)

    def settle(
        self,
        kind: DrafterKind | None,
        gain: float,
        n_steps: float = 1.0,
        p_loss: float = 1.0,
        n_parallel: int = 1,
    ) -> None:
        """Account for a step: its gain (negative: a loss), and the plain steps that it took.

        n_parallel: answers that share the step, each of which settles its part.
        """
        if gain < 0.0:
            gain *= min(1.0, _SAFETY * p_loss)
        gain /= n_parallel
        if kind:
            gains = self._gains[kind] + gain
            self._gains[kind], gain = max(0.0, gains), min(0.0, gains)
        session, before = self._session, self._allowed
        session.elapsed += n_steps / n_parallel
        self._add(gain + self._allowed - before)

    @property
    def _allowed(self) -> float:
        """Plain steps that the session may have lost up to now."""
        return max(_FIRST, _SHARE * self._session.elapsed)

    def _add(self, gain: float) -> None:
        session = self._session
        balance = session.balance + gain
        session.balance = min(_MOST, balance)
        session.credit = min(_MOST_CREDIT, session.credit + balance - session.balance)
