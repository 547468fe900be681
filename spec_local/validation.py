"""Pydantic's validation errors, as part of a one-line message."""

from pydantic import ValidationError

_LONGEST = 200


def first_error(error: ValidationError) -> tuple[tuple[str, ...], str]:
    """The first error: its location, as keys and indices from the outside in, and what is wrong."""
    first = error.errors(include_url=False, include_input=False)[0]
    match first["type"]:
        case "missing":
            what = "is missing"
        case "extra_forbidden":
            what = "unknown key"
        case "value_error":
            what = str(first["ctx"]["error"])
        case _:
            what = first["msg"][:1].lower() + first["msg"][1:]
    place = tuple(str(part) for part in first["loc"] if part != "[key]")
    return place, " ".join(what.split())[:_LONGEST]


def describe(error: ValidationError) -> str:
    """The first error, as ``location: message``."""
    place, what = first_error(error)
    return f"{'.'.join(place)}: {what}" if place else what
