"""Training while the server is idle, with a program in place of the one that trains."""

import asyncio
import contextlib
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from spec_local.models.head_versions import HeadVersions
from spec_local.server.learning import idle_training as learning
from spec_local.server.learning.idle_training import IdleTraining, Pace
from spec_local.server.supervision.events import Loaded
from spec_local.server.supervision.served_models import ServedModel, ServedModels
from tests import processes
from tests.server.conftest import Server
from tests.server.test_engine import GREEDY, AnswerRequest, collect, text
from tests.tiny_heads import write_tiny_eagle, write_tiny_main
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
ANSWER = namedtuple("ANSWER", "number")
CHILD = """
import json, os, subprocess, sys, threading, time
from pathlib import Path
job = json.loads(sys.stdin.readline())
def end():
    sys.stdin.read()
    os._exit(1)
threading.Thread(target=end, daemon=True).start()
def tell(event, **more):
    print(json.dumps({"event": event, **more}), flush=True)
def add(number):
    from spec_local.models.head_versions import HeadVersions
    new = Path(job["folder"]) / "new"
    new.write_bytes(Path(os.environ["HEADS"], str(number)).read_bytes())
    version = HeadVersions(Path(job["main"])).add(
        new, origin=job["draft"] and Path(job["draft"]), n_answers=25, last_answer=25,
        before={"user": 0.4}, after={"user": 0.52, "built_in": 0.43})
    tell("version", number=version.number, before=version.before, after=version.after)
with open(os.environ["STARTS"], "a") as starts:
    starts.write(json.dumps(job) + "\\n")
tell("stage", name="training")
tell("progress", share=0.25)
"""
FOREVER = 'sys.stderr.write("working\\n")\nwhile True: time.sleep(0.01)'


class Answers:
    """Kept answers with the numbers 1 to n."""

    def __init__(self, n):
        self.n = n

    def answers(self):
        return [ANSWER(i + 1) for i in range(self.n)]

    def count_after(self, number):
        return max(0, self.n - number)


class ScriptedEngine:
    """An engine with nothing behind it."""

    n_running = n_unfinished = 0
    draft_path = None

    def __init__(self, session, name, *, max_waiting, keep_headers, log):
        self.name, self.sessions = name, [session]
        self.error = None
        self.ready, self._stopped = asyncio.Event(), asyncio.Event()

    def check_ready(self):
        return self.loaded

    async def run(self, *, persist=False):
        path = self.draft_path
        self.loaded = Loaded(self.name, path and path.name, 512, 2, None, draft_path=path, offload="3")
        self.ready.set()
        await self._stopped.wait()

    async def reload(self, session):
        self.sessions.append(session)

    def stop(self, seconds=10.0):
        self._stopped.set()


def pretend_torch(monkeypatch, is_installed):
    def find_spec(name, *package, find=importlib.util.find_spec):
        return (object() if is_installed else None) if name == "torch" else find(name, *package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch, specdec):
    monkeypatch.setenv("XDG_CACHE_HOME", specdec.environment["XDG_CACHE_HOME"])
    monkeypatch.setattr("platformdirs.user_data_dir", lambda name: str(tmp_path / "data/specdec"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    monkeypatch.setenv("HEADS", str(tmp_path / "heads"))
    pretend_torch(monkeypatch, True)
    (tmp_path / "heads").mkdir()
    (tmp_path / "main.gguf").write_bytes(b"main")
    (tmp_path / "heads/1").write_bytes(b"head")
    yield tmp_path
    gc.collect()  # a pipe to a child that was left open fails the test that opened it


@pytest.fixture
def main(home):
    return home / "main.gguf"


@pytest.fixture
def versions(main):
    return HeadVersions(main)


class World:
    """A server with a model that learns, and what is logged.

    battery, free: to be set by a test.
    """

    def __init__(
        self, main, script, *, n_answers=25, create=ScriptedEngine, session=(), max_memory=None, **pace
    ):
        self.lines, self.battery, self.free = [], False, 1 << 40
        self.answers = Answers(n_answers)
        arguments = {"main": main, "learn": True, "threads": 2, "draft": "auto"} | dict(session)
        self.model = ServedModel("tiny", arguments)
        self.served = ServedModels([self.model], create=create, log=self.lines.append)
        script = CHILD + script
        self.training = IdleTraining(
            self.served,
            self.lines.append,
            open_answers=lambda main: self.answers,
            command=[sys.executable, "-c", script],
            on_battery=lambda: self.battery,
            free=lambda: self.free,
            pace=Pace(**{"idle_s": 0.2, "check_s": 0.05} | pace),
            max_memory=max_memory,
        )

    @contextlib.asynccontextmanager
    async def running(self):
        await self.served.start()
        self.training.start()
        try:
            yield self
        finally:
            await self.training.stop()
            await self.served.stop()
        assert children() == []

    async def until(self, condition, seconds=30):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.lines, self.state)
            await asyncio.sleep(0.01)

    @property
    def state(self):
        return self.training.described(self.model)["state"]

    async def child(self):
        """The child, as soon as it runs and has told its progress."""
        await self.until(lambda: "training: training, 25%" in self.state)
        (child,) = children()
        return child


def children():
    return processes.children("-c")


def starts(home):
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in (home / "starts").read_text().splitlines()]
    return []


