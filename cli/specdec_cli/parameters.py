"""The parameters of commands, as fields of dataclasses: ``ctx: int = option("--ctx", default=4096)``."""

import dataclasses
import inspect
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import typer

REQUIRED = dataclasses.MISSING
_PARAMETER = "parameter"  # in the metadata of a field


def option(*names: str, default: Any = None, **more: Any) -> Any:
    """Return a field that is an option; more: as of `typer.Option`.

    Args:
        names: as of `typer.Option`; but without them, a switch has no negation.
    """
    return dataclasses.field(default=default, metadata={_PARAMETER: typer.Option(*names, **more)})


def argument(*, default: Any = None, **more: Any) -> Any:
    """Return a field that is an argument; more: as of `typer.Argument`. default: or `REQUIRED`."""
    return dataclasses.field(default=default, metadata={_PARAMETER: typer.Argument(**more)})


def parameters(options: Any) -> Iterator[inspect.Parameter]:
    """Yield the parameters that Typer reads, of the fields of a dataclass and of the dataclasses in them."""
    hints = typing.get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from parameters(kind)
        else:
            more = list(field.metadata.values())
            for each in more:
                if kind is bool and each.default is ...:  # where Typer has the first name
                    each.param_decls = [f"--{field.name.replace('_', '-')}"]
            yield inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=Annotated[kind, *more] if more else kind,
                default=inspect.Parameter.empty if field.default is REQUIRED else field.default,
            )


def record(options: Any, values: dict[str, Any]) -> Any:
    """Return the dataclass of these values of `parameters`; others are ignored."""
    hints = typing.get_type_hints(options)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(options)}
    return options(
        **{
            name: record(kind, values) if dataclasses.is_dataclass(kind) else values[name]
            for name, kind in kinds.items()
        }
    )
