"""Check the arguments of the public API, so that a wrong one gives an error of one line."""

import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Unpack, cast, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, WrapValidator
from typing_extensions import TypedDict  # of pydantic, which needs it before Python 3.12

from spec_local.core.checks import shown
from spec_local.errors import InvalidRequest

Printable = Annotated[int, Field(gt=-(2**1000), lt=2**1000)]
"""An integer that is reduced to what is possible. Python refuses to print very large ones in errors."""
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""An integer for llama.cpp."""


def _keeping_cells(tokens: Any, check: Callable[[Any], Sequence[int]]) -> Sequence[int]:
    found = check(tokens)  # plain numbers
    return [*tokens] if found and min(found) < 0 else found


Tokens = Annotated[Sequence[int], WrapValidator(_keeping_cells)]
"""Token ids, and the cells of pictures (`spec_local.core.span.Cell`), which stay what they are."""
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type[Any])
_TYPED_DICT: Any = TypedDict  # for type checkers, which want its fields to be literals
_CONFIG = ConfigDict(strict=True, arbitrary_types_allowed=True)
_EXPECTED = {
    "greater_than_equal": "{ge:.10g} or more",
    "less_than_equal": "at most {le:.10g}",
    "less_than": "less than {lt:.10g}",
    "string_type": "text",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "True or False",
    "list_type": "a list",
    "sequence_str": "a list",
    "dict_type": "a mapping",
    "callable_type": "a function",
    "is_instance_of": "a {class}",
    "dataclass_exact_type": "a {class_name}",
}
"""The expected values, by pydantic's type of the error."""


@dataclass(frozen=True, slots=True)
class Default:
    """In an `Annotated` field of a TypedDict: the value of an argument that is not given."""

    value: Any


def ignore(*_: object) -> None:
    """A callback for callers that have given none."""


def checked(function: _Function) -> _Function:
    """Check arguments against the annotations of a function or method; lists and mappings are copied.

    Text is not a sequence, True is not an integer, and sequences are lists or tuples. Arguments that are an
    unpacked TypedDict are shown one by one in the signature and the documentation, with their `Default`; the
    function gets all of them.

    Raises (when it is called):
        InvalidRequest: an argument has the wrong type or value. A missing or unknown one is a TypeError.
    """
    signature, more, doc = _with_fields(function)
    defaults = {parameter.name: parameter.default for parameter in more}
    others = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]

    @functools.cache  # at the first call: it takes milliseconds, and an annotation may name a later class
    def validator() -> TypeAdapter[dict[str, Any]]:
        hints = get_type_hints(function, include_extras=True) | {each.name: each.annotation for each in more}
        named = {name: hints[name] for name in signature.parameters if name in hints and name not in others}
        record = _TYPED_DICT("Arguments", named, total=False)
        record.__pydantic_config__ = _CONFIG
        return TypeAdapter(record)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            unknown = [] if others else [name for name in kwargs if name not in signature.parameters]
            why = f"has no argument {unknown[0]!r}" if unknown else f"is {error}"
            near = similar(unknown[0], signature.parameters) if unknown else ""
            raise TypeError(f"{function.__qualname__} {why}{near}") from None
        for name in others:
            given |= given.pop(name, {})
        try:
            given |= validator().validate_python(given)
        except ValidationError as error:
            raise _refusal(error) from None
        return function(**defaults | given)

    call.__signature__, call.__doc__ = signature, doc  # type: ignore[attr-defined]
    return cast(_Function, call)


def _with_fields(
    function: Callable[..., Any],
) -> tuple[inspect.Signature, Sequence[inspect.Parameter], str | None]:
    """The signature and documentation with the fields of an unpacked TypedDict, and these fields."""
    signature, doc = inspect.signature(function), function.__doc__
    parameters = list(signature.parameters.values())
    if not parameters or get_origin(parameters[-1].annotation) is not Unpack:
        return signature, (), doc
    last = parameters.pop()
    (record,) = get_args(last.annotation)
    more = [
        last.replace(
            name=name,
            kind=last.KEYWORD_ONLY,
            default=next(each.value for each in get_args(hint) if isinstance(each, Default)),
            annotation=hint,
        )
        for name, hint in get_type_hints(record, include_extras=True).items()
    ]
    n = sum(each.kind is not each.KEYWORD_ONLY for each in parameters)
    lines = textwrap.indent(inspect.cleandoc(record.__doc__).partition("\n\n")[2], " " * 12).lstrip()
    shown = (doc or "").replace(f"{last.name}: see `{record.__name__}`.", lines)
    return signature.replace(parameters=[*parameters[:n], *more, *parameters[n:]]), more, shown


def checked_fields(kind: _Class) -> _Class:
    """Check the arguments of a dataclass as `checked` does."""
    kind.__init__ = checked(kind.__init__)
    return kind


def similar(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that was probably meant, if any."""
    names = sorted(known)
    near = [each for each in names if each.startswith(name)] or difflib.get_close_matches(name, names, 1)
    return f": did you mean {near[0]}?" if near else ""


def _refusal(error: ValidationError) -> InvalidRequest:
    """The error of the first wrong argument; of the types in a union, that which fits furthest counts."""
    errors = error.errors(include_url=False)
    worst = max(errors, key=lambda each: _place(each["loc"]).count("["))
    place = _place(worst["loc"])
    expected = dict.fromkeys(_expected(each) for each in errors if _place(each["loc"]) == place)
    return InvalidRequest(f"{place} is {shown(worst['input'])}: give {' or '.join(expected)}")


def _place(location: tuple[int | str, ...]) -> str:
    """The argument and the indices in it, without the types of unions, which pydantic adds."""
    name, *rest = location
    if "[key]" in rest:
        return f"a key of {name}"
    return "".join([str(name), *(f"[{part}]" for part in rest if isinstance(part, int))])


def _expected(error: Any) -> str:
    context = error.get("ctx", {})
    if context.get("class") in ("Sequence", "Iterable"):
        return "a list"
    known = _EXPECTED.get(error["type"])
    return known.format(**context) if known else error["msg"].removeprefix("Input should be ")
