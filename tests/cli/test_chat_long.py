"""Long conversations, long messages, resized windows, and completion."""

import subprocess

import psutil
import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def test_many_turns_take_no_more_memory(specdec, main, draft):
    """With a draft model, trees, and a context that is often full."""
    arguments = ["--main", main, "--draft", draft, "--shape", "auto", "--threads", 1, "--ctx", 512, "-n", 16]
    arguments += ["--when-full", "drop-oldest", "--no-stats", "--temp", 0.8, "--seed", 1]
    messages = ["tell me about number {}", "/regen", "/undo", "and {} more of that"]
    with subprocess.Popen(
        [*specdec.command, "chat", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=specdec.environment,
    ) as process:
        memory = []
        for turn in range(160):
            process.stdin.write(f"{messages[turn % 4].format(turn)}\n/set stop XYZ{turn}\n".encode())
            process.stdin.flush()
            specdec.wait_for(process, b"stop = ")  # the turn before it is over
            memory.append(psutil.Process(process.pid).memory_info().rss)
        process.stdin.close()
        assert process.stdout.read().count(b"\n") >= 120  # all but /undo are answers
        process.stderr.read()
        assert process.wait(timeout=20) == 0
    warm, end = max(memory[40:60]), max(memory[-20:])
    assert end <= 1.02 * warm, [m >> 20 for m in memory[::20]]


def test_a_paste_of_50_kb(terminal, main):
    person = terminal("--main", main, "--temp", "0", "--threads", "1", "--ctx", "100000", "-n", "4")
    person.prompt()
    pasted = "\n".join(f"{i:05} " + "words and more words " * 4 for i in range(570))
    assert len(pasted) > 50_000
    person.type(f"\x1b[200~{pasted}\x1b[201~")
    person.enter("")
    assert "4 tokens in" in person.prompt()
    person.type("\x04")
    assert person.leaves_with() == 0


def test_resizing_the_window(terminal, main):
    """At the prompt, and during an answer."""
    person = terminal(
        "--main", main, "--temp", "0", "--threads", "1", "--ctx", "4096", "-n", "300", "--markdown"
    )
    person.prompt()
    person.child.setwinsize(20, 40)
    person.prompt()
    person.enter("hello")
    for size in ((10, 20), (50, 200), (24, 80)):
        person.child.setwinsize(*size)
    assert "300 tokens in" in " ".join(person.prompt().split())
    assert "4 tokens in" in person.say("/set max-tokens 4") + person.say("again")


def test_tab_completes_commands_and_files(terminal, main, unmeasured):
    (unmeasured.folder / "notes-of-today.txt").write_text("hello")
    person = terminal("--main", main, "--threads", "1", "--ctx", "512", "-n", "4", specdec=unmeasured)
    person.prompt()
    for typed, completed in (("/rea\t", "d"), (" notes-of\t", "-today.txt"), ("\r", "will be sent before")):
        person.type(typed)
        seen = person.until(completed)
    assert "notes-of-today.txt (5 bytes)" in seen
    person.prompt()
    for typed, completed in (("/set whe\t", "n-full"), (" drop-oldest\r", "when-full = drop-oldest")):
        person.type(typed)
        person.until(completed)


def test_show_drafts_marks_draft_tokens_on_a_terminal_only(terminal, specdec, main, draft):
    arguments = ["--main", main, "--draft", draft, "--policy", "fixed", "--temp", "0", "--threads", "1"]
    arguments += ["--ctx", "512", "-n", "40", "--show-drafts"]
    person = terminal(*arguments, "--no-stats")
    person.prompt()
    person.type("hello\r")
    person.until("green: accepted draft tokens", "\x1b[32m", "\x1b[0m")
    person.until("rejected: “", "more")
    person.prompt()
    piped = specdec("chat", *arguments, stdin=b"hello\n")
    assert b"\x1b" not in piped.stdout
