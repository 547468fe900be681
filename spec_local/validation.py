"""Pydantic's validation errors, as part of a one-line message."""

from pydantic import ValidationError

_MAX_LENGTH = 200


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
        case "json_invalid":  # the line is that of the text, which can be a part of a file
            what = "invalid JSON: " + str(first["ctx"]["error"]).partition(" at line ")[0]
        case _:
            what = first["msg"][:1].lower() + first["msg"][1:]
    location = tuple(str(part) for part in first["loc"] if part != "[key]")
    return location, " ".join(what.split())[:_MAX_LENGTH]


def describe(error: ValidationError) -> str:
    """The first error, as ``location: message``."""
    location, what = first_error(error)
    where = " ".join(".".join(location).split())[:_MAX_LENGTH]
    return f"{where}: {what}" if where else what
