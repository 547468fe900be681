"""The models of a server by name, with scripted engines: which one is loaded, unloaded, and waited for."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from spec_local.errors import InvalidRequest, ModelFileError
from spec_local.opening.memory_plan import MemoryPlan
from spec_local.server.supervision.events import Loaded
from spec_local.server.supervision.served_models import (
    BackendError,
    ServedModel,
    ServedModels,
    UnknownModel,
    seconds_of,
)
from spec_local.server.supervision.supervisor import Busy, NotReady

OTHER_THREADS = []


@pytest.fixture(autouse=True)
def other_threads():
    """Those that run before a test, such as of a server that an earlier test has left."""
    OTHER_THREADS[:] = threading.enumerate()


class ScriptedEngine:
    """An engine that is loaded at once, or cannot be loaded, or is loaded by the test."""

    n_running = n_unfinished = 0

    def __init__(self, session, name, *, max_waiting, keep_headers, log):
        self.session, self.name, self.keep_headers = session, name, keep_headers
        self.loaded = self.error = None
        self.ready, self._stopped = asyncio.Event(), asyncio.Event()
        self.cancelled = False

    def check_ready(self):
        if not self.loaded:
            raise NotReady("the models are not loaded: try again soon")
        return self.loaded

    async def run(self, *, persist=False):
        match self.session["how"]:
            case "broken":
                self.error = ModelFileError("broken.gguf is damaged: download it again")
                self.ready.set()
                return
            case "refused":
                raise OSError("too many open files")
            case "usual" | "ends slowly":
                self.load()
        await self._stopped.wait()
        await asyncio.sleep(0.05 if self.session["how"] == "ends slowly" else 0)
        self.loaded = None

    def load(self):
        self.loaded = Loaded(self.name, None, 512, self.session.get("parallel"), None)
        self.ready.set()

    def cancel_all(self):
        self.cancelled = True

    def stop(self, seconds=10.0):
        self._stopped.set()


class Timers:
    """In place of the event loop's: they end when a test lets the time pass."""

    def __init__(self):
        self.now, self._due = 0.0, []

    def call_later(self, seconds, callback, *arguments):
        timer = asyncio.Handle(callback, arguments, asyncio.get_running_loop())
        self._due.append((self.now + seconds, timer))
        return timer

    async def wait(self, seconds):
        self.now += seconds
        due = [timer for when, timer in self._due if when <= self.now]
        self._due = [(when, timer) for when, timer in self._due if when > self.now]
        for timer in due:
            if not timer.cancelled():
                timer._run()
        await settle()


class World:
    """Models that need 4, 3, 2 … bytes each."""

    def __init__(self, memory=100, how=(), n=3, **options):
        self.timers, self.lines, self.planned = Timers(), [], []
        models = [
            ServedModel(name, {"how": dict(how).get(name, "usual"), "needed": 4 - i})
            for i, name in enumerate("abcd"[:n])
        ]
        self.served = ServedModels(
            models,
            memory=memory,
            create=ScriptedEngine,
            plan=self.plan,
            call_later=self.timers.call_later,
            log=self.lines.append,
            **options,
        )

    def plan(self, session, memory):
        self.planned.append(session["needed"])
        if session["how"] == "damaged":
            raise ModelFileError("damaged.gguf is not a GGUF file: give a model in GGUF format")
        return MemoryPlan(2, session["needed"], 7 if memory is None else memory)

    @property
    def loaded(self):
        return "".join(model.name for model in self.served.models if model.loaded)

    def engine(self, name):
        return self.served.named(name).engine

    async def ask(self, name, **options):
        """One request, from its beginning to its end."""
        with await self.served.use(name, **options) as engine:
            assert engine.loaded.name == name


async def settle():
    """Let everything happen that can. Plans are made in threads."""
    planning = [threading.current_thread()]
    while planning:
        for _ in range(50):
            await asyncio.sleep(0)
        planning = [thread for thread in threading.enumerate() if thread not in OTHER_THREADS]
        for thread in planning:
            thread.join()


async def begun(coroutine):
    """A task that has come as far as it can."""
    task = asyncio.create_task(coroutine)
    await settle()
    return task


