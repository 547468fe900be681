"""Folders, models and the command for these tests."""

import pytest
from command import Specdec, folders

from spec_local.llama.tiny import write_tiny_model


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def specdec(home):
    return Specdec(home, folders(home))


@pytest.fixture(scope="session")
def main(home, specdec):
    """A model that never ends its answer, already checked. F32: batches and single tokens agree closely."""
    path = write_tiny_model(home / "main.gguf", n_layers=1, tensor_type="F32", n_ctx=1 << 17)
    assert specdec("generate", "--main", path, "-n", 1, "--ctx", 64, "x").returncode == 0
    return path


@pytest.fixture(scope="session")
def draft(home, specdec):
    """A draft that often agrees with main; already checked."""
    path = write_tiny_model(home / "draft.gguf", n_layers=1, tensor_type="F32", n_ctx=1 << 17, noise=0.1)
    assert specdec("generate", "--main", path, "-n", 1, "--ctx", 64, "x").returncode == 0
    return path


@pytest.fixture
def fresh(tmp_path):
    """The command on a machine where nothing has been done yet."""
    return Specdec(tmp_path, folders(tmp_path))
