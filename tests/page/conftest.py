"""The page in a real browser, against the real application with a scripted engine."""

import asyncio
import base64
import dataclasses
import io
import shutil
import socket
import threading

import pytest
import uvicorn
from PIL import Image as Pillow

from spec_local.answers.gain import Gain
from spec_local.engine.events import Statistics
from spec_local.images.image import Image
from spec_local.server import app
from spec_local.server.supervision.events import Delta, Ended, Loaded, MarkedSpan, Reading, Started
from spec_local.server.supervision.served_models import ServedModel, ServedModels
from spec_local.server.supervision.supervisor import AnswerEvents, Busy, NotReady
from tests.waiting import wait_until

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def delta(*spans, reasoning="", source="draft", drafted=2, accepted=1):
    """A step with these spans, of which the first ones are the reasoning."""
    text = "".join(span.text for span in spans).removeprefix(reasoning)
    return Delta(
        text,
        reasoning,
        spans=spans,
        source=source,
        n_drafted=drafted,
        n_accepted=accepted,
        draft_depth=drafted,
    )


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> [x](javascript:alert(3)) </code></pre>"
ANSWERS = {
    "marks": [
        delta(MarkedSpan("The"), source="none", drafted=0, accepted=0),
        delta(MarkedSpan(" cat sat", "accepted"), MarkedSpan(" on", "corrected", (" down the",))),
        delta(MarkedSpan(" `x` it.\n\n```python\nprint(", "accepted"), MarkedSpan("1)\n```\n")),
    ],
    "think": [
        delta(MarkedSpan("Hmm, ", "accepted"), MarkedSpan("well.", "main"), reasoning="Hmm, well."),
        delta(MarkedSpan("Yes.")),
    ],
    "hostile": [
        delta(
            MarkedSpan(HOSTILE, "accepted"),
            MarkedSpan(f"```html\n{HOSTILE}\n```\n"),
            MarkedSpan(HOSTILE, "corrected", (HOSTILE,)),
        )
    ],
    "long": [delta(MarkedSpan("first ")), "wait", delta(MarkedSpan("never"))],
    "many": [delta(MarkedSpan(f"word{i} ", "accepted")) for i in range(150)],
}


class ScriptedEngine:
    """Answers by the last message; others are echoed."""

    n_running = n_unfinished = 0

    def __init__(self):
        self.loaded = Loaded("scripted", "draft.gguf", 4096, 4, None, {"version": "0"})
        self.is_ready, self.busy_s = True, 0
        self.requests, self.cancelled, self._running = [], threading.Event(), {}
        self.gain = Gain("faster", "about 1.5 times as fast as without drafts", 1.5)

    def check_ready(self):
        if not self.is_ready:
            raise NotReady("the models are being loaded: try again soon")
        return self.loaded

    def answer(self, requests):
        if self.busy_s:
            raise Busy(f"64 answers wait already: try again in {self.busy_s} s", self.busy_s)
        self.requests += requests
        self.cancelled.clear()
        self.is_read = asyncio.Event()
        answers = AnswerEvents(1)
        stopped = asyncio.Event()
        self._running[answers] = stopped, asyncio.create_task(self._play(answers, requests[0], stopped))
        return answers

    async def _play(self, answers, request, stopped):
        question = request.messages[-1]["content"]
        if question == "slow":
            for n_read in (400, 1200):
                answers.put(0, Reading(4100, n_read, 0, 1.0))
                await asyncio.sleep(0.4)
            await self.is_read.wait()
        answers.put(0, Started(5, 2))
        for event in ANSWERS.get(question, [delta(MarkedSpan(f"You said {question}"))]):
            if event == "wait":
                await stopped.wait()
            else:
                answers.put(0, event)
                await asyncio.sleep(0.01)
            if stopped.is_set():
                answers.put(0, Ended(Delta(), "cancelled", Statistics()))
                return
        statistics = Statistics(
            predicted_n=30, predicted_s=0.5, n_steps=10, draft_n=12, draft_n_accepted=9,
            tested_at=[8, 4], accepted_at=[6, 3], prompt_n=7, cached_n=40,
        )  # fmt: skip
        statistics.steps_by.update({"draft": 8, "none": 2})
        answers.put(0, Ended(Delta(), "stop", statistics, plain_seconds=0.025, gain=self.gain))

    def cancel(self, answers):
        stopped, _ = self._running[answers]
        if not stopped.is_set():
            stopped.set()
            self.cancelled.set()

    async def ask(self, what, argument=None):
        return {"main": [[1, 0.01], [4, 0.012], [8, 0.02]], "draft": [[1, 0.001], [8, 0.002]]}