@asynccontextmanager
async def running(**options):
    world = World(**options)
    await world.served.start()
    try:
        yield world
    finally:
        await world.served.stop()
        assert world.loaded == ""


async def test_models_are_loaded_when_they_are_asked_for():
    async with running() as world:
        assert world.loaded == "a"
        await world.ask("b")
        await world.ask("a")
        assert world.loaded == "ab"
        assert world.engine("b").session["parallel"] == 2
        assert world.planned == [4, 3]
        assert world.served.current.name == "a"
        with await world.served.use("b"):
            assert world.served.current.name == "b"


@pytest.mark.parametrize("memory", [7, None])
async def test_the_one_that_was_not_used_for_the_longest_time_is_unloaded(memory):
    """Without a limit, that of the first plan counts."""
    async with running(memory=memory) as world:
        await world.ask("b")
        await world.ask("a")
        await world.ask("c")  # 4 + 3 + 2 bytes do not fit
        assert world.loaded == "ac"
        await world.ask("b")
        assert world.loaded == "bc"
        await world.ask("a")
        assert world.loaded == "ab"


async def test_no_more_are_unloaded_than_necessary():
    async with running(memory=9, n=4) as world:
        await world.ask("b")
        await world.ask("c")
        await world.ask("d")
        assert world.loaded == "bcd"


async def test_one_that_ends_slowly_makes_room():
    async with running(memory=9, n=4, how={"c": "ends slowly"}) as world:
        await world.ask("b")
        await world.ask("c", keep_alive=0)
        await world.timers.wait(0)
        await world.ask("d")  # when the process of c has ended: no other one is unloaded
        assert world.loaded == "abd"


async def test_one_that_ends_slowly_is_loaded_again_when_it_has_ended():
    async with running(keep_alive=10.0, how={"a": "ends slowly"}) as world:
        first = world.engine("a")
        await world.timers.wait(10)
        with await world.served.use("a") as second:
            assert second is not first
            assert first.loaded is None


async def test_a_model_that_is_too_large_is_loaded_alone():
    async with running(memory=1) as world:
        await world.ask("b")
        assert world.loaded == "b"
        await world.ask("a")
        assert world.loaded == "a"


async def test_a_model_in_use_is_not_unloaded_and_each_has_its_turn():
    async with running(memory=4) as world:
        first = await world.served.use("a")
        second = await world.served.use("a")
        waiting = await begun(world.ask("b"))
        later = await begun(world.ask("a"))  # it would keep the first one in use for ever
        assert (world.loaded, world.served.n_waiting) == ("a", 2)
        with first:
            pass
        await settle()
        assert world.loaded == "a"
        with second:
            pass
        await waiting
        await later
        assert world.loaded == "a"
        assert [line for line in world.lines if "load" in line] == [
            "unloading a", "loading b", "unloading b", "loading a",
        ]  # fmt: skip


async def test_those_that_wait_for_the_same_model_load_it_once():
    async with running(how={"b": "by hand"}) as world:
        requests = [await begun(world.ask("b")) for _ in range(3)]
        assert world.served.n_waiting == 3
        await begun(world.ask("a"))  # there is room, and the turn is free
        assert world.served.n_waiting == 3
        world.engine("b").load()
        await asyncio.gather(*requests)
        assert world.lines.count("loading b") == 1


async def test_a_client_that_goes_does_not_wait():
    async with running(memory=4, n=4, how={"d": "by hand"}) as world:
        using = await world.served.use("a")
        gone = await begun(world.ask("b"))
        behind = await begun(world.ask("c"))
        gone.cancel()
        await settle()
        assert world.served.n_waiting == 1
        with using:
            pass
        await behind
        assert world.loaded == "c"
        loading = await begun(world.ask("d"))
        loading.cancel()
        await settle()
        world.engine("d").load()
        await world.ask("a")  # nobody uses the other one
        assert world.loaded == "a"


async def test_too_many_wait():
    async with running(memory=4, max_waiting=2) as world:
        with await world.served.use("a"):
            waiting = [await begun(world.ask(name)) for name in "bc"]
            with pytest.raises(Busy, match="2 requests wait for a model already") as raised:
                await world.served.use("b")
            assert raised.value.retry_s >= 1
        await asyncio.gather(*waiting)
        await world.ask("a")


