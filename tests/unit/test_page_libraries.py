"""The libraries of the server's page are the released files that its table names, with their licences."""

import hashlib
import re

from spec_local.server.app import PAGE, page_files

VENDOR = PAGE / "vendor"


def test_the_table_names_each_file():
    table = (VENDOR / "README.md").read_text()
    sums = dict(re.findall(r"^\| `([^`]+)`.* `(\w{64})` \|$", table, re.MULTILINE))
    files = [file for file in VENDOR.rglob("*.*") if file.suffix not in (".md", ".txt", ".woff2")]
    found = {str(file.relative_to(VENDOR)): file.read_bytes() for file in files}
    fonts = sorted((VENDOR / "katex/fonts").iterdir())
    found["katex/fonts/*.woff2"] = b"".join(font.read_bytes() for font in fonts)
    assert {name: hashlib.sha256(content).hexdigest() for name, content in found.items()} == sums
    wanted = re.findall(r"fonts/[\w-]+\.woff2", (VENDOR / "katex/katex.min.css").read_text())
    assert sorted(set(wanted)) == [f"fonts/{font.name}" for font in fonts]
    licences = (VENDOR / "LICENSES.txt").read_text()
    for name in ("markdown-it", "DOMPurify", "highlight.js", "katex"):
        assert re.search(rf"^{name} \d+\.\d+\.\d+ \(", licences, re.MULTILINE)
    versions = re.findall(r"\d+\.\d+\.\d+", table)
    assert set(versions) == set(re.findall(r"^\S+ (\d+\.\d+\.\d+)", licences, re.MULTILINE))
    assert "SIL OPEN FONT LICENSE Version 1.1" in licences


def test_they_are_served_and_small():
    paths = [path for path in page_files() if path.startswith("/vendor/")]
    files = {file for kind in ("js", "css", "woff2") for file in VENDOR.rglob(f"*.{kind}")}
    assert {f"/vendor/{file.relative_to(VENDOR).as_posix()}" for file in files} <= set(paths)
    assert sum(file.stat().st_size for file in VENDOR.glob("*.js")) < 300_000
    assert sum(file.stat().st_size for file in files) < 900_000  # with what is loaded for formulas only
