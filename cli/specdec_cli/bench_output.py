"""The outputs of `specdec bench`: the report on stdout, a file, or lines while it runs."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from spec_local.errors import InvalidRequest
from specdec_cli import render

if TYPE_CHECKING:
    from spec_local.bench.variants import Variant


_File = TypeVar("_File")


class FormatChoice(StrEnum):
    md = "md"
    csv = "csv"
    json = "json"
    jsonl = "jsonl"


class Formats(Protocol):
    """The formats of one kind of results: `spec_local.bench.report`, or `parallel_report`."""

    def markdown(self, results: Any, *, width: int | None = None) -> str: ...
    def csv_rows(self, results: Any) -> str: ...
    def as_json(self, results: Any) -> str: ...
    def settings_object(self, variant: "Variant") -> dict[str, Any]: ...
    def line(self, event: Any) -> tuple[str, dict[str, Any]]: ...
    def summary_object(self, results: Any) -> dict[str, Any]: ...


class Sink(Protocol):
    """Results in one format: some are written immediately, others at the end."""

    def begin(self, record: Mapping[str, Any], variants: "Sequence[Variant]") -> None: ...
    def add(self, event: Any) -> None: ...
    def finish(self, results: Any) -> None: ...


class _Whole(Sink):
    """Writes everything at the end. width: of the terminal that shows it."""

    def __init__(
        self, formats: Formats, form: FormatChoice, write: Callable[[str], object], width: int | None = None
    ) -> None:
        self._formats, self._form, self._write, self._width = formats, form, write, width

    def begin(self, record: Mapping[str, Any], variants: "Sequence[Variant]") -> None:
        pass

    def add(self, event: Any) -> None:
        pass

    def finish(self, results: Any) -> None:
        if self._form == FormatChoice.md:
            self._write(self._formats.markdown(results, width=self._width))
        elif self._form == FormatChoice.csv:
            self._write(self._formats.csv_rows(results))
        else:
            self._write(self._formats.as_json(results))


class _Lines(Sink):
    """Writes one JSON object per line immediately, so that an aborted run loses no measurements."""

    def __init__(self, formats: Formats, write: Callable[[str], object]) -> None:
        self._formats, self._write = formats, write

    def _line(self, kind: str, content: Mapping[str, Any]) -> None:
        self._write(json.dumps({"type": kind, **content}, ensure_ascii=False) + "\n")

    def begin(self, record: Mapping[str, Any], variants: "Sequence[Variant]") -> None:
        settings = {variant.name: self._formats.settings_object(variant) for variant in variants}
        self._line("start", {"record": record, "settings": settings})

    def add(self, event: Any) -> None:
        self._line(*self._formats.line(event))

    def finish(self, results: Any) -> None:
        self._line("summary", self._formats.summary_object(results))


class _Both(Sink):
    """Writes to a file, then to standard output."""

    def __init__(self, file: Sink, stdout: Sink) -> None:
        self._sinks = file, stdout

    def begin(self, record: Mapping[str, Any], variants: "Sequence[Variant]") -> None:
        for each in self._sinks:
            each.begin(record, variants)

    def add(self, event: Any) -> None:
        for each in self._sinks:
            each.add(event)

    def finish(self, results: Any) -> None:
        for each in self._sinks:
            each.finish(results)


def file_format(path: Path, form: FormatChoice | None) -> FormatChoice:
    """The format of a file: that of its suffix, otherwise the one given.

    Raises:
        InvalidRequest: there is none.
    """
    suffix = path.suffix.removeprefix(".").lower()
    if suffix in list(FormatChoice):
        return FormatChoice(suffix)
    if form:
        return form
    if path.name in list(FormatChoice) and not path.exists():
        raise InvalidRequest(
            f"--output {path} names a file, not a format: give --format {path.name}, "
            f"or a file such as result.{path.name}"
        )
    raise InvalidRequest(
        f"the format of {path} is unknown: let its name end in .md, .csv, .json or .jsonl, or add --format"
    )


def shows_lines(path: Path | None, form: FormatChoice | None) -> bool:
    """Return whether lines of results appear on a terminal during the benchmark."""
    return _stdout_format(path, form) == FormatChoice.jsonl and sys.stdout.isatty()


def _stdout_format(path: Path | None, form: FormatChoice | None) -> FormatChoice:
    """The format on standard output: the report, if the format given is that of the file."""
    return form if form and not (path and file_format(path, form) == form) else FormatChoice.md


@contextlib.contextmanager
def sink(formats: Formats, path: Path | None, form: FormatChoice | None) -> Iterator[Sink]:
    """Standard output, and a file if one is given; errors of the file are raised at once."""
    shown = _stdout_format(path, form)
    stdout: Sink = (
        _Lines(formats, render.write)
        if shown == FormatChoice.jsonl
        else _Whole(formats, shown, render.write, render.width())
    )
    if not path:
        yield stdout
        return
    written = file_format(path, form)
    if written == FormatChoice.jsonl:
        with _writable(path, lambda: path.open("a", encoding="utf-8", buffering=1)) as file:  # line-buffered
            yield _Both(_Lines(formats, file.write), stdout)
        return
    with contextlib.ExitStack() as stack:
        part = stack.enter_context(replacing(path))

        def write(text: str) -> None:
            assert part
            part.write_text(text, encoding="utf-8")
            stack.close()  # the file is complete, even if standard output fails

        yield _Both(_Whole(formats, written, write), stdout)


@contextlib.contextmanager
def replacing(path: Path | None) -> Iterator[Path | None]:
    """A temporary file that replaces `path` if the block succeeds; errors are raised at its start."""
    from spec_local.system.files import replacing as replacing_file

    if not path:
        yield None
        return
    target = Path(os.path.realpath(path))  # do not replace a symbolic link
    with _writable(path, lambda: replacing_file(target)) as part:
        yield part


@contextlib.contextmanager
def _writable(path: Path, start: Callable[[], contextlib.AbstractContextManager[_File]]) -> Iterator[_File]:
    """Open a file.

    Raises:
        InvalidRequest: it cannot be written. Errors of the block stay what they are.
    """
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(start())
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be written ({error.strerror}): give another path") from None
        yield opened
