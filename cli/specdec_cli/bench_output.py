"""The outputs of `specdec bench`: a report, a file, or lines while it runs."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specdec_cli import render

if TYPE_CHECKING:
    from spec_local.bench.variants import Variant


class OutputChoice(StrEnum):
    md = "md"
    csv = "csv"
    json = "json"
    jsonl = "jsonl"


class Formats(Protocol):
    """The formats of one kind of results: `spec_local.bench.report`, or `parallel_report`."""

    def markdown(self, results: Any, *, bars: bool = False) -> str: ...
    def csv_rows(self, results: Any) -> str: ...
    def as_json(self, results: Any) -> str: ...
    def settings_object(self, variant: "Variant") -> dict[str, Any]: ...
    def line(self, event: Any) -> tuple[str, dict[str, Any]]: ...
    def summary_object(self, results: Any) -> dict[str, Any]: ...


class Sink(Protocol):
    """An output: some write results immediately, others at the end."""

    shows_lines: bool
    """Whether lines of results appear on standard output during the benchmark."""

    def begin(self, record: Mapping[str, Any], variants: "Sequence[Variant]") -> None: ...
    def add(self, event: Any) -> None: ...
    def finish(self, results: Any) -> None: ...


class _Whole(Sink):
    """Writes everything at the end: to standard output, or to a file with a report on standard output."""

    shows_lines = False

    def __init__(self, formats: Formats, output: OutputChoice, part: Path | None) -> None:
        self._formats, self._output, self._part = formats, output, part

    def begin(self, record: Mapping[str, Any], variants: "Sequence[Variant]") -> None:
        pass

    def add(self, event: Any) -> None:
        pass

    def finish(self, results: Any) -> None:
        formats = self._formats
        form = {"md": formats.markdown, "csv": formats.csv_rows, "json": formats.as_json}[self._output.value]
        if self._part:
            self._part.write_text(form(results), encoding="utf-8")
        if self._part or self._output == OutputChoice.md:
            _report(formats, results)
        else:
            render.write(form(results))


class _Lines(Sink):
    """Writes one JSON object per line immediately, so that an aborted run loses no measurements."""

    def __init__(self, formats: Formats, write: Callable[[str], object], *, reports: bool) -> None:
        self._formats, self._write, self._reports = formats, write, reports
        self.shows_lines = not reports and sys.stdout.isatty()

    def _line(self, kind: str, content: Mapping[str, Any]) -> None:
        self._write(json.dumps({"type": kind, **content}, ensure_ascii=False) + "\n")

    def begin(self, record: Mapping[str, Any], variants: "Sequence[Variant]") -> None:
        settings = {variant.name: self._formats.settings_object(variant) for variant in variants}
        self._line("start", {"record": record, "settings": settings})

    def add(self, event: Any) -> None:
        self._line(*self._formats.line(event))

    def finish(self, results: Any) -> None:
        self._line("summary", self._formats.summary_object(results))
        if self._reports:
            _report(self._formats, results)


def _report(formats: Formats, results: Any) -> None:
    render.write(formats.markdown(results, bars=sys.stdout.isatty()))


@contextlib.contextmanager
def sink(formats: Formats, output: OutputChoice, out: Path | None) -> Iterator[Sink]:
    """The output of this format to a file, or to standard output; errors of the file are raised at once."""
    if output != OutputChoice.jsonl:
        with replacing(out) as part:
            yield _Whole(formats, output, part)
    elif not out:
        yield _Lines(formats, render.write, reports=False)
    else:
        with out.open("a", encoding="utf-8", buffering=1) as file:  # line-buffered
            yield _Lines(formats, file.write, reports=True)


@contextlib.contextmanager
def replacing(path: Path | None) -> Iterator[Path | None]:
    """A temporary file that replaces `path` if the block succeeds; errors are raised at its start."""
    from spec_local.files import replacing as replacing_file

    if not path:
        yield None
        return
    with replacing_file(path) as part:
        yield part
