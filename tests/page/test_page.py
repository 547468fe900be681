"""The page of `specdec serve`, used as people use it."""

import json
import re

import pytest

from tests.page.conftest import HOSTILE, Served, ask, keep_settings, text_of
from tests.waiting import wait_until


def test_marks_and_rejected_tokens(open_page):
    page = open_page()
    page.click("#settings-button")
    page.check("[name=marks]")
    keep_settings(page)
    ask(page, "marks")
    assert text_of(page, ".answer .accepted") == ["cat", "sat", "x", "it.", "print", "("]
    assert text_of(page, ".answer .corrected") == ["on"]
    assert text_of(page, ".answer pre code") == ["print(1)\n"]
    assert text_of(page, ".answer p code") == ["x"]
    tip = page.locator("#rejected")
    assert tip.is_hidden()
    page.hover(".answer .corrected")
    assert tip.text_content() == "rejected ␣down the"
    page.mouse.move(0, 0)
    assert tip.is_hidden()
    page.focus(".answer .corrected")
    assert tip.is_visible()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    assert (
        page.evaluate("getComputedStyle(document.querySelector('.accepted')).textDecorationLine")
        == "underline"
    )


def test_marks_are_off_until_asked_for(open_page, served):
    page = open_page()
    ask(page, "marks")
    style = "getComputedStyle(document.querySelector('.accepted')).textDecorationLine"
    assert page.evaluate(style) == "none"
    assert page.locator(".answer .corrected").get_attribute("tabindex") == "-1"
    page.focus("#turns")
    page.keyboard.press("m")
    wait_until(lambda: page.evaluate(style) == "underline")
    assert page.locator(".answer .corrected").get_attribute("tabindex") == "0"
    page.reload()
    assert page.evaluate("document.body.classList.contains('marked')") is True
    page.click("#settings-button")
    page.uncheck("[name=marks]")
    keep_settings(page)
    wait_until(lambda: page.evaluate(style) == "none")


def test_statistics(open_page):
    page = open_page()
    page.wait_for_selector("#statistics svg")  # of the costs
    ask(page, "marks")
    panel = page.locator("#statistics")
    assert "60 tokens/s" in panel.text_content()
    assert "about 1.5 times as fast as without drafts" in panel.text_content()
    assert "9 of 12 (75 %)" in panel.text_content()
    assert "from the cache40read7" in panel.text_content()
    titles = text_of(page, "#statistics svg title")
    assert titles[:2] == ["position 1: 6 of 8 accepted", "position 2: 3 of 4 accepted"]
    assert "main model, 4 tokens: 12.0 ms" in titles
    assert "draft model, 1 token: 1.00 ms" in titles
    assert (
        "about 1.5 times as fast as without drafts · 75 % of drafts accepted"
        in page.locator("article footer").text_content()
    )


def test_what_a_head_has_learned(open_page, served):
    page = open_page()
    page.wait_for_selector("#statistics svg")
    assert "head" not in page.locator("#statistics").text_content()
    served.learning.enabled = True
    page.reload()
    page.wait_for_selector("#statistics:has-text('What the head has learned')")
    assert "collecting answers: 7 of 20" in page.locator("#statistics").text_content()
    titles = text_of(page, "#statistics svg[aria-label*=version] title")
    assert titles == [
        *("before, your answers: 47 % accepted", "version 1, your answers: 58 % accepted"),
        "version 2, your answers: 61 % accepted",
        *("before, built-in prompts: 43 % accepted", "version 1, built-in prompts: 43 % accepted"),
        "version 2, built-in prompts: 44 % accepted",
    ]


def test_statistics_of_a_running_answer(open_page):
    page = open_page()
    page.fill("#question", "many")
    page.keyboard.press("Enter")
    page.wait_for_selector("#statistics svg[aria-label^=Acceptance]")
    assert page.locator("#stop").is_visible()
    first, second = text_of(page, "#statistics svg title")[:2]
    assert re.fullmatch(r"position 1: (\d+) of \1 accepted", first)
    assert re.fullmatch(r"position 2: 0 of \d+ accepted", second)
    assert page.locator("#stop").is_visible()
    speed = float(page.locator("#statistics .speed strong").text_content())
    assert 10 < speed < 400  # two tokens each 10 ms or more


