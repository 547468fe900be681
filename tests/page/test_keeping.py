"""What people wrote is not lost: deletions that are undone, two tabs, and browsers that store nothing."""

import pytest

from tests.page.conftest import ask, text_of
from tests.waiting import wait_until

NAMES = "nav .open"


def delete(page, name):
    page.click(f"nav [aria-label='Delete {name}']")


def test_a_deletion_is_undone(open_page):
    page = open_page()
    ask(page, "one")
    page.click("#new")
    ask(page, "two")
    delete(page, "one")
    assert text_of(page, NAMES) == ["two"]
    assert page.locator("#deleted span").text_content() == "Deleted “one”."
    assert "Undo" in page.locator("#status").text_content()  # for those who do not see the page
    assert page.evaluate("document.activeElement.id") == "question"
    page.click("#deleted button")
    assert text_of(page, NAMES) == ["two", "one"]
    assert text_of(page, ".answer") == ["You said one"]
    assert page.locator("#deleted").is_hidden()
    page.reload()
    assert text_of(page, NAMES) == ["two", "one"]


def test_several_deletions_are_undone_with_the_keyboard_after_a_reload(open_page):
    page = open_page()
    for name in ("one", "two", "three"):
        page.click("#new")
        ask(page, name)
    delete(page, "three")
    delete(page, "one")
    assert page.locator("#deleted span").text_content() == "Deleted 2 conversations."
    page.reload()
    assert text_of(page, NAMES) == ["two"]
    assert page.locator("#deleted span").text_content() == "Deleted 2 conversations."
    page.focus("#turns")
    page.keyboard.press("Control+z")
    assert text_of(page, NAMES) == ["three", "two", "one"]


def test_the_time_to_undo_ends(open_page):
    page = open_page()
    page.clock.install()
    ask(page, "one")
    delete(page, "one")
    page.focus("#deleted button")
    page.clock.run_for(20_000)
    page.wait_for_timeout(1000)
    assert page.locator("#deleted").is_visible()  # someone is about to press it
    page.focus("#question")
    wait_until(page.locator("#deleted").is_hidden)
    assert not [key for key in page.evaluate("Object.keys(localStorage)") if "conversation" in key]


def test_a_double_click_deletes_one(open_page):
    page = open_page()
    for name in ("one", "two", "three"):
        page.click("#new")
        ask(page, name)
    page.dblclick("nav [aria-label='Delete three']")
    assert text_of(page, NAMES) == ["two", "one"]


def tabs(open_page, browser):
    """Two tabs with one conversation."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    first = open_page(context=context)
    ask(first, "one")
    return first, open_page(context=context)


def test_two_tabs_lose_no_turn(open_page, browser):
    first, second = tabs(open_page, browser)
    assert text_of(second, ".question") == ["one"]
    ask(first, "from the first")
    wait_until(lambda: text_of(second, ".answer") == ["You said one", "You said from the first"])
    # Both at once: each is another version of what follows.
    for page in (first, second):
        page.fill("#question", "long")
        page.keyboard.press("Enter")
    for page in (first, second):
        page.locator(".answer p:text-is('first')").wait_for()
    for page in (first, second):
        page.click("#stop")
    for page in (first, second):
        page.wait_for_selector("#send")
    for page in (first, second):
        page.wait_for_selector(".versions:has-text('/ 2')")
    first.reload()
    assert first.locator(".versions").count() == 1
    stored = first.evaluate(
        """() => Object.entries(localStorage)
          .filter(([key]) => key.startsWith("specdec.conversation."))
          .map(([, text]) => JSON.parse(text).turns.map(({ question }) => question))"""
    )
    assert stored == [["one", "from the first", "long", "long"]]


def test_a_tab_follows_names_deletions_and_undoing(open_page, browser):
    first, second = tabs(open_page, browser)
    first.click("nav [aria-label='Rename one']")
    first.fill("#name input", "another")
    first.click("#name button.main")
    wait_until(lambda: text_of(second, NAMES) == ["another"])
    delete(first, "another")
    wait_until(lambda: text_of(second, NAMES) == ["New conversation"])
    first.click("#deleted button")
    wait_until(lambda: "another" in text_of(second, NAMES))


def test_tabs_share_their_settings(open_page, browser):
    first, second = tabs(open_page, browser)
    first.focus("#turns")
    first.keyboard.press("m")
    wait_until(lambda: second.evaluate("document.body.className") == "marked")
    second.click("#theme-button")
    first.reload()
    assert first.evaluate("document.body.className") == "marked"  # the other tab has not changed it back
    assert first.title() == "one · specdec"


def test_a_tab_that_answers_keeps_what_another_one_deletes(open_page, browser):
    first, second = tabs(open_page, browser)
    second.fill("#question", "long")
    second.keyboard.press("Enter")
    second.wait_for_selector(".answer:has-text('first')")
    page_of = "Object.values(localStorage).filter((text) => text.includes('long')).length"
    wait_until(lambda: first.evaluate(page_of) == 1)
    delete(first, "one")
    second.click("#stop")
    wait_until(lambda: text_of(first, NAMES).count("one") == 1)
    assert text_of(second, ".question") == ["one", "long"]


@pytest.mark.parametrize("what", ["localStorage", "sessionStorage"])
def test_a_browser_without_storage(open_page, browser, what):
    context = browser.new_context()
    refusal = "{ get() { throw new DOMException('', 'SecurityError'); } }"
    context.add_init_script(f"Object.defineProperty(window, '{what}', {refusal})")
    page = open_page(context=context)
    ask(page, "one")
    assert text_of(page, ".answer") == ["You said one"]
    if what == "localStorage":
        assert "stores nothing" in page.locator("#notice").text_content()


def test_conversations_are_found_by_name_and_text(open_page):
    page = open_page()
    for name in ("Apples", "pears", "marks"):
        page.click("#new")
        ask(page, name)
    page.fill("#search", "CAT SAT")  # in an answer
    assert text_of(page, NAMES) == ["marks"]
    assert page.locator("#found").text_content() == "1 of 3 conversations"
    page.fill("#search", "apple")
    assert text_of(page, NAMES) == ["Apples"]
    page.keyboard.press("Escape")
    assert text_of(page, NAMES) == ["marks", "pears", "Apples"]
    assert page.locator("#found").text_content() == ""
