"""Libraries on top of OpenAI's and Anthropic's clients, against a real server: see client_libraries.py."""

import json
import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("client_libraries.py")
ENVIRONMENT = Path(__file__).parents[2] / ".venv" / "libraries"
LIBRARIES = ("litellm", "langchain-openai", "instructor", "pydantic-ai", "openai-agents")


@pytest.mark.skipif(
    not (ENVIRONMENT / "installed").exists(), reason="make .venv/libraries/installed installs them"
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library(server, library, tmp_path):
    text = server.chat("one two three")["choices"][0]["message"]["content"]
    environment = os.environ | {"HOME": str(tmp_path)}
    command = [ENVIRONMENT / "bin" / "python", SCRIPT, library, server.address, json.dumps(text)]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
