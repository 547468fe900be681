"""What people report of chat pages: input methods, clicks, clipboards, scrolling, long texts, and waiting."""

import pytest

from spec_local.server.supervision.events import MarkedSpan
from tests.page.conftest import ANSWERS, ask, delta, keep_settings, text_of
from tests.waiting import wait_until

KEYS = """events => {
  for (const [type, init] of events) {
    const Kind = type.startsWith("composition") ? CompositionEvent : KeyboardEvent;
    const event = new Kind(type, { bubbles: true, cancelable: true, ...init });
    document.getElementById("question").dispatchEvent(event);
  }
}"""
ENTER = {"key": "Enter", "keyCode": 13}
START, END = ["compositionstart", {}], ["compositionend", {}]
LOG = "document.getElementById('turns')"


@pytest.mark.parametrize(
    "events",
    [
        [START, ["keydown", ENTER | {"keyCode": 229, "isComposing": True}], END],  # Chrome, Firefox
        [START, END, ["keydown", ENTER | {"keyCode": 229}]],  # Safari
        [START, END, ["keydown", ENTER]],
    ],
)
def test_enter_that_ends_a_composition_does_not_send(open_page, served, events):
    page = open_page()
    page.fill("#question", "にほん")
    page.evaluate(KEYS, events)
    page.wait_for_timeout(100)
    assert text_of(page, ".question") == []
    page.keyboard.press("Enter")
    wait_until(lambda: text_of(page, ".question") == ["にほん"])


def test_escape_of_a_composition_stops_nothing(open_page):
    page = open_page()
    page.fill("#question", "long")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer:has-text('first')")
    page.evaluate(KEYS, [["keydown", {"key": "Escape", "keyCode": 229, "isComposing": True}]])
    assert page.locator("#stop").is_visible()
    page.keyboard.press("Escape")
    page.wait_for_selector("#send")


def test_a_double_click_on_send_does_not_stop(open_page, served):
    page = open_page()
    page.fill("#question", "long")
    page.dblclick("#send")
    page.wait_for_selector(".answer:has-text('first')")
    assert page.locator("#stop").is_visible()
    assert len(served.engine.requests) == 1
    assert page.evaluate("document.activeElement.id") == "question"  # one goes on writing
    page.click("#stop")
    page.wait_for_selector("#send")
    assert page.evaluate("document.activeElement.id") == "question"


def stop_and_continue(page, question, begun):
    """Stop an answer when this part of it is shown, and let it go on."""
    page.fill("#question", question)
    page.keyboard.press("Enter")
    page.wait_for_selector(begun)
    page.click("#stop")
    page.click("footer button:has-text('Continue')")


def test_an_answer_that_was_stopped_goes_on_in_its_place(open_page, served, monkeypatch):
    monkeypatch.setitem(ANSWERS, "first ", [delta(MarkedSpan("and the rest.", "accepted"))])
    page = open_page()
    stop_and_continue(page, "long", ".answer:has-text('first')")
    page.wait_for_selector(".answer:has-text('first and the rest.')")
    page.wait_for_selector("#send")
    assert served.engine.requests[-1].messages == [
        {"role": "user", "content": "long"},
        {"role": "assistant", "content": "first "},
    ]
    assert page.locator(".versions").count() == 0
    assert "Stopped" not in page.locator("article").text_content()
    assert page.locator("footer button:has-text('Continue')").count() == 0
    page.reload()
    assert text_of(page, ".answer") == ["first and the rest."]


def test_reasoning_that_was_stopped_goes_on(open_page, served, monkeypatch):
    monkeypatch.setitem(ANSWERS, "hm", [delta(MarkedSpan("Well, "), reasoning="Well, "), "wait"])
    monkeypatch.setitem(ANSWERS, "", [delta(MarkedSpan("so."), reasoning="so."), delta(MarkedSpan("Yes."))])
    page = open_page()
    stop_and_continue(page, "hm", ".reasoning:has-text('Well')")
    page.wait_for_selector(".answer:has-text('Yes.')")
    assert served.engine.requests[-1].messages[1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "Well, "}
    ]
    assert text_of(page, ".reasoning div") == ["Well, so."]


