"""Take the screenshots of the page of `specdec serve`, with a real answer.

    specdec serve MAIN.gguf --draft DRAFT.gguf --temp 0
    python docs/images/make_screenshots.py http://localhost:8080

The pictures in docs/images show Qwen2.5-Coder 1.5B with its 0.5B sibling, both in Q4_K_M.
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

QUESTION = "Write a Python function for the n-th Fibonacci number, then the same with type hints. Code only."
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ANSWER_MS = 300_000


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("address")
    address = options.parse_args().address
    path = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1180, "height": 760}, color_scheme=theme)
            page.goto(address)
            page.fill("#question", QUESTION)
            page.keyboard.press("Enter")
            page.wait_for_selector("#status:has-text('complete')", state="attached", timeout=ANSWER_MS)
            page.evaluate("document.getElementById('turns').scrollTop = 0")
            page.locator(".answer .corrected:not(.blank)").first.hover()
            page.screenshot(path=Path(__file__).with_name(f"serve-{theme}.png"))
        browser.close()


if __name__ == "__main__":
    main()
