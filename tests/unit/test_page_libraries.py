"""The libraries of the server's page are the released files that its table names, with their licences."""

import hashlib
import re

from spec_local.server.app import PAGE, page_files

VENDOR = PAGE / "vendor"


def test_the_table_names_each_file():
    table = (VENDOR / "README.md").read_text()
    sums = dict(re.findall(r"^\| `([^`]+)` \|.*`(\w{64})` \|$", table, re.MULTILINE))
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in VENDOR.glob("*.js")}
    assert files == sums
    licences = (VENDOR / "LICENSES.txt").read_text()
    for name in ("markdown-it", "DOMPurify", "highlight.js"):
        assert re.search(rf"^{name} \d+\.\d+\.\d+ \(", licences, re.MULTILINE)
    versions = re.findall(r"\d+\.\d+\.\d+", table)
    assert sorted(versions) == sorted(re.findall(r"^\S+ (\d+\.\d+\.\d+)", licences, re.MULTILINE))


def test_they_are_served_and_small():
    paths = [path for path in page_files() if path.startswith("/vendor/")]
    assert {f"/vendor/{file.name}" for file in VENDOR.glob("*.js")} <= set(paths)
    assert sum(file.stat().st_size for file in VENDOR.glob("*.js")) < 300_000
