"""Questions on the page: files, waiting for the models, and the versions of a turn."""

import json

import pytest

from tests.page.conftest import ask, text_of
from tests.waiting import wait_until

DROP = """([name, bytes]) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], name));
  const event = (type) => new DragEvent(type, {dataTransfer: data, bubbles: true, cancelable: true});
  const passed = document.body.dispatchEvent(event("dragover"));
  document.getElementById("turns").dispatchEvent(event("drop"));
  return passed;
}"""


def choose(page, *files):
    """Attach files of the given names and bytes with the button."""
    with page.expect_file_chooser() as chooser:
        page.click("#attach")
    payloads = [{"name": name, "mimeType": "", "buffer": data} for name, data in files]
    chooser.value.set_files(payloads)


def sent(served):
    return [message["content"] for message in served.engine.requests[-1].messages]


def test_files_are_sent_with_the_question(open_page, served):
    page = open_page()
    page.wait_for_selector("#model:has-text('scripted')")
    choose(page, ("notes.txt", "Grüße\r\n".encode()), ("other.txt", b"no"))
    page.wait_for_selector("#files li:has-text('other.txt')")
    assert (
        page.evaluate(DROP, ["a b.md", list(b"\xef\xbb\xbf````\ncode\n````")]) is False
    )  # it takes the drop
    page.wait_for_selector("#files li:has-text('a b.md')")
    assert text_of(page, "#files .note") == ["8 bytes", "2 bytes", "14 bytes"]
    page.click("[aria-label='Remove other.txt']")
    assert page.evaluate("document.activeElement.ariaLabel") == "Remove a b.md"
    ask(page, "What is it?")
    expected = "notes.txt:\n```txt\nGrüße\n```\n\na b.md:\n`````md\n````\ncode\n````\n`````\n\nWhat is it?"
    assert sent(served) == [expected]
    assert page.locator("#files").is_hidden()
    page.reload()  # they are kept, and sent again with what follows
    page.click(".question summary >> nth=1")
    assert page.locator(".question pre").nth(1).is_visible()
    ask(page, "and?")
    assert sent(served)[0] == expected


def test_files_are_a_question(open_page, served):
    page = open_page()
    choose(page, ("notes.txt", b"text"))
    page.wait_for_selector("#files li")
    page.click("#send")
    page.wait_for_selector("nav .open:has-text('notes.txt')")
    wait_until(lambda: served.engine.requests)
    assert sent(served) == ["notes.txt:\n```txt\ntext\n```"]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("big.txt", b"x" * 16385, "big.txt is too large: a question has room for files of 16 kB."),
        ("zero.txt", b"a\0b", "zero.txt is not a text file"),
        ("x.png", b"\x89PNG\r\n\x1a\n", "x.png is not a text file"),
    ],
)
def test_files_that_are_refused(open_page, name, content, line):
    page = open_page()
    page.wait_for_selector("#model:has-text('4096')")  # tokens of context: 16384 bytes
    page.evaluate(DROP, [name, list(content)])
    page.wait_for_selector(f"#notice:has-text('{line}')")
    assert page.locator("#files li").count() == 0


def test_files_together_have_a_limit(open_page):
    page = open_page()
    page.wait_for_selector("#model:has-text('4096')")
    choose(page, ("one.txt", b"x" * 16000), ("two.txt", b"x" * 500), ("three.txt", b"x"))
    page.wait_for_selector("#notice:has-text('two.txt is too large')")
    page.wait_for_selector("#files li:has-text('three.txt')")
    assert page.locator("#files li").count() == 2


def test_editing_keeps_the_files_of_both_questions(open_page, served):
    page = open_page()
    choose(page, ("old.txt", b"old"))
    page.wait_for_selector("#files li")
    ask(page, "one")
    choose(page, ("new.txt", b"new"))
    page.wait_for_selector("#files li")
    page.click("footer button:has-text('Edit')")
    assert text_of(page, "#files li span:first-child") == ["old.txt"]
    page.click("[aria-label='Remove old.txt']")
    page.fill("#question", "two")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer:has-text('You said two')")
    assert sent(served) == ["two"]
    assert text_of(page, "#files li span:first-child") == ["new.txt"]


def test_a_question_waits_for_the_models(open_page, served):
    served.engine.is_ready = False
    page = open_page(allowed=("503",))
    page.fill("#question", "one")
    page.keyboard.press("Enter")
    page.wait_for_selector("article:has-text('Waiting for the models')")
    page.wait_for_selector("#notice:has-text('being loaded')")
    assert page.locator("#status").text_content() == "Waiting for the models to load"
    assert not served.engine.requests
    served.engine.is_ready = True
    page.wait_for_selector(".answer:has-text('You said one')")
    page.wait_for_selector("#send")
    assert "Waiting" not in page.locator("article").text_content()
    assert page.locator("#notice").is_hidden()
    assert len(served.engine.requests) == 1


def test_a_question_that_waits_can_be_stopped(open_page, served):
    served.engine.is_ready = False
    page = open_page(allowed=("503",))
    page.fill("#question", "one")
    page.keyboard.press("Enter")
    page.wait_for_selector("article:has-text('Waiting')")
    page.click("#stop")
    page.wait_for_selector("article footer:has-text('Stopped.')")
    served.engine.is_ready = True
    page.wait_for_selector("#model:has-text('scripted')")
    assert not served.engine.requests
    page.click("footer button:has-text('Regenerate')")
    page.wait_for_selector(".answer:has-text('You said one')")


