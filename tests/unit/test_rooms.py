"""The layers of the library, and what each part of it may import, checked on the source."""

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LAYERS = (
    ("errors", "validation"),
    ("text", "bfloat16"),
    ("signatures", "system"),
    ("core", "images"),
    ("reasoning", "arguments"),
    ("kernels", "verifiers", "lookups", "grammar", "prompt_cache"),
    ("llama", "policies"),
    ("datastore", "calibration", "proposers", "conversion"),
    ("installed",),
    ("settings", "engine", "models"),
    ("opening", "answers", "testing"),
    ("chat",),
    ("session",),
    ("chat_session", "llama_cpp_python"),
    ("batch", "bench"),
    ("training",),
    ("server",),
)
"""Packages and single modules of spec_local, lowest layer first; each imports only layers below its own."""

OTHER_PACKAGES = {"gguf", "llama_cpp", "numpy", "pydantic"}
BASE = {"errors", "text", "validation", "system"}
WITHOUT_IO = ("core", "verifiers", "lookups", "policies", "proposers", "engine")
IO_MODULES = {
    *("asyncio", "ctypes", "fcntl", "http", "io", "logging", "mmap", "multiprocessing", "os", "pathlib"),
    *("shutil", "signal", "socket", "sqlite3", "subprocess", "tempfile", "threading", "urllib"),
}
PURE = {"numpy", "spec_local", *sys.stdlib_module_names} - IO_MODULES
"""All that a package without I/O may import: no huggingface_hub, no llama_cpp."""


@dataclass(frozen=True)
class Import:
    """lazy: inside a function, or for type checkers only."""

    importer: str
    imported: str
    lazy: bool

    def __str__(self) -> str:
        return f"{self.importer} imports {self.imported}"


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__").removeprefix("cli.")


@functools.cache
def modules(folder: str = "spec_local") -> list[tuple[str, ast.Module]]:
    return [
        (module_of(file), ast.parse(file.read_text(encoding="utf-8")))
        for file in sorted((ROOT / folder).rglob("*.py"))
    ]


def part_of(module: str) -> str:
    """The part of spec_local that a module belongs to; "" for spec_local itself and for other packages."""
    return module.split(".")[1] if module.startswith("spec_local.") else ""


def is_lazy(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
        isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )


