"""Download from a local server that behaves like the Hugging Face Hub, with the real client."""

import hashlib
import threading

import pytest
from huggingface_hub import constants, scan_cache_dir, try_to_load_from_cache

from spec_local.errors import DownloadError, InvalidRequest
from spec_local.models import hub, hub_cache, hub_client
from spec_local.models.hub_cache import HubModel
from tests.hub_server import Refusal, git_hash

REPO = "someone/toy-GGUF"
TOY = b"GGUF" + bytes(range(256)) * 40
SHA256 = hashlib.sha256(TOY).hexdigest()
PARTS = {f"toy-q8_0-0000{i}-of-00003.gguf": b"GGUF" + bytes([i]) * 1000 * i for i in (1, 2, 3)}
MODEL = HubModel(repo=REPO, files=("toy-q4_k_m.gguf",))


@pytest.fixture
def server(hub_server, monkeypatch):
    monkeypatch.setattr(hub_client, "BLOCK", 100)
    hub_server.commit = hub_server.put(REPO, {"README.md": b"#", "toy-q4_k_m.gguf": TOY, **PARTS})
    return hub_server


def pull(model, **kwargs):
    return hub.pull(model, "toy", **({"log": lambda line: None} | kwargs))


def interrupt(model, n):
    """Pull, and press Ctrl-C after n bytes, a multiple of the block."""

    def progress(done, total):
        if done > n:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(model, progress=progress)


def cached(tmp_path):
    """Every file in the cache except locks and refs."""
    found = [
        p for p in (tmp_path / "cache").rglob("*") if p.is_file() and not {".locks", "refs"} & {*p.parts}
    ]
    return sorted(p.relative_to(tmp_path / "cache" / "models--someone--toy-GGUF").as_posix() for p in found)


def test_pull_and_find(server, tmp_path):
    assert hub_cache.cached_files(MODEL) == []
    lines, progress = [], []
    path = pull(MODEL, log=lines.append, progress=lambda *n: progress.append(n))
    assert path.read_bytes() == TOY
    assert hub_cache.cached_files(MODEL) == [path]
    assert lines == [f"downloading toy: 0.0 MB into {tmp_path / 'cache'}"]
    assert progress[-1] == (len(TOY), len(TOY))
    assert pull(MODEL, log=lines.append) == path
    assert server.count("list") == server.count("bytes") == len(lines) == 1  # the second pull did nothing
    assert hub_cache.cached_files(HubModel(repo=REPO, quant="q4_k_m")) == [
        path
    ]  # another name for the same file


def test_other_tools_find_the_cached_file(server, tmp_path):
    path = pull(MODEL)
    assert try_to_load_from_cache(REPO, "toy-q4_k_m.gguf", cache_dir=tmp_path / "cache") == str(path)
    scan = scan_cache_dir(tmp_path / "cache")
    assert scan.warnings == []
    assert scan.size_on_disk == len(TOY)
    (revision,) = next(iter(scan.repos)).revisions
    assert (revision.commit_hash, revision.refs) == (server.commit, frozenset({"main"}))


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no ranges"])
def test_a_pull_resumes_an_interrupted_one(server, tmp_path, ranges):
    interrupt(MODEL, 1000)
    assert hub_cache.cached_files(MODEL) == []
    assert cached(tmp_path) == [f"blobs/{SHA256}.incomplete"]
    server.requests.clear()
    server.ranges, lines, progress = ranges, [], []
    found = pull(MODEL, log=lines.append, progress=lambda *n: progress.append(n))
    assert found.read_bytes() == TOY
    assert [request[2] for request in server.requests if request[0] == "bytes"] == ["bytes=1000-"]
    assert "of it already downloaded" in lines[0]
    assert progress[0] == (1100 if ranges else 100, len(TOY))
    assert progress[-1] == (len(TOY), len(TOY))


def test_a_pull_resumes_after_a_lost_connection(server):
    server.cuts = [1000]
    progress = []
    assert pull(MODEL, progress=lambda *n: progress.append(n)).read_bytes() == TOY
    assert [request[2] for request in server.requests if request[0] == "bytes"] == [None, "bytes=1000-"]
    assert progress == sorted(progress)
    server.cuts = [0] * 100
    with pytest.raises(
        DownloadError, match=r"the Hub .* cannot be reached .* will resume; HF_ENDPOINT .*HF_HUB_OFFLINE"
    ):
        pull(HubModel(REPO, quant="Q8_0"))


