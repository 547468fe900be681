"""tools/install.py: a wheel of pip's cache is used only if it was built as one would be now."""

import importlib
import zipfile
from pathlib import Path

import pytest

OLD, NEW = ("llama_cpp/lib/libllama.so",), ("llama_cpp/lib/libllama.so", "llama_cpp/lib/libmtmd.so")


@pytest.fixture
def install(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    return importlib.import_module("install")


@pytest.fixture
def compiled(install, monkeypatch, tmp_path):
    """A function that compiles with the contents of pip's next wheels; returns what was run."""
    events = []

    def compiled(*wheels):
        left = list(wheels)

        def build(folder, cmake_args="", *options):
            events.append(("build", *options))
            folder.mkdir(exist_ok=True)
            with zipfile.ZipFile(folder / "llama_cpp_python-1-py3-none-any.whl", "w") as archive:
                for name in left.pop(0):
                    archive.writestr(name, "")

        monkeypatch.setattr(install, "build_binding", build)
        monkeypatch.setattr("subprocess.run", lambda command, **_: events.append(tuple(command[-3:])))
        wheel = install.compile_llama_cpp(tmp_path / "wheels")
        assert install.reads_images(wheel) is ("llama_cpp/lib/libmtmd.so" in wheels[-1])
        return events

    return compiled


def test_a_cached_wheel_is_used(compiled):
    assert compiled(NEW) == [("build",)]


def test_a_cached_wheel_that_cannot_read_pictures_is_not(compiled):
    assert compiled(OLD, NEW) == [("build",), ("cache", "remove", "llama_cpp_python"), ("build",)]


def test_with_options_of_the_user_no_cached_wheel_is_used(compiled, monkeypatch):
    monkeypatch.setenv("CMAKE_ARGS", "-DLLAVA_BUILD=OFF")
    assert compiled(OLD) == [("build", "--no-cache-dir")]
