"""Files in which everything can be wrong: those that specdec has written, of other programs, and of users.

Whatever is in their place, reading ends: with what they have, without it, or with an error of one line.
"""

import copy
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from spec_local.batch.answers import open_answers
from spec_local.batch.runner import read_entries
from spec_local.bench import prompts
from spec_local.calibration import cost_store, experience_store
from spec_local.calibration.cost_store import Conditions
from spec_local.chat import saved_chat
from spec_local.conversion.checkpoint import Checkpoint
from spec_local.datastore import datastore, text_files
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.kernels import check, choice, measure, records
from spec_local.llama import gguf_header
from spec_local.llama.devices import ON_CPU
from spec_local.llama.model_file import check_header
from spec_local.models import catalog, hub_cache, ollama, program_folders
from spec_local.models.head_versions import HeadVersions
from spec_local.opening import vocabulary_store
from spec_local.policies.acceptance_model import AcceptanceModel
from spec_local.policies.cost_model import CostModel
from spec_local.policies.experience import PastAnswers
from spec_local.server.learning import idle_training as learning
from spec_local.server.learning import training_child
from spec_local.settings import GenerationSettings
from spec_local.system.files import read_text
from spec_local.system.toml_file import ConfigFile
from specdec_cli import chat_editor, draft_versions
from tests.checkpoints import write_checkpoint
from tests.stored_models import add_to_hub_cache, add_to_ollama, write_header
from tests.unit.test_kernel_times import FLAT
from tests.unit.test_vocabulary_map import DRAFT, MAIN

WITHIN_S = 20.0  # a generous limit: without a limit of their own, the slowest would not end


@dataclass
class Kind:
    """A kind of file: where it is, what is in an intact one, and what reads it.

    raises: whether an error of one line is allowed, as for a file that a user names.
    """

    path: Path
    content: bytes
    read: Callable[[], object]
    raises: bool = False


def costs(home, main):
    known = Conditions(main, ON_CPU, 1, 512)
    cost_store.save(known, CostModel({1: 0.1, 4: 0.2}, {8: 2.0}), 5.0)
    path = cost_store.path_of(known)
    return Kind(path, path.read_bytes(), lambda: cost_store.read(known))


def experience(home, main):
    known = Conditions(main, ON_CPU, 1, 512)
    kind = (True, "chain", False)
    stored = experience_store._File(
        main="main",
        draft=None,
        saved=5.0,
        known=[experience_store._known(kind, AcceptanceModel(), PastAnswers(gains={(1, 0): 0.4}))],
    )

    def read():
        for model in experience_store.load(known, None).acceptance.values():
            model.draft.rate(0.5)

    return Kind(experience_store._path(known, None), stored.model_dump_json().encode(), read)


def versions(home, main):
    found = HeadVersions(main)
    (home / "new.gguf").write_bytes(b"head")
    found.add(home / "new.gguf", n_answers=9, last_answer=7, before={"user": 0.4}, after={"user": 0.5})
    store = SimpleNamespace(count_after=lambda number: number.to_bytes(8, "little", signed=True))

    def read():
        fresh = HeadVersions(main)
        learner = learning.Learner(None, fresh, store, {"main": main})
        learner.refresh()
        for version in fresh.all():
            draft_versions._row(fresh, version, fresh.current())
            json.dumps(learning._public(version), allow_nan=False)

    return Kind(found.folder / "versions.json", (found.folder / "versions.json").read_bytes(), read)


def times_of_kernels(home, main):
    library = home / "kernels.so"
    record = measure.MeasuredTimes(times={"Q4_K": FLAT, "F16": FLAT}, when=5.0, doubts=("F16",))

    def read():
        if found := measure.recorded(library, "avx2"):
            choice.limits({name: times for name, times in found.times.items() if name in choice.PACKED})
            measure.doubt(library, "avx2", ["none"])

    path = records.paths(library, measure._name("avx2"))[0]
    return Kind(path, record.model_dump_json().encode(), read)


def self_tests(home, main):
    library = home / "kernels.so"
    record = check.CheckRecord(instruction_set="avx2", machine="0" * 16, self_tests={"avx2": "passed"})
    return Kind(
        records.paths(library)[0],
        record.model_dump_json().encode(),
        lambda: [known.machine == "0" for known in records.read(library, check.CheckRecord)],
    )