def test_reasoning_folds_when_the_answer_begins(open_page):
    page = open_page()
    ask(page, "think")
    assert text_of(page, "details.reasoning div") == ["Hmm, well."]
    assert text_of(page, ".answer") == ["Yes."]
    assert page.get_attribute("details.reasoning", "open") is None
    ask(page, "and?")
    reasoning = page.query_selector_all("details.reasoning")
    assert not reasoning[1].is_visible()


def test_text_is_never_html(open_page):
    """Of the model, of the user, of rejected tokens, of names, of errors and of what is stored."""
    page = open_page()
    ask(page, "hostile")
    ask(page, HOSTILE)
    assert HOSTILE in page.locator(".answer").first.text_content()
    assert page.locator(".question").nth(1).text_content() == HOSTILE
    page.locator(".answer .corrected").first.focus()
    assert HOSTILE in page.locator("#rejected").text_content()
    page.locator("nav [aria-label^=Rename]").first.click()
    page.fill("#name input", HOSTILE[:80])
    page.click("#name button.main")
    wait_until(lambda: page.locator("nav .open").first.text_content() == HOSTILE[:80])
    page.reload()
    assert page.locator("nav .open").first.text_content() == HOSTILE[:80]
    assert page.locator(".answer img, .question img, .answer script, nav img, .answer a").count() == 0


def test_a_strict_policy_is_sent(open_page, served):
    page = open_page(allowed=("Content Security Policy",))
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))"
    )
    assert page.evaluate("window.ran") is None


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_cancels_the_answer(open_page, served, how):
    page = open_page()
    page.fill("#question", "long")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer:has-text('first')")
    page.click("#stop") if how == "button" else page.keyboard.press("Escape")
    assert served.engine.cancelled.wait(5)
    page.wait_for_selector("#send")
    assert text_of(page, ".answer") == ["first"]
    assert "Stopped." in page.locator("article footer").text_content()
    ask(page, "next")
    sent = served.engine.requests[-1].messages
    assert [message["content"] for message in sent] == ["long", "first ", "next"]


def test_conversations_are_kept(open_page):
    page = open_page()
    ask(page, "one")
    page.click("#new")
    ask(page, "two")
    page.reload()
    assert text_of(page, ".answer") == ["You said two"]
    assert text_of(page, "nav .open") == ["two", "one"]
    page.click("nav .open:has-text('one')")
    assert text_of(page, ".answer") == ["You said one"]
    page.click("nav [aria-label='Delete one']")
    assert text_of(page, "nav .open") == ["two"]
    page.reload()
    assert text_of(page, "nav .open") == ["two"]
    with page.expect_download() as download:
        page.click("#export-json")
    exported = json.loads(download.value.path().read_text())
    assert exported["messages"][-1] == {"role": "assistant", "content": "You said two"}


@pytest.mark.parametrize("damage", ["{", "null", '{"id": "x", "turns": [1]}', '{"turns": {}}'])
def test_a_damaged_storage(open_page, damage):
    page = open_page()
    ask(page, "one")
    script = "damage => { for (const key of Object.keys(localStorage)) localStorage.setItem(key, damage) }"
    page.evaluate(script, damage)
    page.reload()
    for stored in page.query_selector_all("nav .open"):
        stored.click()
    page.click("#new")
    ask(page, "two")
    assert text_of(page, ".answer") == ["You said two"]


def test_a_full_storage(open_page, browser):
    context, held = browser.new_context(), []
    context.route("**/props*", lambda route: held.append(route))
    page = open_page(context=context)
    page.evaluate("localStorage.setItem('x', 'x'.repeat(5 * 1024 * 1024 - 800))")
    ask(page, "one " * 300)
    assert "full" in page.locator("#notice").text_content()
    assert len(text_of(page, ".answer")) == 1
    # What the page asked the server before has its answer now, and the notice stays.
    for route in held:
        route.continue_()
    page.wait_for_selector("#model:has-text('scripted')")
    assert "full" in page.locator("#notice").text_content()


def test_settings_reach_the_server(open_page, served):
    page = open_page()
    page.click("#settings-button")
    page.fill("[name=system]", "Be brief.")
    page.fill("[name=temperature]", "0.3")
    page.fill("[name=max_tokens]", "7")
    page.fill("[name=seed]", "5")
    page.uncheck("[name=speculative]")
    keep_settings(page)
    ask(page, "hi")
    request = served.engine.requests[-1]
    assert request.messages[0] == {"role": "system", "content": "Be brief."}
    assert request.settings.sampling.temperature == 0.3
    assert (request.settings.max_tokens, request.settings.seed) == (7, 5)
    assert request.settings.policy == "off"


