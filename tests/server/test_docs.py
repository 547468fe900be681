"""The commands and programs in docs/server.md, against a real server."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from tests.cli.test_docs import ROOT, blocks

BLOCKS = list(blocks(ROOT / "docs/server.md"))
REQUESTS = [text for language, text, _ in BLOCKS if language == "sh" and text.startswith("curl ")]
PROGRAMS = [text for language, text, _ in BLOCKS if language == "python"]
CONTAINER = [text for language, text, _ in BLOCKS if language == "sh" and text.startswith("docker ")]
SERVERS = [text for _, text, _ in BLOCKS if text not in CONTAINER + PROGRAMS and "specdec serve" in text]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_all_blocks_are_tested():
    assert len(REQUESTS) + len(PROGRAMS) + len(SERVERS) + len(CONTAINER) == len(BLOCKS) == 10


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")
@pytest.mark.parametrize("request_", REQUESTS)
def test_requests(server, request_):
    script = request_.replace("http://localhost:8080", server.address)
    done = subprocess.run(["sh", "-c", f"{script.strip()} -s"], capture_output=True, timeout=30, check=True)
    assert b'"finish_reason": "length"' in done.stdout.replace(b":", b": ")


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs(server, program):
    script = program.replace("http://localhost:8080", server.address)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30, check=True)
    assert done.stdout


def test_health_check_of_the_container(server):
    command = json.loads(re.search(r"HEALTHCHECK .*?CMD (\[.*?\])\n", DOCKERFILE, re.DOTALL)[1])
    assert command[:2] == ["python", "-c"]
    there = command[2].replace("http://127.0.0.1:8080", server.address)
    nowhere = command[2].replace("127.0.0.1:8080", "127.0.0.1:1")
    for program, healthy in ((there, True), (nowhere, False)):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=False)
        assert (done.returncode == 0) == healthy


def test_the_container_does_not_serve_without_a_key(inside):
    variables = dict(re.findall(r"\b(SPECDEC_\w+)=(\S+)", DOCKERFILE))
    done = inside("serve", env=variables)
    assert done.returncode
    assert b"SPECDEC_API_KEY" in done.stderr
