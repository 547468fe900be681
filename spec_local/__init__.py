"""Lossless speculative decoding for GGUF models.

    from spec_local import Session, Text

    with Session.open("starter-pair") as session:
        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        print(session.complete(messages, max_tokens=64))
        for event in session.chat(messages, max_tokens=64):  # while it is generated
            if isinstance(event, Text):
                print(event.text, end="", flush=True)

The public API is ``__all__`` and the modules `spec_local.chat.request`, `spec_local.chat.saved_chat`,
`spec_local.batch.runner` and `spec_local.batch.answers`. Everything is imported on first use.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_local.chat.call_reading import ToolCall
    from spec_local.chat.conversation import Conversation
    from spec_local.chat.template import ChatTemplate
    from spec_local.chat_session import ChatSession, MessagesDropped
    from spec_local.core.sampling import TokenLogprob
    from spec_local.core.sampling_settings import SamplingSettings
    from spec_local.engine.events import Failed, Prefilled, Statistics
    from spec_local.errors import SpecLocalError
    from spec_local.session import Done, NumberedEvent, Session, Text
    from spec_local.settings import GenerationSettings

__version__ = "0.1.0"

__all__ = [
    "ChatSession",
    "ChatTemplate",
    "Conversation",
    "Done",
    "Failed",
    "GenerationSettings",
    "MessagesDropped",
    "NumberedEvent",
    "Prefilled",
    "SamplingSettings",
    "Session",
    "SpecLocalError",
    "Statistics",
    "Text",
    "TokenLogprob",
    "ToolCall",
    "__version__",
]

_HOMES = {
    "spec_local.chat_session": ("ChatSession", "MessagesDropped"),
    "spec_local.chat.conversation": ("Conversation",),
    "spec_local.chat.call_reading": ("ToolCall",),
    "spec_local.chat.template": ("ChatTemplate",),
    "spec_local.settings": ("GenerationSettings",),
    "spec_local.session": ("Done", "NumberedEvent", "Session", "Text"),
    "spec_local.engine.events": ("Failed", "Prefilled", "Statistics"),
    "spec_local.core.sampling": ("TokenLogprob",),
    "spec_local.core.sampling_settings": ("SamplingSettings",),
    "spec_local.errors": ("SpecLocalError",),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            from spec_local.signatures import make_readable

            found = getattr(importlib.import_module(home), name)
            make_readable(found)
            globals()[name] = found  # the next use finds it without this function
            return found
    raise AttributeError(
        f"module 'spec_local' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
    )
