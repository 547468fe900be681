"""The outputs of `specdec bench`: the report on stdout, a file, or lines while it runs."""

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from spec_local.bench.variants import Variant
from spec_local.errors import InvalidRequest
from spec_local.system.files import expanded, replacing
from specdec_cli import render
from specdec_cli.signatures.drafts import FormatChoice


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


def sink(formats: ModuleType, path: Path | None, form: str | None) -> Sink:
    """Standard output, and a file if one is given: see `output_path`."""
    stdout = _stdout_format(path, form), render.write, render.width()
    if not path:
        return Sink(formats, stdout)

    def append(text: str) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)

    def replace(text: str) -> None:
        with replacing(Path(os.path.realpath(path))) as part:  # do not replace a symbolic link
            part.write_text(text, encoding="utf-8")

    written = file_format(path, form)
    # The file is complete, even if standard output fails.
    return Sink(formats, (written, append if written == "jsonl" else replace, None), stdout)


def output_path(path: Path | None) -> Path | None:
    """A path that a user gave for a file, with ~ expanded; its folder is created.

    Raises:
        InvalidRequest: no file can be written there.
    """
    if not path:
        return None
    path = expanded(path)
    if path.exists() and not path.is_file():
        raise InvalidRequest(f"{path} is not a regular file: give another path")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written ({error.strerror}): give another path") from None
