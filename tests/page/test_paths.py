"""The page behind a proxy that serves it under a path."""

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.page.conftest import ask, text_of


@pytest.fixture
def proxy(served):
    """A proxy that has the server under /llm/, and nothing else. Returns its address.

    Tests request it before `open_page`, so that it ends after the page, which would miss it.
    """
    port = int(served.address.rpartition(":")[2])

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            if not self.path.startswith("/llm"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            there = http.client.HTTPConnection("localhost", port)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "origin")}
            there.request(self.command, self.path.removeprefix("/llm") or "/", body, headers)
            response = there.getresponse()
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            while part := response.read1():
                self.wfile.write(part)
            there.close()

        do_GET = do_POST = answer

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("localhost", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_all_of_the_page_works_under_a_path(proxy, open_page):
    page = open_page(f"{proxy}/llm/")
    page.wait_for_selector("#model:has-text('scripted')")
    page.wait_for_selector("#statistics svg")
    ask(page, "$x^2$")
    page.wait_for_selector(".answer .katex")
    assert text_of(page, ".answer annotation") == ["x^2"]
    assert page.locator("#failed").count() == 0


def test_without_the_slash_the_page_says_what_is_wrong(proxy, open_page):
    page = open_page(f"{proxy}/llm", allowed=("Failed to load", "Refused to"))
    page.wait_for_selector("#failed:has-text('ends with a slash')")