def is_stopped(process):
    return process.status() == psutil.STATUS_STOPPED


async def test_training_starts_when_the_server_is_idle_and_waits_for_answers(home, main):
    began = time.monotonic()
    async with World(main, FOREVER, n_answers=19).running() as world:
        await world.until(lambda: world.state == "collecting answers: 19 of 20 until the next training")
        await asyncio.sleep(0.4)
        assert starts(home) == []
        world.answers.n = 20
        child = await world.child()
        assert time.monotonic() - began > 0.2
        assert child.nice() == 19
        if sys.platform == "linux":
            assert os.sched_getscheduler(child.pid) == os.SCHED_IDLE
        folder = HeadVersions(main).folder
        expected = {"main": str(main), "draft": None, "threads": 2, "offload": "3"}
        assert starts(home) == [expected | {"folder": str(folder), "minutes": Pace().minutes}]
        described = world.training.described(world.model)
        assert (described["training"], described["share"], described["kept_answers"]) == (True, 0.25, 20)
        assert world.training.is_training


async def test_a_request_pauses_training_at_once(main):
    async with World(main, FOREVER, idle_s=0, check_s=60).running() as world:
        child = await world.child()
        assert not is_stopped(child)
        world.served.on_request()  # the next look is a minute away
        await world.until(lambda: is_stopped(child))
        assert not world.training.is_training


async def test_a_request_while_the_child_starts(main):
    world = World(main, FOREVER, idle_s=30, check_s=60)
    world.training._last_active -= 30
    async with world.running():
        await world.until(lambda: world.training._round)
        world.served.on_request()  # the next look is a minute away
        await world.until(children)
        (child,) = children()
        await world.until(lambda: is_stopped(child))


async def test_training_goes_on_when_the_server_is_idle_again(main):
    async with World(main, FOREVER, idle_s=0.5).running() as world:
        child = await world.child()
        world.served.on_request()
        with await world.served.use("tiny"):
            await asyncio.sleep(0.8)  # longer than the time without requests
            assert is_stopped(child)
            paused = "training: training, 25%; paused, an answer was requested"
            await world.until(lambda: world.state == paused)
        ended = time.monotonic()
        await world.until(lambda: not is_stopped(child))
        assert time.monotonic() - ended > 0.4
        await world.until(lambda: world.training.is_training)


async def test_on_battery(home, main):
    world = World(main, FOREVER)
    world.battery = True
    async with world.running():
        await world.until(lambda: world.state == "waiting for mains power")
        assert starts(home) == []
        world.battery = False
        child = await world.child()
        world.battery = True
        await world.until(lambda: is_stopped(child))
        await world.until(lambda: world.state.endswith("paused, on battery"))
        world.battery = False
        await world.until(lambda: not is_stopped(child))


