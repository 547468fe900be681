"""Libraries on top of OpenAI's, Anthropic's and ollama's clients, against a real server.

See client_libraries.py and client_libraries.mjs; `make test` installs them into environments of their own.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.chat_templates import TOOL_TEMPLATES
from tests.scripted_model import write_calling_model
from tests.server.conftest import Server

HERE, ENVIRONMENTS = Path(__file__).parent, Path(__file__).parents[2] / ".venv"
PYTHON, NPM = ENVIRONMENTS / "libraries", ENVIRONMENTS / "npm"
LIBRARIES = ("litellm", "langchain-openai", "instructor", "pydantic-ai", "openai-agents")
OLLAMA = ("ollama", "langchain-ollama")
IN_PYTHON = pytest.mark.skipif(
    not (PYTHON / "installed").exists(), reason="make .venv/libraries/installed installs them"
)
IN_NODE = pytest.mark.skipif(
    not (NPM / "installed").exists(), reason="make .venv/npm/installed installs them"
)


@pytest.fixture(scope="module")
def two_models(specdec, models):
    """A server with a model that calls a tool besides."""
    caller = write_calling_model(specdec.folder / "caller.gguf", TOOL_TEMPLATES["Hermes"])
    with Server(specdec, models[0], caller, "--ctx", 4096, "--parallel", 2) as started:
        yield started


def use(server, folder, *command, more=()):
    text = server.chat("one two three", model="main")["choices"][0]["message"]["content"]
    done = subprocess.run(
        [*command, server.address, json.dumps(text), *more],
        capture_output=True,
        env=os.environ | {"HOME": str(folder)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]


@IN_PYTHON
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library(server, library, tmp_path):
    use(server, tmp_path, PYTHON / "bin" / "python", HERE / "client_libraries.py", library)


@IN_PYTHON
@pytest.mark.parametrize("library", OLLAMA)
def test_a_library_of_ollama(two_models, library, tmp_path):
    use(two_models, tmp_path, PYTHON / "bin" / "python", HERE / "client_libraries.py", library)


@IN_NODE
@pytest.mark.parametrize("protocol", ["openai", "ollama"])
def test_npm_packages(server, two_models, tmp_path, protocol):
    script = shutil.copy(HERE / "client_libraries.mjs", NPM)  # beside its packages
    use(two_models if protocol == "ollama" else server, tmp_path, "node", script, more=[protocol])