def test_regenerate_and_edit(open_page, served):
    page = open_page()
    ask(page, "one")
    page.click("footer button:has-text('Regenerate')")
    wait_until(lambda: len(served.engine.requests) == 2)
    page.wait_for_selector("#send")
    assert text_of(page, ".answer") == ["You said one"]
    page.click("footer button:has-text('Edit')")
    page.fill("#question", "two")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer:has-text('You said two')")
    assert text_of(page, ".question") == ["two"]
    assert [m["content"] for m in served.engine.requests[-1].messages] == ["two"]


def test_nothing_typed_is_lost_by_editing(open_page):
    page = open_page()
    ask(page, "one")
    page.fill("#question", "half a quest")
    page.click("footer button:has-text('Edit')")
    assert page.input_value("#question") == "one"
    page.keyboard.press("Escape")
    assert page.input_value("#question") == "half a quest"
    page.click("footer button:has-text('Edit')")
    page.keyboard.press("Enter")
    page.wait_for_selector("#send")
    assert page.input_value("#question") == "half a quest"


def test_a_conversation_deleted_during_its_answer_stays_deleted(open_page):
    page = open_page()
    page.fill("#question", "long")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer:has-text('first')")
    page.click("nav [aria-label='Delete long']")
    page.wait_for_selector("#send")
    page.reload()
    page.wait_for_selector("#model:has-text('scripted')")
    assert text_of(page, "nav .open") == ["New conversation"]


def test_keys_only(open_page):
    page = open_page()
    page.keyboard.type("one")  # the field has the focus
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer:has-text('You said one')")
    page.wait_for_selector("#send")
    page.focus("#turns")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#help").is_hidden()
    page.focus("#turns")
    page.keyboard.press("n")
    assert text_of(page, ".question") == []
    assert page.evaluate("document.activeElement.id") == "question"
    ask(page, "three")
    page.focus("#turns")
    page.keyboard.press("r")
    page.wait_for_selector("#send")
    page.keyboard.press("e")
    assert page.input_value("#question") == "three"
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dark_and_light(open_page, scheme):
    page = open_page(color_scheme=scheme)

    def is_dark():
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", background)[:3])) < 3 * 128

    assert is_dark() == (scheme == "dark")
    page.click("#theme-button")
    assert is_dark() == (scheme == "light")
    page.reload()
    assert is_dark() == (scheme == "light")


def test_a_narrow_window(open_page):
    page = open_page(viewport={"width": 360, "height": 640})
    ask(page, "many")
    ask(page, "marks")
    ask(page, "x" * 300)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.getElementById('turns').scrollWidth") <= 360
    page.click("#conversations-button")
    assert page.locator("#conversations").is_visible()
    page.click("#conversations-button")
    page.click("#statistics-button")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_key(open_page, browser):
    with Served(api_key="secret") as served:
        page = open_page(served.address, allowed=("401", "ERR_CONNECTION"))
        page.wait_for_selector("#key[open]")
        page.fill("#key input", "wrong")
        page.click("#key button.main")
        page.wait_for_selector("#key[open]")
        page.fill("#key input", "secret")
        page.click("#key button.main")
        page.wait_for_selector("#model:has-text('scripted')")
        ask(page, "one")
        page.reload()
        page.wait_for_selector("#model:has-text('scripted')")  # kept for the tab
        ask(page, "two")


def test_models_that_are_being_loaded(open_page, served):
    served.engine.is_ready = False
    page = open_page(allowed=("503",))
    page.wait_for_selector("#notice:has-text('being loaded')")
    served.engine.is_ready = True
    page.wait_for_selector("#model:has-text('scripted')")
    assert page.locator("#notice").is_hidden()
    ask(page, "one")


def test_a_server_that_goes(open_page):
    served = Served()
    page = open_page(served.address, allowed=("ERR_", "Failed to load"))
    page.wait_for_selector("#model:has-text('scripted')")
    page.fill("#question", "long")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer:has-text('first')")
    served.stop()
    page.wait_for_selector("article .error")
    assert text_of(page, ".answer") == ["first"]
    assert text_of(page, "footer button") == ["Copy", "Continue", "Retry", "Edit question"]


def test_it_follows_a_long_answer(open_page):
    page = open_page()
    ask(page, "many")
    ask(page, "many")
    log = "document.getElementById('turns')"
    left = f"{log}.scrollHeight - {log}.clientHeight - {log}.scrollTop"
    wait_until(lambda: page.evaluate(left) < 2)
