"""The fields that the bodies of all protocols share, and how bodies are checked.

Fields with the value null count as missing, and fields of other programs are ignored: clients send many.
"""

import dataclasses
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from spec_local.core.sampling import SamplingSettings
from spec_local.errors import InvalidRequest
from spec_local.grammar.usable_schema import Usable, usable
from spec_local.settings import GenerationSettings
from spec_local.validation import first_error

_MAX_STOPS = 64
"""Each stop string is searched for after every token."""
_MAX_TEXTS = 1024
"""Texts in a logit bias, and characters of one: each is tokenized."""
_ANY_OBJECT = '{"type": "object"}'
_SPEED = [field.name for field in dataclasses.fields(GenerationSettings) if field.metadata]
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "mirostat": (0,),
    "typical_p": (1,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "top_n_sigma": (0,),
    "adaptive_target": (-1,),
    "min_keep": (0, 1),
    "lora": ([],),
}
"""Fields of llama.cpp's server that change answers and do not exist here, with the values that do not."""
_OFF_BELOW_0 = {"dynatemp_range", "xtc_probability", "top_n_sigma", "adaptive_target"}
_LISTS = ("samplers", "stop", "input_extra", "response_fields", "tools")
_SAMPLERS: Mapping[str, Mapping[str, float]] = {
    "penalties": {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}
"""Samplers in their order, with the settings at which they do nothing."""
_EXCHANGEABLE = ({"top_k", "min_p"}, {"top_k", "temperature"})
"""Pairs whose order does not change the distribution."""
_LETTERS = {"e": "penalties", "k": "top_k", "p": "top_p", "m": "min_p", "t": "temperature"}
_WORDING = (
    ("input should be greater than or equal to ", "give at least "),
    ("input should be less than or equal to ", "give at most "),
    ("input should be ", "give "),
    ("list should have ", "give "),
    ("is missing", "is missing: add it"),
)

_Read = TypeVar("_Read", bound="Part")


class Part(BaseModel):
    """A JSON object in a body."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _with_whole_numbers(cls, given: Any) -> Any:
        if isinstance(given, dict):
            return {name: whole(value) for name, value in given.items()}
        return given


def whole(value: Any) -> Any:
    """A whole number as an integer, however it is written: JSON has one kind of number, and 3.0 is 3."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    return value


def read(kind: type[_Read], body: Mapping[str, Any]) -> _Read:
    """The checked body.

    Raises:
        InvalidRequest: a field has the wrong type or value; the error names it.
    """
    try:
        # As text, to find what JSON cannot hold: infinite numbers, half characters, endless nesting.
        return kind.model_validate_json(json.dumps(body, allow_nan=False))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ValidationError):
            raise _refusal(error) from None
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _not_json(reason) from None


