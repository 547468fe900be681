"""Which steps are timed, to keep the costs of the main model's calls up to date."""

from spec_local.policies.sharing import SharedCosts, StepCosts

_TIMED_EVERY = 8  # plain steps between two that are timed: timing takes 1 % of a small model's step


class StepTiming:
    """Records the steps of an answer in the main model's costs, as far as it is alone."""

    def __init__(self, main: SharedCosts) -> None:
        self._main = main
        self._n_since_timed = 0  # steps
        self._n_plain = 0  # steps in a row, up to now
        self._as_usual = True  # the last step was plain, and took as long as plain steps do

    def observe(self, costs: StepCosts, n_verified: int, took: float) -> StepCosts:
        """Note a step with n_verified draft tokens, whose call took so long; returns the costs after it."""
        self._n_plain = 0 if n_verified else self._n_plain + 1
        self._n_since_timed += 1
        is_alone, was_usual = costs.load.is_alone, self._as_usual  # the engine times shared calls
        self._as_usual = not n_verified and (not is_alone or 0.8 < took / costs.plain < 1.25)
        # The step after an unusual one is timed, too: disturbed calls must not outnumber others in the table.
        is_usual = self._as_usual and was_usual and self._n_plain >= 3
        if not is_alone or (is_usual and self._n_since_timed < _TIMED_EVERY):
            return costs
        self._n_since_timed = 0
        self._main.observe(costs.load, n_verified, took)
        return self._main.at(costs.load)
