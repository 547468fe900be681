"""What keeps the sources readable: names that mean one thing, short functions, and a small core."""

import ast
from collections import defaultdict

import pytest

from tests.unit.test_rooms import ROOT, modules

CORE = ("core", "engine", "proposers", "verifiers", "policies")
MOST_CORE_LINES = 6_000
MOST_LINES, MOST_PARAMETERS = 80, 10
"""Of a function, with its docstring."""
LONG_SIGNATURES = {
    "Session.open": "documented keyword arguments, as are those below",
    "Session.generate_many": "",
    "Llama.generate": "has the parameters of the class that it stands in for",
    "write_tiny_model": "each parameter is a property of the model that one test needs",
}
"""Functions that may have more parameters, and why."""
MOST_LAZY_IMPORTS = 50
"""Imports inside functions of the command: its signatures load nothing, and each body loads what it needs."""


def functions(tree, prefix=""):
    """The functions of a module with their qualified names, methods and inner functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


@pytest.fixture(scope="module")
def sources():
    return [*modules("spec_local"), *modules("cli")]


def test_a_public_class_name_is_used_once(sources):
    found = defaultdict(list)
    for module, tree in sources:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_functions_are_short(sources):
    long = {
        f"{module}.{name}": node.end_lineno - node.lineno + 1
        for module, tree in sources
        for name, node in functions(tree)
        if node.end_lineno - node.lineno >= MOST_LINES and name not in LONG_SIGNATURES
    }
    assert long == {}


def test_functions_have_few_parameters(sources):
    many, unneeded = {}, set(LONG_SIGNATURES)
    for module, tree in sources:
        for name, node in functions(tree):
            arguments = node.args
            n = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
            n -= bool(arguments.args) and arguments.args[0].arg in ("self", "cls")
            if n > MOST_PARAMETERS and name not in LONG_SIGNATURES:
                many[f"{module}.{name}"] = n
            elif n > MOST_PARAMETERS:
                unneeded.discard(name)
    assert many == {}
    assert unneeded == set()


def test_the_command_imports_at_the_top():
    lazy = [
        f"{module}: {ast.unparse(node)}"
        for module, tree in modules("cli")
        for _, function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert len(lazy) <= MOST_LAZY_IMPORTS, "\n".join(lazy)


def test_the_core_can_be_read_in_an_afternoon():
    files = [file for part in CORE for file in (ROOT / "spec_local" / part).rglob("*.py")]
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= MOST_CORE_LINES
