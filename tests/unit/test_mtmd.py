"""Loading libmtmd: its log, and what is said where it is missing, damaged or of another version."""

import shutil
import subprocess
import sys

import pytest

from spec_local.llama import mtmd, runtime
from spec_local.system import machine
from spec_local.system.native_build import SUFFIX

TRIES = """
from spec_local.errors import BackendError
from spec_local.llama import mtmd
try:
    mtmd.library()
except BackendError as error:
    print(error)
"""
LOOKS = """
import sys
from spec_local.llama import mtmd
print(mtmd.is_available())
assert not {"llama_cpp.llama_cpp", "llama_cpp.mtmd_cpp"} & {*sys.modules}
"""


def output(code):
    """What a new process prints, in which neither library has been loaded."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which libmtmd is looked for, which is empty."""
    monkeypatch.setenv("MTMD_CPP_LIB", str(tmp_path))
    return tmp_path


def test_the_log_is_that_of_llama_cpp(capfd):
    library = mtmd.library()
    assert library is mtmd.library()
    runtime.clear_log()
    assert not library.mtmd_helper_bitmap_init_from_file(None, b"/no/such/file.png", False)
    assert "/no/such/file.png" in runtime.failure_reason()
    runtime.clear_log()
    parameters = library.mtmd_context_params_default()
    assert not library.mtmd_init_from_file(b"/no/such/file.gguf", None, parameters)
    assert "/no/such/file.gguf" in runtime.failure_reason()
    assert capfd.readouterr() == ("", "")


def test_it_is_available():
    assert mtmd.is_available()
    assert output(LOOKS) == "True\n"


def test_it_is_missing(folder):
    assert not mtmd.is_available()
    assert output(LOOKS) == "False\n"
    (line,) = output(TRIES).splitlines()
    assert line.startswith(
        "this llama.cpp was built without libmtmd, which reads images and sound: run specdec"
    )


def test_llama_cpp_is_missing(monkeypatch):
    monkeypatch.delenv("MTMD_CPP_LIB", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not mtmd.is_available()


@pytest.mark.parametrize("kind", ["damaged", "another library"])
def test_it_cannot_be_loaded(folder, kind):
    file = folder / f"libmtmd{SUFFIX}"
    if kind == "damaged":
        file.write_bytes(b"no library")
    else:  # without its functions, as one of another version may be
        shutil.copy(machine.llama_cpp_folder() / "lib" / f"libggml-base{SUFFIX}", file)
    assert mtmd.is_available()
    (line,) = output(TRIES).splitlines()
    assert line.startswith("libmtmd, which reads images and sound, cannot be loaded (")
    assert line.endswith(f"): delete {file}, and run specdec doctor --fix images")
