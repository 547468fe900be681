"""Names under which clients reach the server, and the web pages that may use it."""

import asyncio
import socket

import pytest

from spec_local.errors import InvalidRequest
from spec_local.server import app
from spec_local.server.guard import host_pattern
from tests.unit.test_server_app import Echo, ScriptedEngine, alone, fetch, scope

PAGE = ("/", "/app.js", "/style.css", "/icon.svg")
KEY = {"authorization": "Bearer k"}


def status(method="GET", path="/v1/models", *, hosts=(), api_key=None, origins=(), **headers):
    access = {"hosts": [host_pattern(host) for host in hosts], "api_key": api_key, "origins": origins}
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    more = {"json": {}} if method == "POST" else {}
    return fetch(method, path, headers=sent, access=access, **more).status_code


OWN = """
    localhost Localhost:8080 LOCALHOST. localhost.:8080 127.0.0.1:8080 127.5.0.1 [::1]:8080 [::1]
    chat.localhost host.docker.internal:8080 HOST.docker.internal. host.containers.internal
    box box:8080 BOX box.local box.local.:8080 box.corp.internal
""".split()  # noqa: SIM905
OTHERS = """
    evil.example evil.example:8080 localhost.evil.example 127.0.0.1.evil.example box.evil.example evil.local
    docker.internal x.host.docker.internal host.docker.internal.evil.example 10.0.0.1 0.0.0.0 [::]:8080
    [fd00::1] [::1].evil.example localhost@evil.example 2130706433 box.corp.internal.evil.example local
    internal
""".split()  # noqa: SIM905


@pytest.fixture(autouse=True)
def box(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.corp.internal")


@pytest.mark.parametrize("host", OWN)
def test_names_of_this_machine(host):
    assert status(host=host) == 200
    assert status("POST", "/v1/echo", host=host, origin=f"http://{host}") == 200


@pytest.mark.parametrize("host", OTHERS)
def test_names_that_a_web_page_can_have(host):
    """It may let its own name resolve to this machine (DNS rebinding)."""
    for path in ("/v1/models", "/props", "/", "/app.js", "/learning/../v1/models"):
        assert status(path=path, host=host) == 403, path
    same_origin = {"origin": f"http://{host}", "sec_fetch_site": "same-origin"}
    assert status("POST", "/v1/echo", host=host, **same_origin) == 403
    assert status("POST", "/v1/echo", host=host, origins="*", **same_origin) == 403


def test_a_name_that_the_network_has_given(monkeypatch):
    """Some systems take their full name from the network that they are in."""
    monkeypatch.setattr(socket, "gethostname", lambda: "box.evil.example")
    assert status(host="box.evil.example") == 403
    assert status(host="box") == status(host="box.local") == 200


@pytest.mark.parametrize("host", ["evil.example", "box.tail1.ts.net", "192.168.1.5:80", "[fd00::1]"])
def test_a_key_admits_any_name(host):
    assert status(host=host, api_key="k", **KEY) == 200
    proxied = {"host": "localhost:8080", "origin": f"http://{host}"}  # by one that replaces the host
    for headers in ({"host": host}, proxied):
        assert status("POST", "/v1/echo", api_key="k", **headers, **KEY) == 200
        assert status(api_key="k", authorization="Bearer x", **headers) in (401, 403)
    assert status(host=host, api_key="k") == 401
    for path in PAGE:  # which asks for the key
        assert status(path=path, host=host, origin=f"https://{host}", api_key="k") == 200


@pytest.mark.parametrize(
    ("pattern", "names", "others"),
    [
        (
            "Box.Example.org",
            ["box.example.org", "box.example.org.:443"],
            ["a.box.example.org", "example.org"],
        ),
        ("*.ts.net", ["a.ts.net", "a.b.ts.net:8443"], ["ts.net", "ats.net", "a.ts.net.evil.example"]),
        ("192.168.1.5:8080", ["192.168.1.5", "192.168.1.5:80"], ["192.168.1.50"]),
        ("fd00::1", ["[fd00::1]", "[fd00::1]:8080"], ["[fd00::2]"]),
        ("[fd00::1]", ["[fd00::1]"], ["fd00"]),
    ],
)
def test_names_that_the_user_gives(pattern, names, others):
    for name in names:
        assert status(host=name, hosts=[pattern]) == 200, name
        assert status("POST", "/v1/echo", host=name, origin=f"https://{name}", hosts=[pattern]) == 200
    for name in others:
        assert status(host=name, hosts=[pattern]) == 403, name


@pytest.mark.parametrize(
    "pattern", ["*", "", "*.", "https://box.example.org", "a b", "a.*", "-x", "b\u00f6x"]
)
def test_what_is_no_name(pattern):
    with pytest.raises(InvalidRequest, match="is not the name of a host: give one"):
        host_pattern(pattern)


def test_the_refusal_says_what_to_do():
    response = fetch("GET", "/v1/models", headers={"host": "Box.Example.org:8080"})
    message = response.json()["error"]["message"]
    assert "does not answer to the name box.example.org" in message
    assert "--allow-host box.example.org" in message
    hostile = fetch("GET", "/v1/models", headers={b"host": b"a\xff'\"" + b"b" * 900}).json()["error"][
        "message"
    ]
    assert hostile.isprintable()
    assert hostile.isascii()
    assert len(hostile) < 400


PROXY = {"host": "localhost:8080"}  # one that replaces the host
THERE = "https://box.example.org"


def test_a_page_behind_a_proxy_that_replaces_the_host():
    for path in PAGE:
        assert status(path=path, origin=THERE, **PROXY) == 200, path
        assert status("HEAD", path, origin=THERE, **PROXY) == 200, path
    browser = {"origin": THERE, "sec_fetch_site": "same-origin"}
    assert status("POST", "/v1/echo", **browser, **PROXY) == 200
    # Without encryption, browsers do not say it; then the user has.
    plain = {"origin": "http://box.example.org:8000"}
    assert status("POST", "/v1/echo", **plain, **PROXY) == 403
    assert status("POST", "/v1/echo", **plain, **PROXY, hosts=["box.example.org"]) == 200


@pytest.mark.parametrize("site", [None, "cross-site", "same-site", "none"])
@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://localhost:3000", "http://127.0.0.1:8080", "null", "http://a.ts.net"],
)
def test_a_page_of_another_origin(origin, site):
    """Although its browser sends the request to a name of this machine."""
    said = {"sec_fetch_site": site} if site else {}
    for hosts in ((), ("*.ts.net", "box.example.org")):
        assert status("POST", "/v1/echo", origin=origin, hosts=hosts, **said, **PROXY) == 403
        assert status(origin=origin, hosts=hosts, **said, **PROXY) == 403
    assert status("POST", "/v1/echo", origin=origin, origins=[origin], **said, **PROXY) == 200


