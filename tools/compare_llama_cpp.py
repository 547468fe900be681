"""Compare two versions of llama-cpp-python, and print what changed in that which specdec uses.

    python tools/compare_llama_cpp.py OLD NEW [--test]

OLD and NEW are versions, which pip downloads as source distributions, or folders or archives of these.
Compared are the declarations of llama.cpp's headers and of its Python bindings, names in GGUF files, and the
names of libraries. What specdec uses of these is found by searching its sources for their names; types in a
declaration that is used count as well. What an internal header of llama.cpp defines counts only if it is a
function, or if specdec's own headers define it again. Constants and behaviour that no name leads to are not
compared: `--test` runs the tests with NEW.

Exit codes: 0, nothing of that changed (or all tests passed); 1, something did; 2, the comparison failed.
"""

import argparse
import ast
import difflib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from declarations import Declaration, c_declarations, field_names, number, python_declarations

ROOT = Path(__file__).parents[1]
PACKAGE = "llama-cpp-python"
PUBLIC = ("include", "ggml/include")
INTERNAL = ("src", "ggml/src", "ggml/src/ggml-cpu")
INTERNALS = "spec_local/kernels/ggml_internals.h"
_NEEDED = re.compile(
    r"[^/]+/(llama_cpp/\w+\.py|\.git/modules/vendor/llama\.cpp/HEAD"
    r"|vendor/llama\.cpp/.*(\.h|CMakeLists\.txt|llama-arch\.cpp))"
)
_OUR_NAME = re.compile(r"(?i)(?:llama|ggml|gguf)_\w")
Declarations = Mapping[str, Declaration]


class Failure(Exception):
    """The versions cannot be compared; the message is one line."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What one version declares, by name; versions and commits are "?" if the archive does not tell."""

    version: str
    commit: str
    ggml: str
    headers: Declarations
    bindings: Declarations
    names: Declarations
    libraries: Declarations


@dataclass(frozen=True, slots=True)
class Use:
    """Names in our sources.

    words: identifiers. python: those of modules that use llama-cpp-python. prefixes: beginnings of names
    that are put together at run time. defined: names that our own headers define. literals: regular
    expressions for the strings in our modules.
    """

    words: set[str] = field(default_factory=set)
    python: set[str] = field(default_factory=set)
    prefixes: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)
    literals: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        return name in self.words or name.startswith(tuple(self.prefixes))


# ---- reading ----


def sources(given: str, work: Path) -> Path:
    """Return the folder of a source distribution, given a version, an archive or a folder."""
    path = Path(given)
    if path.is_dir():
        return path
    if not path.is_file():
        folder = work / "downloads"
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", PACKAGE, "--dest", str(folder), f"{PACKAGE}=={given}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise Failure(f"no such folder or archive, and pip cannot download that version ({reason})")
        path = next(folder.glob(f"*-{given}.tar.gz"))
    target = Path(tempfile.mkdtemp(dir=work))
    with tarfile.open(path) as archive:
        members = [member for member in archive.getmembers() if _NEEDED.fullmatch(member.name)]
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in Python 3.11.2
        archive.extractall(target, members)
    return next((folder for folder in target.iterdir()), target)


