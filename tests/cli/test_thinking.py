"""Models that think before they answer, on a terminal and in pipes."""

import json
import re

import pytest

from tests.chat_templates import THINKING_TEMPLATES
from tests.scripted_model import ANSWER, THOUGHT, write_thinking_model

SHORT = ["--temp", "0", "--threads", "1", "--ctx", "512", "-n", "40"]
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
SPENT = r"\(thought for \d+\.\d s, \d+ tokens\)"


@pytest.fixture(scope="module")
def models(home, inside):
    made = {}
    for kind in THINKING_TEMPLATES:
        made[kind] = write_thinking_model(home / f"{kind.replace(' ', '-')}.gguf", kind)
        assert inside("generate", "--main", made[kind], *SHORT, "x").returncode == 0
    return made


@pytest.fixture(params=["both markers", "opened", "channels"])
def model(request, models):
    return models[request.param]


@pytest.fixture
def opened(models):
    return models["opened"]


def lines_of(done):
    assert done.returncode == 0, done
    return [json.loads(line) for line in done.stdout.splitlines()]


def on_screen(text):
    return text.replace("\n", "\r\n")


def test_a_pipe_gets_the_answer_only(inside, model):
    done = inside("generate", "--main", model, *SHORT, "x")
    assert done.stdout.decode() == ANSWER
    assert done.stderr == b""
    done = inside("generate", "--main", model, *SHORT, "--answers", "2", "x")
    assert done.stdout.decode() == f"{ANSWER}\n---\n{ANSWER}\n"


def test_raw_text_is_not_divided(inside, opened):
    done = inside("generate", "--main", opened, *SHORT, "--raw", "Hm, ")
    assert done.stdout.decode() == f"{THOUGHT.removeprefix('Hm, ')}\n</think>\n\n{ANSWER}"


def test_json_has_the_reasoning_in_a_field_of_its_own(inside, model):
    (whole,) = lines_of(inside("generate", "--main", model, *SHORT, "--json", "x"))
    assert (whole["reasoning_content"], whole["content"]) == (THOUGHT, ANSWER)
    for more in ([], ["--answers", "1"]):
        steps = lines_of(inside("generate", "--main", model, *SHORT, *more, "--jsonl", "x"))
        assert "".join(step["content"] for step in steps) == ANSWER
        assert "".join(step.get("reasoning_content", "") for step in steps) == THOUGHT
        assert [token for step in steps for token in step["tokens"]] == whole["tokens"]
    (whole,) = lines_of(inside("generate", "--main", model, *SHORT, "--json", "--answers", "1", "x"))
    assert (whole["reasoning_content"], whole["content"]) == (THOUGHT, ANSWER)