def imports_below(importer: str, node: ast.AST, lazy: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(importer, alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{importer} has a relative import"
            for alias in child.names:
                path = ROOT / str(child.module).replace(".", "/") / alias.name
                is_module = path.is_dir() or path.with_suffix(".py").is_file()
                yield Import(
                    importer, f"{child.module}.{alias.name}" if is_module else str(child.module), lazy
                )
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):  # not in expressions
            yield from imports_below(importer, child, lazy or is_lazy(child))


@functools.cache
def all_imports(folder: str) -> list[Import]:
    return [found for module, tree in modules(folder) for found in imports_below(module, tree)]


def imports(part: str = "") -> list[Import]:
    """All imports of spec_local, or of one of its parts."""
    return [i for i in all_imports("spec_local") if not part or part_of(i.importer) == part]


def package(found: Import) -> str:
    return found.imported.partition(".")[0]


def layer_of(part: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if part in layer)


def test_every_module_has_a_layer():
    listed = [part for layer in LAYERS for part in layer]
    assert len(set(listed)) == len(listed)
    assert {part_of(module) for module, _ in modules()} - {""} == set(listed)


def test_each_layer_imports_only_those_below_it():
    """Lazy imports count, too; `spec_local` itself is not in a layer."""
    upward = {}
    for found in imports():
        importer, imported = part_of(found.importer), part_of(found.imported)
        between_parts = importer and imported and importer != imported
        if between_parts and layer_of(imported) >= layer_of(importer):
            upward.setdefault((importer, imported), []).append(str(found))
    assert upward == {}


def test_the_public_package_imports_nothing_of_its_own_at_run_time():
    assert [
        str(i) for i in imports() if i.importer == "spec_local" and part_of(i.imported) and not i.lazy
    ] == []


@pytest.mark.parametrize("part", WITHOUT_IO)
def test_no_input_or_output(part):
    found = imports(part)
    assert [str(i) for i in found if package(i) not in PURE] == []
    calls = [
        f"{module} calls {node.func.id}"
        for module, tree in modules()
        if part_of(module) == part
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("open", "print", "input")
    ]
    assert calls == []


def test_the_core_imports_nothing_round_it():
    inside = {"", "errors", *WITHOUT_IO}
    found = [i for part in WITHOUT_IO for i in imports(part) if part_of(i.imported) not in inside]
    assert [str(i) for i in found] == []


def test_verifiers_create_no_randomness_and_read_no_clock():
    found = [str(i) for i in imports("verifiers") if package(i) in ("random", "secrets", "time")]
    attributes = [
        f"{module}: {ast.unparse(node)}"
        for module, tree in modules()
        if part_of(module) == "verifiers"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.random", "numpy.random")
    ]
    assert found + attributes == []


def test_no_import_cycles_within_a_package():
    """Of the modules of each package; imports in functions count, too."""
    edges: dict[str, set[str]] = {}
    for found in imports():
        if part_of(found.importer) == part_of(found.imported) != "":
            edges.setdefault(found.importer, set()).add(found.imported)

    def reaches(start: str, goal: str) -> bool:
        seen, waiting = set(), list(edges.get(start, ()))
        while waiting:
            module = waiting.pop()
            if module == goal:
                return True
            if module not in seen:
                seen.add(module)
                waiting += edges.get(module, ())
        return False

    assert [module for module in edges if reaches(module, module)] == []


@pytest.mark.parametrize(("below", "above"), [("spec_local.llama", "heads"), ("spec_local.llama", "setup")])
def test_inner_packages_are_above_the_modules_beside_them(below, above):
    found = [
        i
        for i in imports("llama")
        if i.importer.count(".") == 2 and i.imported.startswith(f"{below}.{above}")
    ]
    assert [str(i) for i in found] == []


def test_kernels_import_base_modules_only():
    found = [i for i in imports("kernels") if part_of(i.imported)]
    assert [str(i) for i in found if part_of(i.imported) not in {*BASE, "kernels"}] == []


MUST_NOT = {
    "errors": {"numpy"},
    "validation": {"numpy"},
    "text": {"numpy"},
    "bfloat16": {"errors", "validation"},
    "arguments": {"validation", "text"},
    "signatures": {"errors"},
    "system": {"gguf", "llama_cpp"},
    "core": {"pydantic", "llama_cpp"},
    "images": {"pydantic", "signatures", "text", "validation"},
    "reasoning": {"pydantic", "system"},
    "kernels": {"core", "validation"},
    "verifiers": {"errors"},
    "lookups": {"errors"},
    "grammar": {"llama_cpp", "validation"},
    "prompt_cache": {"core", "errors", "text"},
    "llama": {"lookups", "verifiers", "grammar"},
    "policies": {"errors", "lookups", "verifiers"},
    "datastore": {"kernels", "policies", "prompt_cache", "verifiers"},
    "calibration": {"lookups", "prompt_cache", "verifiers"},
    "proposers": {"verifiers"},
    "conversion": {"kernels", "policies", "prompt_cache", "verifiers"},
    "installed": {"llama", "llama_cpp", "policies", "pydantic"},
    "settings": {"llama", "system", "text"},
    "engine": {"lookups", "policies"},
    "models": {"datastore", "grammar", "lookups", "verifiers"},
    "opening": {"datastore", "grammar", "lookups", "prompt_cache", "verifiers"},
    "answers": {"calibration", "models"},
    "testing": {"llama_cpp", "models", "pydantic", "system"},
    "chat": {"engine", "models", "policies", "proposers"},
    "session": {"verifiers"},
    "chat_session": {"llama", "models", "opening", "policies", "proposers"},
    "llama_cpp_python": {"llama", "models", "opening", "policies"},
    "batch": {"datastore", "llama", "models", "policies"},
    "bench": {"datastore", "grammar", "models", "opening"},
    "training": {"answers", "engine", "kernels", "verifiers"},
    "server": {"batch", "bench", "lookups", "policies", "proposers", "training", "verifiers"},
}
"""Parts in lower layers, and packages, that each part does not import.

`test_the_core_imports_nothing_round_it` says more of the core, its drafters and its policies.
"""


@pytest.mark.parametrize("part", [part for layer in LAYERS for part in layer])
def test_what_each_part_does_not_know(part):
    unknown = MUST_NOT[part]
    known_at_all = {each for layer in LAYERS[: layer_of(part)] for each in layer} | OTHER_PACKAGES
    assert unknown
    assert unknown <= known_at_all  # what the layers forbid anyway is not worth a rule
    found = [i for i in imports(part) if (part_of(i.imported) or package(i)) in unknown]
    assert [str(i) for i in found] == []


@pytest.mark.parametrize(
    ("wanted", "allowed"),
    [
        # The kernels' self-test loads ggml by importing it.
        ("llama_cpp", {"llama", "llama_cpp_python", "kernels"}),
        ("jinja2", {"chat"}),
        ("PIL", {"images"}),
        ("ctypes", {"llama", "llama_cpp_python", "kernels"}),
        ("torch", {"training"}),
        ("huggingface_hub", {"models"}),
        ("starlette", {"server"}),
        ("uvicorn", {"server"}),
        ("prometheus_client", {"server"}),
    ],
)
def test_heavy_and_native_packages_stay_in_their_parts(wanted, allowed):
    found = [i for i in imports() + all_imports("cli") if package(i) == wanted]
    assert [str(i) for i in found if part_of(i.importer) not in allowed] == []


def test_only_the_training_command_imports_training():
    found = [i for i in all_imports("cli") if part_of(i.imported) == "training"]
    assert found
    assert [str(i) for i in found if not i.importer.startswith("specdec_cli.draft_")] == []


def test_the_library_does_not_import_the_command_or_write_to_the_terminal():
    screens = ("specdec_cli", "typer", "click", "rich", "prompt_toolkit")
    assert [str(i) for i in imports() if package(i) in screens] == []
    printing = {
        module
        for module, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    }
    # Child processes, which print what their parents read.
    assert printing <= {"spec_local.system.child_process", "spec_local.training.learn"}
