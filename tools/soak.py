"""Open, use and close sessions at random for a long time; fail if memory or open files grow, or on a defect.

    python -m tools.soak --minutes 60
    python -m tools.soak --minutes 60 --main main.gguf --draft draft.gguf

Not part of the test suite. Without models, it writes tiny ones. Each round opens up to three sessions with
random settings, generates answers with random settings, ends most of them early in one of several ways, and
closes everything in a random order. Only errors of specdec itself are expected. Between rounds, when nothing
is open, the resident memory and the numbers of open file descriptors and threads are recorded, and the
datastore, which may grow, is emptied. Over the second half of the time, a line fitted to any of them must not
rise by more than noise.
"""

import argparse
import faulthandler
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import platformdirs
import psutil

from spec_local.chat.conversation import Conversation
from spec_local.chat.template import ChatTemplate
from spec_local.chat_session import ChatSession
from spec_local.engine.events import Failed
from spec_local.errors import SpecLocalError
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from spec_local.llama.tiny import write_tiny_model
from spec_local.policies import POLICY_NAMES
from spec_local.proposers import PROPOSER_NAMES, SHAPE_NAMES
from spec_local.session import Done, Session, Text
from spec_local.settings import GenerationSettings
from spec_local.verifiers import VERIFIER_NAMES
from tests.unfiltered import unfiltered

PERIOD_S = 10.0  # between two records
MAX_GROWTH = {"memory": 16 << 20, "files": 2, "threads": 2}
"""Over the second half: in bytes, more than the allocator's noise; in file descriptors and threads."""
PROMPT = "the of and to in is you that it he was for on are with as his they"
GRAMMARS = ['root ::= ("yes" | "no") " " [0-9]+', "root ::= [a-z ]*", 'root ::= "(" root ")" | "x"']
SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a"]},
    {"type": "array", "items": {"enum": ["x", "y", None]}, "maxItems": 4},
    {"type": "string", "maxLength": 9},
]


@dataclass
class Log:
    """counts: by what happened. defects: tracebacks. records: seconds, bytes, file descriptors, threads.

    last: the latest answer, for tracebacks. held: an unfinished answer.
    """

    counts: Counter = field(default_factory=Counter)
    defects: list = field(default_factory=list)
    records: list = field(default_factory=list)
    last: str = ""
    held: object = None

    def defect(self, what):
        self.defects.append(f"{what}\nlast answer: {self.last}")
        print(self.defects[-1], file=sys.stderr, flush=True)

    def unraisable(self, found):
        """A hook: an error in a destructor, which Python only prints."""
        self.counts["destructor: defect"] += 1
        self.defect("".join(traceback.format_exception(found.exc_value)))

    def attempt(self, what, call, *args):
        """Count a call as clean, refused (an error of specdec) or a defect; its result, or None."""
        try:
            result = call(*args)
        except SpecLocalError as error:
            self.counts[f"{what}: refused"] += 1
            if not str(error) or "\n" in str(error):
                self.defect(f"not one line: {error!r}")
        except Exception:
            self.counts[f"{what}: defect"] += 1
            self.defect(traceback.format_exc())
        else:
            self.counts[f"{what}: clean"] += 1
            return result
        return None


def sampling_of(rng, n_vocab):
    return unfiltered(
        temperature=rng.choice([0.0, 0.0, 0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 5, 40]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.1, 0.0]),
        min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
        repeat_penalty=rng.choice([1.0, 1.0, 1.2, 0.9]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        presence_penalty=rng.choice([0.0, 0.0, -0.5]),
        penalty_window=rng.choice([64, 0, 8]),
        logit_bias=rng.choice([{}, {}, {rng.randrange(n_vocab): rng.choice([5.0, -float("inf")])}]),
    )


def settings_of(rng, n_vocab):
    constraint = rng.choice([None, None, None, "grammar", "schema"])
    return GenerationSettings(
        sampling=sampling_of(rng, n_vocab),
        seed=rng.choice([None, 0, rng.randrange(2**32)]),
        max_tokens=rng.choice([0, 1, 8, 32, 32, 100, None]),
        stops=rng.choice([(), (), ("e",), ("the ", "\n")]),
        proposer=rng.choice(["auto", "auto", *PROPOSER_NAMES]),
        policy=rng.choice(POLICY_NAMES),
        draft_max=rng.choice([None, None, 0, 1, 4, 16]),
        draft_p_min=rng.choice([0.75, 0.0, 1.0]),
        staged=rng.choice([None, None, 0, 3, 8]),
        shape=rng.choice(SHAPE_NAMES),
        tree_nodes=rng.choice([16, 1, 64]),
        beam_width=rng.choice([4, 1, 8]),
        verifier=rng.choice(["auto", "auto", *VERIFIER_NAMES]),
        grammar=rng.choice(GRAMMARS) if constraint == "grammar" else None,
        json_schema=json.dumps(rng.choice(SCHEMAS)) if constraint == "schema" else None,
        logprobs=rng.choice([None, None, 0, 5]),
    )


