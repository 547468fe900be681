"""Answers that no Hub would give: endless, slow, compressed, malformed; and disks that fail at any moment."""

import errno
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import huggingface_hub
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spec_local.errors import DownloadError, SpecLocalError
from spec_local.models import catalog, hub, hub_cache, hub_client
from spec_local.models.hub_cache import HubModel

REPO = "someone/toy-GGUF"
TOY = b"GGUF" + bytes(range(256)) * 4
SHA256 = hashlib.sha256(TOY).hexdigest()
PARTS = {f"toy-q8_0-0000{i}-of-00002.gguf": b"GGUF" + bytes([i]) * 1000 for i in (1, 2)}
MODEL = HubModel(repo=REPO, files=("toy-q4_k_m.gguf",))
SPLIT = HubModel(repo=REPO, quant="q8_0")
MANY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def server(hub_server):
    hub_server.put(REPO, {"toy-q4_k_m.gguf": TOY, **PARTS})
    return hub_server


def pull(model=MODEL):
    return hub.pull(model, "toy", log=lambda line: None)


def outcome(call, *args):
    """The result of a call, and the message of its error."""
    try:
        return call(*args), ""
    except SpecLocalError as error:
        return None, str(error)


def part_of(sha256=SHA256):
    return hub_cache.part_of(hub_cache.repo_folder(REPO) / "blobs" / sha256)


def respond(request, status=200, **headers):
    """Send the head of an answer; underscores in names of headers are hyphens."""
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), str(value))
    request.end_headers()
    request.close_connection = True


class Endless:
    """Answers with one status and an unlimited body; `sent` counts its bytes."""

    def __init__(self, status, **headers):
        self.status, self.headers, self.sent = status, headers, 0
        self.stopped = threading.Event()

    def __call__(self, request):
        respond(request, self.status, **self.headers)
        try:
            while self.sent < 200 << 20:
                request.wfile.write(b"[" * 65536)
                self.sent += 65536
        finally:
            self.stopped.set()


@pytest.mark.parametrize(
    ("kind", "status", "headers", "what"),
    [
        ("list", 200, {}, "has more than 4 MiB"),
        ("list", 302, {"Location": "/elsewhere"}, "status 404"),
        ("list", 500, {}, "status 500"),
        ("list", 404, {"X_Error_Code": "RepoNotFound"}, "has no model"),
        ("resolve", 200, {}, f"sent more than {len(TOY)} bytes of toy"),
        ("resolve", 200, {"Content_Length": 10**12}, "with 1000000000000 bytes instead of"),
        ("resolve", 302, {"Location": "/elsewhere"}, "status 404"),
        ("resolve", 503, {}, "status 503"),
        ("resolve", 300, {}, "status 300"),
    ],
)
def test_an_endless_answer_is_not_read(server, kind, status, headers, what):
    endless = server.hostile[kind] = Endless(status, **headers)
    with pytest.raises(DownloadError, match=what):
        pull()
    assert endless.stopped.wait(10)
    # what was read, and what the buffers of the sockets hold
    assert endless.sent < (4 << 20) + (16 << 20)
    assert not part_of().exists() or part_of().stat().st_size <= len(TOY)
    server.hostile.clear()
    assert pull().read_bytes() == TOY


def test_compressed_answers_are_refused(server):
    bomb = gzip.compress(bytes(64 << 20))
    server.hostile["resolve"] = lambda request: server.send(request, 200, bomb, {"Content-Encoding": "gzip"})
    with pytest.raises(DownloadError, match="compressed, which was not requested"):
        pull()
    assert not part_of().exists()
    server.hostile["list"] = lambda request: server.send(request, 200, bomb, {"Content-Encoding": "gzip"})
    with pytest.raises(DownloadError, match="does not respond like the Hugging Face Hub"):
        pull()


def test_redirects_in_a_circle_end(server):
    server.hostile["list"] = lambda request: server.send(request, 302, b"", {"Location": request.path})
    with pytest.raises(DownloadError, match="without end"):
        pull()


@pytest.mark.parametrize(
    "location",
    ["http://[", "http://" + "a" * 70 + ".x/", "ftp://x/", "\x1b[2J", "http://\xff\xfe/", "http://x:0x/"],
)
def test_redirects_to_invalid_addresses(server, location):
    server.hostile["list"] = lambda request: server.send(request, 302, b"", {"Location": location})
    with pytest.raises(DownloadError) as caught:
        pull()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("HF_TOKEN", "hf_\xe9"), ("HTTP_PROXY", "gopher://x"), ("ENDPOINT", "http://[::")],
)
def test_invalid_settings(server, monkeypatch, name, value):
    if name == "ENDPOINT":
        monkeypatch.setattr(hub_client.constants, name, value)
    monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_PROXY")
    huggingface_hub.close_session()
    with pytest.raises(DownloadError) as caught:
        pull()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("found", ["bytes 0-1027/1028", "bytes 400-1027/1028", "pages 1-2", ""])
