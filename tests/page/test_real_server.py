"""The page against a real server."""

from tests.page.conftest import ask
from tests.server.conftest import Server, arguments, models, specdec  # noqa: F401


def test_a_chat(open_page, specdec, arguments):  # noqa: F811
    started = Server(specdec, *arguments, "--temp", 0, "--policy", "fixed", "--draft-max", 3)
    try:
        page = open_page(started.address)
        page.wait_for_selector("#model:has-text('draft.gguf')")
        page.click("#settings-button")
        page.fill("[name=max_tokens]", "24")
        page.click("#settings button.main")
        page.wait_for_selector("#settings", state="hidden")
        ask(page, "one two three")
        expected = started.chat("one two three", max_tokens=24)["choices"][0]["message"]["content"]
        shown = page.locator(".answer").text_content()
        assert "".join(shown.split()) == "".join(expected.replace("`", "").split())
        assert page.locator(".answer .accepted").count() > 0
        assert "tokens/s" in page.locator("#statistics").text_content()
        assert page.locator("#statistics svg").count() == 2
    finally:
        started.stop()
