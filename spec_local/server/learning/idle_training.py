"""Training while the server is idle: when a head is trained on the kept answers, and when a new one is used.

A child process trains (see `training_child`), one at a time, while nothing is asked. It is paused as soon as
an answer is requested, and on battery. A better head is loaded between two answers.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from spec_local.datastore.answer_store import AnswerStore, answer_store_of
from spec_local.errors import SpecLocalError
from spec_local.llama import gguf_header
from spec_local.llama.gguf_tensors import parts
from spec_local.llama.memory import free_memory
from spec_local.models.head_versions import HeadVersion, HeadVersions
from spec_local.server.learning.training_child import COMMAND, TrainingChild, end_abandoned, remember
from spec_local.server.supervision.events import Loaded
from spec_local.server.supervision.served_models import ServedModel, ServedModels
from spec_local.server.supervision.supervisor import NotReady
from spec_local.system import extras
from spec_local.system.files import format_size

# What training takes beside the main model: PyTorch, and data of a few hundred answers.
_CHILD_BYTES = 3 * 10**9
_MAX_FAILURES = 4  # starts of the child that end without a result, one after another
_RECORD, _LOCK = "training.json", "training.lock"
_LAST = ("version", "unchanged", "failed")
"""Events with which a round ends."""


@dataclass(frozen=True)
class Pace:
    """When a head is trained, and for how long.

    Attributes:
        idle_s: seconds without a request after which training starts or goes on: a person who reads an answer
            and writes the next question should not find the processor busy.
        min_new: answers since the last round that are worth another one: fewer change what a head accepts by
            less than can be measured on a tenth of them.
        minutes: length of a round, without pauses.
        check_s: seconds between two looks at the power supply, memory and answers; a request pauses training
            at once.
    """

    idle_s: float = 60.0
    min_new: int = 20
    minutes: float = 30.0
    check_s: float = 3.0


@dataclass(eq=False)
class Learner:
    """A served model that learns.

    Attributes:
        answers: its kept answers. session: its arguments of `Session.open` at the start of the server.
        all, current: its versions, and the one to use.
        n_kept, n_new: answers, and those since the last round.
        stage, share: what the running round does, and the part that is done, 0 to 1.
        state: what it does or waits for, in words.
        n_failed: starts of the child without a result, one after another.
        n_tried: number of the version that could not replace one that was rolled back.
    """

    model: ServedModel
    versions: HeadVersions
    answers: AnswerStore
    session: Mapping[str, Any]
    all: Sequence[HeadVersion] = ()
    current: HeadVersion | None = None
    n_kept: int = 0
    n_new: int = 0
    stage: str = ""
    share: float = 0.0
    state: str = "starting"
    n_failed: int = 0
    n_tried: int = -1

    @property
    def main(self) -> Path:
        return Path(self.session["main"])

    def refresh(self) -> None:
        """Read versions and counts from the disk."""
        self.all, self.current = self.versions.all(), self.versions.current()
        self.n_kept = self.answers.count_after(0)
        self.n_new = self.answers.count_after(self.versions.last_round)


class IdleTraining:
    """Trains a head for each model of a server whose session has `learn`. Its methods run in the event loop.

    Args:
        served: the models.
        log: called with a line about each result, and once about each reason not to train.
        open_answers: opens the kept answers of a main model, given its file.
        max_memory: bytes that a child may take; None: half of what is free at its start.
        pace, command, on_battery, free: as usual, except in tests.
    """

    def __init__(
        self,
        served: ServedModels,
        log: Callable[[str], None],
        *,
        open_answers: Callable[[Path], AnswerStore] | None = None,
        pace: Pace = Pace(),
        max_memory: int | None = None,
        command: Sequence[str] = COMMAND,
        on_battery: Callable[[], bool] | None = None,
        free: Callable[[], int] = free_memory,
    ) -> None:
        self._served, self._log = served, log
        self._open_answers = open_answers or (lambda main: answer_store_of(main, log))
        self._pace, self._max_memory, self._command = pace, max_memory, command
        self._on_battery, self._free = on_battery or _is_on_battery, free
        self._learners: list[Learner] = []
        self._training: Learner | None = None  # the one that the child is for
        self._logged: set[str] = set()
        self._last_active = time.monotonic()
        self._child: TrainingChild | None = None
        self._bound = 0  # bytes of the child's memory
        self._was_too_large = False
        self._watching: asyncio.Task[None] | None = None
        self._round: asyncio.Task[None] | None = None

    # For the server

    def start(self) -> None:
        """Begin to watch the server; call it when the first model is loaded."""
        self._served.on_request = self._pause
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """End the child."""
        for task in (self._watching, self._round):
            if task:
                task.cancel()
                await asyncio.wait([task])

    @property
    def is_training(self) -> bool:
        """True while a child runs that is not paused."""
        return bool(self._child and not self._child.is_paused)

    def learner(self, model: ServedModel) -> Learner | None:
        """What is known about a model; None: it does not learn, or that is not known yet."""
        return next((each for each in self._learners if each.model is model), None)

    def described(self, model: ServedModel) -> dict[str, Any]:
        """The state of a model's learning for GET /learning."""
        if not (learner := self.learner(model)):
            return {"enabled": bool(model.session.get("learn")), "state": "starting", "versions": []}
        current = learner.current
        return {
            "enabled": True,
            "state": learner.state,
            "training": self.is_training and learner is self._training,
            "share": learner.share if learner is self._training else None,
            "kept_answers": learner.n_kept,
            "new_answers": learner.n_new,
            "needed_answers": self._pace.min_new,
            "version": current.number if current else None,
            "versions": [_public(each) for each in learner.all],
        }

    # Watching

    def _pause(self) -> None:
        """An answer is requested."""
        self._last_active = time.monotonic()
        if self._child:
            self._child.pause()

    @property
    def _is_quiet(self) -> bool:
        return self._served.is_idle and time.monotonic() - self._last_active >= self._pace.idle_s

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except (OSError, SpecLocalError) as error:
                self._log_once(f"learning: {error}")
            await asyncio.sleep(self._pace.check_s)

    async def _look(self) -> None:
        if not self._served.is_idle:
            self._last_active = time.monotonic()
        if len(self._learners) < sum(bool(model.session.get("learn")) for model in self._served.models):
            self._learners = await asyncio.to_thread(self._opened)
        for learner in self._learners:
            await asyncio.to_thread(learner.refresh)
        if self._child:
            await self._attend(self._child)
        elif not self._round or self._round.done():
            await self._begin()

    def _opened(self) -> list[Learner]:
        found = list(self._learners)
        for model in self._served.models:
            if model.session.get("learn") and not self.learner(model):
                main = Path(model.session["main"])
                try:
                    versions = HeadVersions(main, self._log)
                    with _locked(versions.folder) as is_locked:
                        if is_locked:
                            end_abandoned(versions.folder / _RECORD)
                    found.append(Learner(model, versions, self._open_answers(main), model.session))
                except (OSError, SpecLocalError) as error:
                    self._log_once(f"learning: no head of {model.name} is trained ({error})")
        return found

    async def _attend(self, child: TrainingChild) -> None:
        """Pause or resume the child, or end it if it takes too much memory."""
        taken = await asyncio.to_thread(child.private_memory)
        if taken > self._bound:
            self._was_too_large = True
            self._log(
                f"learning: training was ended, as it took {format_size(taken)} of memory, more than "
                f"the {format_size(self._bound)} that it may take"
            )
            await child.end()
            return
        reason = "" if self._is_quiet else "an answer was requested"
        if not reason and self._on_battery():
            reason = "on battery"
        (child.pause if reason else child.resume)()
        if self._training:
            self._training.state = _progress(self._training) + (f"; paused, {reason}" if reason else "")

    async def _begin(self) -> None:
        """Use another version if the user has rolled back, or start a round, if one is due."""
        for learner in self._learners:
            learner.stage, learner.state = "", await self._reason_to_wait(learner)
            if not learner.state:
                learner.state = "training"
                self._round = asyncio.create_task(self._train(learner))
                return

    async def _reason_to_wait(self, learner: Learner) -> str:
        """Why no round starts now, in words; "": it may start."""
        loaded, name = learner.model.loaded, learner.model.name
        if not loaded:
            return "waiting until the model is loaded"
        if self._is_quiet and _is_outdated(learner, loaded):
            wanted = learner.current.number if learner.current else 0
            if learner.n_tried != wanted:
                learner.n_tried = wanted
                if await self._use(learner, learner.session):
                    now = f"version {wanted}" if wanted else "no version that has learned"
                    self._log(f"learning: {name} drafts with {now}, after a change by another program")
            return "another version is in use"
        if why := _untrainable(learner.session, loaded):
            self._log_once(f"learning: no head of {name} is trained, as {why}")
            return f"no head is trained, as {why}"
        if learner.n_new < self._pace.min_new:
            return f"collecting answers: {learner.n_new} of {self._pace.min_new} until the next training"
        if why := extras.without_torch():
            self._log_once(f"learning: no head of {name} is trained, as {why}")
            return "no head is trained without PyTorch"
        if learner.n_failed >= _MAX_FAILURES:
            return "training has failed too often"
        if not self._is_quiet:
            return f"waiting until nothing was asked for {self._pace.idle_s:.0f} s"
        if self._on_battery():
            return "waiting for mains power"
        needed = sum(part.stat().st_size for part in parts(learner.main) or [learner.main]) + _CHILD_BYTES
        if (free := self._free()) < needed:
            self._log_once(f"learning: training a head of {name} needs {format_size(needed)} of free memory")
            return f"waiting for memory: {format_size(free)} of {format_size(needed)} are free"
        return ""

    def _log_once(self, line: str) -> None:
        """Log a line unless it was logged."""
        if line not in self._logged:
            self._logged.add(line)
            self._log(line)

    # Training

    async def _train(self, learner: Learner) -> None:
        """One round, from the start of the child to the use of the new head."""
        try:
            with _locked(learner.versions.folder) as is_locked:
                if not is_locked:
                    learner.state = "another server trains this head"
                    await asyncio.sleep(self._pace.check_s)
                    return
                last = await self._child_result(learner)
            await self._end_round(learner, last)
        except NotReady:  # the server ends, or the model's process has; the next look uses the version
            pass
        except (OSError, SpecLocalError) as error:
            learner.n_failed += 1
            self._log(f"learning: training failed: {error}")
        finally:
            learner.stage, learner.share = "", 0.0

    async def _child_result(self, learner: Learner) -> Mapping[str, Any]:
        """Run the child to its end; return its last event, with the last answer that it can have seen."""
        record = learner.versions.folder / _RECORD
        end_abandoned(record)
        # Not kept for the time of a round: they may be deleted in the meantime.
        last_kept = max((each.number for each in await asyncio.to_thread(learner.answers.answers)), default=0)
        last: dict[str, Any] = {}
        free = self._free()
        self._bound = free // 2 if self._max_memory is None else self._max_memory
        self._was_too_large = False
        child = await TrainingChild.start(self._job(learner), self._command)
        try:
            self._child, self._training, learner.stage = child, learner, "starting"
            learner.state = _progress(learner)
            remember(child, record)
            if not self._is_quiet:  # something was asked while it started
                child.pause()
            async for event in child.events():
                if event.get("event") == "stage":
                    learner.stage, learner.share = str(event.get("name")), 0.0
                elif event.get("event") == "progress":
                    with contextlib.suppress(TypeError, ValueError):
                        learner.share = min(1.0, max(0.0, float(event["share"])))
                elif event.get("event") in _LAST:
                    last = event
                learner.state = _progress(learner)
        finally:
            self._child = self._training = None
            await asyncio.shield(child.end())
            record.unlink(missing_ok=True)
        if not last:
            last = {"event": "died", "message": child.last_error or f"exit code {child.exit_code}"}
        return {"last_answer": last_kept, **last}

    def _job(self, learner: Learner) -> dict[str, Any]:
        loaded = learner.model.loaded
        draft = loaded.draft_path if loaded else None
        return {
            "main": str(learner.main.absolute()),
            "draft": str(draft.absolute()) if draft else None,
            "threads": learner.session.get("threads"),
            "offload": loaded.offload if loaded else "0",
            "folder": str(learner.versions.folder),
            "minutes": self._pace.minutes,
        }

    async def _end_round(self, learner: Learner, last: Mapping[str, Any]) -> None:
        name, result = learner.model.name, last["event"]
        if result == "died":
            learner.n_failed += 1
            if not self._was_too_large:
                self._log(f"learning: training a head of {name} failed ({last['message']})")
            if learner.n_failed >= _MAX_FAILURES:
                self._log(f"learning: no head of {name} is trained until the server is started again")
            return
        await asyncio.to_thread(learner.versions.end_round, last["last_answer"])
        await asyncio.to_thread(learner.refresh)
        if result == "failed":
            learner.n_failed += 1
            self._log(f"learning: training a head of {name} failed ({last.get('message')})")
            return
        learner.n_failed = 0
        if result == "unchanged":
            self._log(f"learning: the head of {name} is unchanged ({last.get('why')})")
        elif (version := learner.current) and version.number == last.get("number"):
            learner.state = f"version {version.number} will be used after the answers that run"
            path = learner.versions.path(version)
            if await self._use(learner, {**learner.model.session, "draft": path}):
                self._log(f"learning: {name} drafts with version {version.number}: {_gain(version)}")

    async def _use(self, learner: Learner, session: Mapping[str, Any]) -> bool:
        """Load a model with another head between two answers; return False if it cannot be loaded.

        A version that cannot be loaded is rolled back.
        """
        error = await self._served.reload(learner.model, session)
        if not error:
            return True
        self._log(f"learning: {learner.model.name} continues with the previous head ({error})")
        if learner.current and session.get("draft") == learner.versions.path(learner.current):
            await asyncio.to_thread(learner.versions.rollback)
            await asyncio.to_thread(learner.refresh)
        return False