def test_a_question_waits_for_a_busy_server(open_page, served):
    served.engine.busy_s = 1
    page = open_page(allowed=("429",))
    page.fill("#question", "one")
    page.keyboard.press("Enter")
    page.wait_for_selector("article:has-text('The server is busy: asking again in 1 s …')")
    assert page.locator("#status").text_content() == "The server is busy: asking again in 1 s"
    served.engine.busy_s = 30
    page.wait_for_selector("article:has-text('asking again in 30 s …')")
    page.click("#stop")
    page.wait_for_selector("article footer:has-text('Stopped.')")
    served.engine.busy_s = 1
    page.click("footer button:has-text('Regenerate')")
    page.wait_for_selector("article:has-text('asking again in 1 s …')")
    served.engine.busy_s = 0
    page.wait_for_selector(".answer:has-text('You said one')")
    page.wait_for_selector("#send")
    assert "busy" not in page.locator("article").text_content()
    assert len(served.engine.requests) == 1


@pytest.mark.parametrize(
    ("retry_after", "shown_s"), [("Wed, 21 Oct 2026 07:28:00 GMT", 2), ("99999999", 60), ("-1", 2), (None, 2)]
)
def test_what_a_proxy_says_of_the_time_to_wait_is_bounded(open_page, served, retry_after, shown_s):
    page = open_page(allowed=("429",))
    headers = {"retry-after": retry_after} if retry_after else {}
    page.route("**/chat/completions", lambda route: route.fulfill(status=429, headers=headers, body="<html>"))
    page.fill("#question", "one")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"article:has-text('asking again in {shown_s} s')")


def test_a_question_survives_a_page_that_closes(open_page, served):
    page = open_page()
    page.fill("#question", "long")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer:has-text('first')")
    page.reload()
    assert text_of(page, ".question") == ["long"]
    assert page.locator(".answer").text_content().strip() == "first"
    assert "before the answer ended" in page.locator("article .error").text_content()
    assert page.locator("footer button:has-text('Retry')").is_visible()


def test_versions_of_a_question(open_page, served):
    page = open_page()
    ask(page, "one")
    ask(page, "two")
    page.click("article:first-child footer button:has-text('Edit')")
    page.fill("#question", "other")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer:has-text('You said other')")
    page.wait_for_selector("#send")
    assert text_of(page, ".question") == ["other"]
    assert text_of(page, ".versions") == ["‹2 / 2›"]
    page.focus("[aria-label='Previous version']")
    page.keyboard.press("Enter")
    assert text_of(page, ".question") == ["one", "two"]
    assert text_of(page, ".versions") == ["‹1 / 2›"]
    assert page.evaluate("document.activeElement.ariaLabel") == "Previous version"
    ask(page, "three")
    assert sent(served) == ["one", "You said one", "two", "You said two", "three"]
    page.reload()
    assert text_of(page, ".question") == ["one", "two", "three"]
    page.click("[aria-label='Next version']")
    assert text_of(page, ".answer") == ["You said other"]
    page.click("[aria-label='Next version']")  # after the last comes the first
    assert text_of(page, ".question") == ["one", "two", "three"]


def test_an_answer_that_is_generated_again_keeps_the_other(open_page, served):
    page = open_page()
    ask(page, "one")
    page.click("footer button:has-text('Regenerate')")
    page.wait_for_selector(".versions:has-text('2 / 2')")
    page.click("footer button:has-text('Regenerate')")
    page.wait_for_selector(".versions:has-text('3 / 3')")
    assert text_of(page, ".answer") == ["You said one"]
    assert sent(served) == ["one"]


def test_conversations_of_an_earlier_page(open_page, served):
    """They had neither versions nor files."""
    page = open_page()
    turns = [
        {"question": question, "reasoning": [], "statistics": None, "ended": "stop", "error": ""}
        | {"answer": [{"text": f"{question}!", "kind": "accepted", "rejected": []}]}
        for question in ("first", "second")
    ]
    stored = {"id": "x", "name": "old", "changed": 1, "turns": turns}
    page.evaluate(
        "text => localStorage.setItem('specdec.conversation.x', text)",
        json.dumps(stored),
    )
    page.reload()
    page.click("nav .open:has-text('old')")
    assert text_of(page, ".question") == ["first", "second"]
    ask(page, "third")
    assert sent(served) == ["first", "first!", "second", "second!", "third"]


@pytest.mark.parametrize("damage", [{"parent": 0}, {"parent": 5}, {"files": [1]}, {"parent": "x"}])
def test_damaged_versions_are_left_out(open_page, damage):
    page = open_page()
    turn = {"question": "q", "reasoning": [], "answer": [], "ended": "stop"} | damage
    script = "text => localStorage.setItem('specdec.conversation.x', text)"
    page.evaluate(script, json.dumps({"id": "x", "name": "broken", "turns": [turn], "last": "length"}))
    page.reload()
    page.wait_for_selector("#model:has-text('scripted')")
    assert text_of(page, "nav .open") == ["New conversation"]
