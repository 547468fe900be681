"""What is taken from the page: pictures of the speed, and conversations as files."""

import json
import re
import struct
from xml.etree import ElementTree

import pytest

from spec_local.answers.gain import Gain
from tests.page.conftest import ask
from tests.waiting import wait_until


def saved(page, button):
    """The file that a button gives: its name and bytes."""
    with page.expect_download() as download:
        page.click(button)
    return download.value.suggested_filename, download.value.path().read_bytes()


def test_a_picture_of_the_speed(open_page):
    page = open_page()
    page.wait_for_selector("#model:has-text('scripted')")
    ask(page, "a secret question")
    page.click("footer button:has-text('Share speed')")
    assert page.locator("#picture").is_visible()
    assert page.get_attribute("#picture img", "alt").startswith("scripted, draft draft.gguf · 30 tokens")
    wait_until(lambda: page.evaluate("document.querySelector('#picture img').naturalWidth") == 1200)

    name, svg = saved(page, "#save-svg")
    assert name == "speed of scripted, draft draft.gguf.svg"
    texts = [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == [
        "specdec",
        "scripted, draft draft.gguf",
        "60 tokens/s",
        "30 tokens · draft tokens accepted: 9 of 12 (75 %)",
        "about 1.5 times as fast as without drafts",
        "with draft tokens 60 tokens/s",
        "without 40 tokens/s",
    ]
    assert b"secret" not in svg
    widths = [
        float(element.get("width"))
        for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")
    ]
    assert widths[1] / widths[2] == 1.5

    name, png = saved(page, "#save-png")
    assert name.endswith(".png")
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (1200, 630)
    assert len(png) > 5000  # an empty picture has fewer bytes
    page.keyboard.press("Escape")
    assert page.locator("#picture").is_hidden()
    focused = page.evaluate("document.activeElement.textContent")
    assert focused == "Share speed"


def test_a_stopped_answer_has_no_speed(open_page):
    page = open_page()
    page.fill("#question", "long")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer:has-text('first')")
    page.click("#stop")
    page.wait_for_selector("article footer:has-text('Stopped.')")
    assert page.locator("footer button:has-text('Share speed')").count() == 0


@pytest.mark.parametrize(
    "gain",
    [
        None,
        Gain("none", "no drafts (no draft model, and no earlier text recurred)"),
        Gain("same", "about as fast as without drafts"),
        Gain("slower", "slower than usual: the machine may be busy or hot"),
    ],
)
def test_no_number_is_stated_or_shared_where_there_is_no_gain(open_page, served, gain):
    served.engine.gain = gain
    page = open_page()
    ask(page, "marks")
    for place in (page.locator("article footer"), page.locator("#statistics")):
        assert not re.search(r"\d×|times", place.text_content())
        assert not gain or gain.words in place.text_content()
    assert page.locator("footer button:has-text('Share speed')").count() == 0


def test_a_conversation_as_markdown(open_page):
    page = open_page()
    page.wait_for_selector("#model:has-text('scripted')")
    ask(page, "think")
    ask(page, "```py\nx = 1")
    name, text = saved(page, "#export-markdown")
    assert name == "think.md"
    statistics = (
        "*30 tokens · 60 tokens/s · about 1.5 times as fast as without drafts · 75 % of drafts accepted*"
    )
    answer = "## Answer (scripted, draft draft.gguf)"
    assert text.decode() == "\n\n".join(
        [
            "# think",
            "## Question",
            "think",
            answer,
            "<details><summary>Reasoning</summary>",
            "Hmm, well.",
            "</details>",
            "Yes.",
            statistics,
            "## Question",
            "```py\nx = 1\n```",  # code that does not end is ended
            answer,
            "You said ```py\nx = 1",
            statistics + "\n",
        ]
    )


def test_a_conversation_as_json(open_page):
    page = open_page()
    ask(page, "one")
    page.click("footer button:has-text('Regenerate')")
    page.wait_for_selector(".versions:has-text('2 / 2')")
    name, text = saved(page, "#export-json")
    exported = json.loads(text)
    assert name == "one.json"
    assert exported["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "You said one"},
    ]
    assert [turn["parent"] for turn in exported["turns"]] == [-1, -1]  # both versions