class ScriptedLearning:
    """Two versions of a head, the first of which continues a general one. enabled: to be set by a test."""

    is_training, enabled = False, False

    def learner(self, model):
        return None

    def described(self, model):
        def version(number, before, after):
            return {"number": number, "trained": 0, "answers": 60, "before": before, "after": after}

        first = {"user": 0.58, "built_in": 0.43}
        versions = [
            version(1, {"user": 0.47, "built_in": 0.43}, first),
            version(2, first, {"user": 0.61, "built_in": 0.44}),
        ]
        state = "collecting answers: 7 of 20 until the next training"
        return {"enabled": self.enabled, "state": state, "versions": versions}


class Served:
    """The application in a thread. address: of the page."""

    def __init__(self, **access):
        self.engine, self.learning = ScriptedEngine(), ScriptedLearning()
        opened = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://localhost:{opened.getsockname()[1]}"
        served = ServedModels([ServedModel("scripted", {}, engine=self.engine)])
        config = uvicorn.Config(
            app.create(served, app.Access(**access), learning=self.learning),
            lifespan="off",
            log_level="error",
            access_log=False,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = lambda: threading.Lock()  # signals are those of pytest
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [opened]})
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not BROWSER:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def served():
    with Served() as started:
        yield started


@pytest.fixture
def seeing(served):
    """The server of a model that reads images."""
    served.engine.loaded = dataclasses.replace(served.engine.loaded, reads=(Image,))
    return served


@pytest.fixture
def open_page(browser, served):
    """Open the page in a new window with a storage of its own; every error on it fails the test."""
    problems, contexts = [], []

    def make(address=None, allowed=(), context=None, **options):
        context = context or browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))

        def on_console(message):
            if message.type in ("error", "warning") and not any(text in message.text for text in allowed):
                problems.append(f"console: {message.text}")

        page.on("console", on_console)
        page.on("request", lambda request: external(request.url))
        page.goto(address or served.address)
        return page

    def external(url):
        if not url.startswith(("http://localhost:", "blob:http://localhost:")):
            problems.append(f"request: {url}")

    yield make
    for context in dict.fromkeys(contexts):
        context.close()
    assert problems == []


def ask(page, question):
    """Ask, and wait for the end of the answer."""
    page.fill("#question", question)
    page.keyboard.press("Enter")
    wait_until(lambda: page.locator("#status").text_content() in ("The answer is complete.",))


def keep_settings(page):
    """Leave the dialog; the settings are read with its `close` event, after it is hidden."""
    page.evaluate(
        """() => {
          const dialog = document.getElementById("settings");
          window.kept = new Promise((done) => dialog.addEventListener("close", () => done(), { once: true }));
        }"""
    )
    page.click("#settings button.main")
    page.evaluate("window.kept")


def text_of(page, selector):
    return [element.text_content() for element in page.query_selector_all(selector)]


# Images

GIVE = """([how, files]) => {
  const data = new DataTransfer();
  for (const [name, type, base64] of files) {
    data.items.add(new File([Uint8Array.from(atob(base64), (c) => c.charCodeAt(0))], name, { type }));
  }
  const options = { bubbles: true, cancelable: true };
  const target = document.getElementById(how === "paste" ? "question" : "turns");
  const event = how === "paste"
    ? new ClipboardEvent("paste", { clipboardData: data, ...options })
    : new DragEvent("drop", { dataTransfer: data, ...options });
  return target.dispatchEvent(event);
}"""
LOADED = "img => img.complete && img.naturalWidth > 0"


def picture(form="PNG", size=(40, 30), colour="red", **options):
    """The bytes of a file of one colour."""
    file = io.BytesIO()
    Pillow.new("RGB", size, colour).save(file, form, **options)
    return file.getvalue()


def give(page, how, *files):
    """Drop or paste files, each (name, type, bytes); return whether the browser does what it does else."""
    encoded = [[name, kind, base64.b64encode(data).decode()] for name, kind, data in files]
    return page.evaluate(GIVE, [how, encoded])


def shown(page, count, place="#files"):
    """Wait for so many images, all of which are loaded; return their names."""
    images = page.locator(f"{place} .thumbnail img")
    wait_until(lambda: images.count() == count and all(image.evaluate(LOADED) for image in images.all()))
    return [image.get_attribute("alt") for image in images.all()]