@pytest.mark.parametrize(
    ("battery", "expected"),
    [(None, False), ({"power_plugged": False}, True), ({"power_plugged": True}, False)],
)
def test_what_the_system_says_about_the_battery(monkeypatch, battery, expected):
    found = battery and namedtuple("Battery", battery)(**battery)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: found, raising=False)
    assert learning._is_on_battery() is expected
    monkeypatch.delattr(psutil, "sensors_battery")
    assert learning._is_on_battery() is False


async def test_too_little_memory_is_free(home, main):
    world = World(main, FOREVER)
    world.free = 2_500_000_000
    async with world.running():
        await world.until(lambda: world.state == "waiting for memory: 2.5 GB of 3.0 GB are free")
        await asyncio.sleep(0.3)
        assert world.lines == ["learning: training a head of tiny needs 3.0 GB of free memory"]
        assert starts(home) == []
        world.free = 4_000_000_000
        await world.child()


async def test_a_child_that_takes_too_much_memory_is_ended(home, main):
    async with World(main, "kept = b'x' * (200 << 20)\n" + FOREVER, max_memory=150 << 20).running() as world:
        await world.until(lambda: len(starts(home)) == 4, 30)
        await world.until(lambda: world.state == "training has failed too often")
    *ended, last = world.lines
    assert len(ended) == 4
    assert all("training was ended, as it took " in line and "than the 157 MB" in line for line in ended)
    assert last == "learning: no head of tiny is trained until the server is started again"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("print('no JSON'); os._exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
        ("print('x' * 2_000_000, flush=True); time.sleep(60)", "exit code -15"),
    ],
)
async def test_a_child_that_dies_is_started_again_three_times(home, main, how, reason):
    async with World(main, how).running() as world:
        await world.until(lambda: world.state == "training has failed too often", 30)
        await asyncio.sleep(0.3)
    assert len(starts(home)) == 4
    assert world.lines == [
        *[f"learning: training a head of tiny failed ({reason})"] * 4,
        "learning: no head of tiny is trained until the server is started again",
    ]


@pytest.mark.parametrize(
    ("last", "line"),
    [
        ('tell("unchanged", why="0.3 points are too little")', "the head of tiny is unchanged (0.3 points"),
        ('tell("failed", message="the disk is full")', "training a head of tiny failed (the disk is full)"),
    ],
)
async def test_a_round_without_a_version_is_not_repeated(home, main, versions, last, line):
    async with World(main, last).running() as world:
        await world.until(lambda: world.lines)
        await asyncio.sleep(0.5)
        assert len(starts(home)) == 1
        assert line in world.lines[0]
        assert versions.last_round == 25
        assert world.state == "collecting answers: 0 of 20 until the next training"
    async with World(main, last, n_answers=44).running() as world:  # after a restart of the server
        await asyncio.sleep(0.5)
        assert len(starts(home)) == 1
        world.answers.n = 45
        await world.until(lambda: len(starts(home)) == 2)


async def test_what_cannot_be_trained(home, main, monkeypatch):
    draft = home / "small.gguf"
    draft.write_bytes(b"no head")

    async def state(create=ScriptedEngine, **options):
        async with World(main, FOREVER, create=create, **options).running() as world:
            await world.until(lambda: "no head" in world.state)
            await asyncio.sleep(0.3)
            assert world.lines == [f"learning: no head of tiny is trained{world.lines[0][36:]}"]
            assert starts(home) == []
            return world.lines[0][36:]

    class WithDraft(ScriptedEngine):
        draft_path = draft

    class WithLayers(ScriptedEngine):
        draft_path = main

    assert await state(WithDraft) == (
        ", as small.gguf drafts, which is no EAGLE-3 head: give --draft none or such a head"
    )
    assert "own layers for multi-token prediction draft" in await state(WithLayers)
    assert "on other machines" in await state(session={"workers": ["a:1"]})
    pretend_torch(monkeypatch, False)
    assert (await state()).startswith(", as training a head needs PyTorch: run ")


async def test_models_that_do_not_learn(home, main):
    async with World(main, FOREVER, session={"learn": False}).running() as world:
        await asyncio.sleep(0.4)
        assert starts(home) == []
        assert world.training.described(world.model)["enabled"] is False