def shared_tokens(home, main):
    models = [SimpleNamespace(path=main, vocabulary=each) for each in (MAIN, DRAFT)]
    vocabulary_store.vocabulary_map(*models)
    path = vocabulary_store._path(*models)
    return Kind(path, path.read_bytes(), lambda: vocabulary_store.vocabulary_map(*models))


def ref_of_the_hub(home, main):
    add_to_hub_cache(home / "hub", "user/repo", "model.gguf")
    model = hub_cache.HubModel("user/repo", quant="model")
    path = home / "hub/models--user--repo/refs/main"
    return Kind(path, path.read_bytes(), lambda: hub_cache.cached_files(model))


def manifest_of_ollama(home, main):
    folder, name = home / ".ollama/models", "registry.ollama.ai/library/llama3.2/3b"
    add_to_ollama(folder, name, write_header(home / "m"))
    path = folder / "manifests" / name
    return Kind(path, path.read_bytes(), lambda: [ollama.find("llama3.2:3b"), list(ollama.models())])


def settings_of_lm_studio(home, main):
    return Kind(home / ".lmstudio/settings.json", b'{"downloadsFolder": "/a"}', program_folders.lm_studio)


def pointer_of_lm_studio(home, main):
    return Kind(home / ".lmstudio-home-pointer", b"/a/b", program_folders.lm_studio)


def record_of_a_training(home, main):
    path = home / "training.json"
    record = json.dumps([2**30, 5.0]).encode()
    return Kind(path, record, lambda: training_child.end_abandoned(path))


def journal(home, main):
    pytest.importorskip("torch")  # make test-lowest has none
    from spec_local.training import recipe

    path = home / "journal.json"
    content = b'{"settings": {"main": "0"}, "n_tokens": 5, "curve": [{"n_read": 1}]}'
    return Kind(path, content, lambda: recipe._load(path, {}), raises=True)


def texts(name):
    def kind(home, main):
        folder = home / "texts"
        first = datastore.Datastore(folder, 1000)
        first.add([datastore.StoredText.of(range(100, 140))])
        first.add_answer(range(200, 240))
        first.add_model("a")
        return Kind(folder / name, (folder / name).read_bytes(), lambda: datastore.contents(folder))

    return kind


def saved_conversation(home, main):
    path = home / "chat.json"
    content = (
        b'{"format": "specdec conversation", "version": 1, "model": "m", "paths": ["/a"], "messages": [\n'
        b'{"role": "user", "content": "a"},\n'
        b'{"role": "assistant", "content": "b", "tool_calls": [{"id": "1", "function": {"name": "f"}}],'
        b' "generated": {"offset": 1, "tokens": [1, 2]}}\n]}'
    )

    def read():
        saved_chat.paths_of(path)
        for i, message in enumerate(saved_chat._read(path).messages):
            saved_chat._message(path, i, message)

    return Kind(path, content, read, raises=True)


def config(home, main):
    path = home / "config.toml"
    return Kind(
        path, b"temp = 1\n[chat]\ntop-k = 3\n", lambda: ConfigFile(path, "c", "x").table(), raises=True
    )


def named_models(home, main):
    def read():
        catalog._catalog.cache_clear()
        catalog.models()

    content = b'[models.a]\ndescription = "a"\nlicence = "b"\nrepo = "user/repo"\nfile = "a.gguf"\n'
    return Kind(catalog.user_file(), content, read, raises=True)


def prompts_in(suffix, content):
    def kind(home, main):
        path = home / f"prompts{suffix}"
        return Kind(path, content, lambda: prompts.load(path), raises=True)

    return kind


def batch(home, main):
    path = home / "in.jsonl"
    content = b'{"id": 1, "prompt": "a", "seed": 1, "max_tokens": 3}'

    def read():
        lines = read_text(path, 1 << 20).encode().split(b"\n")
        read_entries(lines, "in.jsonl", main, GenerationSettings())

    return Kind(path, content, read, raises=True)


def answers_of_a_batch(home, main):
    path = home / "out.jsonl"

    def read():
        if path.is_file():  # to anything else, answers are only written
            with open_answers(path):
                pass

    return Kind(path, b'{"index": 0, "id": null, "key": "0", "content": "a"}', read, raises=True)


def head(home, main):
    path = write_header(home / "head.gguf", name="a head")

    def read():
        gguf_header.describe(gguf_header.read_metadata(path))
        gguf_header.read_tokens(path)
        gguf_header.read_tokenizer(path)
        check_header(path)

    return Kind(path, path.read_bytes(), read, raises=True)


