"""Choose the device of the main model and that of the draft model, from the measured costs of their calls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from spec_local.calibration.tuning import chain_plans
from spec_local.llama.devices import CPU
from spec_local.policies.adaptive import MAX_CALLS
from spec_local.policies.cost_model import CallCosts

_T = TypeVar("_T")
ACCEPTANCE_RATE = 0.8
"""Assumed for the expected speeds with drafts."""
_EQUAL = 0.03  # a share: differences up to this are within the error of the costs


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of each model, by its name."""

    main: str
    draft: str

    def __str__(self) -> str:
        if self.main == self.draft:
            return f"both on {shown(self.main)}"
        return f"main on {shown(self.main)}, draft on {shown(self.draft)}"


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Costs of calls on one device: of the main model, and of the draft model or head (None: there is none).

    is_head: a head reads the main model's hidden states, and is always on the same device.
    """

    main: CallCosts
    draft: CallCosts | None = None
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """What was compared, in tokens per second.

    plain: plain decoding by device of the main model. drafting: expected with drafts at `ACCEPTANCE_RATE`;
    empty: no model drafts.
    """

    plain: Mapping[str, float]
    drafting: Mapping[Placement, float]

    @property
    def fastest_plain(self) -> str:
        """The device on which plain decoding is fastest."""
        return _fastest(self.plain)

    @property
    def best(self) -> Placement:
        """The placement to use: the fastest with drafts, or else for plain decoding."""
        if self.drafting:
            return _fastest(self.drafting)
        return Placement(self.fastest_plain, self.fastest_plain)

    def sentences(self) -> list[str]:
        """Return which device is the fastest for plain decoding, and which placement with drafts."""
        device = self.fastest_plain
        others = [f"{shown(each)} {_rate(speed)}" for each, speed in self.plain.items() if each != device]
        speeds = "; ".join([f"{_rate(self.plain[device])} tokens/s", *others])
        lines = [f"Plain decoding is fastest on {shown(device)} ({speeds})."]
        if self.drafting:
            best, expected = self.best, f"tokens/s expected at {ACCEPTANCE_RATE:g} acceptance"
            slower = sorted((p for p in self.drafting if p != best), key=lambda p: -self.drafting[p])
            speeds = "; ".join(
                [
                    f"{_rate(self.drafting[best])} {expected}",
                    *(f"{each} {_rate(self.drafting[each])}" for each in slower),
                ]
            )
            lines.append(f"With drafts: {best} ({speeds}).")
        return lines


def shown(device: str) -> str:
    """A device's name in a sentence."""
    return "the CPU" if device == CPU else device


def choose(costs: Mapping[str, DeviceCosts], max_draft: int = MAX_CALLS) -> PlacementChoice:
    """Compare all placements whose costs are known.

    The models are called in turns, whichever devices they are on, so that a step takes the sum of their
    times: a draft model does not draft while the main model verifies.

    Args:
        costs: at least those of one device; preferred ones first, of the same speed.
        max_draft: maximum number of draft tokens per step.
    """
    plain = {device: 1.0 / each.main.seconds(1) for device, each in costs.items()}
    drafting = {}
    pairs = [(main, draft) for main in costs for draft in costs]
    for main, draft in sorted(pairs, key=lambda pair: pair[0] != pair[1]):  # simple ones first
        drafter = costs[draft]
        if drafter.draft and (main == draft or not drafter.is_head):
            plan = chain_plans(costs[main].main, drafter.draft, [ACCEPTANCE_RATE], max_draft)[0]
            drafting[Placement(main, draft)] = plan.speed
    return PlacementChoice(plain, drafting)


def _fastest(speeds: Mapping[_T, float]) -> _T:
    """The first one that is as fast as the fastest one, within `_EQUAL`."""
    least = (1.0 - _EQUAL) * max(speeds.values())
    return next(each for each, speed in speeds.items() if speed >= least)


def _rate(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 10.0 else f"{speed:.1f}"
