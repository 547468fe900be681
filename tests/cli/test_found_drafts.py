"""Without --draft: what is found on this machine drafts, and what cannot be used never makes a start fail."""

import json
import subprocess
import sys

import pytest

from spec_local.llama.tiny import write_tiny_model
from tests.tiny_heads import write_tiny_eagle, write_tiny_main

SHORT = ("-n", 24, "-t", 1, "-c", 256, "--temp", 0)
DRAFTS = ("--policy", "fixed", "--proposer", "draft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files that are written once: a main model, and small ones."""
    folder = tmp_path_factory.mktemp("files")
    write_tiny_model(folder / "main.gguf", n_layers=4, tensor_type="F32", n_embd=128)
    write_tiny_model(folder / "small.gguf", n_layers=1, tensor_type="Q8_0")
    write_tiny_model(
        folder / "other.gguf", n_layers=1, tensor_type="Q8_0", extra_tokens=[f"other{i}" for i in range(200)]
    )
    write_tiny_main(folder / "eagle-main.gguf")
    write_tiny_eagle(folder / "eagle.gguf")
    write_tiny_eagle(folder / "deep.gguf", layers=(1, 2, 9))
    return folder


@pytest.fixture
def put(folder, fresh_inside):
    """Put a file, or its first bytes, into the folder of models; return its path."""

    def put(name, n_bytes=None):
        path = fresh_inside.folder / "models" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((folder / name).read_bytes()[:n_bytes])
        return path

    return put


@pytest.fixture
def answer(fresh_inside):
    """Return an answer, and the notes on standard error without those of a first use."""

    def answer(*arguments):
        done = fresh_inside("generate", *arguments, *SHORT, "--json", "hello")
        assert done.returncode == 0, done.stderr
        lines = done.stderr.decode().splitlines()
        return json.loads(done.stdout), [line for line in lines if "(first use" not in line]

    return answer


def test_a_small_model_is_found_and_draft_none_turns_it_off(answer, put):
    main = put("main.gguf")
    plain, notes = answer("--main", main)
    assert notes == []
    put("small.gguf")
    found, notes = answer("--main", main, *DRAFTS)
    (line,) = notes
    assert line.startswith("drafting with small.gguf (same vocabulary, 1/")
    assert line.endswith(" of the size; --draft none turns it off)")
    assert found["timings"]["draft_n"] > 0
    without, notes = answer("--main", main, "--draft", "none")
    assert notes == []
    assert "draft" not in without["model"] or not without["model"]["draft"]
    assert found["content"] == without["content"] == plain["content"]
    assert answer("--main", main, "--proposer", "suffix")[1] == []
    assert answer("--main", main, "--no-spec")[1] == []


def test_run_says_what_drafts(fresh_inside, put):
    main, small = put("main.gguf"), put("small.gguf")
    done = fresh_inside("run", main, "hello", *SHORT)
    assert done.returncode == 0, done
    assert b"drafting with small.gguf" in done.stderr
    small.unlink()
    assert b"drafting" not in fresh_inside("run", main, "hello", *SHORT).stderr


def test_a_chat_says_what_drafts(fresh, put, terminal):
    main, _ = put("main.gguf"), put("small.gguf")
    person = terminal(main, *SHORT, command="run", specdec=fresh)
    assert "drafting with small.gguf (same vocabulary" in person.prompt()


ON = "speculation is off: /draft on switches it on"
LOOKS = "no draft model is used: /model MAIN auto looks for one"


@pytest.mark.parametrize(
    ("options", "lines", "drafts", "last"),
    [
        ([], ["/model {}"], True, None),
        (["--draft", "none"], ["/model {}"], False, LOOKS),
        (["--draft", "none"], ["/model {} auto"], True, None),
        (["--no-spec"], ["/model {}"], False, ON),
        (["--no-spec"], ["/draft on", "/model {}"], True, None),
        (["--no-spec"], ["/model {} {small}", "/draft on"], True, None),
        (["--policy", "off"], ["/model {}"], False, ON),
        ([], ["/draft off", "/model {}"], False, ON),
        ([], ["/draft off", "/model {}", "/draft on"], True, None),
    ],
)
def test_what_is_switched_off_in_a_chat_stays_off_with_another_model(
    fresh_inside, put, options, lines, drafts, last
):
    main, small = put("main.gguf"), put("small.gguf")
    typed = "\n".join(lines).format(main, small=small)
    done = fresh_inside("chat", main, *SHORT, *options, stdin=typed.encode())
    assert done.returncode == 0, done.stderr
    notes = done.stderr.decode().splitlines()
    assert (last or "draft small.gguf") in notes[-1]
    last_use = [line for line in notes if "policy" in line or "no speculation" in line][-1]
    assert ("draft small.gguf" in last_use) == drafts


def test_the_library_looks_for_a_draft_only_if_it_is_asked_to(fresh, put):
    main, _ = put("main.gguf"), put("small.gguf")
    script = (
        "import sys\n"
        "from spec_local import Session\n"
        "for draft in (None, 'auto', 'none'):\n"
        "    with Session.open(sys.argv[1], draft, n_ctx=256) as session:\n"
        "        print(session.draft and session.draft.model.path.name)\n"
    )
    command = [sys.executable, "-c", script, main]
    done = subprocess.run(command, env=fresh.environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "small.gguf", "None"]


def test_a_head_beside_the_model_is_found(answer, put):
    main, _ = put("eagle-main.gguf"), put("eagle.gguf")
    found, notes = answer("--main", main, *DRAFTS)
    assert notes == ["drafting with eagle.gguf (a head beside the main model; --draft none turns it off)"]
    assert found["timings"]["draft_n_accepted"] > 0
    plain, _ = answer("--main", main, "--draft", "none")
    assert found["content"] == plain["content"]


@pytest.mark.parametrize(
    ("name", "n_bytes"), [("small.gguf", 60_000), ("eagle.gguf", 40_000), ("deep.gguf", None)]
)
def test_a_file_that_cannot_be_used_is_skipped_without_a_word(fresh_inside, put, name, n_bytes):
    """Nobody has asked for it; with -vv, the reason is shown once, and the file is not tried again."""
    main = put("eagle-main.gguf" if name != "small.gguf" else "main.gguf")
    command = ("generate", "--main", main, *SHORT, "hello")
    assert fresh_inside(*command).returncode == 0  # checks the main model
    put(name, n_bytes)
    for option, expected in (("-vv", 1), ("-vv", 0), ("-t1", 0)):
        done = fresh_inside(*command, option)
        assert done.returncode == 0
        assert done.stderr.count(f"not drafting with {name}: ".encode()) == expected
    put(name, n_bytes and n_bytes + 1_000)  # it has changed
    assert name.encode() not in fresh_inside(*command).stderr


def test_the_next_one_is_tried(answer, put):
    main, _ = put("eagle-main.gguf"), put("deep.gguf")
    put("eagle.gguf")
    for _ in range(2):
        assert [line.partition(" (")[0] for line in answer("--main", main)[1]] == ["drafting with eagle.gguf"]


def test_another_vocabulary_is_not_used(answer, put):
    main, _ = put("main.gguf"), put("other.gguf")
    assert answer("--main", main)[1] == []


def test_a_model_that_begins_texts_with_another_token_is_skipped(answer, put):
    main, small = put("main.gguf"), put("small.gguf")
    before, key, after = small.read_bytes().partition(b"tokenizer.ggml.bos_token_id")
    small.write_bytes(before + key + after[:4] + b"\3\0\0\0" + after[8:])
    assert answer("--main", main)[1] == []


def test_what_does_not_fit_into_the_memory_is_not_used(answer, put, free_memory):
    main, _ = put("main.gguf"), put("small.gguf")
    free_memory(150_000_000)
    assert answer("--main", main)[1] == []


def test_a_draft_that_can_be_downloaded_is_offered(answer, put, fresh_inside):
    main = put("main.gguf")
    models = fresh_inside.folder / "config" / "specdec" / "models.toml"
    models.parent.mkdir(parents=True)
    entry = 'description = "d"\nlicence = "l"\nrepo = "user/repo"\n'
    models.write_text(
        f'[models.big]\n{entry}file = "main.gguf"\n[models.little]\n{entry}file = "little.gguf"\n'
        '[pairs.duo]\nmain = "big"\ndraft = "little"\nnote = "n"\n'
    )
    (line,) = answer("--main", main)[1]
    assert (
        line
        == "no draft model for main.gguf is on this machine: run specdec models pull little to draft with one"
    )


def test_a_benchmark_measures_with_and_without_it(fresh_inside, put):
    main, _ = put("main.gguf"), put("small.gguf")
    prompts = fresh_inside.folder / "prompts.jsonl"
    prompts.write_text('{"category": "prose", "name": "greeting", "text": "hello"}\n')
    arguments = ["bench", "--main", main, "--prompts", prompts, "--runs", 1, "--format", "json", *SHORT[:-2]]
    found = fresh_inside(*arguments, *DRAFTS)
    assert b"drafting with small.gguf" in found.stderr
    assert json.loads(found.stdout)["variants"][1]["draft_n"] > 0
    lookups = fresh_inside(*arguments, "--draft", "none")
    assert lookups.returncode == 0
    assert b"drafting" not in lookups.stderr
