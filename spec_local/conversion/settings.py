"""Read settings of a config.json, which anybody may have written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spec_local.errors import ModelFileError
from spec_local.validation import first_error

_Read = TypeVar("_Read", bound=BaseModel)
_MAX_WHY = 200  # characters
STRICT = ConfigDict(strict=True, allow_inf_nan=False)
"""Of models for `read_settings`: true is no number, and text neither."""
Size = Annotated[int, Field(gt=0, lt=1 << 31)]
"""Fits into llama.cpp's integers."""
Index = Annotated[int, Field(ge=0, lt=1 << 30)]
"""Of a layer or a token; one more fits, too."""
_LARGEST = 1e30  # of the numbers in a header, which are float32
Number = Annotated[float, Field(gt=-_LARGEST, lt=_LARGEST)]
Positive = Annotated[float, Field(gt=0, lt=_LARGEST)]


def read_settings(kind: type[_Read], values: Mapping[str, Any], folder: Path) -> _Read:
    """Check settings of the config.json in `folder`.

    Raises:
        ModelFileError: names the first setting that is missing, wrong or not supported.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        location, why = first_error(error)
        raise unsupported(folder, ".".join(location), why) from None


def unsupported(folder: Path, name: str, why: str) -> ModelFileError:
    """The error for the setting `name` of the config.json in `folder`."""
    path = folder / "config.json"
    return ModelFileError(f"{path}: `{name}` cannot be converted ({why[:_MAX_WHY]}): use another head")