def test_another_range_keeps_the_partial_file(server, found):
    part_of().parent.mkdir(parents=True)
    part_of().write_bytes(TOY[:300])
    server.hostile["resolve"] = lambda request: server.send(
        request, 206, TOY[300:], {"Content-Range": found} if found else {}
    )
    if found:
        with pytest.raises(DownloadError, match="from another position than byte 300"):
            pull()
        assert part_of().read_bytes() == TOY[:300]
        server.hostile.clear()
    assert pull().read_bytes() == TOY


class Trickle:
    """Sends the first half of the file, then a byte from time to time."""

    def __init__(self, body, pause):
        self.body, self.pause = body, pause

    def __call__(self, request):
        respond(request, Content_Length=len(self.body))
        half = len(self.body) // 2
        request.wfile.write(self.body[:half])
        for i in range(half, len(self.body)):
            time.sleep(self.pause)
            request.wfile.write(self.body[i : i + 1])


@pytest.mark.parametrize("kind", ["list", "resolve"])
def test_a_slow_server_meets_a_deadline(server, monkeypatch, kind):
    monkeypatch.setattr(hub_client, "PATIENCE_S", 0.2)
    monkeypatch.setattr(hub_client, "_SLOWEST", 10**6)
    server.hostile[kind] = Trickle(TOY, 0.05)
    with pytest.raises(DownloadError, match=r"sent only \d+ bytes in .* the download will resume"):
        pull()
    if kind == "resolve":
        assert part_of().read_bytes() == TOY[: part_of().stat().st_size]
        assert part_of().stat().st_size >= len(TOY) // 2
    server.hostile.clear()
    assert pull().read_bytes() == TOY


def test_a_server_that_sends_a_byte_for_each_request(server):
    """A byte is no progress: otherwise, a file of a few gigabytes would need as many requests."""
    server.cuts = [1] * 10
    with pytest.raises(DownloadError, match="cannot reach the Hub"):
        pull()
    assert server.count("bytes") == hub_client.TRIES
    assert part_of().read_bytes() == TOY[: hub_client.TRIES]
    server.cuts = []
    assert pull().read_bytes() == TOY


@pytest.mark.slow
def test_ctrl_c_stops_a_slow_download_and_keeps_the_partial_file(server, tmp_path):
    server.hostile["resolve"] = Trickle(TOY, 3600.0)
    script = (
        "import signal\n"
        "from spec_local.models import hub\n"
        "from spec_local.models.hub_cache import HubModel\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore it
        "def progress(*n): print('received', flush=True)\n"
        f"hub.pull(HubModel({REPO!r}, files={MODEL.files!r}), 'toy', lambda line: None, progress)\n"
    )
    environment = os.environ | server.environment(tmp_path) | {"HF_HUB_CACHE": str(tmp_path / "cache")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, **pipes) as child:
        try:
            assert child.stdout.readline() == b"received\n"
            child.send_signal(signal.SIGINT)
            assert child.wait(30) == -signal.SIGINT
        finally:
            child.kill()
    assert part_of().read_bytes() == TOY[: len(TOY) // 2]
    server.hostile.clear()
    assert pull().read_bytes() == TOY


NAMES = [
    "toy-Q4_0.gguf",
    "a/b/toy-Q4_0.gguf",
    "../../../../toy-Q4_0.gguf",
    "a/../../../../../../toy-Q4_0.gguf",
    "/tmp/specdec-hostile/toy-Q4_0.gguf",
    "~/toy-Q4_0.gguf",
    "~root/toy-Q4_0.gguf",
    "C:\\toy-Q4_0.gguf",
    "..\\..\\toy-Q4_0.gguf",
    "\\\\server\\toy-Q4_0.gguf",
    "a\0b-Q4_0.gguf",
    "a\ud800b-Q4_0.gguf",
    "a\x1b[2Jb-Q4_0.gguf",
    "a\nb-Q4_0.gguf",
    "a" * 300 + "-Q4_0.gguf",
    "a/" * 3000 + "-Q4_0.gguf",
    ".-Q4_0.gguf/-Q4_0.gguf",
    "-Q4_0-00001-of-00001.gguf",
    "-Q4_0-00001-of-99999.gguf",
    ".gguf",
    "",
]
NUMBERS = st.sampled_from([0, -1, len(TOY), 2**63 - 1, 2**63, 10**400, 1.5, 1e300, True, None])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | NUMBERS
VALUES = st.recursive(
    SCALARS | st.sampled_from(NAMES),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["sha", "siblings", "rfilename", "size", "lfs", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


def files_of(folder):
    return {path for path in folder.rglob("*") if not path.is_dir()}


def listing_of(*names, size=1028):
    """A good listing of files with these names, each with the content of TOY."""
    files = [
        {
            "rfilename": name,
            "size": size,
            "blobId": "1" * 40,
            "lfs": {"size": size, "sha256": SHA256, "pointerSize": 134},
        }
        for name in names
    ]
    return {"id": REPO, "sha": "2" * 40, "siblings": files}


@st.composite
def damaged_listings(draw):
    """A listing with hostile names, in which some values are replaced or deleted."""
    listing = listing_of(*draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3)))
    files = listing["siblings"]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.sampled_from([listing, *files, *(file["lfs"] for file in files)]))
        key = draw(st.sampled_from(sorted(at)))
        if draw(st.booleans()):
            at[key] = draw(VALUES)
    return listing


