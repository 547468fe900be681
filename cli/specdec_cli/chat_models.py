"""The models of a chat, which can be replaced by others, or opened again with a larger context."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from spec_local.chat_session import ChatSession
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.models.names import FOUND_PROJECTOR, NO_DRAFT, NO_PROJECTOR
from spec_local.session import Session
from specdec_cli import typed_ahead
from specdec_cli.options import ModelOptions, SamplingOptions
from specdec_cli.sessions import generation_settings, open_session


@dataclass
class ChatModels:
    """The open models of a chat; there is memory for one session at a time."""

    options: ModelOptions
    sampling: SamplingOptions
    session: Session = field(init=False)

    def __enter__(self) -> Session:
        self.session = open_session(self.options)
        return self.session

    def __exit__(self, *_: object) -> None:
        self.session.close()

    def use(self, chat: ChatSession, main: str, draft: str | None) -> None:
        """Open other models; what the user has switched off stays off.

        Args:
            draft: None: one is looked for, unless the chat was to have none.

        Raises:
            SpecLocalError: see `reopen`.
        """
        options = self.options
        no_spec = options.no_spec and chat.settings.proposer == "none" and not draft
        kept = NO_DRAFT if options.draft == NO_DRAFT else None
        # A projector is for one main model.
        mmproj = NO_PROJECTOR if options.mmproj == NO_PROJECTOR else FOUND_PROJECTOR
        self.reopen(chat, main=main, draft=draft or kept, mmproj=mmproj, no_spec=no_spec)

    def switched_off(self, chat: ChatSession) -> str:
        """Return how to switch on what the user has switched off; "": nothing."""
        if chat.settings.proposer == "none" or chat.settings.policy == "off":
            return "speculation is off: /draft on switches it on"
        if self.options.draft == NO_DRAFT:
            return "no draft model is used: /model MAIN auto looks for one"
        return ""

    def reopen(self, chat: ChatSession, **changes: Any) -> None:
        """Open the models with other options; the conversation and the settings stay.

        Sampling settings that are the old main model's defaults become those of the new one.

        Raises:
            SpecLocalError: they cannot be opened; the old ones are open again.
        """
        options = replace(self.options, **changes)
        files = options.files()
        if missing := [path for path in files if path and not path.is_file()]:
            raise InvalidRequest(
                f"{missing[0]} does not exist: give a file, or a name from specdec models list"
            )
        settings = [generation_settings(each, self.sampling).sampling for each in (self.options, options)]
        with typed_ahead.collecting():
            self.session.close()
            try:
                self._use(chat, lambda: open_session(options, files))
            except (SpecLocalError, KeyboardInterrupt):
                self._use(chat, lambda: open_session(self.options))
                raise
        if chat.settings.sampling == settings[0]:
            chat.settings = replace(chat.settings, sampling=settings[1])
        self.options = options

    def _use(self, chat: ChatSession, open_: Callable[[], Session]) -> None:
        self.session = open_()
        try:
            chat.use(self.session)
        except SpecLocalError:
            self.session.close()
            raise
