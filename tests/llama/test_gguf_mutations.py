"""Damaged and hostile headers: each file is refused with one line, or works in every role.

The check of a new file runs in a child process, where a crash is harmless. What passes the check must neither
crash a session nor raise an untyped error there.
"""

import copy
import json
import os
import random
import select
import subprocess
import sys
from collections import Counter

import pytest

from spec_local.llama.tiny import write_tiny_model
from tests.gguf_mutations import ARRAY, INT32, STRING, UINT32, Gguf, mutated, parse, shorten_vocabulary

N_SEEDS = 40
MAX_MEMORY = 400  # MiB of the child process; it needs less than 100
DEADLINE = 30.0  # seconds for a file; it takes about 0.05

# Checks a file as `probe` does, then uses it as the main and as the draft model of sessions that do not.
WORKER = """
import json, resource, sys
from pathlib import Path
import spec_local.system.machine
from spec_local import session
from spec_local.opening import loading
from spec_local.core.sampling import SamplingSettings
from spec_local.errors import SpecLocalError
from spec_local.llama.devices import OFFLOADED
from spec_local.llama.setup.probe import _exercise
from spec_local.settings import GenerationSettings
from tests.unfiltered import unfiltered
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
spec_local.system.machine.default_threads = lambda: 1
loading.check_model_files = lambda *args, **kwargs: None
sampling = unfiltered(temperature=0.8)
plain = GenerationSettings(sampling, max_tokens=8, proposer="none", policy="fixed")
schema = GenerationSettings(sampling, max_tokens=8, proposer="none", policy="fixed", json_schema="{}")
tree = GenerationSettings(sampling, max_tokens=8, proposer="draft", policy="fixed", shape="tree")

TEXT = "Hello, you" + bytes(range(256)).decode("utf-8", "surrogateescape")

def use(main, draft, settings, **options):
    with session.Session.open(main, draft, threads=1, **options) as opened:
        opened.main.model.chat_template
        opened.main.model.vocabulary.fingerprint
        return sum(len(getattr(event, "tokens", ())) for event in opened.generate(TEXT, settings))

def outcome(call):
    try:
        return "works", call() or 0
    except SpecLocalError as error:
        return "error", str(error)
    except Exception as error:
        return "untyped", repr(error)

def peak_memory():  # in MiB; on Linux, ru_maxrss counts the memory of the process that started this one
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) >> 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 20

for line in sys.stdin:
    path = Path(line.strip())
    for call in (
        lambda: _exercise(path, OFFLOADED),
        lambda: use(path, None, plain, cache_type="q8_0"),
        lambda: use(path, None, schema),
        lambda: use(sys.argv[1], path, tree, branches=64),
    ):
        found = outcome(call)
        print(json.dumps(found), flush=True)
        if found[0] != "works" and call.__code__.co_names[0] == "_exercise":
            break
    print(json.dumps(["end", peak_memory()]), flush=True)
"""