def check_pull(server, tmp_path, answer):
    """Whatever JSON the Hub returns: a file in the cache, or one line of error, and nothing anywhere else."""
    server.requests.clear()
    server.hostile["list"] = lambda request: server.send(request, 200, json.dumps(answer).encode())
    server.hostile["resolve"] = lambda request: server.send(request, 200, TOY)
    path, message = outcome(pull, HubModel(REPO, quant="Q4_0"))
    assert message.isprintable()
    if path:
        assert path.read_bytes() == TOY
        assert str(path).isprintable()
        assert path.resolve().is_relative_to(tmp_path / "cache")
        hub_cache.remove(HubModel(REPO, quant="Q4_0"))
    assert {path.relative_to(tmp_path).parts[0] for path in files_of(tmp_path)} <= {"cache"}
    assert not Path("/tmp/specdec-hostile").exists()
    return message


@pytest.mark.slow
@MANY
@given(answer=damaged_listings() | VALUES)
def test_no_listing_breaks_a_pull(server, tmp_path, answer):
    check_pull(server, tmp_path, answer)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_no_name_breaks_a_pull(server, tmp_path, name):
    check_pull(server, tmp_path, listing_of(name))
    check_pull(server, tmp_path, listing_of(name, f"x/{name}", "y-Q4_0.gguf"))


@pytest.mark.parametrize("size", [-1, 2**63, 10**400, 1.5, True, None, "7", [7]], ids=str)
def test_sizes_that_no_file_has(server, tmp_path, size):
    message = check_pull(server, tmp_path, listing_of("toy-Q4_0.gguf", size=size))
    assert "does not respond like the Hugging Face Hub" in message


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"sha":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"sha": "\\ud800", "siblings": []}',
        b'{"sha": "%s", "siblings": [{"rfilename": "\\udfff.gguf"}]}' % (b"2" * 40),
        b'{"sha": "%s", "siblings": [%s]}' % (b"2" * 40, b",".join([b"{}"] * 500_000)),
        b'{"sha": %s}' % (b"9" * 100_000),
        b'{"sha": 1e999999}',
        b"\xff\xfe\x00",
        b"",
        b"null",
        b"<html>",
    ],
    ids=range(12),
)
def test_no_bytes_break_a_pull(server, body):
    server.hostile["list"] = lambda request: server.send(request, 200, body)
    with pytest.raises(DownloadError, match="does not respond like the Hugging Face Hub"):
        pull()


HEADERS = st.dictionaries(
    st.sampled_from(
        ["Content-Length", "Content-Range", "Content-Encoding", "Content-Type", "Location", "Retry-After"]
    )
    | st.sampled_from(["X-Error-Code", "X-Error-Message", "Transfer-Encoding", "Set-Cookie", "X-HF-Warning"]),
    st.sampled_from(
        ["", "0", "-1", "7", "1028", "9" * 30, "bytes 0-", "gzip", "chunked", "identity", "\x1b[2J"]
    )
    | st.sampled_from(["/", "//", "http://127.0.0.1:1/", "?", "RepoNotFound", "GatedRepo", "EntryNotFound"])
    | st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=9),
    max_size=3,
)


