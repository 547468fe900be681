"""Names under which clients, web pages and proxies reach a real server."""

import contextlib
import http.client
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tests.server.conftest import Server
from tests.unit.test_server_run import needs_ipv6

QUESTION = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 2}


def answered(server, request):
    """The status of a request as bytes; 0: the connection was closed."""
    host, port = server.address.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                received += part
    return int(received.split(b" ", 2)[1]) if received else 0


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /v1/models HTTP/1.1\nHost: evil.example", 403),
        ("GET /v1/models HTTP/1.1\nHost: EVIL.example.:8080", 403),
        ("GET /v1/models HTTP/1.1\nHost: localhost.:1", 200),
        ("GET //v1//models HTTP/1.1\nHost: [::1]", 200),
        ("GET /v1/models HTTP/1.1\nHost: localhost\nHost: evil.example", 400),
        ("GET /v1/models HTTP/1.1\nHost: evil.example\nHost: localhost", 400),
        ("GET /v1/models HTTP/1.1\nX-Forwarded-Host: localhost\nHost: evil.example", 403),
        ("GET http://evil.example/v1/models HTTP/1.1\nHost: localhost", 403),
        ("GET http://localhost/v1/models HTTP/1.1\nHost: localhost", 200),
        ("GET /v1/models HTTP/1.1\nX: no host", 400),
        ("GET /v1/models HTTP/1.0\nX: no host", 200),
        ("GET /v1/models HTTP/1.1\nHost: localhost\nOrigin: null", 403),
        ("POST /tokenize HTTP/1.1\nHost: localhost\nOrigin: http://evil.example\nContent-Length: 0", 403),
    ],
)
def test_hosts(server, head, status):
    request = (head + "\nConnection: close\n\n").replace("\n", "\r\n")
    assert answered(server, request.encode()) == status


@needs_ipv6
def test_both_loopback_addresses(server):
    port = server.address.rpartition(":")[2]
    for host in ("127.0.0.1", "[::1]", "localhost"):
        assert httpx.get(f"http://{host}:{port}/v1/models").status_code == 200


def test_further_names(specdec, models):
    names = ["--allow-host", "Box.example.org", "--allow-host", "*.ts.net"]
    with Server(specdec, models[0], "--draft", "none", "--ctx", 256, *names) as started:
        for name in ("box.example.org", "a.ts.net:8443"):
            assert started.get("/v1/models", headers={"host": name}).status_code == 200
        refused = started.get("/v1/models", headers={"host": "other.example.org"})
        assert refused.status_code == 403
        assert "--allow-host other.example.org" in refused.json()["error"]["message"]


def test_a_name_that_is_none(inside, models):
    line = inside.one_line(inside("serve", models[0], "--allow-host", "*"), 2)
    assert "'*' is not the name of a host: give one such as box.example.org" in line


def proxy(address, prefix):
    """A proxy that serves an address under a path, and replaces the host, as nginx does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if not self.path.startswith(prefix):
                self.send_error(404)
                return
            upstream = http.client.HTTPConnection(address, timeout=30)
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {**dict(self.headers), "Host": address}
            upstream.request(self.command, "/" + self.path.removeprefix(prefix), body, headers)
            response = upstream.getresponse()
            data = response.read()
            self.send_response(response.status)
            self.send_header("Content-Type", response.headers["content-type"])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            upstream.close()

        do_POST = do_GET

        def log_message(self, *_):
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def test_a_proxy_under_a_path_that_replaces_the_host(server):
    """The page, its scripts with their origin, and what it asks for."""
    there = "https://public.example"
    with proxy(server.address.removeprefix("http://"), "/llm/") as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{listening.server_port}/llm/"
        page = httpx.get(
            base,
            headers={"accept": "text/html", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
        )
        assert page.status_code == 200
        files = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
        assert {"app.js", "style.css"} <= {*files}
        for file in (*files, "markdown.js", "vendor/purify.min.js"):
            assert httpx.get(base + file, headers={"origin": there}).status_code == 200, file
        headers = {"origin": there, "sec-fetch-site": "same-origin"}
        answer = httpx.post(f"{base}v1/chat/completions", json=QUESTION, headers=headers, timeout=30)
        assert answer.status_code == 200
        headers["sec-fetch-site"] = "cross-site"
        assert httpx.post(f"{base}v1/chat/completions", json=QUESTION, headers=headers).status_code == 403
        listening.shutdown()