def test_what_an_answer_waits_for_is_said_in_its_place(open_page, served):
    page = open_page()
    page.fill("#question", "slow")
    page.keyboard.press("Enter")
    page.wait_for_selector("article .waiting:text-is('Reading 1,200 of 4,100 tokens …')")
    assert page.locator("#status").text_content().startswith("Reading")
    served.engine.is_read.set()
    page.wait_for_selector(".answer:has-text('You said slow')")
    assert page.locator("article .waiting").is_hidden()


def test_loading_is_said(open_page):
    page = open_page()
    body = ": loading coder-7b\\n\\n: waiting\\n\\n"
    page.evaluate(
        f"""() => {{
          const before = window.fetch;
          window.fetch = (path, options) => path.includes("completions")
            ? Promise.resolve(new Response(new ReadableStream({{
                start(stream) {{ stream.enqueue(new TextEncoder().encode("{body}".split(": waiting")[0])); }},
              }})))
            : before(path, options);
        }}"""
    )
    page.fill("#question", "hi")
    page.keyboard.press("Enter")
    assert page.locator("article .waiting").is_hidden()  # not in the first half second
    page.wait_for_selector("article .waiting:text-is('Loading coder-7b …')")


def test_copying_without_the_clipboard_of_https(open_page, browser):
    context = browser.new_context()
    context.add_init_script("Object.defineProperty(Navigator.prototype, 'clipboard', { value: undefined })")
    page = open_page(context=context)
    ask(page, "marks")
    listen = "document.addEventListener('copy', () => (window.copied = document.activeElement.value))"
    page.evaluate(listen)
    page.click("footer button:has-text('Copy')")
    wait_until(lambda: page.locator("#status").text_content() == "Copied")
    assert page.evaluate("window.copied").startswith("The cat sat on")
    page.evaluate("document.execCommand = () => false")
    page.click(".code button")
    page.wait_for_selector("#notice:has-text('Ctrl+C')")
    assert page.evaluate("getSelection().toString()").strip() == "print(1)"


def test_a_reader_who_scrolls_up_is_left_there(open_page):
    page = open_page(viewport={"width": 700, "height": 400})
    ask(page, "many")
    page.fill("#question", "many")
    page.keyboard.press("Enter")
    page.wait_for_selector("article:last-child .answer:has-text('word20 ')")
    page.mouse.move(350, 150)
    page.mouse.wheel(0, -30)
    page.wait_for_timeout(100)
    top = page.evaluate(f"{LOG}.scrollTop")
    page.wait_for_selector("article:last-child .answer:has-text('word120 ')")
    assert page.evaluate(f"{LOG}.scrollTop") == top
    page.wait_for_selector("#send")
    assert page.evaluate(f"{LOG}.scrollTop") == top


@pytest.mark.parametrize("viewport", [{"width": 640, "height": 400}, {"width": 320, "height": 480}])
def test_long_words_and_tables_at_any_width(open_page, monkeypatch, viewport):
    table = "| name | about |\n|-|-|\n| incomprehensibilities | " + "a word " * 30 + "|"
    columns = "\n".join(["|".join(["", *["internationalization"] * 9, ""]), "|-" * 9 + "|"])
    monkeypatch.setitem(ANSWERS, "table", [delta(MarkedSpan(f"{table}\n\n{columns}\n\n{'x' * 400}"))])
    page = open_page(viewport=viewport)
    ask(page, "table")
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert page.evaluate(f"{LOG}.scrollWidth") <= viewport["width"]
    boxes = page.locator(".table")
    assert boxes.last.evaluate("box => box.scrollWidth > box.clientWidth")
    heights = page.locator(".table th").evaluate_all("cells => cells.map((cell) => cell.clientHeight)")
    assert max(heights) < 40  # no word was broken
    assert page.locator("#question").bounding_box()["y"] < viewport["height"]


def test_each_paragraph_has_its_own_direction(open_page, monkeypatch):
    monkeypatch.setitem(ANSWERS, "שלום", [delta(MarkedSpan("שלום עולם\n\nhello\n\n```\nx = 1\n```"))])
    page = open_page()
    ask(page, "שלום")
    right = "e => { const r = document.createRange(); r.selectNodeContents(e); const b = "
    right += "e.getBoundingClientRect(), a = r.getBoundingClientRect(); "
    right += "return b.right - a.right < a.left - b.left; }"
    assert page.locator(".answer p").nth(0).evaluate(right)
    assert not page.locator(".answer p").nth(1).evaluate(right)
    assert page.locator(".question").evaluate("e => getComputedStyle(e).direction") == "rtl"


