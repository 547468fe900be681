"""Libraries on top of OpenAI's and Anthropic's clients, against a real server.

See client_libraries.py and client_libraries.mjs; `make test` installs them into environments of their own.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE, ENVIRONMENTS = Path(__file__).parent, Path(__file__).parents[2] / ".venv"
PYTHON, NPM = ENVIRONMENTS / "libraries", ENVIRONMENTS / "npm"
LIBRARIES = ("litellm", "langchain-openai", "instructor", "pydantic-ai", "openai-agents")


def use(server, folder, *command):
    text = server.chat("one two three")["choices"][0]["message"]["content"]
    done = subprocess.run(
        [*command, server.address, json.dumps(text)],
        capture_output=True,
        env=os.environ | {"HOME": str(folder)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]


@pytest.mark.skipif(
    not (PYTHON / "installed").exists(), reason="make .venv/libraries/installed installs them"
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library(server, library, tmp_path):
    use(server, tmp_path, PYTHON / "bin" / "python", HERE / "client_libraries.py", library)


@pytest.mark.skipif(not (NPM / "installed").exists(), reason="make .venv/npm/installed installs them")
def test_npm_packages(server, tmp_path):
    script = shutil.copy(HERE / "client_libraries.mjs", NPM)  # beside its packages
    use(server, tmp_path, "node", script)
