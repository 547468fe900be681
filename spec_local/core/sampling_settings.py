"""The sampling settings: each is declared once, with its range, its names, and what turns it off.

The options of the command, ``/set``, the fields of HTTP bodies, the defaults in a model's file and the
options of the plug-in for llm follow from `SETTINGS`; `spec_local.core.sampling` has the arithmetic.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from spec_local.core.checks import Number, Numbers, Texts, flag

WHOLE_CONTEXT = 2**31 - 1
"""A window that no context is longer than: llama.cpp's -1."""
SAMPLERS = {
    "penalties": "e",
    "dry": "d",
    "top_n_sigma": "s",
    "top_k": "k",
    "top_p": "p",
    "min_p": "m",
    "xtc": "x",
    "temperature": "t",
}
"""llama.cpp's samplers in the order in which they are applied, with its letters for them."""
FILTERS = {"top_n_sigma", "top_k", "top_p", "min_p"}
"""Samplers that only remove tokens, and never the most probable one."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of one sampling setting.

    check: returns the value, converted; raises InvalidRequest if it is not valid.
    help: a sentence without the full stop.
    sampler: the one of `SAMPLERS` that it turns on or off; "": none.
    off: the value with which it changes nothing; None: there is none.
    foreign: converts a valid value of llama.cpp, in a body or a file, to one that is valid here.
    needs_all: it depends on the logits of all allowed tokens, not only on those of the most probable ones.
    field: of `SamplingSettings`.
    option: of the command, and in ``/set``; as in llama.cpp. body: of an HTTP body, in all protocols.
    gguf: in the file of a model, after ``general.sampling.``; "": files do not have it.
    """

    check: Any
    help: str
    sampler: str = ""
    off: float | None = None
    foreign: Callable[[Any], Any] = lambda value: value
    needs_all: bool = False
    field: str = ""
    option: str = ""
    body: str = ""
    gguf: str = ""

    @property
    def kind(self) -> Any:
        """Its type in options and bodies: a number, or a list of texts; None: another, or it has neither."""
        match self.check:
            case Number(kind=kind):
                return kind
            case Texts():
                return list[str]
        return None