@pytest.mark.parametrize("origin", ["null", "chrome-extension://localhost:8080", "file://", "localhost:8080"])
def test_what_is_no_page_of_a_server(origin):
    for site in ("same-origin", "none"):
        assert status("POST", "/v1/echo", origin=origin, sec_fetch_site=site, **PROXY) == 403


def test_a_page_of_an_allowed_host_that_is_another_site():
    said = {"origin": "http://box.example.org:9000", "sec_fetch_site": "cross-site"}
    assert status("POST", "/v1/echo", hosts=["box.example.org"], **said, **PROXY) == 403


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        # Programs put a path after a base URL that ends with a slash.
        *((path, 200) for path in ("//v1/models", "/v1//models", "/v1/models/", "//v1//models//")),
        # Requests as proxies get them: the host of the target counts, not that of the header.
        ("http://localhost:8080/v1/models", 200),
        ("HTTP://[::1]//v1/models", 200),
        ("http://evil.example/v1/models", 403),
        ("http://evil.example", 403),
        ("http://localhost:8080@evil.example/v1/models", 403),
    ],
)
def test_the_target_of_a_request(target, expected):
    sent = []

    async def send(message):
        sent.append(message)

    created = app.create(alone(ScriptedEngine()), app.Access(), {"/v1/echo": Echo})
    asyncio.run(created(scope(target) | {"method": "GET"}, None, send))
    assert sent[0]["status"] == expected


def test_several_hosts_are_refused():
    response = fetch("GET", "/v1/models", headers=[("host", "localhost"), ("host", "evil.example")])
    assert response.status_code == 400
