"""specdec draft versions and rollback."""

import re

import pytest

from spec_local.models.head_versions import HeadVersions

DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d"


@pytest.fixture
def versions(fresh_inside, main):
    """Two versions for the main model."""
    new = fresh_inside.folder / "new.gguf"
    with fresh_inside._in_place():
        versions = HeadVersions(main)
        new.write_bytes(b"one")
        versions.add(new, n_answers=60, after={"user": 0.584, "built_in": 0.43})
        new.write_bytes(b"two")
        versions.add(
            new,
            n_answers=1140,
            before={"user": 0.584, "built_in": 0.43},
            after={"user": 0.61, "built_in": 0.44},
        )
    return versions


def lines(done):
    assert (done.returncode, done.stderr) == (0, b""), done
    return done.stdout.decode().splitlines()


def test_versions_are_listed(fresh_inside, main, versions):
    headings, first, second = lines(fresh_inside("draft", "versions", main))
    assert re.split(r" {2,}", headings) == [
        *("version", "trained", "answers", "your answers", "built-in prompts"),
    ]
    assert re.fullmatch(rf"1 +{DATE} +60 +– → 0\.58 +– → 0\.43", first)
    assert re.fullmatch(rf"2 +{DATE} +1,140 +0\.58 → 0\.61 +0\.43 → 0\.44 +current", second)
    versions.path(versions.all()[0]).unlink()
    _, first, second = lines(fresh_inside("draft", "versions", "--main", main))
    assert first.endswith("  deleted")


def test_rollback(fresh_inside, main, versions):
    done = fresh_inside("draft", "rollback", main)
    assert (done.returncode, done.stdout) == (0, b"")
    assert re.fullmatch(
        rf"version 2 is no longer used for main\.gguf; version 1 of {DATE} is used instead\n",
        done.stderr.decode(),
    )
    _, first, second = lines(fresh_inside("draft", "versions", main))
    assert first.endswith("  current")
    assert second.endswith("  rolled back")
    done = fresh_inside("draft", "rollback", main)
    assert done.stderr.decode() == (
        "version 1 is no longer used for main.gguf; the head or draft model that you give, or one "
        "that is found, is used instead\n"
    )
    assert "no head for main.gguf has learned" in fresh_inside.one_line(
        fresh_inside("draft", "rollback", main), 2
    )


@pytest.mark.parametrize("command", ["versions", "rollback"])
def test_errors_are_one_line(fresh_inside, main, command):
    def failed(*arguments, code=2):
        return fresh_inside.one_line(fresh_inside("draft", command, *arguments), code)

    assert failed(main) == (
        "specdec: no head for main.gguf has learned from your answers yet: specdec serve --learn trains "
        "one while idle"
    )
    assert "none.gguf cannot be read" in failed("none.gguf", code=1)
    assert "the main model is missing" in failed()