def read(folder: Path) -> Tree:
    """Read a source distribution."""
    llama = folder / "vendor" / "llama.cpp"
    headers = [f for part in (*PUBLIC, *INTERNAL) for f in sorted((llama / part).glob("*.h"))]
    modules = sorted((folder / "llama_cpp").glob("*.py"))
    if not headers or not modules:
        raise Failure(f"not a source distribution of {PACKAGE}: it has no headers or no bindings")
    settings = _settings(llama)
    head = folder / ".git/modules/vendor/llama.cpp/HEAD"
    version = re.search(r'^__version__ = "(.*)"', _text(folder / "llama_cpp/__init__.py"), re.MULTILINE)
    return Tree(
        version=version[1] if version else "?",
        commit=_text(head).strip()[:9] or "?",
        ggml=".".join(settings.get(f"GGML_VERSION_{part}", "?") for part in ("MAJOR", "MINOR", "PATCH")),
        headers=_merged(d for f in headers for d in c_declarations(_text(f), _relative(f, llama))),
        bindings=_merged(d for f in modules for d in python_declarations(_text(f), _relative(f, folder))),
        names=_merged(_gguf_names(llama / "src" / "llama-arch.cpp")),
        libraries=_merged(_libraries(llama, settings)),
    )


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _relative(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


def _merged(declarations: Iterable[Declaration]) -> Declarations:
    """Return declarations by name. Several of one name, in branches of an ``#if``, count as one."""
    result: dict[str, Declaration] = {}
    for d in declarations:
        other = result.get(d.name)
        if not other or (d.parts and not other.parts):
            result[d.name] = d
        elif not other.parts and d.text not in other.text.split(" | "):
            result[d.name] = Declaration(other.file, other.kind, d.name, f"{other.text} | {d.text}")
    return result


def _settings(llama: Path) -> dict[str, str]:
    files = (llama / "CMakeLists.txt", llama / "ggml" / "CMakeLists.txt")
    return dict(re.findall(r'^\s*set\((\w+)\s+"?([^\s")]+)"?\)', "\n".join(map(_text, files)), re.MULTILINE))


def _libraries(llama: Path, settings: Mapping[str, str]) -> Iterator[Declaration]:
    for file in (llama / "src" / "CMakeLists.txt", llama / "ggml" / "src" / "CMakeLists.txt"):
        for name, version in re.findall(
            r"set_target_properties\(([\w-]+)\s+PROPERTIES\s+VERSION\s+\S+\s+SOVERSION\s+(\S+)", _text(file)
        ):
            soname = f"lib{name}.so.{settings.get(version.strip('${}'), version)}"
            yield Declaration(_relative(file, llama), "library", name, soname)


def _gguf_names(file: Path) -> Iterator[Declaration]:
    for name in re.findall(r'\{\s*LLM_\w+\s*,\s*"([^"]+)"\s*\}', _text(file)):
        yield Declaration("src/llama-arch.cpp", "name", name, f'"{name}"')


def use(root: Path) -> Use:
    """Search our sources for names."""
    found = Use()
    for file in sorted(f for part in ("spec_local", "cli") for f in (root / part).rglob("*")):
        if file.suffix not in (".py", ".h", ".cpp"):
            continue
        text = _text(file)
        words = set(re.findall(r"\b[A-Za-z_]\w*", text))
        found.words.update(words)
        if file.suffix == ".py":
            found.prefixes.update(w for w in words if w.endswith("_") and _OUR_NAME.match(w))
            found.prefixes.update(w for w in re.findall(r"\b(\w+)\{", text) if _OUR_NAME.match(w))
            found.literals.update(_literals(ast.parse(text)))
            if re.search(r"\bllama_cpp\b", text):
                found.python.update(words)
        elif file.suffix == ".h":
            found.defined.update(d.name for d in c_declarations(text, file.name) if d.kind != "constant")
    return found


def _literals(tree: ast.Module) -> Iterator[str]:
    """Yield regular expressions for the strings of a module that may be names in a GGUF file."""
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
        are_names = all(text is None or re.fullmatch(r"[\w.-]+", str(text)) for text in texts)
        if are_names and isinstance(texts[0], str):
            yield "".join(r"\w*" if text is None else re.escape(str(text)) for text in texts)


# ---- what is used ----


def used_headers(declared: Declarations, used: Use) -> set[str]:
    """Return the names that our sources contain, and those of public types in their declarations."""
    public = {name for name, d in declared.items() if d.file.startswith(PUBLIC)}
    owner = {v.split(" = ")[0]: name for name, d in declared.items() if d.kind == "enum" for v in d.parts}
    names = {owner.get(name, name) for name in (*declared, *owner) if used.has(name)}
    functions = {n for n in names if _OUR_NAME.match(n) and n in declared and declared[n].kind == "function"}
    return _closed(names & (public | used.defined) | functions, declared, public)


def used_bindings(declared: Declarations, used: Use) -> set[str]:
    """Return the names of bindings that our sources contain, and those in their declarations."""
    names = {n for n in declared if _OUR_NAME.match(n) and used.has(n)}
    names |= {n for n, d in declared.items() if d.kind == "method" and set(n.split(".")) <= used.python}
    return _closed(names, declared, {n for n in declared if _OUR_NAME.match(n)})


def _closed(names: set[str], declared: Declarations, allowed: set[str]) -> set[str]:
    """Add the allowed names in the declarations of names, until there are no more."""
    result, waiting = set(names), [n for n in names if n in declared]
    while waiting:
        new = (declared[waiting.pop()].words() & allowed) - result
        result |= new
        waiting += new
    return result


def used_names(declared: Declarations, used: Use) -> set[str]:
    """Return those names of keys, tensors and architectures that our strings contain."""
    patterns = [re.compile(pattern) for pattern in used.literals]
    return {name for name in declared if any(_is_part(name, pattern) for pattern in patterns)}


def _is_part(name: str, pattern: re.Pattern[str]) -> bool:
    """Return whether a pattern is for a GGUF name, with or without the architecture, or for its tensors."""
    short = re.sub(r"^%s\.", "", name).replace("%d", "0")
    return any(pattern.fullmatch(text) for text in (short, f"{short}.weight", f"{short}.bias"))


# ---- comparing ----


def changes(old: Tree, new: Tree, used: Use) -> list[str]:
    """Return what changed in that which is used, one line for each change."""
    lines: list[str] = []
    for part, select in (
        ("headers", used_headers), ("bindings", used_bindings), ("names", used_names), ("libraries", None)
    ):  # fmt: skip
        before, after = getattr(old, part), getattr(new, part)
        names = select(before, used) | select(after, used) if select else {*before, *after}
        for name in sorted(names, key=lambda n: ((before.get(n) or after[n]).file, n)):
            lines += _difference(before.get(name), after.get(name), used)
    known = mismatches(old, used)
    return lines + [line for line in mismatches(new, used) if line not in known]


def _difference(old: Declaration | None, new: Declaration | None, used: Use) -> Iterator[str]:
    if old and not new:
        yield f"{old.file}: {old.text}: removed"
    elif new and not old:
        yield f"{new.file}: {new.text}: added"
    elif old and new:
        if old.file != new.file:
            yield f"{old.file}: {old.text}: moved to {new.file}"
        if old.text != new.text:
            yield f"{new.file}: {old.text} -> {new.text}"
        are_enums = old.kind == new.kind == "enum"
        found = _values(old.parts, new.parts, used) if are_enums else _fields(old.parts, new.parts)
        yield from (f"{new.file}: {new.text}: {change}" for change in found)


def _fields(old: tuple[str, ...], new: tuple[str, ...]) -> Iterator[str]:
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            yield " -> ".join("; ".join(part) or "nothing" for part in (old[a:b], new[c:d]))


def _values(old: tuple[str, ...], new: tuple[str, ...], used: Use) -> Iterator[str]:
    before, after = (dict(part.split(" = ", 1) for part in parts) for parts in (old, new))
    yield from (f"{name} = {before[name]} -> nothing" for name in before if name not in after)
    yield from (f"nothing -> {name} = {after[name]}" for name in after if name not in before)
    if moved := [name for name in after if before.get(name, after[name]) != after[name]]:
        # An insertion moves all values that follow it: one line for those.
        shown = [name for name in moved if used.has(name)] or [moved[-1]]
        shown = [f"{name} {before[name]} -> {after[name]}" for name in shown]
        yield f"{len(moved)} values changed, {', '.join(shown)}"


def mismatches(tree: Tree, used: Use) -> list[str]:
    """Return structures and constants of the bindings that are not those of the headers."""
    lines = []
    values = dict(p.split(" = ", 1) for d in tree.headers.values() if d.kind == "enum" for p in d.parts)
    for name in sorted(used_bindings(tree.bindings, used)):
        ours, theirs = tree.bindings.get(name), tree.headers.get(name)
        has_union = theirs and any("{" in part for part in theirs.parts)
        if ours and theirs and ours.parts and theirs.parts and not has_union:
            bound, declared = tuple(part.partition(":")[0] for part in ours.parts), field_names(theirs.parts)
            for difference in _fields(bound, declared):
                lines.append(f"{ours.file}: class {name}: not as in {theirs.file}: {difference}")
        elif ours and name in values:
            bound_value, value = (number(e, {}) for e in (ours.text.partition(" = ")[2], values[name]))
            if isinstance(bound_value, int) and isinstance(value, int) and bound_value != value:
                lines.append(f"{ours.file}: {ours.text}: not as in llama.cpp: {value}")
    return lines


def heading(old: Tree, new: Tree, root: Path) -> list[str]:
    """Return the versions of both, and those which our kernels must be told."""
    lines = [
        f"{PACKAGE} {old.version} -> {new.version}, llama.cpp {old.commit} -> {new.commit}, "
        f"ggml {old.ggml} -> {new.ggml}"
    ]
    ours = re.findall(r'#define (SPECDEC_GGML_\w+) "(.*)"', _text(root / INTERNALS))
    for name, value in ours:
        right = new.ggml if name.endswith("VERSION") else new.commit[:7]
        if value != right:
            lines.append(f'to do: {INTERNALS}: #define {name} "{right}", not "{value}"')
    return lines


# ---- testing ----


def test(given: str, version: str, work: Path) -> bool:
    """Run the tests of a copy of this repository that is pinned to a version. Return whether all passed."""
    copy = work / "specdec"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "dist"))
    for pins in (copy / "pyproject.toml", copy / "requirements-dev.txt"):
        pinned = re.sub(
            rf'^(\W*){PACKAGE}==[^"\s]+', rf"\g<1>{PACKAGE}=={version}", _text(pins), flags=re.MULTILINE
        )
        pins.write_text(pinned, encoding="utf-8")
    python: list[str | Path] = [copy / ".venv/bin/python", "-m"]
    pip: list[str | Path] = [*python, "pip", "install", "--quiet", "--disable-pip-version-check"]
    package = Path(given).resolve() if Path(given).exists() else f"{PACKAGE}=={version}"
    steps: list[list[str | Path]] = [
        ["make", ".venv/bin/python"],
        [*pip, package],
        [*pip, "--constraint", "requirements-dev.txt", "--editable", ".[dev]"],
        ["touch", ".venv/installed", ".venv/installed-dev"],  # else make compiles a version of the index
        ["make", ".venv/rpc"],
        [copy / ".venv/bin/specdec", "models", "pull", "starter"],
    ]
    for step in steps:
        if subprocess.run(step, cwd=copy, stdout=sys.stderr, check=False).returncode:
            print(f"failed: {' '.join(map(str, step))}")
            return False
    suites = ("unit", "llama", "cli")
    return all([_passes([*python, "pytest", f"tests/{suite}"], copy, suite) for suite in suites])


def _passes(command: list[str | Path], folder: Path, suite: str) -> bool:
    options = ["-n", "auto", "--dist", "loadfile", "-rfE", "--tb=line"]
    done = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    print(f"tests/{suite}: {lines[-1] if lines else done.stderr.strip()[-200:]}")
    print("".join(f"{line}\n" for line in lines if line.startswith(("FAILED", "ERROR"))), end="")
    return done.returncode == 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", help="version, folder or archive of a source distribution")
    parser.add_argument("new", help="the same")
    parser.add_argument("--test", action="store_true", help="then run the tests with NEW; this compiles it")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        work, trees = Path(folder), []
        for given in (options.old, options.new):
            try:
                trees.append(read(sources(given, work)))
            except (Failure, OSError, tarfile.TarError, SyntaxError) as error:
                reason = str(error).splitlines()[0].rstrip(":")
                print(f"compare_llama_cpp: {given}: {reason}", file=sys.stderr)
                return 2
        old, new = trees
        found = changes(old, new, use(ROOT))
        print(
            "\n".join([*heading(old, new, ROOT), *found, f"{len(found)} changes of what specdec uses"]),
            flush=True,
        )
        if options.test:
            return 0 if test(options.new, new.version, work) else 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
