"""The commands and programs in docs/server.md, against a real server."""

import shutil
import subprocess
import sys

import pytest

from tests.cli.test_docs import ROOT, blocks

BLOCKS = list(blocks(ROOT / "docs/server.md"))
REQUESTS = [text for language, text, _ in BLOCKS if language == "sh" and text.startswith("curl ")]
PROGRAMS = [text for language, text, _ in BLOCKS if language == "python"]
SERVERS = [text for language, text, _ in BLOCKS if language == "sh" and "specdec serve" in text]


def test_all_blocks_are_tested():
    assert len(REQUESTS) + len(PROGRAMS) + len(SERVERS) == len(BLOCKS) == 7


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
