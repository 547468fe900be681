"""Take the screenshots of the page of `specdec serve`, with a real answer.

    specdec serve MAIN.gguf --draft DRAFT.gguf --temp 0
    python docs/images/make_screenshots.py http://localhost:8080

The pictures in docs/images show Qwen2.5-Coder 1.5B in Q8_0 with its 0.5B sibling in Q4_0, on a machine that
does nothing else. Both show the same answer, the second one on a phone with the statistics.
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

WARM_UP = "Name three primes."
QUESTION = "Write a Python function for the n-th Fibonacci number, and explain how fast it is."
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ANSWER_MS = 300_000
PICTURES = Path(__file__).parent
PHONE: ViewportSize = {"width": 390, "height": 844}


def ask(browser: Browser, address: str, question: str) -> Page:
    """Ask in a new conversation, and wait for the end of the answer."""
    page = browser.new_page(viewport={"width": 1180, "height": 760})
    page.goto(address)
    page.fill("#question", question)
    page.keyboard.press("Enter")
    page.wait_for_selector("#status:has-text('complete')", state="attached", timeout=ANSWER_MS)
    return page


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("address")
    address = options.parse_args().address
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not path:
        raise SystemExit(f"there is no browser: install {' or '.join(BROWSERS)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        ask(browser, address, WARM_UP).close()  # the first answer after the start is slower
        page = ask(browser, address, QUESTION)
        page.focus("#turns")
        page.keyboard.press("m")  # marks draft tokens
        page.evaluate("document.getElementById('turns').scrollTop = 0")
        page.locator(".answer .corrected:not(code *)").first.hover()
        page.screenshot(path=PICTURES / "serve.png")
        page.set_viewport_size(PHONE)
        page.click("#statistics-button")
        page.screenshot(path=PICTURES / "serve-phone.png")
        browser.close()


if __name__ == "__main__":
    main()
