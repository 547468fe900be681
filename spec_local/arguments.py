"""Check the types of arguments of the public API, so that a wrong one gives an error of one line."""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Union

from spec_local.errors import InvalidRequest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_MAX_BITS = 1000  # of an integer: a larger one is not a float, and Python may refuse to print it
_NAMES: dict[Any, str] = {
    str: "text",
    int: "an integer",
    float: "a number",
    bool: "True or False",
    Path: "a path",
    type(None): "None",
}


def checked(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Check arguments against the annotations of a function or method.

    Raises (when it is called):
        InvalidRequest: an argument has the wrong type. As usual, a missing or unknown one is a TypeError.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # raises an error that names the function
        hints = _hints(function)
        for name, value in given.items():
            if name in hints:
                check(name, value, hints[name])
        return function(*args, **kwargs)

    return call


def check_fields(instance: "DataclassInstance") -> None:
    """Check the fields of a dataclass against their annotations.

    Raises:
        InvalidRequest: a field has a value of the wrong type.
    """
    hints = _hints(type(instance))
    for field in fields(instance):
        if field.init:
            check(field.name, getattr(instance, field.name), hints[field.name])


def check(name: str, value: object, hint: Any) -> None:
    """Check one value; see `check_fields`.

    Supported are classes, unions, literals, functions, TypedDicts, iterables, tuples, mappings. Text is not
    a sequence, True is not an integer, and an integer has up to 1000 bits.
    """
    if not _fits(value, hint):
        kind = _kind(value)
        if typing.get_origin(hint) is Literal and isinstance(value, str):
            kind = ascii(value[:40])
        raise InvalidRequest(f"{name} is {kind}: give {_description(hint)}")


@functools.cache
def _hints(of: Any) -> dict[str, Any]:
    return typing.get_type_hints(of)


def _fits(value: object, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if origin in (Sequence, list):
        right = isinstance(value, list if origin is list else Sequence)
        return right and not isinstance(value, (str, bytes)) and _all_fit(value, arguments[0])
    if origin is Iterable:  # what it yields is checked when it does
        return isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    if origin is tuple:
        right = isinstance(value, tuple) and len(value) == len(arguments)
        return right and all(map(_fits, value, arguments))  # type: ignore[call-overload]
    if origin is Mapping:
        return (
            isinstance(value, Mapping)
            and _all_fit(value.keys(), arguments[0])
            and _all_fit(value.values(), arguments[1])
        )
    if origin is Callable:
        return callable(value)
    if hint in (int, float):
        small = isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= _MAX_BITS
        return small or (hint is float and isinstance(value, float))
    if typing.is_typeddict(hint):
        parts = _hints(hint)
        return (
            isinstance(value, dict)
            and hint.__required_keys__ <= value.keys() <= parts.keys()
            and all(_fits(each, parts[key]) for key, each in value.items())
        )
    return isinstance(value, hint)


def _all_fit(values: Any, hint: Any) -> bool:
    if hint is int:  # thousands of tokens
        return all(type(value) is int or _fits(value, int) for value in values)
    return all(_fits(value, hint) for value in values)


def _kind(value: object) -> str:
    """Describe a value of the wrong type, without the value: it can be long, or impossible to print."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > _MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    name = type(value).__name__
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return " of ".join([name, *sorted({type(each).__name__ for each in value})[:1]])
    return name


def _description(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_description, arguments))
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin in (Sequence, list, Iterable):
        kind, space, rest = _description(arguments[0]).removeprefix("a ").removeprefix("an ").partition(" ")
        return f"a list of {kind}s{space}{rest}"
    if origin is tuple:
        return f"a tuple of {' and '.join(map(_description, arguments))}"
    if origin is Mapping:
        return "a mapping"
    if origin is Callable:
        return "a function"
    if typing.is_typeddict(hint):
        parts = [
            f"{'' if key in hint.__required_keys__ else 'optionally '}{key} ({_description(each)})"
            for key, each in _hints(hint).items()
        ]
        return f"a dict with {' and '.join(parts)}"
    return _NAMES.get(hint) or f"a {hint.__name__}"
