"""Use the library for an hour with random settings, and watch memory and open files.

    python benchmarks/soak.py --minutes 60 --threads 1

Tiny models are written to a temporary folder. Sessions are opened, answer some prompts, and are closed, often
in the middle of an answer. Settings, prompts, seeds and the place where an answer is left are random.

An error that is not a `SpecLocalError` is a defect; so is memory that still grows in the second half of the
time, by more than `_MB_PER_HOUR`, and a file descriptor or thread that stays open. Exit status 1 if there is
a defect.
"""

import gc
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import parser

from spec_local import (
    ChatSession,
    ChatTemplate,
    Conversation,
    GenerationSettings,
    SamplingSettings,
    Session,
    SpecLocalError,
)
from spec_local.llama.tiny import write_tiny_model
from spec_local.registry import POLICY_NAMES, PROPOSER_NAMES, SHAPE_NAMES
from spec_local.verifiers import VERIFIERS

_MB_PER_HOUR = 20  # a leak of one answer's logits would be a hundred times as much
_SAMPLE_S = 10.0
_SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}}'
_WORDS = ["the", "water", "people", "make", "time", "<|im_end|>", "\n", "ญี", "{}", "1", "2", "3", ""]


class Soak:
    """Random uses of the library, and counts of what became of them.

    Args:
        folder: of the models, and for saved chats and states.
    """

    def __init__(self, folder: Path, seed: int, threads: int, datastore: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.defects: list[str] = []
        self._folder, self._random = folder, random.Random(seed)
        self._threads, self._datastore = threads, datastore
        main = write_tiny_model(folder / "main.gguf", end_scale=0.3)
        window = write_tiny_model(folder / "window.gguf", architecture="gemma3", end_scale=0.3)
        draft = write_tiny_model(folder / "draft.gguf", noise=0.05)
        other = write_tiny_model(folder / "other.gguf", noise=0.05, extra_tokens=["another", "vocabulary"])
        self._pairs = [(main, draft), (main, other), (main, None), (window, None), (window, draft)]

    def step(self) -> None:
        """Open a session, use it several times, and close it."""
        choose = self._random
        main, draft = choose.choice(self._pairs)
        try:
            session = Session.open(
                main,
                draft,
                n_ctx=choose.choice([64, 256, 512]),
                threads=self._threads,
                branches=choose.choice([1, 64]),
                datastore=self._datastore and choose.random() < 0.5,
            )
        except SpecLocalError as error:
            self.counts[f"refused: {type(error).__name__}"] += 1
            return
        left: Any = None
        for _ in range(choose.randint(1, 6)):
            use = choose.choice([self._answer, self._answer, self._chat, self._state])
            try:
                left = use(session)
                self.counts[f"clean: {use.__name__[1:]}"] += 1
            except SpecLocalError as error:
                self.counts[f"refused: {type(error).__name__}"] += 1
            except Exception:
                self.defects.append(traceback.format_exc())
        session.close()
        del left

    def _answer(self, session: Session) -> Any:
        events = session.generate(self._text(), self._settings())
        return self._read(events)

    def _chat(self, session: Session) -> Any:
        model = session.main.model
        conversation = Conversation(model, ChatTemplate(model))
        chat = ChatSession(session, conversation, GenerationSettings(max_tokens=20))
        for _ in range(self._random.randint(1, 3)):
            for _ in chat.send(self._text()):
                pass
        path = self._folder / "chat.json"
        chat.save(path, with_state=self._random.random() < 0.5)
        chat.load(path)
        return self._read(chat.send(self._text()))

    def _state(self, session: Session) -> None:
        path = self._folder / "state"
        session.save_state(path)
        session.load_state(path)

    def _read(self, events: Any) -> Any:
        """Read an answer; often stop before its end, and return what keeps it open."""
        limit = self._random.choice([0, 1, 3, 10**9])
        for n, _ in enumerate(events):
            if n >= limit:
                self.counts["left in the middle"] += 1
                if self._random.random() < 0.5:
                    events.close()
                return events
        return None

    def _text(self) -> str:
        return " ".join(self._random.choices(_WORDS, k=self._random.randint(1, 40)))

    def _settings(self) -> GenerationSettings:
        choose = self._random
        sampling = SamplingSettings(
            temperature=choose.choice([0.0, 0.8, 1.5]),
            top_k=choose.choice([0, 1, 40]),
            top_p=choose.choice([1.0, 0.9]),
            min_p=choose.choice([0.0, 0.05]),
            repeat_penalty=choose.choice([1.0, 1.3]),
        )
        return GenerationSettings(
            sampling,
            seed=choose.randrange(1000),
            max_tokens=choose.choice([0, 1, 30, 80]),
            stops=choose.choice([(), ("the",)]),
            proposer=choose.choice(list(PROPOSER_NAMES)),
            policy=choose.choice(list(POLICY_NAMES)),
            shape=choose.choice(list(SHAPE_NAMES)),
            verifier=choose.choice(["auto", "auto", *VERIFIERS]),
            greedy_draft=choose.random() < 0.2,
            json_schema=choose.choice([None, None, None, _SCHEMA]),
            logprobs=choose.choice([None, 3]),
        )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--minutes", type=float, default=60.0)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument(
        "--datastore", action="store_true", help="use the user's datastore of these models"
    )
    options = arguments.parse_args()
    process = psutil.Process()
    samples: list[tuple[float, float, int, int]] = []  # seconds, MB, file descriptors, threads
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), options.seed, options.threads, options.datastore)
        started = time.monotonic()
        while (elapsed := time.monotonic() - started) < 60 * options.minutes:
            soak.step()
            if not samples or elapsed - samples[-1][0] > _SAMPLE_S:
                gc.collect()
                memory = process.memory_info().rss / 1e6
                samples.append((elapsed, memory, process.num_fds(), process.num_threads()))
    half = np.array(samples[len(samples) // 2 :])
    slope = float(np.polyfit(half[:, 0], half[:, 1], 1)[0]) * 3600 if len(half) > 2 else 0.0
    for name, n in sorted(soak.counts.items()):
        print(f"{n:8} {name}")
    print(
        f"memory {samples[0][1]:.0f} MB at the start, {samples[-1][1]:.0f} MB at the end, {slope:+.1f} MB/h"
    )
    for i, what in ((2, "file descriptors"), (3, "threads")):
        print(f"{what}: {half[0, i]:.0f} at half time, {half[-1, i]:.0f} at the end")
    if slope > _MB_PER_HOUR:
        soak.defects.append("memory grows")
    if (half[-1, 2:] > half[0, 2:] + 1).any():
        soak.defects.append("files or threads stay open")
    print(f"{len(soak.defects)} defects", *soak.defects, sep="\n")
    sys.exit(bool(soak.defects))


if __name__ == "__main__":
    main()