def published_head(name):
    """A file of a published head: config.json, or one with tensors."""

    def kind(home, main):
        tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1, 2])}
        folder = write_checkpoint(home / "published", {"hidden_size": 3}, tensors)
        if name.endswith(".bin"):
            torch = pytest.importorskip("torch")
            torch.save({key: torch.tensor(values) for key, values in tensors.items()}, folder / name)
            (folder / "model.safetensors").unlink()

        def read():
            found = Checkpoint(folder)
            assert all(found.tensor(key).shape == found.shape(key) for key in found.names)

        return Kind(folder / name, (folder / name).read_bytes(), read, raises=True)

    return kind


def text(home, main):
    path = home / "text"

    def read():
        with suppress(text_files.Skipped):
            text_files.read_text(path)

    return Kind(path, b"text", read)


def history(home, main):
    return Kind(
        home / "state/chat-history",
        b"\n+a\n",
        lambda: list(chat_editor.input_history().load_history_strings()),
    )


KINDS = {
    "costs": costs,
    "experience": experience,
    "versions of a head": versions,
    "times of kernels": times_of_kernels,
    "self-tests of kernels": self_tests,
    "shared tokens": shared_tokens,
    "ref of the Hub": ref_of_the_hub,
    "manifest of ollama": manifest_of_ollama,
    "settings of LM Studio": settings_of_lm_studio,
    "pointer of LM Studio": pointer_of_lm_studio,
    "record of a training": record_of_a_training,
    "journal": journal,
    "index": texts("index"),
    "journal of texts": texts("journal"),
    "names of models": texts("models"),
    "saved chat": saved_conversation,
    "config": config,
    "models.toml": named_models,
    "prompts.toml": prompts_in(".toml", b'[[prompt]]\ncategory = "a"\nname = "b"\ntext = "c"\n'),
    "prompts.jsonl": prompts_in(".jsonl", b'{"category": "a", "name": "b", "text": "c"}'),
    "conversations.jsonl": prompts_in(".jsonl", b'{"question_id": 1, "category": "a", "turns": ["b", "c"]}'),
    "batch": batch,
    "answers of a batch": answers_of_a_batch,
    "head": head,
    "config.json of a head": published_head("config.json"),
    "safetensors": published_head("model.safetensors"),
    "pytorch_model.bin": published_head("pytorch_model.bin"),
    "text": text,
    "history": history,
}


TOML = ("config", "models.toml", "prompts.toml")
LINES = ("prompts.jsonl", "conversations.jsonl", "batch", "saved chat")
"""JSON of users."""
JSON = (
    "config.json of a head",
    *("costs", "experience", "versions of a head", "times of kernels", "self-tests of kernels", *LINES),
    *("manifest of ollama", "settings of LM Studio", "record of a training", "journal", "answers of a batch"),
)
NO_PIPES = [name for name in KINDS if name not in ("prompts.toml", *LINES[:-1])]
"""The others are named by users, who may mean a pipe."""


@pytest.fixture(params=KINDS)
def kind(request, empty_home, monkeypatch):
    monkeypatch.setattr("platformdirs.user_state_dir", lambda name: str(empty_home / "state"))
    (empty_home / "state").mkdir()
    main = empty_home / "main.gguf"
    main.write_bytes(b"GGUF" * 1000)
    found = KINDS[request.param](empty_home, main)
    found.path.parent.mkdir(parents=True, exist_ok=True)
    found.path.unlink(missing_ok=True)
    return found