def open_session(rng, models, threads):
    """A session of its own models, or of the caller's models and contexts; all that must be closed."""
    main, *drafts = rng.choice(models)
    draft = rng.choice([None, *drafts, *drafts])
    known = {
        "n_ctx": rng.choice([64, 256, 512]),
        "cache_type": rng.choice(["f16", "f16", "q8_0"]),
        "threads": threads,
    }
    branches = rng.choice([1, 1, 64])
    if rng.random() < 0.7:
        datastore = rng.random() < 0.3
        parallel = rng.choice([1, 1, 2, 5])
        return [Session.open(main, draft, branches=branches, datastore=datastore, parallel=parallel, **known)]
    parts = []
    for path in filter(None, (main, draft)):
        parts.append(Model(path))
        parts.append(open_sequence(parts[-1], max_branches=branches, **known))
    return [*parts, Session(*parts[1::2])]


def answer(rng, session, log):
    """Generate an answer, and end it in one of several ways."""
    vocabulary = session.main.model.vocabulary
    prompt = " ".join(rng.choices(PROMPT.split(), k=rng.choice([1, 5, 5, 30, 200])))
    settings = log.attempt("settings", settings_of, rng, vocabulary.n_tokens)
    if settings is None:
        return
    ending = rng.choice(["whole", "whole", "closed", "dropped", "left", "cancelled"])
    log.last = f"{ending} {prompt[:40]!r} {settings}"
    left = rng.randrange(1, 12)
    cancelled = (lambda: next(steps) > left) if ending == "cancelled" else lambda: False
    steps = iter(range(10**9))
    events = session.generate(prompt, settings, cancelled=cancelled)
    text, done = "", None
    for n, event in enumerate(events):
        if isinstance(event, Text):
            text += event.text
        if isinstance(event, Done):
            done = event
        elif ending in ("closed", "dropped", "left") and n == left:
            if ending == "closed":
                events.close()
            if ending == "left":  # the next answer, or closing the session, ends it
                log.held = events
            return
    assert done, "an answer ended without Done"
    if settings.json_schema and done.reason == "stop" and not done.stopping_word:
        json.loads(text)


def many_answers(rng, session, log):
    """Generate several answers at the same time; some are cancelled, and some are left with all others."""
    n_vocab = session.main.model.vocabulary.n_tokens
    words, n = PROMPT.split(), rng.randrange(1, 12)
    each = [log.attempt("settings", settings_of, rng, n_vocab) or GenerationSettings() for _ in range(n)]
    prompts = [" ".join(words[: rng.choice([0, 1, 5, 12, 200])] + rng.choices(words, k=3)) for _ in range(n)]
    log.last = f"{prompts!r:.200} {each}"
    left = rng.choice([10**9, 10**9, rng.randrange(1, 40)])
    limits = [rng.choice([10**9, 10**9, rng.randrange(0, 9)]) for _ in range(n)]
    steps, ended = Counter(), set()
    events = session.generate_many(
        prompts,
        each,
        n_parallel=rng.choice([None, rng.randrange(1, session.n_parallel + 1)]),
        cancelled=lambda i: steps[i] > limits[i],
    )
    for _, (number, event) in zip(range(left), events, strict=False):
        assert number not in ended, "an event after the end of its answer"
        steps[number] += 1
        if isinstance(event, Done | Failed):
            ended.add(number)
        if isinstance(event, Failed) and (not str(event.error) or "\n" in str(event.error)):
            log.defect(f"not one line: {event.error!r}")
    if left == 10**9:
        assert len(ended) == n, "an answer without an end"
    elif rng.random() < 0.5:
        events.close()
    else:
        log.held = events


