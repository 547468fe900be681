"""What pydantic finds wrong with what people wrote, as a part of one line."""

from pydantic import ValidationError

_LONGEST = 200


def first_fault(error: ValidationError) -> tuple[tuple[str, ...], str]:
    """The first thing that is wrong: where it is, as keys and numbers from outside in, and what."""
    first = error.errors(include_url=False, include_input=False)[0]
    match first["type"]:
        case "missing":
            what = "is missing"
        case "extra_forbidden":
            what = "there is no such key"
        case "value_error":
            what = str(first["ctx"]["error"])
        case _:
            what = first["msg"][:1].lower() + first["msg"][1:]
    place = tuple(str(part) for part in first["loc"] if part != "[key]")
    return place, " ".join(what.split())[:_LONGEST]


def told(error: ValidationError) -> str:
    """The same, as ``place: what``."""
    place, what = first_fault(error)
    return f"{'.'.join(place)}: {what}" if place else what