def _progress(learner: Learner) -> str:
    return f"training: {learner.stage}, {learner.share:.0%}"


def _is_on_battery() -> bool:
    """Return whether this machine has a battery and draws on it."""
    read = getattr(psutil, "sensors_battery", lambda: None)  # some systems have none
    try:
        battery = read()
    except (OSError, RuntimeError, psutil.Error):
        return False
    return battery is not None and battery.power_plugged is False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of those that train in a folder of versions; yields False if another process does."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK, mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _is_outdated(learner: Learner, loaded: Loaded) -> bool:
    """Return whether a version is in use that the user has rolled back, or is not the newest one."""
    used, folder = loaded.draft_path, learner.versions.folder
    if not used or used.absolute().parent != folder.absolute():
        return False
    return learner.current is None or used.name != learner.current.file


def _untrainable(session: Mapping[str, Any], loaded: Loaded) -> str | None:
    """Why no head can be trained for a model as it is served; None: one can."""
    if session.get("workers"):
        return "its layers are on other machines"
    if not loaded.draft_path or _architecture(loaded.draft_path) == "eagle3":
        return None
    if loaded.draft_path == Path(session["main"]):
        return "its own layers for multi-token prediction draft: give --draft none or an EAGLE-3 head"
    return f"{loaded.draft} drafts, which is no EAGLE-3 head: give --draft none or such a head"


@functools.cache
def _architecture(path: Path) -> str:
    return str(gguf_header.read_metadata(path).get("general.architecture", ""))


def _public(version: HeadVersion) -> dict[str, Any]:
    """What everybody may know of a version."""
    return {
        "number": version.number,
        "trained": round(version.trained),
        "answers": version.n_answers,
        "before": version.before,
        "after": version.after,
        "rolled_back": version.is_rolled_back,
    }


def _gain(version: HeadVersion) -> str:
    """Acceptance before and after training, for people."""
    change = {
        data: f"{before:.2f} → {after:.2f}"
        if (before := version.before.get(data)) is not None
        else f"{after:.2f}"
        for data, after in version.after.items()
    }
    kinds = (("user", "your answers"), ("built_in", "built-in prompts"))
    return "accepted of " + ", of ".join(f"{text}: {change[data]}" for data, text in kinds if data in change)
