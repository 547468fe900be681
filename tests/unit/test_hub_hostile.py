"""Answers that no Hub would give, names that leave the cache, and disks that fail at any moment."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from spec_local.errors import DownloadError, SpecLocalError
from spec_local.models import catalog, hub, hub_cache
from spec_local.models.hub_cache import HubModel
from tests.named_models import write_catalog

REPO = "someone/toy-GGUF"
TOY = b"GGUF" + bytes(range(256)) * 4
SHA256 = hashlib.sha256(TOY).hexdigest()
PARTS = {f"toy-q8_0-0000{i}-of-00002.gguf": b"GGUF" + bytes([i]) * 1000 for i in (1, 2)}
MODEL = HubModel(repo=REPO, files=("toy-q4_k_m.gguf",))
SPLIT = HubModel(repo=REPO, quant="q8_0")


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


def files_of(folder):
    return {path for path in folder.rglob("*") if not path.is_dir()}


def respond(request, status=200, **headers):
    """Send the head of an answer; underscores in names of headers are hyphens."""
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), str(value))
    request.send_header("Connection", "close")  # otherwise the next request may meet the end of this one
    request.end_headers()


def test_an_endless_file_is_not_read(server):
    sent = []

    def endless(request):
        respond(request)
        while sum(sent) < 200 << 20:
            request.wfile.write(bytes(1 << 16))
            sent.append(1 << 16)

    server.hostile["resolve"] = endless
    with pytest.raises(DownloadError, match=f"sent more than {len(TOY)} bytes of toy"):
        pull()
    assert sum(sent) < 16 << 20  # one block, and what the buffers of the sockets hold
    server.hostile.clear()
    assert pull().read_bytes() == TOY


@pytest.mark.parametrize("kind", ["list", "head", "resolve"])
def test_a_server_that_never_answers(server, monkeypatch, kind):
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    server.hostile[kind] = lambda request: time.sleep(1)
    with pytest.raises(
        DownloadError,
        match=r"the Hub .* cannot be reached .*timed out.* will resume; HF_ENDPOINT .*HF_HUB_OFFLINE",
    ):
        pull()


@pytest.mark.parametrize(
    ("name", "value"),
    [("HF_TOKEN", "hf_\xe9"), ("HTTP_PROXY", "gopher://x"), ("ENDPOINT", "http://[::")],
)
def test_invalid_settings(server, monkeypatch, name, value):
    if name == "ENDPOINT":
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_PROXY")
    huggingface_hub.close_session()
    with pytest.raises(DownloadError, match="check the network, HF_ENDPOINT, HF_TOKEN and") as caught:
        pull()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_ctrl_c_stops_a_download_and_keeps_the_partial_file(server, tmp_path):
    def stops(request):  # after half of the file
        respond(request, Content_Length=len(TOY))
        request.wfile.write(TOY[: len(TOY) // 2])
        request.wfile.flush()
        time.sleep(60)

    server.hostile["resolve"] = stops
    script = (
        "import signal\n"
        "from spec_local.models import hub, hub_client\n"
        "from spec_local.models.hub_cache import HubModel\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore it
        "hub_client.BLOCK = 100\n"
        "def progress(done, total): print(done, flush=True)\n"
        f"hub.pull(HubModel({REPO!r}, files={MODEL.files!r}), 'toy', lambda line: None, progress)\n"
    )
    environment = os.environ | server.environment(tmp_path) | {"HF_HUB_CACHE": str(tmp_path / "cache")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, **pipes) as child:
        try:
            for line in child.stdout:
                if line == b"500\n":
                    break
            child.send_signal(signal.SIGINT)
            assert child.wait(30) == -signal.SIGINT
        finally:
            child.kill()
    part = hub_cache.part_of(hub_cache.repo_folder(REPO) / "blobs" / SHA256)
    kept = part.stat().st_size
    assert kept >= 400
    assert part.read_bytes() == TOY[:kept]
    server.hostile.clear()
    assert pull().read_bytes() == TOY
    assert server.requests[-1][2] == f"bytes={kept}-"


SAFE = ["toy-Q4_0.gguf", "a/b/toy-Q4_0.gguf", "~/toy-Q4_0.gguf", "C:\\toy-Q4_0.gguf", "..\\..\\toy-Q4_0.gguf"]
UNSAFE = [
    "../../../../toy-Q4_0.gguf",
    "a/../../../../../../toy-Q4_0.gguf",
    "a/./toy-Q4_0.gguf",
    "/tmp/specdec-hostile/toy-Q4_0.gguf",
    "a\0b-Q4_0.gguf",
    "a\ud800b-Q4_0.gguf",
    "a\x1b[2Jb-Q4_0.gguf",
    "a\nb-Q4_0.gguf",
    "a" * 300 + "-Q4_0.gguf",
    "a/" * 3000 + "-Q4_0.gguf",
    "-Q4_0-00001-of-99999.gguf",
    "",
]


def listing(name="toy-Q4_0.gguf", size=1028, sha256=SHA256, commit="2" * 40):
    """The JSON of a repository with one file, whose content is TOY."""
    lfs = {"size": size, "sha256": sha256, "pointerSize": 134}
    file = {"rfilename": name, "size": size, "blobId": "1" * 40, "lfs": lfs}
    return {"id": REPO, "sha": commit, "siblings": [file]}


def check_pull(server, tmp_path, body):
    """Pull, with this list of files: a file in the cache, or one line of error, and nothing anywhere else."""
    server.hostile["list"] = lambda request: server.send(request, 200, body)
    server.hostile["head"] = lambda request: server.send(request, 200, TOY)
    server.hostile["resolve"] = lambda request: server.send(request, 200, TOY)
    path, message = outcome(pull, HubModel(REPO, quant="Q4_0"))
    assert message.isprintable()
    if path:
        assert path.read_bytes() == TOY
        assert str(path).isprintable()
        assert path.resolve().is_relative_to(tmp_path / "cache")
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}
    assert not Path("/tmp/specdec-hostile").exists()
    return message


@pytest.mark.slow
@pytest.mark.parametrize("name", SAFE + UNSAFE, ids=range(len(SAFE + UNSAFE)))
def test_no_name_leaves_the_cache(server, tmp_path, name):
    message = check_pull(server, tmp_path, json.dumps(listing(name)).encode())
    assert bool(message) == (name in UNSAFE)


@pytest.mark.parametrize(
    "changes",
    [
        *({"size": size} for size in (-1, 2.5, True, None, "7")),
        *({"sha256": name} for name in ("../../../../x", "", None, "A" * 64)),
        *({"commit": name} for name in ("../../../x", "main", None)),
        {"name": 7},
    ],
    ids=str,
)
def test_no_field_of_a_listing_leaves_the_cache(server, tmp_path, changes):
    message = check_pull(server, tmp_path, json.dumps(listing(**changes)).encode())
    assert "does not respond like the Hugging Face Hub" in message


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"\xff\xfe", b"[" * 100_000], ids=range(5))
def test_what_is_not_a_listing(server, tmp_path, body):
    assert "does not respond like the Hugging Face Hub" in check_pull(server, tmp_path, body)


@pytest.mark.parametrize("kind", ["list", "head"])
@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (500, {}, b'["not what the package expects"]'),
        (400, {}, b'{"errors": [5]}'),
        (404, {"X_Error_Message": "\x1b[2J"}, b"two\nlines"),
        (302, {"Location": "http://["}, b""),
        (302, {"Location": "?"}, b""),  # in a circle
        (204, {}, b""),
        (999, {}, b""),
        (200, {"Content_Encoding": "gzip"}, b"GGUF"),
        (200, {"Content_Length": "-1"}, b""),
    ],
)
def test_no_http_answer_breaks_a_pull(server, kind, status, headers, body):
    def answer(request):
        respond(request, status, **headers)
        request.wfile.write(body)

    server.hostile = {kind: answer}
    path, message = outcome(pull)
    assert message.isprintable()
    assert bool(message) == (path is None)
    server.hostile = {}
    assert pull().read_bytes() == TOY


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

                def tell(self):
                    return file.tell()

            return Failing()

        return wrapped


@pytest.fixture
def named(tmp_path, monkeypatch):
    """A function that returns the name under which `catalog` knows a model of the server."""
    monkeypatch.setattr("platformdirs.user_config_dir", lambda name: str(tmp_path / "config"))
    write_catalog(tmp_path / "config", {"toy": {"repo": REPO, "file": MODEL.files[0]}})
    yield lambda model: "toy" if model is MODEL else f"{REPO}:{model.quant}"
    catalog._catalog.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "code"), [(MODEL, errno.EIO), (SPLIT, errno.ENOSPC)], ids=["one file", "two files"]
)
def test_a_failing_disk_during_a_pull(server, named, tmp_path, monkeypatch, model, code):
    """Each operation in turn: one line of error, no wrong file, and a second pull or removal succeeds."""
    expected = [TOY] if model is MODEL else list(PARTS.values())
    name = named(model)
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
        catalog.remove(name)
        assert hub_cache.cached_files(model) == []
        left = {path.name for path in files_of(tmp_path / "cache") if ".locks" not in path.parts}
        assert {name for name in left if name != "main" and not name.startswith(".main.")} == set()
    assert {"write", "fsync", "replace", "symlink", "close"} <= set(failed)


@pytest.mark.parametrize("model", [MODEL, SPLIT], ids=["one file", "two files"])
def test_a_failing_disk_during_a_removal(server, named, tmp_path, monkeypatch, model):
    """Each operation in turn: one line of error, and a second removal deletes the rest."""
    name = named(model)
    failed = []
    for n in range(1, 100):
        pull(model)
        with monkeypatch.context() as patch:
            disk = FailingDisk(patch, tmp_path / "cache", n, errno.EIO)
            _, message = outcome(catalog.remove, name)
        if not disk.failed:
            break
        assert os.strerror(errno.EIO) in message
        assert message.isprintable()
        failed.append(disk.failed)
        catalog.remove(name)
        left = {path.name for path in files_of(tmp_path / "cache") if ".locks" not in path.parts}
        assert left == {"main"}
        assert catalog.size_on_disk(name) == 0
    assert "unlink" in failed
