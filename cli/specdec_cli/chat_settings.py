"""What ``/set`` shows and changes in a chat: the options of the command line that matter from one answer to the next."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spec_local.errors import InvalidRequest
from specdec_cli.settings import nearest

if TYPE_CHECKING:
    from specdec_cli.talk import Talk


@dataclass(frozen=True, slots=True)
class _Setting:
    """owner: what has the field, from a talk; takes: what a value must look like; parse: raises ValueError."""

    owner: str
    field: str
    takes: str
    parse: Callable[[str], Any]

    def read(self, talk: "Talk") -> Any:
        return getattr(_owner(talk, self.owner), self.field)

    def write(self, talk: "Talk", value: Any) -> None:
        owner = _owner(talk, self.owner)
        if self.owner in ("talk", "chat"):
            setattr(owner, self.field, value)
            return
        changed = replace(owner, **{self.field: value})  # checks the value
        if self.owner == "sampling":
            changed = replace(talk.chat.settings, sampling=changed)
        talk.chat.settings = changed


def _owner(talk: "Talk", name: str) -> Any:
    settings = talk.chat.settings
    return {"talk": talk, "chat": talk.chat, "settings": settings, "sampling": settings.sampling}[name]


def change(talk: "Talk", name: str, text: str) -> None:
    """Give a setting another value.

    Raises:
        InvalidRequest: there is no such setting, or the value makes no sense; nothing has changed.
    """
    setting = _setting(name)
    try:
        value = setting.parse(text)
    except ValueError:
        raise InvalidRequest(f"{name} is not {text[:40]!r}: give {setting.takes}") from None
    setting.write(talk, value)


def shown(talk: "Talk", name: str = "") -> Iterator[str]:
    """A line for a setting, or for each; raises as `change` does."""
    for each, setting in ({name: _setting(name)} if name else SETTINGS).items():
        yield f"{each} = {_text(setting.read(talk))}"


def _setting(name: str) -> _Setting:
    if name in SETTINGS:
        return SETTINGS[name]
    raise InvalidRequest(f"there is no setting {name}{nearest(name, SETTINGS)}: /set lists them")


def _text(value: Any) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case None:
            return "none"
        case float():
            return f"{value:g}"
        case str() | int():
            return str(value)
        case _:
            return ", ".join(map(repr, value)) or "none"


def _number(text: str) -> float:
    value = float(text)
    if math.isnan(value):
        raise ValueError
    return value


def _perhaps(text: str) -> int | None:
    return None if text == "none" else int(text)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError
    return text == "on"


def _stops(text: str) -> Sequence[str]:
    return () if text == "none" else (text.replace("\\n", "\n"),)


def _when_full(text: str) -> str:
    from spec_local.chat.chat_session import WHEN_FULL

    if text not in WHEN_FULL:
        raise ValueError
    return text


SETTINGS = {
    "temp": _Setting("sampling", "temperature", "a number, 0 or more", _number),
    "top-k": _Setting("sampling", "top_k", "a whole number, 0: off", int),
    "top-p": _Setting("sampling", "top_p", "a number up to 1, 1: off", _number),
    "min-p": _Setting("sampling", "min_p", "a number up to 1, 0: off", _number),
    "repeat-penalty": _Setting("sampling", "repeat_penalty", "a number, 1: off", _number),
    "frequency-penalty": _Setting("sampling", "frequency_penalty", "a number, 0: off", _number),
    "presence-penalty": _Setting("sampling", "presence_penalty", "a number, 0: off", _number),
    "seed": _Setting("settings", "seed", "a whole number, or none", _perhaps),
    "max-tokens": _Setting("settings", "max_tokens", "a whole number, or none", _perhaps),
    "stop": _Setting("settings", "stops", "a text that ends an answer (\\n: a new line), or none", _stops),
    "policy": _Setting("settings", "policy", "adaptive, fixed, confidence, entropy or off", str),
    "draft-max": _Setting("settings", "draft_max", "a whole number, or none", _perhaps),
    "when-full": _Setting("chat", "when_full", "stop or drop-oldest", _when_full),
    "show-drafts": _Setting("talk", "show_drafts", "on or off", _switch),
    "markdown": _Setting("talk", "markdown", "on or off", _switch),
    "stats": _Setting("talk", "show_statistics", "on or off", _switch),
}