def chat(rng, session, folder, log):
    """Some turns of a conversation, which is saved, loaded, and often left in the middle of an answer."""
    model = session.main.model
    talk = ChatSession(session, Conversation(model, ChatTemplate(model)), GenerationSettings(max_tokens=20))
    for _ in range(rng.randrange(1, 4)):
        for _ in talk.send(rng.choice(PROMPT.split())):
            pass
    path = folder / "chat.json"
    talk.save(path)
    talk.load(path)
    log.held = talk.send("is it")
    for _ in zip(range(rng.choice([0, 1, 3, 99])), log.held, strict=False):
        pass


def round_of(rng, models, folder, threads, log):
    """Several sessions, several answers, and closing in a random order, now and then in mid-answer."""
    opened = [
        log.attempt("open", open_session, rng, models, threads) for _ in range(rng.choice([1, 1, 2, 3]))
    ]
    opened = [parts for parts in opened if parts]
    for _ in range(rng.randrange(1, 6)):
        if opened:
            session = rng.choice(opened)[-1]
            log.attempt("answer", rng.choice([answer, answer, many_answers]), rng, session, log)
            if rng.random() < 0.1:
                log.attempt("chat", chat, rng, session, folder, log)
    if opened and rng.random() < 0.5:  # to close in mid-answer
        session = rng.choice(opened)[-1]
        log.held = session.generate("the of and", GenerationSettings(max_tokens=50))
        with suppress(SpecLocalError):
            next(log.held, None)
    parts = [part for group in opened for part in group]
    rng.shuffle(parts)
    for part in parts:
        log.attempt("close", part.close)
    if log.held is not None:  # an answer of a session that is closed ends with an error or at once
        log.attempt("late answer", list, log.held)
    log.held = None


def growth(records, column):
    """The rise of a fitted line over the second half of the records."""
    half = np.array(records[len(records) // 2 :], float)
    slope, _ = np.polyfit(half[:, 0], half[:, column], 1)
    return float(slope * (half[-1, 0] - half[0, 0]))


def tiny_models(folder):
    def write(name, **kwargs):
        return write_tiny_model(folder / f"{name}.gguf", n_layers=1, end_scale=0.05, **kwargs)

    main, other = write("main"), write("other", seed=3, extra_tokens=["zebra", "yonder"])
    return [
        (main, write("draft", noise=0.05), other),
        (other, main),
        (write("window", architecture="gemma3"), main),
        (
            write("recurrent", architecture="mamba"),
            write("recurrent-draft", architecture="mamba", noise=0.05),
        ),
    ]


def main():
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("--minutes", type=float, default=60)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--main", type=Path, help="GGUF file; without it, tiny models are used")
    options.add_argument("--draft", type=Path)
    given = options.parse_args()
    faulthandler.enable()
    rng, log, process = random.Random(given.seed), Log(), psutil.Process()
    sys.unraisablehook = log.unraisable
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for variable in [v for v in os.environ if v.startswith("XDG_")]:
            del os.environ[variable]
        os.environ["HOME"] = name  # for caches, costs and the datastore
        given_models = [(given.main, given.draft) if given.draft else (given.main,)]
        models = given_models if given.main else tiny_models(folder)
        began = recorded = time.monotonic()
        while (now := time.monotonic()) - began < 60 * given.minutes:
            round_of(rng, models, folder, given.threads, log)
            log.counts["rounds"] += 1
            if now - recorded > PERIOD_S:
                recorded = now
                shutil.rmtree(Path(platformdirs.user_cache_dir("specdec"), "texts"), ignore_errors=True)
                gc.collect()
                memory, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
                log.records.append((now - began, memory, files, threads))
                answers = log.counts["answer: clean"]
                print(
                    f"{now - began:6.0f} s, {log.counts['rounds']} rounds, {answers} answers, "
                    f"{memory / 1e6:.1f} MB, {files} files, {threads} threads, {len(log.defects)} defects",
                    flush=True,
                )
    if len(log.records) < 8:
        print(f"only {len(log.records)} records: give more --minutes", file=sys.stderr)
        return 2
    grown = {what: growth(log.records, column) for column, what in enumerate(MAX_GROWTH, start=1)}
    print(json.dumps({"counts": dict(sorted(log.counts.items())), "growth": grown}, indent=1))
    failed = [what for what, by in grown.items() if by > MAX_GROWTH[what]]
    tried = sum(n for what, n in log.counts.items() if what != "rounds")
    print(f"tried {tried}, defects {len(log.defects)}, growing: {', '.join(failed) or 'nothing'}")
    return 1 if failed or log.defects else 0


if __name__ == "__main__":
    sys.exit(main())