@contextmanager
def limited():
    """Raise an error where something takes too long, as opening a pipe without a writer."""

    def stop(signum, frame):
        raise AssertionError(f"it takes more than {WITHIN_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, WITHIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_that_it_ends(kind):
    with limited():
        try:
            kind.read()
        except (SpecLocalError, OSError) as error:
            if not kind.raises:
                raise
            message = error.strerror if isinstance(error, OSError) else str(error)
            assert message.isprintable()
            assert len(message) < 1000


def check_content(kind, content):
    kind.path.write_bytes(content)
    try:
        check_that_it_ends(kind)
    except Exception as error:
        error.add_note(f"content: {content[:300]!r}")
        raise


def test_an_intact_file_is_read(kind):
    kind.path.write_bytes(kind.content)
    kind.raises = False
    check_that_it_ends(kind)


@pytest.mark.parametrize("kind", NO_PIPES, indirect=True)
@pytest.mark.parametrize("make", ["pipe", "device", "folder", "endless"])
def test_only_regular_files_of_a_sane_size_are_read(kind, make):
    if make == "pipe":
        os.mkfifo(kind.path)
    elif make == "device":
        kind.path.symlink_to("/dev/zero")
    elif make == "folder":
        kind.path.mkdir()
    else:
        kind.path.touch()
        os.truncate(kind.path, 1 << 34)
    check_that_it_ends(kind)


WRONG = [
    *("null", "true", "-1", "0", "0.5", "NaN", "Infinity", "-Infinity", "1e300", "1e26", "-1e300", "1e999"),
    *("9" * 25, "9" * 5000, "[]", "{}", "[[]]", '""', '"x"', '"\\ud800"', '"\\u0000"', '"a\\nb"'),
    *('"' + "x" * 5000 + '"', "[" * 20_000, "[" * 9_000 + "]" * 9_000, '{"a":' * 9_000),
]
PLACE = "@here@"


def places(value, path=()) -> Iterator[tuple[object, ...]]:
    """The paths of the parts of a JSON value; of a list, of the first two."""
    yield path
    items = enumerate(value[:2]) if isinstance(value, list) else ()
    parts = value.items() if isinstance(value, dict) else items
    for key, part in parts:
        yield from places(part, (*path, key))


def with_place(value, path):
    """A copy of a value, with `PLACE` at a path."""
    if not path:
        return PLACE
    value = copy.deepcopy(value)
    part = value
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = PLACE
    return value


@pytest.mark.parametrize("kind", JSON, indirect=True)
def test_any_part_of_a_json_file_can_be_wrong(kind):
    intact = json.loads(kind.content)
    for path in places(intact):
        text = json.dumps(with_place(intact, path))
        for wrong in WRONG:
            check_content(kind, text.replace(f'"{PLACE}"', wrong).encode())
        if path and isinstance(path[-1], str):
            check_content(kind, text.replace(f'"{path[-1]}": "{PLACE}"', '"": 1').encode())
            check_content(kind, text.replace(f'"{path[-1]}": "{PLACE}"', '"a\\nb": 1').encode())


def test_any_bytes_can_be_wrong(kind):
    rng = random.Random(0)
    for _ in range(60):
        content = bytearray(kind.content)
        for _ in range(rng.randint(0, 3)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        check_content(kind, bytes(content[: rng.randint(0, 2 * len(content))]))
    for content in (b"", b"\0" * 100, b"\xff" * 100, b"\xef\xbb\xbf", rng.randbytes(5000)):
        check_content(kind, content)


WRONG_TOML = {
    "nested": (b"[" * 100_000, "its values are nested too deeply"),
    "nested tables": (b"{a=" * 100_000, "its values are nested too deeply"),
    "a long number": (b"9" * 5000, "a number in it is too long"),
    "half a character": (b'"\\ud800"', "line {line}, "),
}


@pytest.mark.parametrize("kind", TOML, indirect=True)
@pytest.mark.parametrize(("wrong", "why"), WRONG_TOML.values(), ids=WRONG_TOML.keys())
def test_what_is_wrong_in_a_toml_file_of_a_user(kind, wrong, why):
    kind.path.write_bytes(b"# one\n" + kind.content + b"\nlast = " + wrong + b"\nend = 1\n")
    line = kind.content.count(b"\n") + 3
    with limited(), pytest.raises(SpecLocalError, match=f", {why.format(line=line)}") as error:
        kind.read()
    assert str(error.value).isprintable()


WRONG_JSON = {
    "nested": b"[" * 100_000,
    "nested and closed": b"[" * 100_000 + b"]" * 100_000,
    "a long number": b"9" * 5000,
    "half a character": b'"\\ud800"',
    "no number": b"NaN",
}


@pytest.mark.parametrize("wrong", WRONG_JSON.values(), ids=WRONG_JSON.keys())
@pytest.mark.parametrize("name", LINES)
def test_a_json_file_of_a_user_names_the_line(tmp_path, name, wrong):
    main = tmp_path / "main.gguf"
    main.write_bytes(b"GGUF")
    kind = KINDS[name](tmp_path, main)
    lines = [b"", b""] if name != "saved chat" else [b"{", b'"format":']
    kind.path.write_bytes(b"\n".join([*lines, wrong]))
    with pytest.raises(InvalidRequest, match="line 3") as error:
        kind.read()
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 300 + len(str(tmp_path))