def _not_json(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not JSON ({reason}): correct it")


def _refusal(error: ValidationError) -> InvalidRequest:
    location, what = first_error(error)
    if not location:
        reason = what.removeprefix("invalid JSON: ")
        return InvalidRequest(what) if reason == what else _not_json(reason.partition(" at line ")[0])
    field = location[0]
    for part in location[1:]:
        name = ascii(part[:40])[1:-1]  # a key of the client
        field += f"[{part}]" if part.isdecimal() else f".{name}"
    what = what.replace(" after validation", "")
    for phrase, better in _WORDING:
        if what.startswith(phrase):
            what = better + what.removeprefix(phrase)
            break
    return InvalidRequest(f"{field} {what}" if what.startswith("is ") else f"{field}: {what}")


# Types of fields


def _listed(value: object) -> object:
    if isinstance(value, list):
        return [each for each in value if each is not None]
    return [value] if isinstance(value, str) else value


def _pairs(value: object) -> object:
    """Tokens or texts with their biases, from both forms of llama.cpp's server: a mapping, or pairs."""
    if isinstance(value, dict):
        value = [[int(key) if _NUMBER.fullmatch(key) else key, bias] for key, bias in value.items()]
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return value
    return [(whole(key), float("-inf") if bias is False else bias) for key, bias in value]


_NUMBER = re.compile(r"[+-]?[0-9]{1,999}")
Count = Annotated[int, Field(ge=-1)]
"""A number of tokens; −1: no limit."""
Stops = Annotated[list[str], Field(max_length=_MAX_STOPS), BeforeValidator(_listed)]
_Bias = Annotated[
    list[tuple[int | str, float]],
    BeforeValidator(_pairs),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]


def _check_schema(value: Any) -> Any:
    if not isinstance(value, dict | bool | None):
        raise ValueError("give a JSON schema")
    return value


Schema = Annotated[Any, AfterValidator(_check_schema)]
"""A JSON schema: an object, or true or false. None: there is none."""


class _NamedSchema(Part):
    schema_: Schema = Field(alias="schema")


class ResponseFormat(Part):
    """OpenAI's ``response_format``; llama.cpp's server also accepts a schema of a ``json_object``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None
    schema_: Schema = Field(None, alias="schema")


def schema_of(form: ResponseFormat | None, field: str = "response_format") -> str | None:
    """The JSON schema that the answer must follow, as text; None: there is none. field: of the body."""
    found = _usable(form, field)
    return found.schema if found else None


def _usable(form: ResponseFormat | None, field: str) -> Usable | None:
    if form is None or form.type == "text":
        return None
    schema = form.json_schema.schema_ if form.json_schema else form.schema_
    if schema is None:
        if form.type == "json_schema":
            raise InvalidRequest("the format json_schema has no schema: add it, or give json_object")
        return Usable(_ANY_OBJECT)
    return usable(json.dumps(schema), field)


class SamplingBody(Part):
    """The fields of a body that make the settings of an answer."""

    model: str | None = None
    stream: bool | None = None
    marks: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n_predict: Count | None = None
    n_indent: Annotated[int, Field(ge=0)] | None = None
    t_max_predict_ms: Annotated[float, Field(ge=-1)] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Count | None = None
    samplers: str | list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: _Bias | None = None
    grammar: str | None = None
    json_schema: Schema = None
    speculative: Any = None
    n_max: int | None = Field(None, alias="speculative.n_max")
    p_min: float | None = Field(None, alias="speculative.p_min")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_samplers(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, values in _NEUTRAL.items():
            value = body.get(name)
            is_off = name in _OFF_BELOW_0 and isinstance(value, int | float) and value < 0
            if value not in (None, *values) and not is_off:
                raise ValueError(f"{name} is not supported: give {values[0]}, or leave it out")
        # In Lua, an empty list is an empty object.
        return {name: value for name, value in body.items() if name not in _LISTS or value != {}}

    @property
    def most(self) -> int | None:
        """Maximum number of tokens, by OpenAI's names or llama.cpp's, whose server prefers its own."""
        given = (self.n_predict, self.max_completion_tokens, self.max_tokens)
        return next((count for count in given if count is not None), None)

    def settings(self, **more: Any) -> GenerationSettings:
        """The settings; `more`: those that each protocol names differently.

        Raises:
            InvalidRequest: a setting is out of range, or two exclude each other.
        """
        sampling = {
            "temperature": self.temperature,
            "top_k": None if self.top_k is None else max(self.top_k, 0),  # as in llama.cpp
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repeat_penalty": self.repeat_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "penalty_window": 2**31 - 1 if self.repeat_last_n == -1 else self.repeat_last_n,
            "logit_bias": self._bias(),
        }
        given = {
            "seed": None if self.seed in (None, -1) else self.seed % 2**64,  # as llama.cpp, also below zero
            "min_indent": self.n_indent,
            "max_seconds": ms / 1e3 if (ms := self.t_max_predict_ms or 0) > 0 else None,
            "grammar": self.grammar or None,
            "json_schema": own.schema if (own := self._own_schema()) else None,
        }
        return GenerationSettings(
            sampling=_ordered(SamplingSettings(**_without_none(sampling)), self.samplers),
            **self._speed(),
            **_without_none(given | _without_none(more)),
        )

    def _bias(self) -> dict[int, float] | None:
        """The biases of tokens; numbers that no vocabulary has are ignored, as in llama.cpp's server."""
        if self.logit_bias is None:
            return None
        biases: dict[int, float] = defaultdict(float)
        for key, bias in self.logit_bias:
            if isinstance(key, int) and 0 <= key < 2**31:
                biases[key] += bias
        return dict(biases)

    def more(self) -> dict[str, Any]:
        """The fields of `AnswerRequest` that are the same for all protocols.

        Raises:
            InvalidRequest: the bias has too many texts, or too long ones.
        """
        texts = [(key, bias) for key, bias in self.logit_bias or () if isinstance(key, str)]
        if len(texts) > _MAX_TEXTS or any(len(text) > _MAX_TEXTS for text, _ in texts):
            raise InvalidRequest(
                f"logit_bias: give up to {_MAX_TEXTS} texts of up to {_MAX_TEXTS} characters"
            )
        return {"marks": bool(self.marks), "ignore_end": bool(self.ignore_eos), "text_bias": texts}

    def _own_schema(self) -> Usable | None:
        return None if self.json_schema is None else usable(json.dumps(self.json_schema), "json_schema")

    def warnings(self, form: ResponseFormat | None, field: str = "response_format") -> list[str]:
        """Sentences about what of the schemas of the answer is not enforced; see `schema_of`."""
        found = (_usable(form, field), self._own_schema())
        return [warning for one in found if one for warning in one.warnings]

    def _speed(self) -> dict[str, Any]:
        if self.speculative is False:
            return {"policy": "off"}
        given = {} if self.speculative is None or self.speculative is True else self.speculative
        if not isinstance(given, dict):
            raise InvalidRequest(f"speculative: give false, or an object with {', '.join(_SPEED)}")
        for name in given:
            if name not in _SPEED:
                raise InvalidRequest(
                    f"speculative has the unknown key {name[:40]!a}: give {', '.join(_SPEED)}"
                )
        whole_numbers = {name: whole(value) for name, value in given.items()}
        return _without_none({"draft_max": self.n_max, "draft_p_min": self.p_min}) | whole_numbers


def _ordered(settings: SamplingSettings, samplers: str | list[str] | None) -> SamplingSettings:
    """The settings without the samplers that a list of them, or of their letters, leaves out.

    Raises:
        InvalidRequest: it is in another order than `_SAMPLERS`, which changes the distribution.
    """
    if samplers is None:
        return settings
    names = [_LETTERS.get(name, name) for name in samplers]
    absent = [name for name in _SAMPLERS if name not in names]
    off: dict[str, Any] = {k: v for name in absent for k, v in _SAMPLERS[name].items()}
    settings = dataclasses.replace(settings, **off)

    def has_effect(name: str) -> bool:
        if settings.temperature == 0 and name in ("top_k", "top_p", "min_p"):
            return False  # the most probable token is always left
        return any(getattr(settings, field) != value for field, value in _SAMPLERS.get(name, {}).items())

    used, order = [name for name in names if has_effect(name)], [*_SAMPLERS]
    if any(
        order.index(first) >= order.index(second) and {first, second} not in _EXCHANGEABLE
        for first, second in itertools.combinations(used, 2)
    ):
        raise InvalidRequest(f"samplers in this order are not supported: give {', '.join(_SAMPLERS)}")
    return settings


def limit(count: int | None) -> int | None:
    """The maximum number of tokens; None: no limit."""
    return None if count == -1 else count


def choices(settings: GenerationSettings, n: int) -> list[GenerationSettings]:
    """The settings of n answers: if a seed is given, each has its own."""
    seed = settings.seed
    return [settings if seed is None else dataclasses.replace(settings, seed=seed + i) for i in range(n)]


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
