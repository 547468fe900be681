"""The settings of ``/set``: options that can change from one answer to the next."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spec_local.chat_session import WHEN_FULL
from spec_local.core import sampling_settings
from spec_local.errors import InvalidRequest
from specdec_cli.names import nearest

if TYPE_CHECKING:
    from specdec_cli.chat_view import ChatView


@dataclass(frozen=True, slots=True)
class _Setting:
    """owner: see `_owner`. expected: a description of valid values. parse: raises ValueError.

    unset: the word that stands for None.
    """

    owner: str
    field: str
    expected: str
    parse: Callable[[str], Any]
    unset: str = "none"

    def read(self, view: "ChatView") -> Any:
        return getattr(_owner(view, self.owner), self.field)

    def write(self, view: "ChatView", value: Any) -> None:
        owner = _owner(view, self.owner)
        if self.owner in ("view", "chat"):
            setattr(owner, self.field, value)
            return
        changed = replace(owner, **{self.field: value})  # checks the value
        if self.owner == "sampling":
            changed = replace(view.chat.settings, sampling=changed)
        view.chat.settings = changed


def _owner(view: "ChatView", name: str) -> Any:
    settings = view.chat.settings
    return {"view": view, "chat": view.chat, "settings": settings, "sampling": settings.sampling}[name]


def change(view: "ChatView", name: str, text: str) -> None:
    """Change a setting.

    Raises:
        InvalidRequest: the setting or its value is invalid; nothing has changed.
    """
    setting = _setting(name)
    try:
        value = setting.parse(text)
    except ValueError:
        raise InvalidRequest(f"{name} {text[:40]!r} is invalid: give {setting.expected}") from None
    setting.write(view, value)


def lines(view: "ChatView", name: str = "") -> Iterator[str]:
    """Yield one line for a setting, or one for each; raises as `change` does."""
    for each, setting in ({name: _setting(name)} if name else SETTINGS).items():
        value = setting.read(view)
        yield f"{each} = {setting.unset if value is None else _text(value)}"


def _setting(name: str) -> _Setting:
    if name in SETTINGS:
        return SETTINGS[name]
    raise InvalidRequest(f"setting {name} is unknown{nearest(name, SETTINGS)}: /set lists all settings")


def _text(value: Any) -> str:
    match value:
        case bool():
            return "on" if value else "off"
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


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _optional(field: str, unset: str = "none") -> _Setting:
    def parse(text: str) -> int | None:
        return None if text == unset else int(text)

    return _Setting("settings", field, f"an integer, or {unset}", parse, unset)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError
    return text == "on"


def _stops(text: str) -> Sequence[str]:
    return () if text == "none" else (text.replace("\\n", "\n"),)


def _when_full(text: str) -> str:
    if text not in WHEN_FULL:
        raise ValueError
    return text


def _of_sampler(setting: sampling_settings.Setting) -> _Setting:
    check, is_integer = setting.check, setting.kind is int
    expected = "an integer" if is_integer else "a number up to 1" if check.most == 1 else "a number"
    expected += f", {check.least:g} or more" if setting.off is None else f", {setting.off:g}: off"
    return _Setting("sampling", setting.field, expected, int if is_integer else _number)


SETTINGS = {
    **{each.option: _of_sampler(each) for each in sampling_settings.SETTINGS if each.kind in (int, float)},
    "seed": _optional("seed"),
    "max-tokens": _optional("max_tokens"),
    "stop": _Setting("settings", "stops", "a text at which answers end (\\n: newline), or none", _stops),
    "policy": _Setting("settings", "policy", "adaptive, fixed, confidence or off", str),
    "draft-max": _optional("draft_max", unset="auto"),
    "ctx": _Setting("view", "n_ctx", "a number of tokens", _size),
    "when-full": _Setting("chat", "when_full", "stop or drop-oldest", _when_full),
    "show-drafts": _Setting("view", "show_drafts", "on or off", _switch),
    "hide-thinking": _Setting("view", "hide_thinking", "on or off", _switch),
    "markdown": _Setting("view", "markdown", "on or off", _switch),
    "wrap": _Setting("view", "wrap", "on or off", _switch),
    "stats": _Setting("view", "show_statistics", "on or off", _switch),
}
