"""The page with a keyboard only, with a screen reader, and on a phone."""

from pathlib import Path

import pytest

from tests.page.conftest import ask, give, picture, shown, text_of

AXE = Path(__file__).parents[2] / ".venv/npm/node_modules/axe-core/axe.min.js"
PHONE = {"viewport": {"width": 390, "height": 844}}
LOOKS = {"light": {"color_scheme": "light"}, "dark": {"color_scheme": "dark"}, "phone": PHONE}
DIALOGS = {
    "settings": "#settings-button",
    "picture": "footer button:has-text('Share')",
    "image": ".question .thumbnail",
}
FOCUSED = """() => {
  const {activeElement: at} = document;
  if (at === document.body) return "";
  if (at.closest("#list")) return at.id.split("-")[0]; // open, rename or delete
  return at.id || at.ariaLabel || at.textContent.trim();
}"""


def violations(page):
    """Those that axe finds, each with the elements that it found them in."""
    found = page.evaluate("axe.run()")["violations"]
    return {each["id"]: [node["html"] for node in each["nodes"]] for each in found}


@pytest.mark.skipif(not AXE.exists(), reason="make .venv/npm/installed installs axe-core")
@pytest.mark.parametrize("look", LOOKS)
def test_axe(open_page, seeing, look):
    page = open_page(**LOOKS[look])
    page.evaluate(AXE.read_text())
    assert violations(page) == {}  # nothing has been asked
    page.wait_for_selector("#model:has-text('scripted')")
    ask(page, "marks")
    ask(page, "think")
    page.click("article:last-child footer button:has-text('Regenerate')")
    page.wait_for_selector(".versions")
    for _ in range(2):  # the first is sent
        with page.expect_file_chooser() as chooser:
            page.click("#attach")
        chooser.value.set_files([{"name": "notes.txt", "mimeType": "", "buffer": b"text"}])
        page.wait_for_selector("#files li")
        if not page.locator("details.file").count():
            ask(page, "with a file")
    for _ in range(2):
        give(page, "drop", ("a.png", "image/png", picture()))
        shown(page, 1)
        if not page.locator(".question .thumbnail").count():
            ask(page, "with an image")
            shown(page, 1, ".question")
    for summary in (".file summary", ".reasoning:not([hidden]) summary"):
        page.click(summary)
    page.click("footer button:has-text('Edit')")
    give(page, "drop", ("b.png", "image/png", picture()))
    shown(page, 1)
    assert violations(page) == {}
    page.focus(".answer .corrected")
    assert page.locator("#rejected").is_visible()
    assert violations(page) == {}
    for dialog, button in DIALOGS.items():
        page.click(button)
        assert page.locator(f"#{dialog}").is_visible()
        assert violations(page) == {}, dialog
        page.keyboard.press("Escape")
    page.click("#help-button")
    assert violations(page) == {}
    page.keyboard.press("Escape")
    if look == "phone":
        page.click("#statistics-button")
        assert violations(page) == {}
        page.click("#conversations-button")
    assert page.locator("#conversations").is_visible()
    assert violations(page) == {}
    page.click("[aria-label^=Rename]")
    assert violations(page) == {}


@pytest.mark.skipif(not AXE.exists(), reason="make .venv/npm/installed installs axe-core")
def test_axe_finds_something(open_page):
    page = open_page()
    page.evaluate(AXE.read_text())
    page.evaluate("document.getElementById('send').replaceChildren()")
    page.evaluate("document.getElementById('model').style.color = '#eee'")
    page.wait_for_selector("#model:has-text('scripted')")
    assert violations(page).keys() == {"button-name", "color-contrast"}


def walk(page, start, key="Tab", most=60):
    """The elements that get the focus, from that with the id `start` on."""
    page.focus(f"#{start}")
    reached = []
    while (name := page.evaluate(FOCUSED)) not in ("", *reached[:1]):
        reached.append(name)
        assert len(reached) < most, reached
        page.keyboard.press(key)
        style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style != "none" or not page.evaluate(FOCUSED), f"after {name}: the focus is not seen"
    return reached


