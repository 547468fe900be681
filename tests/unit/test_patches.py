"""Tests replace few globals of the package: arguments, real files and small programs show what happens.

What other packages and the operating system offer may be replaced, as well as public attributes of objects.
"""

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
OURS = ("spec_local", "specdec_cli")
PATCHES = ("setattr", "delattr", "object", "multiple")  # of pytest's monkeypatch, and of mock.patch
MOST = 51


def patched_globals(path):
    """The lines that replace an attribute of our modules or classes, or a private one of any object."""
    source = path.read_text(encoding="utf-8")
    if "patch" not in source:
        return
    nodes, names = [*ast.walk(ast.parse(source))], {}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {each.asname or each.name.partition(".")[0]: prefix + each.name for each in node.names}
    for node in nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        if node.func.attr in PATCHES and "patch" in ast.unparse(node.func.value):
            owner, *rest = node.args
            name = rest[0].value if rest and isinstance(rest[0], ast.Constant) else ""
            if owner_of(owner, names).startswith(OURS) or (str(name)[:1] == "_" and name[:2] != "__"):
                yield node.lineno


def owner_of(node, names):
    """The dotted name of what is patched, as far as it can be read; empty for what a call returns."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.BinOp | ast.JoinedStr):
        match node:
            case ast.JoinedStr():
                node = node.values[0]
            case ast.BinOp():
                node = node.left
            case _:
                node = node.value
    if isinstance(node, ast.Constant):
        return str(node.value)
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def test_few_globals_are_patched():
    found = {str(path.relative_to(TESTS)): [*patched_globals(path)] for path in TESTS.rglob("*.py")}
    most = Counter({name: len(lines) for name, lines in found.items()}).most_common(5)
    assert sum(map(len, found.values())) <= MOST, most


def test_what_counts(tmp_path):
    source = """
import os
from unittest import mock
from spec_local.system import machine
from spec_local.llama import runtime
monkeypatch.setattr(machine, "default_threads", 1)           # counts
monkeypatch.setattr("spec_local.system.machine.os", 1)       # counts
patch.setattr("spec_local.system." + name, 1)                # counts
mock.patch.object(machine.OtherPrograms, "cores")            # counts
monkeypatch.setattr(session, "_costs", 1)                    # counts
monkeypatch.setattr(os, "open", 1)
monkeypatch.setattr(session, "costs", 1)
monkeypatch.setattr(runtime.library(), "llama_decode", 1)
monkeypatch.setenv("HOME", "x")
"""
    path = tmp_path / "test_x.py"
    path.write_text(source)
    assert len([*patched_globals(path)]) == source.count("# counts")
