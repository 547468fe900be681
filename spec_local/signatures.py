"""Signatures of the public classes as a person would write them, for `help` and `inspect.signature`."""

import inspect
from dataclasses import MISSING, fields, is_dataclass
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Any, ForwardRef, Literal, Union, get_args, get_origin

_WIDTH = 80


def make_readable(kind: type[Any]) -> None:
    """Shorten the signatures of a class and its public methods: no bounds, module names or factories."""
    defaults: dict[str, _Shown] = {}
    if is_dataclass(kind):
        for each in fields(kind):
            if each.default_factory is not MISSING:
                defaults[each.name] = _Shown(f"{type(each.default_factory()).__name__}()")
        kind.__annotations__ = {name: written(hint) for name, hint in kind.__annotations__.items()}
    for name, member in vars(kind).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if isinstance(function, FunctionType) and (
            not name.startswith("_") or name in ("__init__", "__new__")
        ):
            readable = _readable(inspect.signature(function), defaults if name == "__init__" else {})
            function.__signature__ = readable  # type: ignore[attr-defined]


def written(hint: object) -> str:
    """An annotation as text, without module names, and without what `Annotated` adds to a type."""
    if isinstance(hint, str | ForwardRef):  # of a class that is defined later
        return hint if isinstance(hint, str) else hint.__forward_arg__
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return written(args[0])
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(written, args)))
    if isinstance(hint, list):  # the arguments of a function
        origin, args, name = None, tuple(hint), ""
    elif hint in (None, NoneType):
        name = "None"
    else:
        name = getattr(origin or hint, "__name__", str(hint))
    shown = ", ".join(map(repr if origin is Literal else written, args))
    return f"{name}[{shown}]" if args or isinstance(hint, list) else name


class _Shown(str):
    """Text that is shown in a signature without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Signature(inspect.Signature):
    """A signature with one argument a line if it is long, as `help` shows it from Python 3.13 on."""

    def __str__(self) -> str:
        line = super().__str__()
        if len(line) <= _WIDTH:
            return line
        lines = list(map(str, self.parameters.values()))
        kinds = [each.kind for each in self.parameters.values()]
        if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
            lines.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
        returned = "" if self.return_annotation is self.empty else f" -> {self.return_annotation}"
        return "(\n" + "".join(f"    {each},\n" for each in lines) + f"){returned}"


def _readable(signature: inspect.Signature, defaults: dict[str, _Shown]) -> _Signature:
    parameters = [
        each.replace(annotation=_shown(each.annotation), default=defaults.get(each.name, each.default))
        for each in signature.parameters.values()
    ]
    return _Signature(parameters, return_annotation=_shown(signature.return_annotation))


def _shown(annotation: object) -> Any:
    return annotation if annotation is inspect.Parameter.empty else _Shown(written(annotation))
