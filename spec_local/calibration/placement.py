"""Choose the device of the main model and that of the draft model, from the measured costs of their calls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from spec_local.calibration.tuning import chain_plans
from spec_local.llama.devices import DEVICES, Device
from spec_local.policies.adaptive import MAX_CALLS
from spec_local.policies.cost_model import CallCosts

_T = TypeVar("_T")
ACCEPTANCE_RATE = 0.8
"""Assumed for the expected speeds with drafts."""
_EQUAL = 0.03  # a share: differences up to this are within the error of the costs
NAMES: Mapping[Device, str] = {"metal": "Metal", "cpu": "CPU"}
"""As people call them."""
_ON: Mapping[Device, str] = {"metal": "on Metal", "cpu": "on the CPU"}


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of each model."""

    main: Device
    draft: Device

    def __str__(self) -> str:
        if self.main == self.draft:
            return f"both {_ON[self.main]}"
        return f"main {_ON[self.main]}, draft {_ON[self.draft]}"


PLACEMENTS = (
    *(Placement(device, device) for device in DEVICES),
    *(Placement(main, draft) for main in DEVICES for draft in DEVICES if main != draft),
)
"""Simple ones first, which are preferred to others of the same speed."""


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

    plain: Mapping[Device, float]
    drafting: Mapping[Placement, float]

    @property
    def fastest_plain(self) -> Device:
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
        others = [f"{NAMES[each]} {_shown(speed)}" for each, speed in self.plain.items() if each != device]
        speeds = "; ".join([f"{_shown(self.plain[device])} tokens/s", *others])
        lines = [f"Plain decoding is fastest {_ON[device]} ({speeds})."]
        if self.drafting:
            best, expected = self.best, f"tokens/s expected at {ACCEPTANCE_RATE:g} acceptance"
            slower = sorted((p for p in self.drafting if p != best), key=lambda p: -self.drafting[p])
            speeds = "; ".join(
                [
                    f"{_shown(self.drafting[best])} {expected}",
                    *(f"{each} {_shown(self.drafting[each])}" for each in slower),
                ]
            )
            lines.append(f"With drafts: {best} ({speeds}).")
        return lines


def choose(costs: Mapping[Device, DeviceCosts], max_draft: int = MAX_CALLS) -> PlacementChoice:
    """Compare all placements whose costs are known.

    The models are called in turns, whichever devices they are on, so that a step takes the sum of their
    times: a draft model does not draft while the main model verifies.

    Args:
        costs: at least those of one device.
        max_draft: maximum number of draft tokens per step.
    """
    plain = {device: 1.0 / costs[device].main.seconds(1) for device in DEVICES if device in costs}
    drafting = {}
    for each in PLACEMENTS:
        if each.main in costs and each.draft in costs:
            main, drafter = costs[each.main].main, costs[each.draft]
            if drafter.draft and (each.main == each.draft or not drafter.is_head):
                plan = chain_plans(main, drafter.draft, [ACCEPTANCE_RATE], max_draft)[0]
                drafting[each] = plan.speed
    return PlacementChoice(plain, drafting)


def _fastest(speeds: Mapping[_T, float]) -> _T:
    """The first one that is as fast as the fastest one, within `_EQUAL`."""
    least = (1.0 - _EQUAL) * max(speeds.values())
    return next(each for each, speed in speeds.items() if speed >= least)


def _shown(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 10.0 else f"{speed:.1f}"
