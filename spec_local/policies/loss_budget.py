"""A budget of the time that speculation may lose: it bounds what wrong estimates cost.

All amounts are in plain steps: the time of one token without speculation.
"""

from typing import Literal

Kind = Literal["lookup", "draft"]

_LEAST = 2.2  # plain steps an answer may lose from its start: about 1 % of 200 tokens
_MOST = 3.0  # plain steps that income fills the balance to: it forgives three bad steps in a row
_INCOME = 0.006  # share of the elapsed time that may be lost in the long run
_SAFETY = 6.0  # times the expected loss is charged: in full unless 5 of 6 tokens are accepted


class LossBudget:
    """A balance shared by all drafters, plus what each has gained in this answer for itself.

    A step may be chosen if the budget survives its failure. So a text that cannot be predicted costs what
    the balance was and then 0.6 % of the time, however wrong the estimates are; and lookups that fail cannot
    spend what the draft model gains.
    """

    def __init__(self) -> None:
        self._balance = _LEAST
        self._gains: dict[Kind, float] = {"lookup": 0.0, "draft": 0.0}

    def start(self) -> None:
        """Begin an answer: earlier gains end, and the balance is at least the minimum."""
        self._balance = min(_MOST, max(_LEAST, self._balance + sum(self._gains.values())))
        self._gains = {"lookup": 0.0, "draft": 0.0}

    def restore(self) -> None:
        """Forgive losses: they were measured against costs that have changed."""
        self._balance = max(self._balance, _LEAST)

    def may_lose(self, kind: Kind, p_loss: float = 1.0) -> float:
        """Plain steps that a step may cost beyond a plain one.

        Args:
            p_loss: probability that nothing is accepted. Where it is small, only `_SAFETY` times the
                expected loss is charged, so that a long lookup after a long match need not be saved up for.
        """
        return max(0.0, self._balance + self._gains[kind]) / min(1.0, _SAFETY * p_loss)

    def settle(self, kind: Kind | None, gain: float, n_steps: float = 1.0, p_loss: float = 1.0) -> None:
        """Account for a step: its gain (negative: a loss), and the income of the plain steps that it took."""
        if gain < 0.0:
            gain *= min(1.0, _SAFETY * p_loss)
        if kind:
            gains = self._gains[kind] + gain
            self._gains[kind], gain = max(0.0, gains), min(0.0, gains)
        self._balance = min(_MOST, self._balance + gain + _INCOME * n_steps)
