"""Ask a server that learns for a long time, and kill its processes at random; fail if anything is lost.

    python -m tools.soak_learning --requests 200

Not part of the test suite. A tiny main model answers random prompts at temperature 0, one in eight of them in
a second process that shares the store. Between and during the answers, the process with the models, the one
that trains, or the whole server is killed with SIGKILL, on average after every eight requests. The server
trains after a fraction of a second without a request, in rounds of a few seconds. At the end, every answer
that a client has received must be kept, with its whole prompt; every answer must be that of plain decoding;
and the versions of the head must be intact, and used.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from spec_local import GenerationSettings, SamplingSettings, Session, Text
from spec_local.datastore.answer_store import AnswerStore
from spec_local.text import printable
from tests.cli.conftest import folders
from tests.tiny_heads import write_tiny_main

PROMPT = "the of and to in is you that it he was for on are with as his they"
N_TOKENS = 24
SERVER = """
import sys
from spec_local.server.learning import idle_training as learning
learning.IdleTraining.__init__.__kwdefaults__.update(idle_s=0.3, min_new=10, minutes=0.04, check_s=0.1)
from specdec_cli.__main__ import main
main()
"""


class Server:
    """A server that learns, which is started again after each kill."""

    def __init__(self, folder: Path, main: Path, environment: dict[str, str]) -> None:
        self._main, self._environment = main, environment
        self._log = (folder / "server.log").open("w+b")
        self._start()

    def _start(self) -> None:
        arguments = ["serve", self._main, "--draft", "none", "--learn", "--port", 0, "--threads", 1]
        begin = self._log.seek(0, os.SEEK_END)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, *map(str, [*arguments, "--ctx", 512, "--parallel", 2])],
            env=self._environment,
            stderr=self._log,
        )
        for _ in range(600):
            if found := re.search(rb"(http://\S+) serves ", self.log(begin)):
                self.address = found[1].decode()
                return
            time.sleep(0.1)
        raise SystemExit(f"the server does not start: {self.log(begin).decode()}")

    def log(self, begin: int = 0) -> bytes:
        self._log.seek(begin)
        return self._log.read()

    def complete(self, prompt: str) -> str | None:
        """The answer; None: there is none, because a process was killed."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": N_TOKENS}
        with suppress(httpx.HTTPError):
            response = httpx.post(f"{self.address}/v1/completions", json=body, timeout=60)
            if response.status_code == 200:
                return str(response.json()["choices"][0]["text"])
        return None

    def learning(self) -> dict[str, object]:
        with suppress(httpx.HTTPError):
            return dict(httpx.get(f"{self.address}/learning", timeout=10).json())
        return {}

    def kill(self, what: str) -> bool:
        """Kill a process; False: there is none of this kind."""
        own = psutil.Process(self.process.pid)
        if what == "server":
            children = own.children(recursive=True)
            own.kill()
            self.process.wait()
            _, alive = psutil.wait_procs(children, timeout=20)
            assert not alive, f"processes outlive the server: {alive}"
            self._start()
            return True
        wanted = "engine_process" if what == "models" else "training.learn"
        for child in own.children():
            with suppress(psutil.Error):
                if wanted in " ".join(child.cmdline()):
                    child.kill()
                    return True
        return False

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        main_path = write_tiny_main(folder / "main.gguf", end_scale=1.5)
        environment = folders(folder)
        server = Server(folder, main_path, environment)
        try:
            received, kills = _ask(server, main_path, environment, options.requests, rng)
            state = _after_training(server)
        finally:
            server.stop()
        in_use, versions = state.get("version"), state.get("versions")
        print(f"{len(received)} answers, kills: {dict(kills)}, version in use: {in_use}, of {versions}")
        lost, wrong = _compare(folder, main_path, received)
        print(f"lost: {len(lost)}, different from plain decoding: {len(wrong)}")
        if lost or wrong or not in_use:
            print(server.log().decode()[-5000:])
            raise SystemExit(1)


def _ask(
    server: Server, main: Path, environment: dict[str, str], n: int, rng: random.Random
) -> tuple[dict[str, str], Counter[str]]:
    """Ask until there are so many answers; return them by prompt, and the kills."""
    received: dict[str, str] = {}
    kills: Counter[str] = Counter()
    while len(received) < n:
        prompt = " ".join(rng.choices(PROMPT.split(), k=rng.randint(3, 40)))
        if rng.random() < 1 / 8:
            what = rng.choice(["models", "training", "training", "server"])
            if rng.random() < 0.5 and what != "server":  # during an answer
                threading.Timer(rng.uniform(0, 0.05), server.kill, [what]).start()
                kills[what] += 1
            else:
                kills[what] += server.kill(what)
        if rng.random() < 1 / 8:
            answer = _in_another_process(main, prompt, environment)
        else:
            answer = server.complete(prompt)
        if answer is not None:
            received[prompt] = answer
        time.sleep(rng.choice([0, 0, 0, 0.5, 3.0]))  # at times, long enough to train
    return received, kills


def _after_training(server: Server) -> dict[str, object]:
    """What is learned once the last round has ended."""
    state: dict[str, object] = {}
    for _ in range(600):
        state = server.learning()
        if state.get("versions") and not state.get("training"):
            break
        time.sleep(0.2)
    return state


def _in_another_process(main: Path, prompt: str, environment: dict[str, str]) -> str | None:
    command = [sys.executable, "-m", "specdec_cli", "generate", "--main", main, "--draft", "none", "--learn"]
    command += ["--raw", "--temp", 0, "-n", N_TOKENS, "--ctx", 512, "--threads", 1, prompt]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True)
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def _compare(folder: Path, main: Path, received: dict[str, str]) -> tuple[list[str], list[str]]:
    """The prompts whose answers are not kept, and those whose answers are not the main model's."""
    [path] = folder.glob("cache/specdec/texts/*/*.answers")
    kept = {
        (tuple(each.tokens[: each.n_prompt]), tuple(each.tokens[each.n_prompt :]))
        for each in AnswerStore(path).answers()
    }
    lost, wrong = [], []
    settings = GenerationSettings(SamplingSettings(temperature=0), max_tokens=N_TOKENS, proposer="none")
    with Session.open(main, "none", n_ctx=512, threads=1) as session:
        tokenize = session.main.model.vocabulary.tokenize
        for prompt, answer in received.items():
            events = [event for event in session.generate(prompt, settings) if isinstance(event, Text)]
            text = printable("".join(event.text for event in events))
            tokens = [token for event in events for token in event.tokens]
            if text.strip() != answer.strip():
                wrong.append(prompt)
            whole = tuple(tokenize(prompt, add_special=True)), tuple(tokens)
            if len(tokens) >= 4 and whole not in kept:
                lost.append(prompt)
    return lost, wrong


if __name__ == "__main__":
    main()