def test_tab_reaches_everything(open_page, seeing):
    page = open_page()
    page.wait_for_selector("#model:has-text('scripted')")
    ask(page, "marks")
    page.click("footer button:has-text('Regenerate')")
    page.wait_for_selector(".versions")
    give(page, "drop", ("a.png", "image/png", picture()))
    shown(page, 1)
    reached = walk(page, "conversations-button")
    expected = [
        *("conversations-button", "statistics-button", "settings-button", "theme-button", "help-button"),
        *("new", "open", "rename", "delete", "export-markdown", "export-json"),
        *("turns", "Copy", "Regenerate", "Edit question", "Share speed", "Previous version", "Next version"),
        *("Show a.png larger", "Remove a.png", "attach", "attach-images", "question", "send", "statistics"),
    ]
    assert [name for name in reached if name in expected] == expected
    assert [*reversed(walk(page, "statistics", "Shift+Tab"))] == reached


@pytest.mark.parametrize("button", ["settings-button", "help-button"])
def test_dialogs_return_the_focus(open_page, button):
    page = open_page()
    page.focus(f"#{button}")
    page.keyboard.press("Enter")
    dialog = page.locator("dialog[open]")
    assert dialog.is_visible()
    for _ in range(12):
        page.keyboard.press("Tab")
        outside = "document.activeElement !== document.body && !document.activeElement.closest('dialog')"
        assert page.evaluate(outside) is False
    page.keyboard.press("Escape")
    assert dialog.count() == 0
    assert page.evaluate(FOCUSED) == button


def test_the_focus_stays_in_the_list(open_page):
    page = open_page()
    for question in ("one", "two"):
        page.click("#new")
        ask(page, question)
    page.focus("[aria-label='Rename one']")
    page.keyboard.press("Enter")
    page.fill("#name input", "first")
    page.keyboard.press("Enter")
    page.wait_for_selector("nav .open:has-text('first')")
    assert page.evaluate(FOCUSED) == "rename"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # deletes it
    assert text_of(page, "nav .open") == ["two"]
    assert page.evaluate(FOCUSED) == "new"
    page.keyboard.press("Tab")
    assert page.evaluate(FOCUSED) == "search"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate(FOCUSED) == "open"


def test_the_focus_survives_an_answer(open_page):
    page = open_page()
    ask(page, "one")
    page.fill("#question", "many")
    page.keyboard.press("Enter")
    page.wait_for_selector("#stop")
    page.focus("footer button:has-text('Copy')")
    page.wait_for_selector(".answer:has-text('word20 ')")
    assert page.evaluate(FOCUSED) == "Copy"
    page.focus("#stop")
    page.keyboard.press("Enter")
    page.wait_for_selector("#send")
    assert page.evaluate(FOCUSED) == "question"


def test_a_phone(open_page):
    page = open_page(**PHONE)
    page.wait_for_selector("#model:has-text('scripted')")
    boxes = [element.bounding_box() for element in page.query_selector_all("header > :is(button, p)")]
    shown = [box for box in boxes if box and box["width"] > 1]
    assert len(shown) == 5  # four buttons and the model
    assert (
        max(box["y"] + box["height"] / 2 for box in shown)
        - min(box["y"] + box["height"] / 2 for box in shown)
        < 4
    )
    assert page.locator("header").bounding_box()["height"] < 64
    ask(page, "marks")
    page.click("#statistics-button")
    sheet = page.locator("#statistics")
    box = sheet.bounding_box()
    assert (box["x"], box["width"], box["y"] + box["height"]) == (0, 390, 844)  # from below
    assert box["y"] > 150
    assert "60 tokens/s" in sheet.text_content()
    page.keyboard.press("Escape")
    assert sheet.is_hidden()
    assert page.evaluate(FOCUSED) == "statistics-button"
    page.keyboard.press("Enter")
    page.click("#statistics-close")
    assert sheet.is_hidden()
    page.click("#statistics-button")
    page.click("#conversations-button")  # there is room for one
    assert sheet.is_hidden()
    page.mouse.click(380, 400)  # on what it covers
    assert page.locator("#conversations").is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_phone_with_several_models(open_page):
    page = open_page(**PHONE)
    page.wait_for_selector("#model:has-text('scripted')")
    page.evaluate("document.getElementById('models').hidden = false")
    assert page.locator("#models").bounding_box()["width"] > 120
    assert page.locator("#model").is_hidden()
    assert page.locator("header").bounding_box()["height"] < 64