@MANY
@example(
    kind="list", status=200, headers={"Set-Cookie": "a=\x80"}, body=b""
)  # it was sent with later requests
@given(
    kind=st.sampled_from(["list", "resolve"]),
    status=st.sampled_from([200, 204, 206, 300, 302, 304, 308, 400, 401, 404, 416, 429, 451, 500, 599, 999]),
    headers=HEADERS,
    body=st.sampled_from([b"", TOY, TOY[:7], b"[" * 9999, b'{"error": 5}', b'["error"]', b'{"errors": [5]}']),
)
def test_no_http_answer_breaks_a_pull(server, kind, status, headers, body):
    def answer(request):
        respond(request, status, **headers)
        request.wfile.write(body)

    server.hostile = {kind: answer}
    path, message = outcome(pull)
    assert "\n" not in message
    if path:
        assert path.read_bytes() == TOY
        hub_cache.remove(MODEL)
    server.hostile = {}
    assert pull().read_bytes() == TOY
    hub_cache.remove(MODEL)


class FailingDisk:
    """Makes the n-th operation fail that changes files in a folder; counts them."""

    def __init__(self, monkeypatch, folder, n, code):
        self.left, self.folder, self.code, self.failed = n, str(folder), code, None
        for name in ("replace", "symlink", "unlink", "fsync", "mkdir"):
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        monkeypatch.setattr(Path, "open", self._open(Path.open))

    def count(self, what):
        self.left -= 1
        if self.left == 0:
            self.failed = what
            raise OSError(self.code, os.strerror(self.code), what)

    def _wrapped(self, name, call):
        def wrapped(*args, **kwargs):
            if name == "fsync" or any(self.folder in str(arg) for arg in args):
                self.count(name)
            return call(*args, **kwargs)

        return wrapped

    def _open(self, call):
        def wrapped(path, mode="r", *args, **kwargs):
            if not set("wa") & set(mode) or self.folder not in str(path):
                return call(path, mode, *args, **kwargs)
            self.count("open")
            file = call(path, mode, buffering=0)
            disk = self

            class Failing:
                def __enter__(self):
                    return self

                def __exit__(self, *error):
                    file.close()
                    disk.count("close")

                def write(self, data):
                    disk.count("write")
                    return file.write(data)

            return Failing()

        return wrapped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "code"), [(MODEL, errno.EIO), (SPLIT, errno.ENOSPC)], ids=["one file", "two files"]
)
def test_a_failing_disk_during_a_pull(server, tmp_path, monkeypatch, model, code):
    """Each operation in turn: one line of error, no wrong file, and a second pull or removal succeeds."""
    expected = [TOY] if model is MODEL else list(PARTS.values())
    monkeypatch.setattr(catalog, "_hub_model", lambda name: model)
    failed = []
    for n in range(1, 100):
        with monkeypatch.context() as patch:
            disk = FailingDisk(patch, tmp_path / "cache", n, code)
            path, message = outcome(pull, model)
        if not disk.failed:
            break
        assert path or os.strerror(code) in message
        assert message.isprintable()
        failed.append(disk.failed)
        found = [path.read_bytes() for path in hub_cache.cached_files(model)]
        assert found in ([], expected), disk.failed
        if n % 2:
            pull(model)
            assert [path.read_bytes() for path in hub_cache.cached_files(model)] == expected, disk.failed
        catalog.remove("x/y:z")
        assert hub_cache.cached_files(model) == []
        left = {path.name for path in files_of(tmp_path / "cache") if ".locks" not in path.parts}
        assert {name for name in left if name != "main" and not name.startswith(".main.")} == set()
    assert {"write", "fsync", "replace", "symlink", "close"} <= set(failed)


@pytest.mark.parametrize("model", [MODEL, SPLIT], ids=["one file", "two files"])
def test_a_failing_disk_during_a_removal(server, tmp_path, monkeypatch, model):
    """Each operation in turn: one line of error, and a second removal deletes the rest."""
    monkeypatch.setattr(catalog, "_hub_model", lambda name: model)
    failed = []
    for n in range(1, 100):
        pull(model)
        with monkeypatch.context() as patch:
            disk = FailingDisk(patch, tmp_path / "cache", n, errno.EIO)
            _, message = outcome(catalog.remove, "x/y:z")
        if not disk.failed:
            break
        assert os.strerror(errno.EIO) in message
        assert message.isprintable()
        failed.append(disk.failed)
        catalog.remove("x/y:z")
        left = {path.name for path in files_of(tmp_path / "cache") if ".locks" not in path.parts}
        assert left == {"main"}
        assert catalog.size_on_disk("x/y:z") == 0
    assert "unlink" in failed
