"""What keeps the sources readable: names that mean one thing, short functions, and a small core."""

import ast
from collections import defaultdict

import pytest

from tests.unit.test_rooms import ROOT, modules

CORE = ("core", "engine", "proposers", "verifiers", "policies")
MOST_CORE_LINES = 6_000
MOST_LINES, MOST_LINES_OF_A_COMMAND, MOST_PARAMETERS = 80, 60, 10
"""Of a function, with its docstring; of one of the command."""
LONG = {
    "Llama.generate": "has the parameters of the class that it stands in for",
}
"""Functions that may be longer, and have more parameters, and why."""
MOST_LAZY_IMPORTS = 30
"""Inside functions of the command: `commands.body_of` imports the module of a command when it runs."""


def functions(tree, prefix=""):
    """The functions of a module with their qualified names, methods and inner functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
        is_named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from functions(node, f"{prefix}{node.name}." if is_named else prefix)


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


def test_functions_fit_on_a_screen(sources):
    too_long = {}
    for module, tree in sources:
        for name, node in functions(tree):
            arguments = node.args
            n = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
            n -= bool(arguments.args) and arguments.args[0].arg in ("self", "cls")
            n_lines = node.end_lineno - node.lineno + 1
            most_lines = MOST_LINES if module.startswith("spec_local") else MOST_LINES_OF_A_COMMAND
            if n_lines > most_lines or n > MOST_PARAMETERS:
                too_long[name] = f"{module}: {n_lines} lines, {n} parameters"
    assert {name: what for name, what in too_long.items() if name not in LONG} == {}
    assert LONG.keys() <= too_long.keys()  # an exception that is no longer needed


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
