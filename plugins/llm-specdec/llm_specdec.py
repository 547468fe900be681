"""Plug-in for llm (https://llm.datasette.io): local GGUF models with speculative decoding."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import llm
from llm.parts import AttachmentPart, Message, StreamEvent, TextPart
from pydantic import Field, create_model

from spec_local.core.sampling_settings import SETTINGS

if TYPE_CHECKING:
    from spec_local import GenerationSettings, Session

_PREFIX = "specdec"


@llm.hookimpl
def register_models(register: Callable[[llm.Model], None]) -> None:
    """Register the models and pairs that are on this machine, and one model that takes any file."""
    from spec_local.errors import SpecLocalError
    from spec_local.models import catalog

    register(Specdec(_PREFIX))
    try:
        here = {name for name in catalog.models() if catalog.find(name)}
        pairs = [name for name, pair in catalog.pairs().items() if {pair.main, pair.draft} <= here]
        others = [model.name for model in catalog.stored_models()]
    except SpecLocalError:  # a damaged models.toml must not keep llm from starting; specdec reports it
        return
    for name in (*sorted(here), *pairs, *others):
        register(Specdec(f"{_PREFIX}/{name}", name))


_NUMBERS = {each.field: each for each in SETTINGS if each.kind in (int, float)}
_Sampling = create_model(
    "_Sampling",
    __base__=llm.Options,
    **{name: (each.kind | None, Field(None, description=each.help)) for name, each in _NUMBERS.items()},
)


class Specdec(llm.Model):  # type: ignore[misc]
    """A main model with its draft model; `main`: its name, None: from the options."""

    can_stream = True
    supports_schema = True
    attachment_types = {f"image/{kind}" for kind in ("bmp", "gif", "jpeg", "png", "webp")}  # noqa: RUF012

    class Options(_Sampling):  # type: ignore[misc, valid-type]
        main: str | None = Field(None, description="Main model: a file, a name or user/repo:quant")
        draft: str | None = Field(None, description="Draft model; none: no draft model")
        ctx: int | None = Field(None, description="Context length in tokens")
        seed: int | None = Field(None, description="Random seed")
        max_tokens: int | None = Field(None, description="Maximum number of tokens to generate")

    def __init__(self, model_id: str, main: str | None = None) -> None:
        self.model_id, self._main = model_id, main

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.Response,
        conversation: llm.Conversation | None,
    ) -> Iterator[Any]:
        """Yield the parts of an answer; reasoning before it is marked as such.

        Raises:
            llm.ModelError: see `spec_local.errors.SpecLocalError`.
        """
        from spec_local import Done, Text
        from spec_local.errors import SpecLocalError

        try:
            session = _session(self._main, prompt.options)
            events = session.chat(_messages(prompt), _settings(prompt.options), json_schema=prompt.schema)
            splitter = session.splitter()
            for event in events:
                if isinstance(event, Text):
                    yield from _parts(splitter.feed(event.text))
                elif isinstance(event, Done):
                    yield from _parts(splitter.finish())
                    s = event.statistics
                    drafts = {"draft_tokens": s.draft_n, "accepted_draft_tokens": s.draft_n_accepted}
                    response.set_usage(input=s.prompt_n + s.cached_n, output=s.predicted_n, details=drafts)
        except SpecLocalError as error:
            raise llm.ModelError(str(error)) from None


_sessions: "dict[tuple[object, ...], Session]" = {}
"""The session of the last answer, by what it was opened with: in a chat, the models stay loaded."""


def _session(main: str | None, options: Any) -> "Session":
    from spec_local import Session
    from spec_local.models.names import STARTER

    key = (main or options.main or STARTER, options.draft, options.ctx)
    if key not in _sessions:
        while _sessions:
            _sessions.popitem()[1].close()
        _sessions[key] = Session.open(key[0], options.draft, n_ctx=options.ctx)
    return _sessions[key]


def _settings(options: Any) -> "GenerationSettings":
    from spec_local import GenerationSettings, SamplingSettings

    given = {name: value for name, value in options if value is not None}
    sampling = {name: given[name] for name in _NUMBERS if name in given}
    own = {name: given[name] for name in ("seed", "max_tokens") if name in given}
    return GenerationSettings(sampling=SamplingSettings(**sampling), **own)


def _messages(prompt: llm.Prompt) -> list[Any]:
    """The whole chat; of several system messages, templates take only one, the last is used."""
    messages = [{"role": message.role, "content": _content(message)} for message in prompt.messages]
    system = [message for message in messages if message["role"] == "system"][-1:]
    return [*system, *(message for message in messages if message["role"] != "system")]


def _content(message: Message) -> list[Any]:
    """The images of a message, and then its text, as `specdec run` has them."""
    from spec_local.images.image import Image

    attached = [part.attachment for part in message.parts if isinstance(part, AttachmentPart)]
    images = [Image(each.content_bytes(), each.path or "") for each in attached if each]
    return [*images, "".join(part.text for part in message.parts if isinstance(part, TextPart))]


def _parts(parts: Any) -> Iterator[Any]:
    """Yield the texts; bytes that are not UTF-8 become U+FFFD, as llm writes them to a database."""
    from spec_local.text import printable

    if parts.reasoning:
        yield StreamEvent(type="reasoning", chunk=printable(parts.reasoning))
    if parts.answer:
        yield printable(parts.answer)
