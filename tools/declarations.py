"""Read the declarations of C and C++ headers and of ctypes bindings, with regular expressions and `ast`.

This is enough for the headers of llama.cpp, which are regular. It is no C parser: both branches of an
``#if`` are read, macros are not expanded, and functions that return function pointers, templates and
operators are read wrongly. Nothing inside the body of a function or a variable is read.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Declaration:
    """A declared name.

    file: relative to the tree. text: the declaration on one line; for a struct or an enum, its beginning.
    parts: the fields of a struct, or the values of an enum as ``NAME = 1``.
    """

    file: str
    kind: str
    name: str
    text: str
    parts: tuple[str, ...] = ()

    def words(self) -> set[str]:
        """Return all identifiers of the declaration."""
        return set(re.findall(r"\w+", " ".join((self.name, self.text, *self.parts))))


_COMMENT = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|//[^\n]*|/\*.*?\*/""", re.DOTALL)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)(\([^)]*\))?[ \t]+(\S.*)$", re.MULTILINE)
_DEPRECATED = re.compile(r'\b(?:GGML_)?DEPRECATED\s*\((.*?),\s*"[^"]*"\s*\)(?=\s*;)', re.DOTALL)
_ATTRIBUTE = re.compile(r"\b(?:__attribute__|alignas|\w+_ATTRIBUTE_FORMAT)\s*\((?:\([^()]*\)|[^()])*\)")
_TRANSPARENT = re.compile(r'(?:\bextern\s+"C"|\bnamespace[\w\s:]*)\s*$')
_TYPE = re.compile(r"^(typedef\s+)?(struct|class|union|enum)\b(?:\s+class\b)?\s*(\w+)?")


def c_declarations(text: str, file: str) -> Iterator[Declaration]:
    """Yield the structs, enums, functions, types and constants that a header declares."""
    text = _COMMENT.sub(lambda m: m[0] if m[0][0] in "\"'" else " ", text).replace("\\\n", " ")
    for name, arguments, value in _DEFINE.findall(text):
        yield Declaration(file, "constant", name, f"#define {name}{arguments} {_tidy(value)}")
    text = _DEPRECATED.sub(r"deprecated \1", re.sub(r"^[ \t]*#.*$", "", text, flags=re.MULTILINE))
    for head, body, tail in _statements(_ATTRIBUTE.sub("", re.sub(r"\b\w+_API\b", "", text))):
        head, found = head.strip(), _TYPE.match(head.strip())
        if body is None or head.endswith(")"):
            yield from _simple(head, file)
        elif found:
            kind, parts = ("enum", _values(body)) if found[2] == "enum" else ("struct", _fields(body))
            if name := found[3] or tail.strip(" *") or " ".join(parts[:1]).partition(" ")[0]:
                yield Declaration(file, kind, name, f"{found[2]} {name}", tuple(parts))


def _statements(code: str) -> Iterator[tuple[str, str | None, str]]:
    """Yield the statements as (before the braces, inside the braces or None, from there to the semicolon)."""
    start, position = 0, 0
    while found := re.compile(r"[{};]").search(code, position):
        head, position = code[start : found.start()], found.end()
        tail, body = "", None
        if found[0] == "{" and not _TRANSPARENT.search(head):
            end = _closing(code, found.start())
            body, position = code[found.end() : end], end + 1
            if _TYPE.match(head.strip()) and not head.rstrip().endswith((")", "=")):
                semicolon = code.find(";", position) % (len(code) + 1)  # the end, if there is none
                tail, position = code[position:semicolon], semicolon + 1
        start = position
        if found[0] != "}" and (found[0] == ";" or body is not None):
            yield head, body, tail


def _closing(code: str, opening: int) -> int:
    """Return the position of the brace that closes the one at `opening`."""
    depth = 0
    for found in re.compile("[{}]").finditer(code, opening):
        depth += 1 if found[0] == "{" else -1
        if not depth:
            return found.start()
    return len(code)