def _setting(default: Any, check: Any, help: str, **more: Any) -> Any:
    """A field with its `Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(check, help, **more)})


def _off_below_0(value: Any) -> Any:
    return max(value, 0)


def _whole_below_0(value: Any) -> Any:
    return WHOLE_CONTEXT if value == -1 else value


_TEMPERATURE = Number(float, 0, 100)
_SHARE = Number(float, 0, 1)
_PENALTY = Number(float, -100, 100)
_COUNT = Number(int, 0, WHOLE_CONTEXT)


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling settings; names, meaning and defaults are those of llama.cpp and of the command.

    Raises:
        InvalidRequest: a value is out of range or has the wrong type.
    """

    temperature: float = _setting(
        0.8, _TEMPERATURE, "Temperature; 0 is greedy", sampler="temperature", option="temp", gguf="temp"
    )
    top_k: int = _setting(
        40,
        _COUNT,
        "Keep the k most probable tokens; 0 keeps all",
        sampler="top_k",
        off=0,
        foreign=_off_below_0,
        gguf="top_k",
    )
    top_p: float = _setting(
        0.95,
        _SHARE,
        "Keep the most probable tokens up to this total probability; 1 keeps all",
        sampler="top_p",
        off=1.0,
        gguf="top_p",
    )
    min_p: float = _setting(
        0.05,
        _SHARE,
        "Minimum probability relative to the most probable token; 0 keeps all",
        sampler="min_p",
        off=0.0,
        gguf="min_p",
    )
    repeat_penalty: float = _setting(
        1.0,
        Number(float, 1e-3, 1e3),
        "Divide the logits of recent tokens by this; 1 disables it",
        sampler="penalties",
        off=1.0,
        gguf="penalty_repeat",
    )
    frequency_penalty: float = _setting(
        0.0,
        _PENALTY,
        "Penalty for each recent occurrence of a token; 0 disables it",
        sampler="penalties",
        off=0.0,
    )
    presence_penalty: float = _setting(
        0.0,
        _PENALTY,
        "Penalty for any recent occurrence of a token; 0 disables it",
        sampler="penalties",
        off=0.0,
    )
    penalty_window: int = _setting(
        64,
        _COUNT,
        "Number of tokens that count as recent",
        foreign=_whole_below_0,
        option="repeat_last_n",
        body="repeat_last_n",
        gguf="penalty_last_n",
    )
    penalize_prompt: bool = _setting(True, flag, "Whether the tokens of the prompt count as recent, too")
    logit_bias: Mapping[int, float] = dataclasses.field(
        default_factory=dict,
        metadata={
            "setting": Setting(
                Numbers(_COUNT, Number(float, most=1e30)),  # the sum with a logit must be finite in float32
                "Add a bias to a token's logit, before penalties; -inf forbids the token",
            )
        },
    )
    top_n_sigma: float = _setting(
        0.0,
        Number(float, 0, 1e3),
        "Keep tokens whose logit is within this many standard deviations of the highest; 0 keeps all",
        sampler="top_n_sigma",
        off=0.0,
        foreign=_off_below_0,
        needs_all=True,
    )
    xtc_probability: float = _setting(
        0.0,
        _SHARE,
        "Probability that XTC removes the most probable tokens; 0 disables it",
        sampler="xtc",
        off=0.0,
        foreign=_off_below_0,
        gguf="xtc_probability",
    )
    xtc_threshold: float = _setting(
        0.1,
        _SHARE,
        "Probability of tokens that XTC removes, except the last of them; above 0.5, none",
        gguf="xtc_threshold",
    )
    dry_multiplier: float = _setting(
        0.0,
        Number(float, 0, 1e3),
        "DRY: penalty for a token that would prolong a repetition; 0 disables it",
        sampler="dry",
        off=0.0,
    )
    dry_base: float = _setting(
        1.75,
        Number(float, 1, 1e3),
        "DRY: factor of the penalty for each further repeated token",
        foreign=lambda value: value if value >= 1 else 1.75,  # as llama.cpp's server
    )
    dry_allowed_length: int = _setting(
        2, _COUNT, "DRY: number of tokens that may be repeated without a penalty"
    )
    dry_penalty_last_n: int = _setting(
        64, _COUNT, "DRY: number of tokens in which to look for repetitions", foreign=_whole_below_0
    )
    dry_sequence_breakers: Sequence[str] = _setting(
        ("\n", ":", '"', "*"),
        Texts(64, 40),
        "DRY: text at which repetitions end",
        option="dry_sequence_breaker",
    )

    def __post_init__(self) -> None:
        for setting in SETTINGS:
            value = setting.check(setting.field, getattr(self, setting.field))
            object.__setattr__(self, setting.field, value)

    @property
    def body(self) -> dict[str, Any]:
        """The fields of an HTTP body with these settings, without those of another type."""
        return {each.body: getattr(self, each.field) for each in SETTINGS if each.kind}

    @property
    def has_penalties(self) -> bool:
        """True if the penalties change the distribution."""
        penalized = self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalized and self.penalty_window > 0

    @property
    def has_dry(self) -> bool:
        """True if DRY changes the distribution."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n > 0

    @property
    def has_xtc(self) -> bool:
        """True if XTC changes the distribution."""
        return self.xtc_probability > 0 and self.xtc_threshold <= 0.5

    @property
    def is_greedy(self) -> bool:
        """True if only one token is possible, the most probable one."""
        return self.temperature == 0 and not self.has_xtc


def _named(field: "dataclasses.Field[Any]") -> Setting:
    setting: Setting = field.metadata["setting"]
    option = (setting.option or field.name).replace("_", "-")
    return dataclasses.replace(setting, field=field.name, option=option, body=setting.body or field.name)


SETTINGS: Sequence[Setting] = tuple(map(_named, fields(SamplingSettings)))
_OFF: Mapping[str, Any] = {each.field: each.off for each in SETTINGS if each.off is not None}
UNCHANGED = SamplingSettings(temperature=1.0, **_OFF)
"""Settings that leave the model's distribution unchanged."""
SamplingSettings.__doc__ = f"{SamplingSettings.__doc__}\n    Args:\n" + "".join(
    f"        {each.field}: {each.help}.\n" for each in SETTINGS
)