async def test_one_server_trains_at_a_time(home, main):
    async with World(main, FOREVER).running() as first:
        await first.child()
        second = World(main, FOREVER)
        await second.served.start()
        second.training.start()
        await second.until(lambda: second.state == "another server trains this head")
        await second.training.stop()
        await second.served.stop()
        assert len(starts(home)) == 1
        assert len(children()) == 1


async def test_nothing_outlives_the_server(home, main):
    """Neither a paused child nor a grandchild that ignores signals."""
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    script = (
        f"subprocess.Popen([sys.executable, '-c', {stubborn!r}])\ntell('progress', share=0.25)\n{FOREVER}"
    )
    async with World(main, script).running() as world:
        await world.until(lambda: len(children()) == 2)
        await asyncio.sleep(0.3)
        world.served.on_request()
    assert children() == []
    assert not (HeadVersions(main).folder / "training.json").exists()


async def test_pipes_that_a_daemon_of_the_child_holds_are_closed(home, main):
    """A process with a session of its own is not the server's to end."""
    daemon = "import time; time.sleep(60)"
    script = (
        f"print(subprocess.Popen([sys.executable, '-c', {daemon!r}], start_new_session=True).pid,"
        f" file=open({str(home / 'daemon')!r}, 'w'), flush=True)\ntell('progress', share=0.5)\n{FOREVER}"
    )

    world = World(main, script)
    try:
        await world.served.start()
        world.training.start()
        await world.until(lambda: "50%" in world.state)
        await world.training.stop()
        await world.served.stop()
    finally:
        psutil.Process(int((home / "daemon").read_text())).kill()


