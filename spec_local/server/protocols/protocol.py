"""The interface of a protocol: how one kind of HTTP body asks for answers, and how events are written."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from spec_local.errors import SpecLocalError
from spec_local.server.protocols.answer_so_far import AnswerSoFar
from spec_local.server.protocols.sampling_body import read
from spec_local.server.supervision.events import AnswerRequest, Event, Loaded, Reading

QUESTIONS = ("messages", "input", "prompt", "images")
"""Fields of bodies that may be large, with images."""


class Exchange(ABC):
    """One request of a client and its response. Created from the body and the model: ``Kind(body, loaded)``.

    Raises (when created):
        InvalidRequest: the body asks for something that does not exist or is not supported.

    Attributes:
        body: the model that checks bodies; its method `requests` makes the requests of a body.
        requests: the answers to generate; all at the same time, if there are slots for them.
        streams: whether the client wants a stream.
        media_type: of a stream. Events are those of this type: server-sent ones, unless it is another.
        has_chunks: each event is a chunk of HTTP of its own, for clients that do not look for its end.
        model: its name in the response. waited_s: seconds from the request until it was loaded.
    """

    body: ClassVar[type[Any]]
    media_type: ClassVar[str] = "text/event-stream"
    has_chunks: ClassVar[bool] = False
    requests: Sequence[AnswerRequest]
    streams: bool
    model: str = ""
    waited_s: float = 0.0

    def __init__(self, body: Mapping[str, Any], loaded: Loaded) -> None:
        given = read(self.body, body)
        self.requests = given.requests(loaded)
        self._given = given.model_copy(update=dict.fromkeys(QUESTIONS))  # the requests have them
        self.streams, self.model = self.wants_stream(body), given.model or loaded.name
        self._answers = [AnswerSoFar() for _ in self.requests]

    def begin(self) -> Iterable[str]:
        """The server-sent events before those of the answers, each with its empty line."""
        return ()

    def reading(self, index: int, event: Reading) -> Iterable[str]:
        """The server-sent events for progress with the prompt of answer number `index`."""
        return ()

    @classmethod
    def wants_stream(cls, body: Mapping[str, Any]) -> bool:
        """What `streams` will be for a body, if that is valid."""
        return body.get("stream") is True

    @classmethod
    def without_model(cls, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The response as JSON to a body that needs no model; None: it needs one."""
        return None

    @classmethod
    def sign_of_life(cls, state: str, model: str) -> str:
        """Text for the stream that tells its client nothing but the state of the answer.

        model: its name.
        """
        return f": {state}\n\n"  # a comment

    @abstractmethod
    def write(self, index: int, event: Event) -> Iterable[str]:
        """The server-sent events for another event of answer number `index`."""

    def end(self) -> Iterable[str]:
        """The server-sent events after all answers have ended."""
        return ()

    @classmethod
    @abstractmethod
    def refused(cls, error: SpecLocalError) -> str:
        """The server-sent event that ends a response which cannot be begun."""

    def failed(self, error: SpecLocalError) -> str:
        """The one that ends a response which cannot be completed."""
        return self.refused(error)

    @abstractmethod
    def whole(self, answers: Sequence[Sequence[Event]]) -> Mapping[str, Any] | Sequence[Any]:
        """The response as JSON, from all events of each answer."""
