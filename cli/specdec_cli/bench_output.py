"""The outputs of `specdec bench`: the report on stdout, a file, or lines while it runs."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO, TypeVar, get_args

from spec_local.bench.variants import Variant
from spec_local.errors import InvalidRequest
from spec_local.system.files import replacing as replacing_file
from specdec_cli import render
from specdec_cli.signatures.bench import FormatChoice

_File = TypeVar("_File")


class Sink:
    """The results in one or several formats: JSON Lines are written immediately, the others at the end.

    Args:
        formats: the functions for one kind of results: `spec_local.bench.report`, or `parallel_report`.
        outputs: formats, the function that writes each, and the width of the terminal that shows it, if any.
    """

    def __init__(
        self, formats: ModuleType, *outputs: tuple[str, Callable[[str], object], int | None]
    ) -> None:
        self._formats, self._outputs = formats, outputs

    def begin(self, record: Mapping[str, Any], variants: Sequence[Variant]) -> None:
        settings = {variant.name: dataclasses.asdict(variant.settings) for variant in variants}
        self._line("start", {"record": record, "settings": settings})

    def add(self, event: Any) -> None:
        self._line(*self._formats.line(event))

    def finish(self, results: Any) -> None:
        for form, write, width in self._outputs:
            if form == "md":
                write(self._formats.markdown(results, width=width))
            elif form == "csv":
                write(self._formats.csv_rows(results))
            elif form == "json":
                write(self._formats.as_json(results))
            else:
                self._line("summary", self._formats.summary_object(results))

    def _line(self, kind: str, content: Mapping[str, Any]) -> None:
        """Write an object immediately, so that an aborted run loses no measurements."""
        for form, write, _ in self._outputs:
            if form == "jsonl":
                write(json.dumps({"type": kind, **content}, ensure_ascii=False) + "\n")


def file_format(path: Path, form: str | None) -> str:
    """The format of a file: that of its suffix, otherwise the one given.

    Raises:
        InvalidRequest: there is none.
    """
    suffix = path.suffix.removeprefix(".").lower()
    if suffix in get_args(FormatChoice):
        return suffix
    if form:
        return form
    if path.name in get_args(FormatChoice) and not path.exists():
        raise InvalidRequest(
            f"--output {path} names a file, not a format: give --format {path.name}, "
            f"or a file such as result.{path.name}"
        )
    raise InvalidRequest(
        f"the format of {path} is unknown: let its name end in .md, .csv, .json or .jsonl, or add --format"
    )


def shows_lines(path: Path | None, form: str | None) -> bool:
    """Return whether lines of results appear on a terminal during the benchmark."""
    return _stdout_format(path, form) == "jsonl" and sys.stdout.isatty()


def _stdout_format(path: Path | None, form: str | None) -> str:
    """The format on standard output: the report, if the format given is that of the file."""
    return form if form and not (path and file_format(path, form) == form) else "md"


@contextlib.contextmanager
def sink(formats: ModuleType, path: Path | None, form: str | None) -> Iterator[Sink]:
    """Standard output, and a file if one is given; errors of the file are raised at once."""
    stdout = _stdout_format(path, form), render.write, render.width()
    if not path:
        yield Sink(formats, stdout)
        return
    written = file_format(path, form)
    if written == "jsonl":
        with _writable(path, lambda: _appended(path)) as file:
            yield Sink(formats, (written, file.write, None), stdout)
        return
    with contextlib.ExitStack() as stack:
        part = stack.enter_context(replacing(path))

        def write(text: str) -> None:
            assert part
            part.write_text(text, encoding="utf-8")
            stack.close()  # the file is complete, even if standard output fails

        yield Sink(formats, (written, write, None), stdout)


def _appended(path: Path) -> TextIO:
    """Open a file to which lines are appended, and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", encoding="utf-8", buffering=1)  # line-buffered


@contextlib.contextmanager
def replacing(path: Path | None) -> Iterator[Path | None]:
    """A temporary file that replaces `path` if the block succeeds; errors are raised at its start."""
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
