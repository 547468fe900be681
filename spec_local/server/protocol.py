"""The interface of a protocol: how one kind of HTTP body asks for answers, and how events are written."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from spec_local.errors import SpecLocalError
from spec_local.server.events import AnswerRequest, Event, Loaded


class Exchange(Protocol):
    """One request of a client and its response. Created from the body and the model: ``Kind(body, loaded)``.

    Raises (when created):
        InvalidRequest: the body asks for something that does not exist or is not supported.

    Attributes:
        requests: the answers to generate; all at the same time, if there are rows for them.
        streams: whether the client wants server-sent events.
    """

    requests: Sequence[AnswerRequest]
    streams: bool

    def __init__(self, body: Mapping[str, Any], loaded: Loaded) -> None: ...

    def begin(self) -> Iterator[str]:
        """The server-sent events before those of the answers, each with its empty line."""

    def write(self, index: int, event: Event) -> Iterator[str]:
        """The server-sent events for an event of answer number `index`."""

    def end(self) -> Iterator[str]:
        """The server-sent events after all answers have ended."""

    def failed(self, error: SpecLocalError) -> Iterator[str]:
        """The server-sent events that end a response which cannot be completed."""

    def whole(self, answers: Sequence[Sequence[Event]]) -> Mapping[str, Any]:
        """The response in one JSON object, from all events of each answer."""
