"""Serializes use of a session: by one thread at a time, except for `close`.

No lock is held while a model computes: a use that comes too early gets an error instead of waiting. An
interrupt (Ctrl-C) may arrive anywhere, so that whatever ends a use is a single assignment.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.llama.native_object import check_process, is_forked

_POLL = 0.1  # seconds between two looks at whether a use has ended, if the notification was lost

_Event = TypeVar("_Event")
_Result = TypeVar("_Result")


class Answer(Iterator[_Event]):
    """The events of an answer.

    Any thread may read on, but only one at a time. If the session is closed, or starts another answer, the
    next event is the last one, ``Done`` with reason ``cancelled``.

    Raises (when read or closed):
        InvalidRequest: another thread is reading the next event now, or this process was forked.
    """

    def __init__(self, lock: "SessionLock[_Event]", events: Generator[_Event, None, None]) -> None:
        self._lock = lock
        self._events: Generator[_Event, None, None] | None = events  # None: the answer has ended
        self._rest: list[_Event] = []  # events that are left after the end

    def __repr__(self) -> str:
        return "<Answer: iterate over it for its events>"

    def __next__(self) -> _Event:
        return self._lock.run(self._read, self) if self._events else self._left()

    def close(self) -> None:
        """End the answer; the session can then be used again."""
        if self._events and not is_forked():
            self._lock.run(self._end, self)

    def __del__(self) -> None:
        if self._events and not is_forked():
            self._lock.abandon(self._end)

    def _read(self) -> _Event:
        events, lock = self._events, self._lock
        if not events:  # ended while this thread waited
            return self._left()
        lock.reader = threading.current_thread()
        try:
            event = next(events)
        except BaseException:
            lock.end(keep_rest=False)
            raise
        if isinstance(event, lock.last):
            lock.end(keep_rest=False)
        return event

    def _left(self) -> _Event:
        with contextlib.suppress(IndexError):
            return self._rest.pop(0)
        raise StopIteration

    def _end(self) -> None:
        if self._events:
            self._lock.end(keep_rest=False)


class SessionLock(Generic[_Event]):
    """Serializes use of a session.

    Args:
        is_left: whether to keep an event that follows after the answer was ended, for its reader.
        last: class of the events that no other can follow.
        free: called once, by `close`, when nothing uses the session any more.

    Attributes:
        is_closed: True as soon as the session is being closed.
        reader: the last thread that read the unfinished answer.
    """

    def __init__(
        self, is_left: Callable[[_Event], bool], last: type[object], free: Callable[[], None]
    ) -> None:
        self._is_left, self.last, self._free = is_left, last, free
        self._state = threading.Condition()  # held for moments only, except by `close`
        self._user = 0  # the thread that uses the session now
        self._events: Generator[_Event, None, None] | None = None  # of the unfinished answer
        self._answer: Callable[[], Answer[_Event] | None] = lambda: None
        self.reader = threading.current_thread()
        self.is_closed = self._replaced = self._is_freed = False

    def is_ending(self) -> bool:
        """Whether the current answer is to end at its next step."""
        return self._replaced or self.is_closed

    def check_open(self) -> None:
        """Raise InvalidRequest if the session is closed, or this process was forked."""
        check_process()
        if self.is_closed:
            raise InvalidRequest("the session is closed: open it again")

    def run(self, use: Callable[[], _Result], answer: Answer[_Event] | None = None) -> _Result:
        """Call a function that uses the session.

        Args:
            answer: the answer that the use belongs to, if any.

        Raises:
            InvalidRequest: the session is closed, or in use; or another thread is reading an answer.
        """
        check_process()
        mine = False
        try:
            with self._state:
                self._admit(answer)
                self._user, mine = threading.get_ident(), True
            if not answer and self._events and not self._answer():
                self.end(keep_rest=False)  # nobody can read it any more
            return use()
        finally:
            if mine:
                self._user = 0
                if self.is_closed:
                    self.close()

    def start(self, events: Generator[_Event, None, None]) -> Answer[_Event]:
        """Within `run`: the answer with these events."""
        answer = Answer(self, events)
        self._events, self._answer, self.reader = events, weakref.ref(answer), threading.current_thread()
        return answer

    def end(self, *, keep_rest: bool = True) -> None:
        """Within `run`: end the unfinished answer, if there is one.

        Args:
            keep_rest: leave its last events to the reader.
        """
        events, answer = self._events, self._answer()
        self._events = None
        rest: list[_Event] = []
        try:
            if events and answer and keep_rest:
                self._replaced = True
                rest = [event for event in events if self._is_left(event)]
        finally:
            self._replaced = False
            if answer:
                answer._rest, answer._events = rest, None
            if events:
                events.close()

    def abandon(self, end: Callable[[], None]) -> None:
        """End an answer that is being deleted, by any thread at any time; otherwise the next use ends it."""
        if self._state.acquire(blocking=False):
            try:
                with contextlib.suppress(SpecLocalError):
                    self.run(end)
            finally:
                self._state.release()

    def close(self) -> None:
        """End the current answer at its next step, wait for that, and free everything.

        Within a use, as in a signal handler, it takes effect when the use ends. A forked process frees
        nothing.
        """
        if is_forked():
            return
        self.is_closed = True
        with self._state:
            if self._user == threading.get_ident():
                return
            while self._user:
                self._state.wait(_POLL)
            if self._is_freed:
                return
            self._is_freed = True
            try:
                self.end()
            finally:
                self._free()
                self._state.notify_all()

    def _admit(self, answer: Answer[_Event] | None) -> None:
        if self._user == threading.get_ident():
            raise InvalidRequest("the session is answering: it cannot be used in a callback of that answer")
        unread = self._events and self._answer() and not answer
        elsewhere = unread and self.reader is not threading.current_thread() and self.reader.is_alive()
        if self._user or elsewhere:
            raise InvalidRequest(
                "the session is answering in another thread: wait for that answer, close its events, or open "
                "another session"
            )
        if not answer:
            self.check_open()