async def test_keep_alive():
    async with running(keep_alive=10.0) as world:
        await world.timers.wait(9)
        assert world.loaded == "a"
        await world.ask("a")
        await world.timers.wait(9)
        assert world.loaded == "a"
        with await world.served.use("b"):
            await world.timers.wait(60)
            assert world.loaded == "b"
        await world.timers.wait(11)
        assert world.loaded == ""
        await world.ask("b", keep_alive="1m")
        await world.timers.wait(59)
        assert world.loaded == "b"
        await world.timers.wait(1)
        assert world.loaded == ""
        await world.ask("a", keep_alive=-1)
        await world.ask("a")
        await world.timers.wait(1e6)
        assert world.loaded == "a"
        await world.ask("a", keep_alive=0)
        await world.timers.wait(0)
        assert world.loaded == ""
        await world.ask("a")  # as the server says, again
        await world.timers.wait(9)
        assert world.loaded == "a"


async def test_one_model_with_a_time_is_loaded_again():
    async with running(n=1, keep_alive=10.0) as world:
        await world.timers.wait(10)
        assert world.loaded == ""
        world.served.check_ready()
        with await world.served.use("any") as engine:
            assert engine.loaded.name == "a"
        assert world.planned == []  # its session chooses the number of rows


async def test_one_model_alone_stays():
    async def test(world):
        assert world.planned == []  # its session chooses the number of rows
        with await world.served.use(None, keep_alive="nonsense") as engine:
            assert engine.loaded.name == "a"
        await world.timers.wait(1e6)
        assert world.loaded == "a"
        world.engine("a").loaded = None  # its process has died, and is started again
        with pytest.raises(NotReady):
            world.served.check_ready()
        with pytest.raises(NotReady):
            await world.served.use("a")
        world.engine("a").loaded = "for stop"

    world = World(n=1)
    await world.served.start()
    await test(world)
    await world.served.stop()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("broken", r"broken\.gguf is damaged"),
        ("damaged", r"damaged\.gguf is not a GGUF file"),
        ("refused", r"its process cannot be started \(too many open files\)"),
    ],
)
async def test_a_model_that_cannot_be_loaded(how, message):
    """It has an error of its own each time, which does not disturb the other one."""
    async with running(how={"b": how}) as world:
        for _ in range(2):
            with pytest.raises(BackendError, match=rf"^b cannot be loaded: {message}"):
                await world.served.use("b")
            await world.ask("a")
        assert world.loaded == "a"
        assert world.served.n_waiting == 0
        several = await asyncio.gather(*[world.served.use("b") for _ in range(3)], return_exceptions=True)
        assert all(isinstance(each, BackendError | NotReady) for each in several)


@pytest.mark.parametrize("n", [1, 2])
async def test_the_first_model_must_be_loaded(n):
    world = World(n=n, how={"a": "broken"})
    with pytest.raises(NotReady):
        world.served.check_ready()
    with pytest.raises(ModelFileError, match="is damaged"):
        await world.served.start()
    with pytest.raises(NotReady):
        world.served.check_ready()


async def test_a_crash_of_one_does_not_touch_the_others():
    async with running() as world:
        await world.ask("b")
        world.engine("b").loaded = None  # its engine starts the process again
        with pytest.raises(NotReady):
            await world.served.use("b")
        await world.ask("a")
        world.served.check_ready()
        world.engine("b").load()
        await world.ask("b")


@pytest.mark.parametrize("end", ["cancel_all", "stop"])
async def test_the_end_of_the_server_refuses_those_that_wait(end):
    world = World(memory=4, how={"b": "by hand"})
    await world.served.start()
    loading = await begun(world.served.use("b"))
    waiting = [await begun(world.served.use(name)) for name in "ca"]
    ended = getattr(world.served, end)()
    if end == "stop":
        await ended
    for task in (loading, *waiting):
        with pytest.raises(NotReady, match="stopping"):
            await task
    await world.served.stop()
    with pytest.raises(NotReady, match="stopping"):
        world.served.check_ready()