def _simple(head: str, file: str) -> Iterator[Declaration]:
    """Yield the function or type that a statement without braces declares."""
    text = _tidy(head)
    if head.startswith("typedef"):
        if name := re.search(r"\(\s*\*\s*(\w+)\s*\)", head) or re.search(r"(\w+)\s*(?:\[[^]]*\]\s*)?$", head):
            yield Declaration(file, "type", name[1], text)
    elif re.match(r"[\w:<>\s*&,]+[\s*&]\w+\s*\(", head) and (name := re.search(r"(\w+)\s*\(", head)):
        yield Declaration(file, "function", name[1], text)


def _split(text: str, separator: str) -> list[str]:
    """Split a text at a separator that is outside of all brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == separator and not depth:
            parts.append(text[start:i])
            start = i + 1
    return [part for part in (*parts, text[start:]) if part.strip()]


def _fields(body: str) -> list[str]:
    return [_tidy(part) for part in _split(re.sub(r"\b(?:public|private|protected)\s*:", "", body), ";")]


def _values(body: str) -> list[str]:
    values: dict[str, int] = {}
    parts = []
    following: int | str = 0
    for part in _split(body, ","):
        name, _, expression = (side.strip() for side in part.partition("="))
        value = number(expression, values) if expression else following
        if isinstance(value, int):
            values[name] = value
        following = value + 1 if isinstance(value, int) else f"{value} + 1"
        parts.append(f"{name} = {value}")
    return parts


def number(expression: str, values: dict[str, int]) -> int | str:
    """Return the value of an expression of numbers, earlier values, ``<<`` and ``|``, or the expression."""
    known = re.sub(r"\b[A-Za-z_]\w*", lambda m: str(values.get(m[0], m[0])), _tidy(expression))
    result = 0
    for term in known.split("|"):
        number, _, shift = term.strip(" ()").partition("<<")
        try:
            result |= int(number.strip().rstrip("uUlL"), 0) << int(shift or "0", 0)
        except ValueError:
            return known
    return result


def _tidy(text: str) -> str:
    """Return a declaration on one line, with spaces as in ``const int *f(float x)``."""
    text = re.sub(r"\b(?:struct|enum|class|extern|static|inline)\s+(?=\w)", "", text)
    text = re.sub(r"\s*(\*+|&+)\s*", r" \1", re.sub(r"\s+", " ", text))
    text = re.sub(r"\s*([(\[])\s*", r"\1", re.sub(r"\s*([)\],])", r"\1", text))
    return re.sub(r",(?=\S)", ", ", re.sub(r"(?<=\w)\((?=\*)", " (", text)).strip()


def field_names(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a struct's fields in C."""
    names = []
    for part in parts:
        for declarator in _split(part, ","):
            if found := re.search(r"\(\*(\w+)\)", declarator) or re.search(r"(\w+)(?:\[\w*\])*$", declarator):
                names.append(found[1])
    return tuple(names)


def python_declarations(text: str, file: str) -> Iterator[Declaration]:
    """Yield the structures, C functions, constants, functions and methods of a module."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            yield Declaration(file, "binding", node.name, _signature(node))
        elif isinstance(node, ast.ClassDef):
            yield from _class(node, file)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                yield Declaration(file, "binding", target.id, f"{target.id} = {ast.unparse(node.value)}")


def _signature(node: ast.FunctionDef) -> str:
    """Return the types of a C function that a decorator declares, else the parameters of the function."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and len(decorator.args) >= 3:
            argument_types, result = map(ast.unparse, decorator.args[1:3])
            return f"{node.name}: {argument_types} -> {result}"
    return f"def {node.name}({ast.unparse(node.args)})"


def _class(node: ast.ClassDef, file: str) -> Iterator[Declaration]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            text = f"class {node.name}: {_signature(item)}"
            yield Declaration(file, "method", f"{node.name}.{item.name}", text)
        elif (
            isinstance(item, ast.Assign)
            and ast.unparse(item.targets[0]) == "_fields_"
            and isinstance(item.value, ast.List)
        ):
            fields = [field for field in item.value.elts if isinstance(field, ast.Tuple)]
            parts = tuple(f"{ast.literal_eval(f.elts[0])}: {ast.unparse(f.elts[1])}" for f in fields)
            yield Declaration(file, "structure", node.name, f"class {node.name}", parts)
