"""The models of a server, by name: loaded when they are asked for, as many at a time as the memory holds.

Each loaded model is a process of its own (see `supervisor`). A model in use is never unloaded: a request for
one that does not fit beside those in use waits, and requests that come later wait behind it, so that each has
its turn, however busy the other models are.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from spec_local.errors import BackendError, InvalidRequest, SpecLocalError
from spec_local.images.media import Media
from spec_local.opening.memory_plan import MemoryPlan, plan_memory
from spec_local.server.supervision.events import Event, Loaded
from spec_local.server.supervision.supervisor import STOPPING, Busy, NotReady, Supervisor
from spec_local.text import counted

_END_S = 0.8  # for processes to end with the server; one that saves what it has learned takes 0.1
_T = TypeVar("_T")
_RETRY_S = 5  # that a client is told to wait: about what it takes to load a model
_FORGIVEN = (".gguf", ":latest")  # ends of names that clients add
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST = 80  # characters of a time, and of a name in an error
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)")  # of a duration as Go and ollama write it


class UnknownModel(SpecLocalError):
    """A request names no model, or one that the server does not have."""


@dataclass(eq=False)
class ServedModel:
    """A model of a server.

    Args:
        name: as clients name it. session: arguments of `Session.open`. others: further names.
        defaults: fields of bodies that do not have them, and of their object ``speculative``.
        kinds: those of files that it reads with its projector.

    Attributes:
        engine: None: the model is not loaded. ending: the one that is being unloaded.
        process: the task that runs the engine, from the start of loading to the end of unloading.
        plan: the memory that it needs; None: not known yet, or it is the only model.
        keep_alive: seconds after its last use when it is unloaded; None: it stays.
        is_reloading: it is being loaded with another head, for which requests wait.
        n_users: requests that use it, or wait until it is loaded.
        last_used: number of its last use; a greater one is later.
    """

    name: str
    session: Mapping[str, Any]
    others: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    kinds: Sequence[type[Media]] = ()
    engine: Supervisor | None = None
    ending: Supervisor | None = None
    process: "asyncio.Task[None] | None" = None
    plan: MemoryPlan | None = None
    keep_alive: float | None = None
    is_reloading: bool = False
    n_users: int = 0
    last_used: int = -1
    timer: asyncio.TimerHandle | None = None

    @property
    def loaded(self) -> Loaded | None:
        """Facts about it; None: it is not loaded."""
        return self.engine.loaded if self.engine else None

    @property
    def reads(self) -> Sequence[type[Media]]:
        """The kinds of files that it reads, also while it is not loaded."""
        return self.loaded.reads if self.loaded else self.kinds


class ServedModels:
    """All models of a server. All methods are called in the event loop.

    A model alone, without `keep_alive`, is loaded by `start` and stays, and it answers requests for any name.

    Args:
        models: the first one is loaded at the start.
        memory: bytes that models may take together; one that needs more is loaded alone. None: half of those
            that are free at the start, where the first one runs.
        keep_alive: seconds after its last use when a model is unloaded, unless a request says otherwise;
            None: it stays until another one needs its memory.
        max_waiting: requests that may wait for a model, and answers that may wait for their turn in each.
        keep_headers: see `EngineProcess`.
        log: called with a line for each slow operation.
        create, plan, call_later: the usual ones, except in tests.

    Attributes:
        observe: called with the last event of each answer, and its seconds since the request.
        on_request: called when an answer is requested.

    Raises:
        InvalidRequest: two models have the same name.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        memory: int | None = None,
        keep_alive: float | None = None,
        max_waiting: int = 64,
        keep_headers: bool = False,
        log: Callable[[str], None] = lambda line: None,
        create: Callable[..., Supervisor] = Supervisor,
        plan: Callable[[Mapping[str, Any], int | None], MemoryPlan] = plan_memory,
        call_later: Callable[..., asyncio.TimerHandle] | None = None,
    ) -> None:
        self.models = list(models)
        self._stays = len(self.models) == 1 and keep_alive is None
        self._memory, self._keep_alive, self._max_waiting, self._log = memory, keep_alive, max_waiting, log
        self._create, self._plan, self._call_later = create, plan, call_later
        self._options = {"max_waiting": max_waiting, "keep_headers": keep_headers}
        self.observe: Callable[[Event, float], None] = lambda event, seconds: None
        self.on_request: Callable[[], None] = lambda: None
        self._names: dict[str, ServedModel] = {}
        for model in self.models:
            if self._names.setdefault(_plain(model.name), model) is not model:
                raise InvalidRequest(f"two models are named {model.name}: remove one, or rename its file")
        for model in self.models:  # the name of one precedes further names of others
            for name in model.others:
                self._names.setdefault(_plain(name), model)
        self._turn = asyncio.Lock()
        """Held by the request that makes room for its model; the others wait behind it."""
        self._changed = asyncio.Event()
        """Set when a model is no longer in use, and when one has been unloaded."""
        self._ending = asyncio.Event()
        self._is_started = False
        self._n_waiting = 0
        self._uses = itertools.count()

    # Facts

    def named(self, name: Any) -> ServedModel:
        """The model with a name, in upper or lower case.

        Raises:
            UnknownModel: there is none, or the name is None.
        """
        if isinstance(name, str) and (found := self._names.get(_plain(name))):
            return found
        names = ", ".join(model.name for model in self.models)
        if name is None:
            raise UnknownModel(f"the request names no model: set model to one of {names}")
        raise UnknownModel(f"model {str(name)[:_LONGEST]!r} not found: this server has {names}")

    def chosen(self, name: Any) -> ServedModel:
        """The model that a request names; one that is alone answers to any name.

        Raises:
            UnknownModel: see `named`.
        """
        return self.named(name) if len(self.models) > 1 else self.models[0]

    @property
    def current(self) -> ServedModel:
        """The model that was used last among those that are loaded, or else the first one."""
        loaded = [model for model in self.models if model.loaded]
        return max(loaded, key=lambda model: model.last_used, default=self.models[0])

    @property
    def n_running(self) -> int:
        """Answers that run."""
        return sum(engine.n_running for engine in self._engines())

    @property
    def n_waiting(self) -> int:
        """Answers that wait for their turn, and requests that wait for a model."""
        return self._n_waiting + sum(engine.n_unfinished - engine.n_running for engine in self._engines())

    @property
    def is_idle(self) -> bool:
        """True if no request uses a model, or waits for one."""
        return not self._n_waiting and not any(model.n_users for model in self.models)

    def check_ready(self) -> None:
        """Raise NotReady until the first model has been loaded; and while a model that is alone is not."""
        if self._ending.is_set():
            raise NotReady(STOPPING)
        if self._stays and (engine := self.models[0].engine):
            if not self.models[0].is_reloading:
                engine.check_ready()
        elif not self._is_started:
            raise NotReady("the models are being loaded: try again soon")

    def _engines(self) -> Iterator[Supervisor]:
        return (model.engine for model in self.models if model.engine)

    # Start and end

    async def start(self, *, persist: bool = False) -> Loaded | None:
        """Load the first model; return None if it is still being tried.

        Args:
            persist: if a model that is alone cannot be loaded, try again; see `Supervisor.run`.

        Raises:
            SpecLocalError: it cannot be loaded.
        """
        first = self.models[0]
        if self._stays:
            self._begin_to_load(first, first.session, persist=persist)
        else:
            await self._load(first, await self._plan_of(first))
        engine = first.engine
        assert engine
        await self._until(engine.ready)
        if not engine.loaded and not persist and engine.error:
            raise engine.error
        self._is_started = True
        self._unload_later(first)
        return engine.loaded

    def refuse(self) -> None:
        """Refuse the requests that wait for a model, and those that arrive; answers go on."""
        self._ending.set()

    def cancel_all(self) -> None:
        """End all answers at their next step."""
        self.refuse()
        for engine in self._engines():
            engine.cancel_all()

    async def stop(self) -> None:
        """End all processes."""
        self.refuse()
        for model in self.models:
            if model.timer:
                model.timer.cancel()
            for engine in filter(None, (model.engine, model.ending)):
                engine.stop(_END_S)
        if processes := [model.process for model in self.models if model.process]:
            await asyncio.wait(processes)

    # Use

    async def use(self, name: Any = None, keep_alive: Any = None) -> AbstractContextManager[Supervisor]:
        """Wait until a model is loaded; it stays so until the end of the context that is returned.

        Args:
            name: what the request gives as its model; None: nothing.
            keep_alive: what it gives as the time to keep the model, see `seconds_of`; None: nothing.

        Raises:
            UnknownModel: there are several models, and this is none of their names.
            InvalidRequest: `keep_alive` is not a time.
            Busy: too many requests wait for a model.
            NotReady: the server ends, or its only model is not loaded.
            BackendError: the model cannot be loaded.
        """
        model = self.chosen(name)
        if self._stays:
            if model.is_reloading and model.engine:
                await self._until(model.engine.ready)
            self.check_ready()
            self._begin_use(model)
            return self._use(model)
        seconds = seconds_of(keep_alive) if keep_alive is not None else None
        if self._turn.locked() or not model.loaded:
            await self._wait_for(model)
        else:
            self._begin_use(model)
        if keep_alive is not None:
            model.keep_alive = seconds
        return self._use(model)

    @contextlib.contextmanager
    def _use(self, model: ServedModel) -> Iterator[Supervisor]:
        assert model.engine
        try:
            yield model.engine
        finally:
            self._end_use(model)

    def _begin_use(self, model: ServedModel) -> None:
        model.n_users += 1
        model.last_used = next(self._uses)
        if model.timer:
            model.timer.cancel()

    def _end_use(self, model: ServedModel) -> None:
        model.n_users -= 1
        model.last_used = next(self._uses)
        if not model.n_users:
            self._changed.set()
            self._unload_later(model)

    async def _wait_for(self, model: ServedModel) -> None:
        """Begin to use a model as soon as it is this request's turn, and the model is loaded."""
        if self._n_waiting and self._n_waiting >= self._max_waiting:
            raise Busy(
                f"{counted(self._n_waiting, 'request')} {'waits' if self._n_waiting == 1 else 'wait'} for a "
                f"model already, as many as the server's option --queue allows: try again in {_RETRY_S} s",
                _RETRY_S,
            )
        self._n_waiting += 1
        try:
            async with self._turn:
                if not model.engine:
                    await self._load(model, await self._plan_of(model))
                    self._log(f"loading {model.name}")
                self._begin_use(model)
            try:
                await self._until_loaded(model)
            except BaseException:
                self._end_use(model)
                raise
        finally:
            self._n_waiting -= 1

    async def _until_loaded(self, model: ServedModel) -> None:
        engine = model.engine
        assert engine
        await self._until(engine.ready)
        if model.engine is not engine:
            raise BackendError(f"{model.name} cannot be loaded: {engine.error}")
        engine.check_ready()

    async def _until(self, event: "asyncio.Event | asyncio.Future[Any]") -> None:
        """Wait for an event, or a result.

        Raises:
            NotReady: the server ends.
        """
        awaited = event.wait() if isinstance(event, asyncio.Event) else event
        waits = [asyncio.ensure_future(each) for each in (awaited, self._ending.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._ending.is_set():
            raise NotReady(STOPPING)

    # Loading and unloading

    async def reload(self, model: ServedModel, session: Mapping[str, Any]) -> SpecLocalError | None:
        """Load a model with other arguments of `Session.open`, as soon as no request uses it.

        Requests that arrive meanwhile wait. A model that is not loaded has them at its next use.

        Returns:
            why it cannot be loaded with them; those before are used again. None: it is loaded.

        Raises:
            NotReady: the server ends, or its only model is not loaded.
        """
        while model.n_users:
            self._changed.clear()
            await self._until(self._changed)
        if not (engine := model.engine):
            model.session = session
            return None
        model.is_reloading = True
        try:
            error = await engine.reload(_within(session, model.plan))
        finally:
            model.is_reloading = False
        if not error:
            model.session = session
        return error

    async def _plan_of(self, model: ServedModel) -> MemoryPlan | None:
        if not model.plan and len(self.models) > 1:
            planning = asyncio.ensure_future(_in_thread(self._plan, model.session, self._memory))
            try:
                await self._until(planning)
                model.plan = planning.result()
                self._memory = model.plan.memory if self._memory is None else self._memory
            except NotReady:
                raise
            except SpecLocalError as error:
                raise BackendError(f"{model.name} cannot be loaded: {error}") from None
        return model.plan

    async def _load(self, model: ServedModel, plan: MemoryPlan | None) -> None:
        """Begin to load a model as soon as there is room for it, for which others are unloaded.

        Raises:
            NotReady: the server ends.
        """
        if self._ending.is_set():  # while this request waited for its turn
            raise NotReady(STOPPING)
        while not self._has_room(model, plan):
            present = [other for other in self.models if other.process]
            idle = [other for other in present if not other.n_users]
            if idle and all(other.engine for other in present):  # none is being unloaded
                self._unload(min(idle, key=lambda other: other.last_used))
            self._changed.clear()
            await self._until(self._changed)
        self._begin_to_load(model, _within(model.session, plan))

    def _has_room(self, model: ServedModel, plan: MemoryPlan | None) -> bool:
        if model.process:  # it is being unloaded
            return False
        taken = sum(other.plan.needed for other in self.models if other.process and other.plan)
        return not plan or not taken or taken + plan.needed <= (self._memory or 0)

    def _begin_to_load(
        self, model: ServedModel, session: Mapping[str, Any], *, persist: bool = False
    ) -> None:
        log = self._log if self._stays else lambda line: self._log(f"{model.name}: {line}")
        engine = self._create(session, model.name, log=log, **self._options)
        engine.observe = lambda event, seconds: self.observe(event, seconds)
        model.engine, model.keep_alive = engine, self._keep_alive
        model.process = asyncio.create_task(engine.run(persist=persist))
        model.process.add_done_callback(functools.partial(self._on_end, model, engine))

    def _on_end(self, model: ServedModel, engine: Supervisor, process: "asyncio.Task[None]") -> None:
        if not process.cancelled() and (failure := process.exception()):
            engine.error = BackendError(f"its process cannot be started ({failure}): try again")
        model.engine = model.ending = model.process = None
        engine.ready.set()  # for those that wait in vain
        self._changed.set()

    def _unload_later(self, model: ServedModel) -> None:
        if model.keep_alive is not None:
            call_later = self._call_later or asyncio.get_running_loop().call_later
            model.timer = call_later(model.keep_alive, self._unload, model)

    def _unload(self, model: ServedModel) -> None:
        """Begin to unload a model that nobody uses."""
        if model.engine:
            self._log(f"unloading {model.name}")
            model.ending, model.engine = model.engine, None
            model.ending.stop()


async def _in_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    """The result of a function in a thread for which the end of this process does not wait."""
    result: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(function(*arguments))
        except BaseException as error:
            result.set_exception(error)

    result.set_running_or_notify_cancel()
    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(result)


def _within(session: Mapping[str, Any], plan: MemoryPlan | None) -> Mapping[str, Any]:
    """The arguments of `Session.open` with as many answers at once as planned."""
    return {**session, "parallel": plan.n_parallel} if plan else session


def _plain(name: str) -> str:
    """A name as names are compared."""
    plain = name.casefold()
    while plain.endswith(_FORGIVEN):
        for end in _FORGIVEN:
            plain = plain.removesuffix(end)
    return plain


def seconds_of(time: Any) -> float | None:
    """The seconds of a time to keep a model, as in ollama: a number, or text such as 300, 5m or 1h30m.

    Returns:
        None: for ever, which a negative time means.

    Raises:
        InvalidRequest: it is something else.
    """
    text = str(time).strip()
    is_number = isinstance(time, int | float | str) and not isinstance(time, bool)
    if is_number and len(text) <= _LONGEST:
        parts = _PART.findall(text.removeprefix("-"))
        with contextlib.suppress(ValueError):
            if parts and "".join(map("".join, parts)) == text.removeprefix("-"):
                seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
                return None if text.startswith("-") else seconds
            if (seconds := float(text)) == seconds:  # not nan
                return None if seconds < 0 else seconds
    raise InvalidRequest(
        f"keep_alive {text[:_LONGEST]!r} is not a time: give seconds, or text such as 5m; -1 for ever"
    )
