"""Images from URLs: only from hosts that the user allows, never from a private network behind a name."""

import http.server
import socket
import ssl
import threading
import time

import pytest

from spec_local.errors import InvalidRequest
from spec_local.server.protocols import image_urls
from spec_local.server.protocols.image_urls import ImageHosts, checked_host

DATA = bytes(range(256)) * 1000


class Handler(http.server.BaseHTTPRequestHandler):
    """Replies of each kind, by path."""

    requested = []  # noqa: RUF012

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.requested.append(self.path)
        path, _, rest = self.path.removeprefix("/").partition("?")
        match path:
            case "image":
                self.reply(DATA)
            case "to":
                self.send_response(302)
                self.send_header("location", rest)
                self.end_headers()
            case "loop":
                self.send_response(307)
                self.send_header("location", "/loop")
                self.end_headers()
            case "endless":
                self.send_response(200)
                self.end_headers()
                while True:
                    self.wfile.write(DATA)
            case "long":
                self.send_response(200)
                self.send_header("content-length", str(1 << 40))
                self.end_headers()
            case "cut":
                self.send_response(200)
                self.send_header("content-length", "1000000")
                self.end_headers()
                self.wfile.write(DATA)
            case "slow" | "slow-headers":
                self.wfile.write(b"HTTP/1.0 200 OK\r\n" + b"\r\n" * (path == "slow"))
                while True:
                    self.wfile.write(b"a")
                    time.sleep(0.02)
            case _:
                self.send_error(404)

    def reply(self, data):
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass  # the client has gone


@pytest.fixture
def server():
    Handler.requested.clear()
    with Server(("127.0.0.1", 0), Handler) as opened:
        threading.Thread(target=opened.serve_forever, args=[0.01], daemon=True).start()
        yield f"127.0.0.1:{opened.server_port}"
        opened.shutdown()


def refusal(url, *hosts, **options):
    with pytest.raises(InvalidRequest) as error:
        ImageHosts([*map(checked_host, hosts)], **options).fetch(url)
    line = str(error.value)
    assert line.isprintable()
    assert len(line) < 300
    return line


def test_an_image_is_fetched_once(server):
    assert ImageHosts([server]).fetch(f"http://{server}/image?a=b c") == DATA
    assert Handler.requested == ["/image?a=b%20c"]


def test_redirects_stay_at_their_host(server):
    hosts = ImageHosts([server])
    assert hosts.fetch(f"http://{server}/to?/image") == DATA
    assert hosts.fetch(f"http://{server}/to?http://{server}/image") == DATA
    Handler.requested.clear()
    port = server.rpartition(":")[2]
    other = f"http://localhost:{port}/image"
    assert "redirects to another host" in refusal(f"http://{server}/to?{other}", server, f"localhost:{port}")
    assert "fetches no images from" in refusal(f"http://{server}/to?http://10.0.0.1/", server)
    assert "'file'" in refusal(f"http://{server}/to?file:///etc/passwd", server)
    assert not any("image" in path and "to?" not in path for path in Handler.requested)
    assert "more than 3 times" in refusal(f"http://{server}/loop", server)


def test_other_hosts_are_not_asked(server):
    name, port = server.split(":")
    for allowed in (name, f"{name}:1", f"{name}:443", "example.org", f"a{server}"):
        assert f"no images from {server}" in refusal(f"http://{server}/image", allowed)
    for url in (f"http://{name}.:{port}/image", f"HTTP://{server}/image"):  # the same host
        assert ImageHosts([server]).fetch(url) == DATA
    Handler.requested.clear()
    for url in (
        *(f"http://example.org@{server}/image", f"http://{server}@example.org/image"),
        *(f"http://{name}:{port}\\@example.org/", f"http://0x7f000001:{port}/image", f"http://[::1/:{port}/"),
        *(f"http://{name}:{port}0/image", f"http://{name}:port/image", f"http://127.1:{port}/image"),
        *(f"http:///{server}/image", f"http:{server}/image", f"//{server}/image", "http://", ""),
    ):
        refusal(url, server)
    assert Handler.requested == []


def test_names_that_lead_into_a_private_network(server, monkeypatch):
    """Whatever the name resolves to, and only if all of its addresses are public."""
    port = int(server.rpartition(":")[2])
    found = ["127.0.0.1"]

    def resolve(name, port, **_):
        return [
            (socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port))
            for a in found
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for address in (
        *("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00::1", "ff02::1"),
        *("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::1"),
    ):
        found[:] = [address]
        assert "private network" in refusal(f"http://a.test:{port}/image", f"a.test:{port}")
    assert Handler.requested == []
    # With an address, the user names the very host.
    found[:] = ["127.0.0.1"]
    assert ImageHosts([server]).fetch(f"http://{server}/image") == DATA
    assert ImageHosts([f"localhost:{port}"]).fetch(f"http://localhost:{port}/image") == DATA


def test_public_addresses():
    assert all(map(image_urls._is_public, ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"]))
    assert not image_urls._is_public("no address")


@pytest.mark.parametrize(
    ("path", "expected"),
    [("endless", "more than 32 MiB"), ("long", "more than 32 MiB"), ("cut", "cannot be fetched"),
     ("absent", "status 404")],
)  # fmt: skip
def test_replies_that_are_no_image(server, path, expected):
    assert expected in refusal(f"http://{server}/{path}", server)


@pytest.mark.parametrize("path", ["slow", "slow-headers"])
def test_slow_replies_end(server, path):
    """Although each byte comes in time."""
    begun = time.monotonic()
    assert "no reply within 0.3 s" in refusal(f"http://{server}/{path}", server, timeout=0.3)
    assert time.monotonic() - begun < 2


def test_a_host_that_is_not_there():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{unused.getsockname()[1]}"
        assert "cannot be fetched" in refusal(f"http://{host}/", host)
        assert "cannot be fetched" in refusal(f"https://{host}/", host)


def test_certificates_are_checked(server, monkeypatch):
    contexts = []
    original = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda: contexts.append(original()) or contexts[0])
    assert "cannot be fetched" in refusal(f"https://{server}/image", server)
    assert contexts[0].check_hostname
    assert contexts[0].verify_mode == ssl.CERT_REQUIRED


def test_hosts_of_the_option():
    assert checked_host(" Upload.Example.org. ") == "upload.example.org"
    assert checked_host("[::1]:80") == "[::1]:80"
    for wrong in ("*", "*.example.org", "https://example.org", "a/b", "a:b", "a:0", "a:70000", "", "a b"):
        with pytest.raises(InvalidRequest, match="is not a host with images"):
            checked_host(wrong)
    hosts = ImageHosts(["example.org"])
    assert hosts._target("https://example.org:443/a")[1:3] == ("example.org", 443)
    for url in ("http://example.org/a", "https://example.org:444/a", "http://example.org:443/a"):
        with pytest.raises(InvalidRequest, match="fetches no images"):
            hosts._target(url)
