"""Render chat templates with Jinja, and trace which text they take from outside. Runs in a child process.

A template is a program from a model's file, so `spec_local.chat.template_process` runs this module in a child
process with limits. Jinja and json are all it needs, so that the child starts quickly.
"""

import contextlib
import datetime
import functools
import json
import operator
import re
import sys
import time
import types
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_CHARACTERS = 1 << 26
_MAX_REASON = 200  # characters of an error message
_HIDDEN = "\0"
_PASSING = (Iterator, KeysView, ValuesView, ItemsView)


class Traced(str):
    """Text that contains content of messages or of the descriptions of tools.

    outline: the same text with `_HIDDEN` in place of the content, except for white space around it.

    Operations of a template that lose the outline are repeated on the outlines of their arguments. If the
    result does not fit, all of the text counts as content.
    """

    outline: str

    def __new__(cls, text: str, outline: str | None = None) -> "Traced":
        traced = super().__new__(cls, text)
        if outline is None:
            start, end = len(text) - len(text.lstrip()), len(text.rstrip())
            outline = text[:start] + _HIDDEN * (end - start) + text[max(start, end) :]
        traced.outline = outline
        return traced

    def __str__(self) -> str:
        return self

    def __getitem__(self, part: Any) -> "Traced":
        return Traced(str.__getitem__(self, part), self.outline[part])

    def __iter__(self) -> Iterator[str]:
        return map(Traced, str.__iter__(self), self.outline)


def _joined(parts: Iterable[str]) -> str:
    parts = list(parts)
    if not any(isinstance(part, Traced) for part in parts):
        return "".join(parts)
    return Traced("".join(parts), "".join(_outline(parts)))


def _sum(left: Any, right: Any) -> Any:
    is_text = isinstance(left, str) and isinstance(right, str)
    return _joined((left, right)) if is_text else left + right


def _outline(value: Any) -> Any:
    """The value, with the outlines of all traced text in it."""
    if isinstance(value, Traced):
        return value.outline
    if type(value) in (list, tuple):
        return type(value)(map(_outline, value))
    if type(value) is dict:
        return {_outline(key): _outline(item) for key, item in value.items()}
    return value


def _has_traced(value: Any) -> bool:
    if type(value) is dict:
        return any(map(_has_traced, value)) or any(map(_has_traced, value.values()))
    return any(map(_has_traced, value)) if type(value) in (list, tuple) else isinstance(value, Traced)


def _with_outline(value: Any, outline: Any) -> Any:
    """Trace the text in a value; an outline that does not fit is ignored."""
    if isinstance(value, str):
        fits = isinstance(outline, str) and len(outline) == len(value)
        fits = fits and all(value.startswith(m[0], m.start()) for m in re.finditer(f"[^{_HIDDEN}]+", outline))
        return Traced(value, outline if fits else None)
    if type(value) not in (list, tuple):
        return value
    if type(outline) is not type(value) or len(outline) != len(value):
        outline = [None] * len(value)
    return type(value)(map(_with_outline, value, outline))


def _tracing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with traced text in its result if there is some in its arguments."""

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        # Iterators are used twice, and views such as dict.keys() are not looked into.
        args = tuple(list(a) if isinstance(a, _PASSING) else a for a in args)
        result = function(*args, **kwargs)
        parts = result if type(result) in (list, tuple) else (result,)
        is_lost = any(isinstance(part, str) and not isinstance(part, Traced) for part in parts)
        if not is_lost or not _has_traced((args, kwargs)):
            return result
        try:
            outline = function(*_outline(args), **_outline(kwargs))
        except Exception:  # such as an index that is not found
            outline = None
        return _with_outline(result, outline)

    return traced


_text_of = _tracing(str)
"""A template's rendering of a value, which can be a whole message or tool."""


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(environment.finalize, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _GenerationTag(Extension):
    """``{% generation %}`` marks answers for training; the text inside is rendered as usual."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The environment that Hugging Face's transformers defines for chat templates, and which they rely on."""

    code_generator_class = _Generator
    concat = staticmethod(_joined)
    intercepted_binops = frozenset({"+", "*", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=_text_of
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _tracing(function) for name, function in self.filters.items()}
        self.binop_table |= {"+": _sum, "*": _tracing(operator.mul), "%": _tracing(operator.mod)}
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        if isinstance(method, types.BuiltinMethodType) and isinstance(method.__self__, str):
            args = (method.__self__, *args)
            __obj = _tracing(lambda text, *rest, **more: __self.getattr(text, method.__name__)(*rest, **more))
        return super().call(__context, __obj, *args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


@functools.lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    return _Environment().from_string(template)


def render(
    template: str,
    bos: str,
    eos: str,
    messages: list[dict[str, Any]] | None,
    tools: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Render messages; None: only check that the template is valid.

    Args:
        tools: descriptions of what the model may call.
        variables: more variables of the template, such as ``enable_thinking``.

    Returns:
        the text, and the parts of it that are content, as pairs of the first and the next index.
    """
    compiled = _compiled(template)
    if messages is None:
        return {}
    text = compiled.render(
        dict.fromkeys(("tool_choice", "functions", "function_call")) | _traced(variables or {}),
        messages=[_traced(message) | {"role": message["role"]} for message in messages],
        tools=_traced(tools),
        bos_token=bos,
        eos_token=eos,
        add_generation_prompt=True,
    )
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"it writes more than {_MAX_CHARACTERS >> 20} MiB")
    found = re.finditer(f"{_HIDDEN}+", _outline(text))
    return {"text": text, "content": [match.span() for match in found]}


def _traced(value: Any) -> Any:
    """The value, with all text in it traced."""
    if isinstance(value, str):
        return Traced(value)
    if isinstance(value, list):
        return [_traced(item) for item in value]
    return {Traced(k): _traced(item) for k, item in value.items()} if isinstance(value, dict) else value


def _limit(name: str, amount: int) -> None:
    """Set a limit of this process, if the system has it."""
    with contextlib.suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        which = getattr(resource, name)
        resource.setrlimit(which, (amount, resource.getrlimit(which)[1]))


def main(max_seconds: float, max_bytes: int) -> None:
    """Answer the requests in stdin, one JSON object per line, until it is closed.

    Args:
        max_seconds: processor time for each request. max_bytes: memory. The system enforces them where it
            can; the parent process does so everywhere, as long as it lives.
    """
    _limit("RLIMIT_CORE", 0)
    _limit("RLIMIT_AS", max_bytes)
    for line in sys.stdin.buffer:
        _limit("RLIMIT_CPU", int(time.process_time() + max_seconds) + 1)
        try:
            request = json.loads(line.decode("utf-8", "surrogatepass"))
            reply = json.dumps(render(**request), ensure_ascii=False).encode("utf-8", "surrogatepass")
        except MemoryError:
            reply = json.dumps({"error": f"it needs more than {max_bytes >> 20} MiB of memory"}).encode()
        except Exception as error:  # Jinja raises exceptions of many types, and so do templates
            reason = " ".join(str(error).split()) or type(error).__name__
            reason = reason if len(reason) <= _MAX_REASON else reason[:_MAX_REASON] + "..."
            reply = json.dumps({"error": reason}).encode()
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
