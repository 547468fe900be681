"""The page against a real server."""

import contextlib

import pytest

from tests.page.conftest import ask, give, keep_settings, picture, shown
from tests.server.conftest import Server, arguments, models, specdec  # noqa: F401
from tests.tiny_projectors import write_projector
from tests.tiny_vision import write_vision_model


@pytest.fixture
def start(specdec):  # noqa: F811
    """Start a server, which ends after the page: what the page asks for after an answer would fail otherwise.

    Tests request it before `open_page`, so that it is finished later.
    """
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(Server(specdec, *arguments))


def answer_on(page):
    """The last answer as the page keeps it: what is shown is rendered."""
    assert page.locator(".answer").last.text_content().strip()
    return page.evaluate(
        """() => {
          const id = JSON.parse(localStorage.getItem("specdec.current"));
          const { turns } = JSON.parse(localStorage.getItem(`specdec.conversation.${id}`));
          return turns.at(-1).answer.map((span) => span.text).join("");
        }"""
    )


def limit_answers(page, n_tokens):
    page.click("#settings-button")
    page.fill("[name=max_tokens]", str(n_tokens))
    keep_settings(page)


def test_a_chat(start, open_page, arguments):  # noqa: F811
    started = start(*arguments, "--temp", 0, "--policy", "fixed", "--draft-max", 3)
    page = open_page(started.address)
    page.wait_for_selector("#model:has-text('draft.gguf')")
    limit_answers(page, 24)
    ask(page, "one two three")
    expected = started.chat("one two three", max_tokens=24)["choices"][0]["message"]["content"]
    assert answer_on(page) == expected
    assert page.locator(".answer .accepted").count() > 0
    assert "tokens/s" in page.locator("#statistics").text_content()
    assert page.locator("#statistics svg").count() == 2


def test_a_choice_of_models(start, open_page, models):  # noqa: F811
    started = start(*models, "--draft", "none", "--ctx", 512, "--parallel", 1, "--temp", 0)
    page = open_page(started.address)
    page.wait_for_selector("#model:has-text('512 tokens of context')")
    assert page.locator("#models option").all_text_contents() == ["main", "draft"]
    limit_answers(page, 24)
    page.select_option("#models", "draft")
    page.wait_for_selector("#model:text-is('is loaded when you ask')")
    for name in ("draft", "main", "draft"):
        page.select_option("#models", name)
        page.click("#new")
        ask(page, "one two three")
        page.wait_for_selector("#model:has-text('512 tokens of context')")
        reply = started.chat("one two three", max_tokens=24, model=name)
        expected = reply["choices"][0]["message"]["content"]
        assert answer_on(page) == expected, name
    page.reload()
    page.wait_for_selector("#model:has-text('512 tokens of context')")
    assert page.locator("#models").input_value() == "draft"


def test_an_image(start, open_page, specdec):  # noqa: F811
    model = write_vision_model(specdec.folder / "page.gguf", "qwen2vl", n_ctx=4096)
    projector = write_projector(specdec.folder / "page-eye.gguf", "qwen2vl_merger")
    options = ("--draft", "none", "--ctx", 2048, "--parallel", 1, "--temp", 0)
    started = start(model, "--mmproj", projector, *options)
    page = open_page(started.address)
    page.wait_for_selector("#attach-images")
    limit_answers(page, 12)
    answers = []
    for colour in ("red", "blue"):
        page.click("#new")
        give(page, "paste", ("image.png", "image/png", picture(size=(112, 84), colour=colour)))
        shown(page, 1)
        with page.expect_request("**/chat/completions") as request:
            ask(page, "one two")
        messages = request.value.post_data_json["messages"]
        reply = started.chat("", messages=messages, max_tokens=12)
        answers.append(answer_on(page))
        assert answers[-1] == reply["choices"][0]["message"]["content"]
    assert answers[0] != answers[1]  # the model has seen the images