def test_a_wrong_file_is_deleted(server, tmp_path):
    server.wrong[SHA256] = bytes(reversed(TOY))
    with pytest.raises(DownloadError, match=f"does not have the hash {SHA256}: it was deleted"):
        pull(MODEL)
    assert cached(tmp_path) == []
    assert hub_cache.cached_files(MODEL) == []


@pytest.mark.parametrize("wrong", [TOY + b"!", TOY[:-1], b""], ids=["long", "short", "empty"])
def test_a_file_of_another_size_is_refused(server, tmp_path, wrong):
    server.wrong[SHA256] = wrong
    with pytest.raises(DownloadError, match=f"with {len(wrong)} bytes instead of {len(TOY)}"):
        pull(MODEL)
    assert hub_cache.cached_files(MODEL) == []
    server.wrong.clear()
    assert pull(MODEL).read_bytes() == TOY


def test_a_file_that_is_too_large_for_http(server, monkeypatch):
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(TOY) - 1)
    with pytest.raises(DownloadError, match=f"or run hf download {REPO} toy-q4_k_m.gguf"):
        pull(MODEL)
    assert server.count("bytes") == 0


def test_files_in_git_have_the_hash_of_git(server, tmp_path):
    """The Hub keeps small files outside of LFS, and has no SHA-256 of them."""
    server.in_git = {"toy-q4_k_m.gguf"}
    path = pull(MODEL)
    assert path.read_bytes() == TOY
    # printf GGUF | git hash-object --stdin
    assert git_hash(b"GGUF") == "53b7dcdfb2702f3512ca9b967b2a138fcfe9bea9"
    assert path.resolve().name == git_hash(TOY)
    path.resolve().write_bytes(TOY[:-1] + b"?")
    assert pull(MODEL).read_bytes() == TOY  # found damaged, and downloaded again
    hub_cache.remove(MODEL)
    server.wrong[SHA256] = TOY[:-1] + b"?"
    with pytest.raises(DownloadError, match=f"does not have the hash {git_hash(TOY)}: it was deleted"):
        pull(MODEL)
    server.wrong.clear()
    with pytest.raises(DownloadError, match=f"does not have the hash {'0' * 64}: it was deleted"):
        pull(HubModel(REPO, MODEL.files, sha256="0" * 64))
    assert cached(tmp_path) == []


@pytest.mark.parametrize(
    ("known", "what"), [({"size": 7}, "not 7 as in models.toml"), ({"sha256": "0" * 64}, f"not {'0' * 64}")]
)
def test_a_file_on_the_hub_that_differs_from_models_toml(server, known, what):
    with pytest.raises(DownloadError, match=what):
        pull(HubModel(repo=REPO, files=MODEL.files, **known))
    assert server.count("bytes") == 0
    pull(MODEL)  # without size and hash the file is downloaded; with them it does not count
    assert hub_cache.cached_files(HubModel(repo=REPO, files=MODEL.files, **known)) == []


def test_a_damaged_file_is_downloaded_again(server, tmp_path):
    path = pull(MODEL)
    path.resolve().write_bytes(TOY[:-1] + b"?")
    lines = []
    assert pull(MODEL, log=lines.append) == path
    assert path.read_bytes() == TOY
    assert "damaged" in lines[0]
    path.resolve().write_bytes(TOY[:-1])
    sized = HubModel(REPO, MODEL.files, size=len(TOY))
    assert hub_cache.cached_files(sized) == []
    assert pull(sized, log=lines.append) == path
    assert path.read_bytes() == TOY
    assert lines[-1].startswith("downloading toy")


@pytest.mark.parametrize("kind", ["list", "head"])
@pytest.mark.parametrize(
    ("refusal", "what"),
    [
        (Refusal(401, {"X-Error-Message": "Invalid credentials in Authorization header"}), "hf auth login"),
        (Refusal(401, {"X-Error-Code": "RepoNotFound"}), "check the name; if it is private, log in"),
        (
            Refusal(401, {"X-Error-Code": "GatedRepo"}),
            "is gated: accept its licence at http.*someone/toy-GGUF",
        ),
        (
            Refusal(403, {"X-Error-Code": "GatedRepo"}),
            "is gated: accept its licence at http.*someone/toy-GGUF",
        ),
        (Refusal(403), "request it at"),
        (Refusal(404, {"X-Error-Code": "RepoNotFound"}), "check the name"),
        (Refusal(429, {"Retry-After": "77"}), "wait 77 s"),
        (Refusal(503), "status 503 .* try again later"),
    ],
    ids=["token", "private", "gated 401", "gated 403", "403", "404", "429", "503"],
)
def test_http_errors_suggest_what_to_do(server, tmp_path, kind, refusal, what):
    server.refusals[kind] = refusal
    with pytest.raises(DownloadError, match=what):
        pull(MODEL)
    assert server.count(kind) == 1  # no silent retries
    assert hub_cache.cached_files(MODEL) == []


