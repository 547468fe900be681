"""The user's folders where no home directory is known, as in a container with a user id of its own."""

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from spec_local.system.folders import user_folder

KINDS = ("cache", "config", "data", "state")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The temporary folder of a user without a home directory, and without XDG variables."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", *(f"XDG_{kind.upper()}_HOME" for kind in KINDS)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("home", [None, "", "relative", "~"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_home_directory_a_private_folder_is_used(temporary, monkeypatch, kind, home):
    if home is not None:
        monkeypatch.setenv("HOME", home)
    for _ in range(2):
        assert user_folder(kind) == temporary / f"specdec-{os.getuid()}" / kind
    (private,) = temporary.iterdir()
    assert private.stat().st_mode & 0o777 == 0o700


def test_xdg_variables_and_an_absolute_home_come_first(temporary, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_folder("cache") == Path("/somewhere/specdec")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # as the specification says, it is ignored
    assert user_folder("cache").is_relative_to(temporary)
    monkeypatch.setenv("HOME", "/nonexistent")
    assert user_folder("cache").is_relative_to("/nonexistent")


@pytest.mark.parametrize("what", ["open to others", "a link", "a file", "of another user"])
def test_what_others_could_replace_is_not_used(temporary, monkeypatch, what):
    place = temporary / f"specdec-{os.getuid()}"
    if what == "a link":
        (temporary / "elsewhere").mkdir(0o700)
        place.symlink_to("elsewhere")
    elif what == "a file":
        place.touch(0o700)
    else:
        place.mkdir(0o700)
        place.chmod(0o755 if what == "open to others" else 0o700)
    if what == "of another user":
        uid = os.getuid()
        place.rename(temporary / f"specdec-{uid + 1}")
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(OSError, match="Not a directory"):
        user_folder("cache").mkdir(parents=True)


def test_without_any_folder_to_write_to_nothing_is_raised(temporary, monkeypatch):
    def none():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert not user_folder("config").exists()