@pytest.mark.parametrize(
    "name",
    ["Big-7B", "big-7b", "BIG-7b.gguf", "big-7b:latest", "big-7b.gguf:latest", "coder", "Coder-Q4.GGUF"],
)
def test_names(name):
    served = ServedModels(
        [ServedModel("Big-7B", {}, ["coder-q4", "coder"]), ServedModel("other", {}, ["coder", "coder"])]
    )
    assert served.named(name).name == "Big-7B"


@pytest.mark.parametrize("name", ["small", "", "big-7b.gguf.part", 5, ["other"], {}, "\ud800", "o" * 99999])
def test_unknown_names(name):
    served = ServedModels([ServedModel("Big-7B", {}, ["coder"]), ServedModel("other", {})])
    with pytest.raises(UnknownModel, match=r"this server has Big-7B, other$") as raised:
        asyncio.run(served.use(name))
    assert len(str(raised.value).encode()) < 300
    with pytest.raises(UnknownModel, match=r"names no model: set model to one of Big-7B, other$"):
        asyncio.run(served.use(None))


def test_two_models_of_one_name():
    with pytest.raises(InvalidRequest, match=r"two models are named A:latest"):
        ServedModels([ServedModel("a", {}), ServedModel("A:latest", {})])


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        (0, 0), (1.5, 1.5), ("300", 300), ("5m", 300), ("1h30m", 5400), ("1.5h", 5400), (" 100ms ", 0.1),
        (-1, None), ("-1", None), ("-1m", None), (float("inf"), float("inf")), ("0s", 0),
    ],
)  # fmt: skip
def test_times(time, seconds):
    assert seconds_of(time) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "time", [True, None, [], {}, "", "m", "5 m", "5x", "1h 2", "nan", float("nan"), "1" * 9**6]
)
def test_what_is_no_time(time):
    with pytest.raises(InvalidRequest, match="is not a time"):
        seconds_of(time)


class ReloadedEngine(ScriptedEngine):
    """Its `reload` ends when the test says so. error: what it returns then."""

    error = None

    async def reload(self, session):
        self.asked, self.loaded = session, None
        self.ready.clear()
        await self.ready.wait()
        return self.error


@pytest.mark.parametrize("n", [1, 2])
async def test_requests_wait_while_a_model_is_loaded_with_another_head(n):
    world = World(n=n)
    world.served._create = ReloadedEngine
    served, model = world.served, world.served.models[0]
    await served.start()
    engine = model.engine
    session = {**model.session, "draft": "head-1.gguf"}
    with await served.use("a"):
        assert not served.is_idle
        reloading = await begun(served.reload(model, session))
        with await served.use("a"):  # neither waits for the other
            pass
        assert engine.loaded
    await settle()
    assert served.is_idle
    assert not engine.loaded
    assert engine.asked == session | ({"parallel": 2} if n > 1 else {})
    waiting = await begun(world.ask("a"))
    served.check_ready()  # the server is healthy
    await settle()
    assert not waiting.done()
    engine.load()
    await waiting
    assert await reloading is None
    assert model.session == session
    await served.stop()


async def test_a_head_that_cannot_be_loaded_and_a_model_that_is_not_loaded():
    world = World()
    world.served._create = ReloadedEngine
    await world.served.start()
    first, second, _ = world.served.models
    before = first.session
    reloading = await begun(world.served.reload(first, {**before, "draft": "head-1.gguf"}))
    first.engine.error = error = ModelFileError("head-1.gguf is damaged: download it again")
    first.engine.load()
    assert await reloading is error
    assert first.session is before
    assert not first.is_reloading
    changed = {**second.session, "draft": "head-2.gguf"}
    assert await world.served.reload(second, changed) is None
    assert second.session == changed
    assert not second.engine
    await world.served.stop()


@pytest.mark.parametrize("keep_headers", [False, True])
async def test_headers_are_kept_in_all_models_if_the_server_is_told_so(keep_headers):
    async with running(memory=8, **({"keep_headers": True} if keep_headers else {})) as world:
        for name in "ab":
            await world.ask(name)
            assert world.engine(name).keep_headers is keep_headers