def test_a_batch_has_the_same_fields(inside, opened, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x\\n"}\n{"prompt": "y\\n"}\n')
    done = inside("generate", "--main", opened, *SHORT, "--input", tmp_path / "prompts.jsonl")
    answers = lines_of(done)
    assert [(a["reasoning_content"], a["content"]) for a in answers] == [(THOUGHT, ANSWER)] * 2
    raw = inside("generate", "--main", opened, *SHORT, "--input", tmp_path / "prompts.jsonl", "--raw")
    assert all("reasoning_content" not in answer for answer in lines_of(raw))


def test_under_a_schema_all_of_the_output_is_the_answer(inside, model):
    done = inside("generate", "--main", model, *SHORT, "--json-schema", '{"const": 7}', "x")
    assert (done.returncode, done.stdout) == (0, b"7"), done


def test_an_answer_that_is_cut_short_within_the_reasoning(inside, model):
    done = inside("generate", "--main", model, *SHORT, "-n", "6", "x")
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr.decode() == "the output ended within the reasoning: there is no answer\n"


def test_a_terminal_shows_the_reasoning_dim(terminal, opened):
    shown = terminal("--main", opened, *SHORT, "x", command="generate")
    assert shown.leaves_with() == 0
    screen = shown.child.before
    dim = "".join(re.findall(re.escape(DIM) + "(.*?)" + re.escape(PLAIN), screen, re.DOTALL))
    assert re.fullmatch(re.escape(THOUGHT.replace("\n", "")) + SPENT, dim.replace("\r\n", ""))
    assert re.search("sky\r\n" + SPENT + "\r\n\r\nIt is\r\n\r\nblue.\r\n$", shown.specdec.plain(screen))


@pytest.mark.parametrize("more", [["--hide-thinking"], ["--hide-thinking", "--answers", "1"]], ids=" ".join)
def test_a_terminal_can_hide_the_reasoning(terminal, opened, more):
    shown = terminal("--main", opened, *SHORT, *more, "x", command="generate")
    assert shown.leaves_with() == 0
    note = "" if "--answers" in more else SPENT + "\r\n\r\n"
    assert re.fullmatch(note + re.escape(on_screen(ANSWER)) + "\r\n", shown.specdec.plain(shown.child.before))


def test_without_colour(terminal, opened):
    shown = terminal("--main", opened, *SHORT, "x", command="generate", env={"NO_COLOR": "1"})
    assert shown.leaves_with() == 0
    screen = shown.child.before
    assert re.fullmatch(
        re.escape(on_screen(THOUGHT + "\n")) + SPENT + re.escape(on_screen("\n\n" + ANSWER + "\n")), screen
    )


@pytest.mark.parametrize(
    ("more", "shown"),
    [([], "Hm,\r\nwhat?\r\n"), (["--no-wrap"], "Hm, what?\r\n")],
    ids=["wrapped", "--no-wrap"],
)
def test_lines_break_between_words(terminal, opened, more, shown):
    narrow = terminal("--main", opened, *SHORT, *more, "x", command="generate", width=6)
    assert narrow.leaves_with() == 0
    assert narrow.specdec.plain(narrow.child.before).startswith(shown)


def test_a_chat_on_a_terminal(terminal, opened):
    person = terminal("--main", opened, "--no-stats", *SHORT)
    person.prompt()
    for _ in range(2):
        screen = person.say("x")
        assert re.search("what[?]\r\n\r\nThe sky\r\n" + SPENT + "\r\n\r\nIt is\r\n\r\nblue.\r\n", screen)
    assert "hide-thinking = on" in person.say("/set hide-thinking on")
    screen = person.say("x")
    assert "what?" not in screen
    assert re.search(SPENT + "\r\n\r\nIt is\r\n\r\nblue.\r\n", screen)
    assert "markdown = on" in person.say("/set markdown on")
    assert re.search(SPENT + "\r\n\r\nIt is\r\n\r\nblue.\r\n", person.say("/regen"))
    person.say("/set show-drafts on")
    assert "what?" in person.say("/regen")
    assert "removed: x" in person.say("/undo")


def test_a_chat_in_a_pipe(inside, model, tmp_path):
    saved = tmp_path / "chat.json"
    typed = f"x\n/regen\n/save {saved}\ny\n".encode()
    done = inside("chat", "--main", model, "--no-stats", *SHORT, stdin=typed)
    assert (done.returncode, done.stdout.decode()) == (0, f"{ANSWER}\n" * 3)
    answered = json.loads(saved.read_text())["messages"][1]
    assert (answered["content"], answered["reasoning_content"]) == (ANSWER, THOUGHT)
    done = inside("chat", "--main", model, "--no-stats", "--load", saved, *SHORT, stdin=b"y\n")
    assert (done.returncode, done.stdout.decode()) == (0, f"{ANSWER}\n")
    assert f"assistant: {ANSWER}" in done.stderr.decode()


def test_run(inside, terminal, opened):
    assert inside("run", opened, "x", *SHORT).stdout.decode() == ANSWER
    shown = terminal(opened, "x", "--hide-thinking", *SHORT, command="run")
    assert shown.leaves_with() == 0
    assert "what?" not in shown.child.before
