"""The models of a chat, which can be replaced by others, or opened again with a larger context."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from spec_local.errors import InvalidRequest, SpecLocalError
from specdec_cli import render
from specdec_cli.options import ModelOptions, SamplingOptions, generation_settings

if TYPE_CHECKING:
    from spec_local.chat_session import ChatSession
    from spec_local.session import Session


@dataclass
class ChatModels:
    """The open models of a chat; there is memory for one session at a time."""

    options: ModelOptions
    sampling: SamplingOptions
    session: "Session" = field(init=False)

    def __enter__(self) -> "Session":
        self.session = self.options.open(render.note)
        return self.session

    def __exit__(self, *_: object) -> None:
        self.session.close()

    def reopen(self, chat: "ChatSession", **changes: Any) -> None:
        """Open the models with other options; the conversation and the settings stay.

        Sampling settings that are the old main model's defaults become those of the new one.

        Raises:
            SpecLocalError: they cannot be opened; the old ones are open again.
        """
        options = replace(self.options, **changes)
        files = options.files()
        if missing := [path for path in files if path and not path.is_file()]:
            raise InvalidRequest(
                f"{missing[0]} does not exist: give a file, or a name of specdec models list"
            )
        settings = [generation_settings(each, self.sampling).sampling for each in (self.options, options)]
        self.session.close()
        try:
            self._use(chat, lambda: options.open(render.note, files))
        except (SpecLocalError, KeyboardInterrupt):
            self._use(chat, lambda: self.options.open(render.note))
            raise
        if chat.settings.sampling == settings[0]:
            chat.settings = replace(chat.settings, sampling=settings[1])
        self.options = options

    def _use(self, chat: "ChatSession", open_: "Callable[[], Session]") -> None:
        self.session = open_()
        try:
            chat.use(self.session)
        except SpecLocalError:
            self.session.close()
            raise
