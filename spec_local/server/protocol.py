"""The interface of a protocol: how one kind of HTTP body asks for answers, and how events are written."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel

from spec_local.errors import SpecLocalError
from spec_local.server.events import AnswerRequest, Event, Loaded


class Exchange(ABC):
    """One request of a client and its response. Created from the body and the model: ``Kind(body, loaded)``.

    Raises (when created):
        InvalidRequest: the body asks for something that does not exist or is not supported.

    Attributes:
        body: the model that checks bodies.
        requests: the answers to generate; all at the same time, if there are rows for them.
        streams: whether the client wants server-sent events.
    """

    body: ClassVar[type[BaseModel]]
    requests: Sequence[AnswerRequest]
    streams: bool

    @abstractmethod
    def __init__(self, body: Mapping[str, Any], loaded: Loaded) -> None: ...

    def begin(self) -> Iterable[str]:
        """The server-sent events before those of the answers, each with its empty line."""
        return ()

    @abstractmethod
    def write(self, index: int, event: Event) -> Iterable[str]:
        """The server-sent events for an event of answer number `index`."""

    def end(self) -> Iterable[str]:
        """The server-sent events after all answers have ended."""
        return ()

    @abstractmethod
    def failed(self, error: SpecLocalError) -> str:
        """The server-sent event that ends a response which cannot be completed."""

    @abstractmethod
    def whole(self, answers: Sequence[Sequence[Event]]) -> Mapping[str, Any]:
        """The response in one JSON object, from all events of each answer."""
