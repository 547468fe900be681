"""Models that think before they answer, on a terminal and in pipes."""

import json
import re

import pytest

from tests.chat_templates import THINKING_TEMPLATES
from tests.scripted_model import ANSWER, THOUGHT, closing_tokens, write_thinking_model

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


def test_a_pipe_gets_the_answer_only(inside, model):
    done = inside("generate", "--main", model, *SHORT, "x")
    assert done.stdout.decode() == f"{ANSWER}\n"
    assert done.stderr == b""
    done = inside("generate", "--main", model, *SHORT, "--answers", "2", "x")
    assert done.stdout.decode() == f"{ANSWER}\n---\n{ANSWER}\n"


def test_raw_text_is_not_divided(inside, opened):
    done = inside("generate", "--main", opened, *SHORT, "--raw", "Hm, ")
    assert done.stdout.decode() == f"{THOUGHT.removeprefix('Hm, ')}\n</think>\n\n{ANSWER}"


def test_json_has_the_reasoning_in_a_field_of_its_own(inside, model):
    (whole,) = inside.objects(inside("generate", "--main", model, *SHORT, "--json", "x"))
    assert (whole["reasoning_content"], whole["content"]) == (THOUGHT, ANSWER)
    for more in ([], ["--answers", "1"]):
        steps = inside.objects(inside("generate", "--main", model, *SHORT, *more, "--jsonl", "x"))
        assert "".join(step["content"] for step in steps) == ANSWER
        assert "".join(step.get("reasoning_content", "") for step in steps) == THOUGHT
        assert [token for step in steps for token in step["tokens"]] == whole["tokens"]
    (whole,) = inside.objects(inside("generate", "--main", model, *SHORT, "--json", "--answers", "1", "x"))
    assert (whole["reasoning_content"], whole["content"]) == (THOUGHT, ANSWER)


def test_a_batch_has_the_same_fields(inside, opened, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x\\n"}\n{"prompt": "y\\n"}\n')
    done = inside("generate", "--main", opened, *SHORT, "--input", tmp_path / "prompts.jsonl")
    answers = inside.objects(done)
    assert [(a["reasoning_content"], a["content"]) for a in answers] == [(THOUGHT, ANSWER)] * 2
    raw = inside("generate", "--main", opened, *SHORT, "--input", tmp_path / "prompts.jsonl", "--raw")
    assert all("reasoning_content" not in answer for answer in inside.objects(raw))


def test_an_answer_that_is_cut_short_within_the_reasoning(inside, model):
    done = inside("generate", "--main", model, *SHORT, "-n", "6", "x")
    assert (done.returncode, done.stdout) == (0, b"")
    assert inside.notes(done) == b"the output ended during the reasoning: there is no answer\n"
    assert b"cut at 6 tokens" in done.stderr


def test_a_schema_holds_after_the_reasoning(inside, model, tmp_path):
    schema = ("--json-schema", '{"enum": ["yes"]}')
    (whole,) = inside.objects(inside("generate", "--main", model, *SHORT, *schema, "--json", "x"))
    assert (whole["reasoning_content"], whole["content"]) == (THOUGHT, '"yes"')
    done = inside("generate", "--main", model, *SHORT, *schema, "--answers", "2", "x")
    assert (done.returncode, done.stdout) == (0, b'"yes"\n---\n"yes"\n')
    (tmp_path / "prompts.txt").write_text("x\n")
    (answer,) = inside.objects(
        inside("generate", "--main", model, *SHORT, *schema, "--input", tmp_path / "prompts.txt")
    )
    assert (answer["reasoning_content"], answer["content"]) == (THOUGHT, '"yes"')
    done = inside("generate", "--main", model, *SHORT, *schema, "--raw", "x")
    assert done.stdout == b'"yes"'
    done = inside("generate", "--main", model, *SHORT, *schema, "-n", "4", "x")
    assert (done.returncode, done.stdout) == (3, b"")


def test_a_schema_leaves_room_for_the_answer(inside, opened):
    """The usual budget, of which a note tells; `--thinking-budget` is another one."""
    schema = ("--json-schema", '{"enum": ["yes"]}')
    command = ("generate", "--main", opened, *SHORT, *schema, "x")
    never = [word for token in closing_tokens("opened") for word in ("--logit-bias", f"{token}=-1000")]
    done = inside(*command, *never)
    assert (done.returncode, done.stdout.rstrip()) == (0, b'"yes"')
    assert done.stderr.startswith(
        b"the reasoning was closed after 20 tokens to leave room for the answer: give "
    )
    for n, thought in ((1, "Hm, "), (100, THOUGHT)):
        done = inside(*command, "--thinking-budget", n, "--json")
        assert (inside.objects(done)[0]["reasoning_content"], done.stderr) == (thought, b"")


@pytest.fixture
def shown(inside, opened):
    """A function that answers on a terminal, and returns the screen with its styles."""

    def shown(*more, command=("generate", "--main"), **options):
        code, screen = inside.on_terminal(*command, opened, *SHORT, *more, "x", **options)
        assert code == 0
        return screen.replace("\r\n", "\n")

    return shown


def test_a_terminal_shows_the_reasoning_dim(shown, inside):
    screen = shown()
    dim = "".join(re.findall(re.escape(DIM) + "(.*?)" + re.escape(PLAIN), screen, re.DOTALL))
    assert re.fullmatch(re.escape(THOUGHT.replace("\n", "")) + SPENT, dim.replace("\n", ""))
    assert re.search("sky\n" + SPENT + "\n\nIt is\n\nblue.\n$", inside.plain(screen))
    without_colour = re.escape(THOUGHT + "\n") + SPENT + re.escape("\n\n" + ANSWER + "\n")
    assert re.fullmatch(without_colour, shown(env={"NO_COLOR": "1"}))


def test_a_terminal_can_hide_the_reasoning(shown, inside):
    for command in (("generate", "--main"), ("run",)):
        screen = inside.plain(shown("--hide-thinking", command=command))
        assert re.fullmatch(SPENT + "\n\n" + re.escape(ANSWER) + "\n", screen)
    assert inside.plain(shown("--hide-thinking", "--answers", "1")) == ANSWER + "\n"


def test_a_terminal_shows_how_much_hidden_reasoning_there_is(shown):
    assert "thinking: 2 tokens" in shown("--hide-thinking", waiting_s=0.0)


def test_lines_break_between_words(shown, inside):
    assert inside.plain(shown(width=6)).startswith("Hm,\nwhat?\n")
    assert inside.plain(shown("--no-wrap", width=6)).startswith("Hm, what?\n")


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