SERVER = """
import asyncio, platformdirs, sys
from pathlib import Path
from tests.server import test_learning as t
t.learning.extras.without_torch = lambda: None
platformdirs.user_data_dir = lambda name: sys.argv[2]
async def main():
    async with t.World(Path(sys.argv[1]), t.FOREVER).running() as world:
        child = await world.child()
        if sys.argv[3] == "paused":
            world.served.on_request()
        print(child.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["running", "paused"])
def test_a_child_ends_when_its_server_is_killed(home, main, how):
    data = str(home / "data/specdec")
    command = [sys.executable, "-c", SERVER, str(main), data, how]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    child = psutil.Process(int(server.stdout.readline()))
    wait_until(lambda: is_stopped(child) == (how == "paused"))
    server.kill()
    server.wait()
    server.stdout.close()
    with contextlib.suppress(psutil.NoSuchProcess):
        child.wait(5)


async def test_a_child_that_was_left_behind_is_ended_by_the_next_server(home, main, versions):
    """As where the kernel does not wake an orphan, and its closed input does not end it."""
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
    left.send_signal(signal.SIGSTOP)
    record = versions.folder / "training.json"
    versions.folder.mkdir(parents=True)
    try:
        for process, began in ((left, 0.0), (other, -100.0)):  # a process with the number of an earlier one
            record.write_text(json.dumps([process.pid, psutil.Process(process.pid).create_time() + began]))
            world = World(main, FOREVER, n_answers=0)
            await world.served.start()
            world.training.start()
            await world.until(lambda: not record.exists())
            await world.training.stop()
            await world.served.stop()
        assert left.wait(5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


# With models


def test_a_server_that_learns(specdec, models):
    """The kept answers are counted, and nothing is trained where a draft model drafts."""
    server = Server(specdec, models[0], "--draft", models[1], "--ctx", 4096, "--parallel", 2, "--learn")

    def learned():
        return server.get("/learning").json()

    try:
        wait_until(lambda: "no head is trained, as draft.gguf drafts" in learned()["state"])
        assert learned()["kept_answers"] == 0
        server.chat("One?")
        wait_until(lambda: learned()["kept_answers"] == 1)
        assert learned()["new_answers"] == 1
        assert server.metric("draft_head_version") == 0
        assert "specdec:training_running 0.0" in server.get("/metrics").text
    finally:
        code, errors = server.stop()
    assert code == 0
    assert errors.count("learning: no head of main is trained, as draft.gguf drafts") == 1


def said(world):
    """The lines about learning, without the one about what is kept, which only the first session logs."""
    return [line for line in world.lines if line.startswith("learning: ") and "are kept" not in line]


@pytest.fixture
def tiny(home):
    """A main model, and files of heads: two that work, and one that does not."""
    main = write_tiny_main(home / "tiny.gguf")
    write_tiny_eagle(home / "heads/1")
    write_tiny_eagle(home / "heads/2", n_draft_vocab=300)
    (home / "heads/3").write_bytes(b"GGUF")
    return main


async def answered(world, prompts):
    """The texts of the answers to prompts that are asked at the same time, as by clients."""

    async def one(prompt):
        world.served.on_request()
        with await world.served.use("tiny") as engine:
            (events,) = await collect(engine.answer([AnswerRequest(GREEDY, prompt=prompt)]))
            return text(events)

    return await asyncio.gather(*map(one, prompts))


def real(tiny, script, **options):
    from spec_local.server.supervision.supervisor import Supervisor

    session = {"n_ctx": 512, "parallel": 2, "draft": "none"} | options.pop("session", {})
    return World(tiny, script, create=Supervisor, session=session, **options)


async def test_a_new_version_is_used_between_two_answers(home, tiny):
    """Requests that arrive meanwhile wait, and their answers are those from before."""
    prompts = ["one two three", "four five", "six"]
    world = real(tiny, "add(1)", idle_s=0, check_s=60)
    await world.served.start()
    try:
        expected = await answered(world, prompts)
        world.training.start()
        await world.until(lambda: world.training._child)
        with await world.served.use("tiny"):  # by a request that the child does not see
            await world.until(lambda: "will be used after the answers that run" in world.state)
            found = [await answered(world, prompts) for _ in range(3)]
            assert world.model.loaded.draft is None
        waited = asyncio.create_task(answered(world, prompts))
        while not world.model.loaded or not world.model.loaded.draft:
            assert world.served.check_ready() is None  # /health goes on
            found.append(await answered(world, prompts))
        found += [await answered(world, prompts), await waited]
        assert found == [expected] * len(found)
        assert world.model.loaded.draft == "head-1.gguf"
        await world.until(lambda: world.training._round.done())
        described = world.training.described(world.model)
        assert described["version"] == 1
        assert described["versions"][0]["after"] == {"user": 0.52, "built_in": 0.43}
        assert said(world) == [
            "learning: tiny drafts with version 1: accepted of your answers: 0.40 → 0.52, of built-in "
            "prompts: 0.43"
        ]
    finally:
        await world.training.stop()
        await world.served.stop()


async def test_a_rollback_and_the_next_version(home, tiny, versions):
    script = "add(len(open(os.environ['STARTS']).readlines()))"
    async with real(tiny, script).running() as world:
        await world.until(lambda: world.model.loaded and world.model.loaded.draft == "head-1.gguf")
        world.answers.n = 50
        await world.until(lambda: world.model.loaded and world.model.loaded.draft == "head-2.gguf")
        assert starts(home)[1]["draft"] == str(HeadVersions(tiny).folder / "head-1.gguf")
        HeadVersions(tiny).rollback()
        await world.until(lambda: world.model.loaded and world.model.loaded.draft == "head-1.gguf")
        await world.until(lambda: "after a change by another program" in world.lines[-1])
        HeadVersions(tiny).rollback()
        await world.until(lambda: world.model.loaded and world.model.loaded.draft is None)
        assert len(starts(home)) == 2


async def test_a_version_that_cannot_be_loaded_is_rolled_back(home, tiny):
    async with real(tiny, "add(3)").running() as world:
        expected = await answered(world, ["one"])
        await world.until(lambda: any(v.is_rolled_back for v in HeadVersions(tiny).all()))
        assert HeadVersions(tiny).current() is None
        await world.until(lambda: world.model.loaded)
        assert await answered(world, ["one"]) == expected
        (line,) = said(world)
        assert line.startswith("learning: tiny continues with the previous head (")
        assert "head-1.gguf" in line