def test_a_huge_paste(open_page, served):
    page = open_page()
    text = "line of text\n" * 40_000  # half a megabyte
    script = "text => { const field = document.getElementById('question'); field.value = text; "
    script += "field.dispatchEvent(new Event('input')); return field.clientHeight; }"
    assert page.evaluate(script, text) < 400
    page.keyboard.press("Enter")
    wait_until(lambda: served.engine.requests)
    assert served.engine.requests[0].messages[0]["content"] == text.strip()


def test_the_first_screen(open_page, served):
    page = open_page()
    tries = page.locator("#first button")
    assert tries.count() == 3
    page.fill("#question", "half a quest")
    question = tries.first.text_content()
    tries.first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer:has-text('You said')")
    assert text_of(page, ".question") == [question]
    assert page.input_value("#question") == "half a quest"
    assert page.locator("#first").count() == 0
    page.wait_for_selector("#send")
    page.click("#new")
    assert page.locator("#first").is_visible()


def test_sampling_settings_reach_the_server(open_page, served):
    page = open_page()
    page.wait_for_selector("#model:has-text('scripted')")
    page.click("#settings-button")
    assert page.get_attribute("[name=top_p]", "placeholder") == "0.95"
    assert page.get_attribute("[name=min_p]", "placeholder") == "0.05"
    page.fill("[name=top_p]", "0.5")
    page.fill("[name=min_p]", "0.1")
    page.fill("[name=stop]", "END\n\n###")
    keep_settings(page)
    ask(page, "hi")
    settings = served.engine.requests[-1].settings
    assert (settings.sampling.top_p, settings.sampling.min_p) == (0.5, 0.1)
    assert [*settings.stops] == ["END", "###"]
    page.click("#settings-button")
    page.fill("[name=top_p]", "7")
    page.keyboard.press("Escape")  # what is not valid is not kept
    ask(page, "hi")
    assert served.engine.requests[-1].settings.sampling.top_p == 0.5


NAMES = {
    "Name three colours.": "Name three colours",
    "a/b\\c: what?*": "a b c what",
    "con": "_con",
    "LPT1.txt": "_LPT1.txt",
    "..": "conversation",
    "": "conversation",
    "हिन्दी में": "हिन्दी में",
    "👩‍👩‍👧 family": "👩‍👩‍👧 family",
    "é" * 100: "é" * 60,
    "👩‍👩‍👧" * 20: "👩‍👩‍👧" * 6,
    "a\nb\u202ec\ud83d": "a b c",
}


def test_names_of_files(open_page):
    page = open_page()
    made = page.evaluate(
        "async names => { const { fileName } = await import('/exports.js'); return names.map(fileName); }",
        [*NAMES],
    )
    assert dict(zip(NAMES, made, strict=True)) == NAMES


def test_a_long_question_names_a_conversation_in_whole_characters(open_page):
    page = open_page()
    ask(page, "A  question\nwith " + "👩‍👩‍👧" * 60)
    name = text_of(page, "nav .open")[0]
    assert name.startswith("A question with 👩‍👩‍👧")
    assert name.endswith("👩‍👩‍👧…")


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (403, "The proxy before the server does not allow this (status 403)."),
        (502, "The proxy does not reach the server: check that specdec serve is running (status 502)."),
        (401, "The proxy before the server wants you to log in: reload this page (status 401)."),
        (200, "A web page came in place of an answer"),
    ],
)
def test_what_a_proxy_answers_is_said_in_words(open_page, status, line):
    page = open_page(allowed=("Failed to load",))
    page.wait_for_selector("#model:has-text('scripted')")
    html = {"status": status, "content_type": "text/html", "body": "<html>"}
    page.route("**/chat/completions", lambda route: route.fulfill(**html))
    page.fill("#question", "one")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"article .error:has-text('{line}')")
    assert page.locator("#key").is_hidden()


def test_a_script_that_does_not_load_is_said(open_page, browser, served):
    context = browser.new_context()
    context.route("**/dom.js", lambda route: route.fulfill(status=404))
    page = open_page(context=context, allowed=("Failed to load",))
    page.wait_for_selector("#failed")
    page.wait_for_timeout(4500)
    assert page.locator("#failed").is_visible()
    whole = open_page()
    assert whole.locator("#failed").count() == 0
    bare = open_page(context=browser.new_context(java_script_enabled=False))
    assert bare.locator("#failed").count() == 1