def test_other_errors_suggest_what_to_do(server, tmp_path, monkeypatch):
    with pytest.raises(DownloadError, match=r"has no file gone\.gguf at revision main"):
        pull(HubModel(repo=REPO, files=("gone.gguf",)))
    with pytest.raises(DownloadError, match="no such revision"):
        pull(HubModel(repo=REPO, files=MODEL.files, revision="v9"))
    server.refusals["list"] = Refusal(200)  # the page of another server
    with pytest.raises(DownloadError, match="does not respond like the Hugging Face Hub"):
        pull(MODEL)
    server.refusals.clear()
    with pytest.raises(InvalidRequest, match="not a valid repository name"):
        pull(HubModel(repo="some--one/a..b", quant="Q4_0"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 5})())
    with pytest.raises(DownloadError, match=r"needs .* MB .* free some space or set HF_HOME"):
        pull(MODEL)
    (tmp_path / "cache2").touch()  # a file where the folder should be
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache2"))
    with pytest.raises(DownloadError, match="cannot write someone/toy-GGUF"):
        pull(MODEL)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(DownloadError, match=r"the Hub .* cannot be reached"):
        pull(MODEL)


def test_a_token_is_sent_to_the_hub(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_toy")
    pull(MODEL)
    assert {request[3] for request in server.requests if request[0] != "bytes"} == {"Bearer hf_toy"}


@pytest.mark.parametrize("model", [HubModel(REPO, tuple(PARTS)), HubModel(REPO, quant="Q8_0")])
def test_split_files(server, tmp_path, model):
    progress = []
    path = pull(model, progress=lambda *n: progress.append(n))
    assert path.name == "toy-q8_0-00001-of-00003.gguf"
    files = hub_cache.cached_files(model)
    assert {p.name: p.read_bytes() for p in files} == PARTS
    assert files[0] == path
    assert progress == sorted(progress)
    assert progress[-1] == (sum(map(len, PARTS.values())),) * 2
    files[2].unlink()
    assert hub_cache.cached_files(model) == []


def test_split_files_are_complete_or_absent(server):
    server.put(REPO, {name: content for name, content in PARTS.items() if "00002" not in name})
    with pytest.raises(InvalidRequest, match="someone/toy-GGUF has no Q8_0 file"):
        pull(HubModel(REPO, quant="Q8_0"))
    server.put(REPO, PARTS)
    server.wrong[hashlib.sha256(PARTS["toy-q8_0-00003-of-00003.gguf"]).hexdigest()] = b"something else"
    with pytest.raises(DownloadError, match="00003"):
        pull(HubModel(REPO, quant="Q8_0"))
    assert hub_cache.cached_files(HubModel(REPO, quant="Q8_0")) == []


NAMES = [
    "toy-Q4_K_M.gguf",
    "toy-Q4_K_S.gguf",
    "toy-F16.gguf",
    "toy-BF16.gguf",
    "mmproj-toy-F16.gguf",
    "toy-Q4_0.gguf",
    "toy-Q4_0_4_4.gguf",
    "toy.imatrix.gguf",
    "Q6_K/toy-Q6_K-00001-of-00002.gguf",
    "Q6_K/toy-Q6_K-00002-of-00002.gguf",
    "README-Q9.md",
    "eagle3-toy-Q5_0.gguf",
    "heads/mtp-toy-Q4_0.gguf",
    "mtp-toy-Q4_K_M.gguf",
]


@pytest.mark.parametrize(
    ("quant", "chosen"),
    [
        ("Q4_K_M", (NAMES[0],)),
        ("q4_k_m", (NAMES[0],)),
        ("f16", (NAMES[2],)),
        ("BF16", (NAMES[3],)),
        ("Q4_0", (NAMES[5],)),
        ("Q6_K", tuple(NAMES[8:10])),
        ("Q9", ()),
        ("imatrix", ()),
        ("Q5_0", ()),  # only as a head, which is not a model
        ("eagle3-toy-Q5_0", (NAMES[11],)),
        ("mtp-toy-Q4_0", (NAMES[12],)),
        ("MTP-toy-Q4_K_M", (NAMES[13],)),
    ],
)
def test_choosing_files_by_quantization(quant, chosen):
    assert HubModel(REPO, quant=quant).choose(NAMES) == chosen


def test_errors_for_a_quantization_list_the_choices(server):
    server.put(REPO, dict.fromkeys(NAMES, TOY))
    with pytest.raises(
        InvalidRequest, match=r"Q4_K matches several files .*: choose one of toy-Q4_K_M.gguf, toy-Q4_K_S"
    ):
        pull(HubModel(REPO, quant="Q4_K"))
    with pytest.raises(
        InvalidRequest, match=r"has no Q9 file: choose one of eagle3-toy-Q5_0.gguf, .*, toy-Q6_K$"
    ):
        pull(HubModel(REPO, quant="Q9"))
    server.put(REPO, {"model.safetensors": b"x"})
    with pytest.raises(InvalidRequest, match="in safetensors format; choose a repository with GGUF files"):
        pull(HubModel(REPO, quant="Q4_K_M"))
    server.put(REPO, {"README.md": b"x"})
    with pytest.raises(InvalidRequest, match="it has no GGUF files"):
        pull(HubModel(REPO, quant="Q4_K_M"))


def test_a_pinned_revision_is_kept(server):
    old = server.put(REPO, {"toy-q4_k_m.gguf": b"GGUF, the old one"}, revision="v1")
    for revision in ("v1", old):
        pinned = HubModel(REPO, MODEL.files, revision=revision)
        assert pull(pinned).read_bytes() == b"GGUF, the old one"
        assert hub_cache.cached_files(pinned)
    assert pull(MODEL) != pull(pinned)
    assert pull(MODEL).read_bytes() == TOY
    assert hub_cache.cached_files(HubModel(REPO, MODEL.files, revision="v2")) == []
    server.put(REPO, PARTS, revision="v2")
    pull(HubModel(REPO, quant="Q8_0", revision="v2"))
    # files of other revisions do not count
    assert hub_cache.cached_files(HubModel(REPO, MODEL.files, revision="v2")) == []


def test_a_newer_commit_keeps_earlier_downloads(server):
    path = pull(MODEL)
    server.put(REPO, {"toy-q4_k_m.gguf": TOY, **PARTS, "new.txt": b"news"})
    pull(HubModel(REPO, quant="Q8_0"))  # now refs/main is the newer commit
    assert hub_cache.cached_files(MODEL) == [path]


def test_offline(server, monkeypatch):
    with pytest.raises(DownloadError, match="specdec is offline: run specdec models pull toy when online"):
        pull(MODEL, offline=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="not been downloaded, and HF_HUB_OFFLINE is set: run"):
        pull(MODEL)
    assert server.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    path = pull(MODEL)
    server.requests.clear()
    assert pull(MODEL, offline=True) == path
    assert server.requests == []


def test_concurrent_pulls_download_once(server):
    listed = threading.Barrier(2, timeout=10)
    list_ = server._list

    def together(*arguments):
        listed.wait()  # both have found the cache empty
        list_(*arguments)

    server._list = together
    waiting = threading.Event()
    server.gate = lambda: waiting.wait(10)  # until the other one waits for the lock
    paths, errors = [], []

    def log(line):
        if "another process that downloads toy-q4_k_m.gguf" in line:
            waiting.set()

    def work():
        try:
            paths.append(pull(MODEL, log=log))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == TOY
    assert server.count("bytes") == 1
    assert waiting.is_set()


def test_remove(server, tmp_path):
    pull(MODEL)
    pull(HubModel(REPO, quant="Q8_0"))
    assert hub_cache.size_on_disk(MODEL) == len(TOY)
    hub_cache.remove(MODEL)
    assert hub_cache.cached_files(MODEL) == []
    assert hub_cache.size_on_disk(MODEL) == 0
    assert hub_cache.cached_files(HubModel(REPO, quant="Q8_0"))
    hub_cache.remove(HubModel(REPO, quant="Q8_0"))
    assert cached(tmp_path) == []


def test_remove_keeps_shared_files(server, tmp_path):
    server.put(REPO, {"toy-q4_k_m.gguf": TOY, "copy-f16.gguf": TOY})
    pull(MODEL)
    copy = pull(HubModel(REPO, quant="F16"))
    hub_cache.remove(MODEL)
    assert copy.read_bytes() == TOY  # one blob, two names: kept
    old = server.put(REPO, {"copy-f16.gguf": TOY}, revision="v1")
    pinned = HubModel(REPO, ("copy-f16.gguf",), revision=old)
    pull(pinned)
    hub_cache.remove(pinned)  # one name in two commits: deleted
    assert cached(tmp_path) == []


@pytest.mark.parametrize("content", [b"\xff" * 40, b"../" * 20, b"a\0b", b""], ids=repr)
def test_a_damaged_ref_is_written_again(server, tmp_path, content):
    path = pull(MODEL)
    ref = tmp_path / "cache" / "models--someone--toy-GGUF" / "refs" / "main"
    assert ref.read_bytes() == server.commit.encode()
    ref.write_bytes(content)
    assert hub_cache.cached_files(MODEL) == []
    assert pull(MODEL) == path
    assert hub_cache.cached_files(MODEL) == [path]


def test_remove_deletes_interrupted_downloads(server, tmp_path):
    interrupt(MODEL, 1000)
    assert hub_cache.size_on_disk(MODEL) == 1000
    with hub_cache.locked(REPO, SHA256, lambda: None):  # a download is in progress
        assert hub_cache.size_on_disk(MODEL) == 0
        hub_cache.remove(MODEL)
    assert hub_cache.size_on_disk(MODEL) == 1000
    hub_cache.remove(MODEL)
    assert cached(tmp_path) == []


EYES = b"GGUF" + b"eyes" * 500
QUANT = HubModel(REPO, quant="Q4_K_M")


def test_a_model_comes_with_its_projector(server, tmp_path):
    files = {"toy-q4_k_m.gguf": TOY, "mmproj-toy-BF16.gguf": b"GGUF", "mmproj-toy-f16.gguf": EYES, **PARTS}
    server.put(REPO, files | {"mtp-toy-Q4_K_M.gguf": TOY})
    lines, progress = [], []
    model = HubModel(REPO, MODEL.files, size=len(TOY), sha256=SHA256)  # these are of the model alone
    path = pull(model, log=lines.append, progress=lambda *n: progress.append(n))
    assert path.name == "toy-q4_k_m.gguf"
    projector = path.with_name("mmproj-toy-f16.gguf")
    assert projector.read_bytes() == EYES
    assert not path.with_name("mmproj-toy-BF16.gguf").exists()
    where = tmp_path / "cache"
    assert lines == [f"downloading toy: 0.0 MB, with 0.0 MB of the projector for images into {where}"]
    assert progress[-1] == (len(TOY) + len(EYES),) * 2
    assert hub_cache.cached_files(model) == hub_cache.cached_files(QUANT) == [path]
    assert hub_cache.cached_projectors(QUANT) == [projector]
    server.requests.clear()
    assert pull(model) == pull(QUANT) == path
    assert server.requests == []
    projector.resolve().write_bytes(b"damaged")
    assert pull(model, log=lines.append) == path
    assert projector.read_bytes() == EYES
    assert "deleted mmproj-toy-f16.gguf: it is damaged" in lines
    assert server.count("bytes") == 1  # the model was there


def test_an_interrupted_pull_goes_on_with_the_projector(server):
    server.put(REPO, {"toy-q4_k_m.gguf": TOY, "mmproj-F16.gguf": EYES})
    interrupt(QUANT, len(TOY) + 200)  # after the model, if that was the first
    path = pull(QUANT)
    assert path.with_name("mmproj-F16.gguf").read_bytes() == EYES


def test_a_head_and_a_projector_come_alone(server):
    server.put(REPO, {"toy-q4_k_m.gguf": TOY, "mmproj-F16.gguf": EYES, "mtp-toy-Q4_K_M.gguf": b"GGUF head"})
    path = pull(HubModel(REPO, quant="mtp-toy-Q4_K_M"))
    assert [each.name for each in path.parent.iterdir()] == ["mtp-toy-Q4_K_M.gguf"]
    # For a model that was downloaded without it.
    assert pull(HubModel(REPO, quant="mmproj-F16")).read_bytes() == EYES
    assert server.count("bytes") == 2
    with pytest.raises(InvalidRequest, match="has no F16 file"):
        pull(HubModel(REPO, quant="F16"))


def test_remove_deletes_the_projector_with_the_last_model(server, tmp_path):
    server.put(REPO, {"toy-q4_k_m.gguf": TOY, "mmproj-F16.gguf": EYES, **PARTS})
    pull(QUANT)
    pull(HubModel(REPO, quant="Q8_0"))
    assert hub_cache.size_on_disk(QUANT) == len(TOY)
    hub_cache.remove(HubModel(REPO, quant="Q8_0"))
    assert hub_cache.cached_projectors(QUANT)
    assert hub_cache.size_on_disk(QUANT) == len(TOY) + len(EYES)
    hub_cache.remove(QUANT)
    assert cached(tmp_path) == []
    assert hub_cache.size_on_disk(QUANT) == 0
