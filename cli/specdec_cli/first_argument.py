"""The first argument of `run` and `generate`: the model, or the prompt where it is the only argument."""

import difflib
import os
import re
import shlex

from spec_local.errors import DownloadError, InvalidRequest
from spec_local.models.names import resolve

_NAME = re.compile(r"[\w./:@~+-]+", re.ASCII)  # what is neither such a name nor a file is a prompt
_ALMOST = 0.8  # similarity from which a word is a mistyped name


def model_and_prompt(
    model: str | None, prompt: str | None, *, command: str, given_elsewhere: bool
) -> tuple[str | None, str | None]:
    """Return the model and the prompt, where a single argument is the prompt if it cannot be a model.

    A single word that names no model is an error in `run`, where it is more probably a mistyped model.
    In `generate`, it is the prompt unless it resembles the name of a model.

    Args:
        given_elsewhere: an option gives the prompt, so that a word must be a model.

    Raises:
        InvalidRequest: the argument is a file of another kind, or a word that is probably no prompt.
    """
    if model is None:
        return model, prompt
    if prompt is not None:
        if not given_elsewhere:
            _check_before_prompt(model, prompt, command)
        return model, prompt
    if _is_model(model):
        return model, None
    if not _NAME.fullmatch(model):
        return None, model
    if given_elsewhere:
        return model, None
    if command == "generate" and "/" not in model and not _resembles_name(model):
        return None, model
    try:
        resolve(model)
    except InvalidRequest as error:
        if command == "run" and "/" in model:  # a path, or a repository
            raise
        word = shlex.quote(model)
        raise InvalidRequest(
            f"{error}; if it is a prompt, type specdec {command} -p {word}, or a model before it: "
            f"specdec {command} MODEL {word}"
        ) from None
    return model, None


def _check_before_prompt(model: str, prompt: str, command: str) -> None:
    """Raise InvalidRequest for a word that is probably the first one of a prompt without quotes."""
    if "/" in model or not _NAME.fullmatch(model):
        return
    try:
        resolve(model)
    except InvalidRequest as error:
        whole = shlex.quote(f"{model} {prompt}")
        raise InvalidRequest(f"{error}; if both are the prompt, type specdec {command} {whole}") from None
    except DownloadError:
        return  # what loads it explains how to get it


def _is_model(text: str) -> bool:
    if text.endswith(".gguf"):
        return True
    path = os.path.expanduser(text)
    if os.path.isfile(path):
        with open(path, "rb") as file:
            if file.read(4) == b"GGUF":
                return True
        name = shlex.quote(text)
        raise InvalidRequest(
            f"{text} is not a model file: if its text is the prompt, type specdec generate --file {name}"
        )
    from spec_local.models import catalog

    return catalog.is_known(text) or text in catalog.pairs()


def _resembles_name(word: str) -> bool:
    from specdec_cli import completion

    names = completion.names("")
    begins_one = any(char.isdigit() for char in word) and any(name.startswith(word) for name in names)
    return begins_one or bool(difflib.get_close_matches(word.lower(), names, 1, _ALMOST))