class Worker:
    """A child process that uses files, and is replaced after a crash or a hang.

    log: file for stderr. main: path of the main model for files that are used as draft models.

    Attributes:
        memory: the peak of the child process, in MiB.
    """

    def __init__(self, log, main):
        self._command, self._log = [sys.executable, "-c", WORKER, main], log
        self._child, self.memory = None, 0

    def use(self, path):
        """The outcomes of a file as the main, constrained and draft model, until a crash or hang."""
        if self._child is None:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=os.environ | {"GGML_NO_BACKTRACE": "1"},
                bufsize=0,
            )
        self._child.stdin.write(os.fsencode(path) + b"\n")
        outcomes = []
        while True:
            kind, detail = self._receive()
            if kind == "end":
                self.memory = max(self.memory, detail)
                return outcomes
            outcomes.append((kind, detail))
            if kind in ("hang", "crash"):
                self.end()
                return outcomes

    def _receive(self):
        """The next line, or ``crash`` and the exit status, or ``hang``."""
        if not select.select([self._child.stdout], [], [], DEADLINE)[0]:
            return "hang", ""
        line = self._child.stdout.readline()
        return json.loads(line) if line else ("crash", str(self._child.wait()))

    def end(self):
        if self._child:
            self._child.kill()
            self._child.communicate()
            self._child = None


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Parsed files: plain, with experts, with sliding windows, recurrent, and with other tokenizers."""
    folder = tmp_path_factory.mktemp("bases")
    shapes = {
        "llama": {"n_layers": 1},
        "experts": {"n_layers": 1, "n_experts": 4, "tensor_type": "Q8_0"},
        "gemma3": {"n_layers": 2, "architecture": "gemma3"},
        "mamba": {"n_layers": 1, "architecture": "mamba"},
    }
    found = {}
    for name, shape in shapes.items():
        content = write_tiny_model(folder / f"{name}.gguf", **shape).read_bytes()
        found[name] = parse(content)
        assert found[name].encoded() == content
    found["bpe"] = with_byte_level_tokenizer(copy.deepcopy(found["llama"]))
    found["rwkv"] = with_rwkv_tokenizer(copy.deepcopy(found["llama"]))
    return found


def with_byte_level_tokenizer(gguf: Gguf) -> Gguf:
    """The same model with the tokenizer of GPT-2, which has merges and no scores."""
    old = gguf.find("tokenizer.ggml.tokens").value
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = [chr(byte) if byte in plain else chr(0x200 + byte) for byte in range(256)]
    tokens = [*old[:5], *(character.encode() for character in characters)]
    merges = [f"{a} {b}".encode() for a in "etaoinshrdlu" for b in "etaoinshrdlu"]
    tokens += [merge.replace(b" ", b"") for merge in merges]
    tokens += [b"[%d]" % n for n in range(len(old) - len(tokens))]
    gguf.set("tokenizer.ggml.model", STRING, b"gpt2")
    gguf.set("tokenizer.ggml.pre", STRING, b"llama-bpe")
    gguf.set("tokenizer.ggml.tokens", ARRAY, tokens, STRING)
    gguf.set("tokenizer.ggml.merges", ARRAY, merges, STRING)
    gguf.set("tokenizer.ggml.token_type", ARRAY, [2, 3, 3, 3, 3] + [1] * (len(tokens) - 5), INT32)
    gguf.entries.remove(gguf.find("tokenizer.ggml.scores"))
    return gguf


def with_rwkv_tokenizer(gguf: Gguf) -> Gguf:
    """The same model with the tokenizer of RWKV, whose first tokens are the bytes."""
    tokens = gguf.find("tokenizer.ggml.tokens")
    tokens.value[5:261] = [b"\\x%02x" % byte for byte in range(256)]
    gguf.set("tokenizer.ggml.model", STRING, b"rwkv")
    return gguf


@pytest.fixture(scope="module")
def worker(bases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("worker")
    main = folder / "main.gguf"
    main.write_bytes(bases["llama"].encoded())
    with (folder / "log").open("wb") as log:
        worker = Worker(log, main)
        yield worker
        worker.end()


def test_unchanged_files_work(bases, worker, tmp_path):
    """Otherwise, the tests below would prove little."""
    path = tmp_path / "model.gguf"
    for name, gguf in bases.items():
        path.write_bytes(gguf.encoded())
        kinds = [kind for kind, _ in worker.use(path)]
        assert kinds == ["works", "works", "works", "error" if name == "mamba" else "works"], name  # no trees


def test_mutated_files_are_refused_or_work(bases, worker, tmp_path):
    names, tally = list(bases), Counter()
    path = tmp_path / "model.gguf"
    for seed in range(N_SEEDS):
        gguf, note = mutated(bases[names[seed % len(names)]], seed)
        path.write_bytes(gguf.encoded())
        check, *sessions = worker.use(path)
        tally[check[0]] += 1
        assert check[0] in ("works", "error", "crash"), (seed, note, check)
        for outcome in sessions:
            assert outcome[0] in ("works", "error"), (seed, note, outcome)
        for kind, detail in (check, *sessions):
            assert kind != "error" or "\n" not in detail.strip(), (seed, note, detail)
    assert tally["works"] > 4
    assert tally["error"] > 16
    assert worker.memory < MAX_MEMORY


def test_truncated_files_are_refused(bases, worker, tmp_path):
    content, rng = bases["llama"].encoded(), random.Random(0)
    cuts = [4, 5, 8, 12, 16, 23, 24, 25, *(rng.randrange(26, 3000) for _ in range(10))]
    cuts += [*(rng.randrange(3000, len(content)) for _ in range(16)), len(content) - 1]
    path = tmp_path / "cut.gguf"
    for cut in cuts:
        path.write_bytes(content[:cut])
        ((kind, message),) = worker.use(path)
        assert kind == "error", (cut, kind, message)
        assert str(path) in message


def setting(key, kind, value):
    return lambda gguf: gguf.set(key, kind, value)


def rename_token(gguf: Gguf, old: bytes, new: bytes) -> None:
    tokens = gguf.find("tokenizer.ggml.tokens").value
    tokens[tokens.index(old)] = new


def with_a_long_token(gguf: Gguf) -> None:
    gguf.find("tokenizer.ggml.tokens").value[-1] = b"x" * 1025


# Files that once crashed or hung a session: base, change, the use that reports it (None: all work), and how.
CORPUS = {
    "rwkv": ("llama", setting("tokenizer.ggml.model", STRING, b"rwkv"), 0, "tokenizer would not end"),
    "window": ("gemma3", setting("gemma3.attention.sliding_window", UINT32, 2**31 - 1), 0, "sliding window"),
    "rope": ("gemma3", setting("gemma3.rope.dimension_count", UINT32, 0), 0, "rotary position"),
    "byte": ("llama", lambda gguf: rename_token(gguf, b"<0x07>", b"bell"), 0, "crash"),
    "empty": ("llama", lambda gguf: shorten_vocabulary(gguf, 0), 0, "has no tokenizer"),
    "end": ("bpe", lambda gguf: shorten_vocabulary(gguf, 2), 2, "no token that ends an answer"),
    "long": ("llama", with_a_long_token, None, ""),
    "context": ("llama", setting("llama.context_length", UINT32, 2**32 - 1), None, ""),
}


@pytest.mark.parametrize(("base", "change", "use", "reason"), CORPUS.values(), ids=CORPUS)
def test_files_that_once_crashed_or_hung(bases, worker, tmp_path, base, change, use, reason):
    gguf, path = copy.deepcopy(bases[base]), tmp_path / "model.gguf"
    change(gguf)
    path.write_bytes(gguf.encoded())
    outcomes = worker.use(path)
    kinds = [kind for kind, _ in outcomes]
    if use is None:
        assert kinds == ["works"] * 4, outcomes
    elif reason == "crash":  # of the check, in its child process
        assert kinds == ["crash"]
    else:
        assert kinds == ["works"] * use + ["error"] + ["works"] * (len(kinds) - use - 1), outcomes
        assert reason in outcomes[use][1]
