"""How a command ends: one line for a person, one code for a program."""

import contextlib
import sys
from collections.abc import Iterator

import typer

from spec_local.errors import InvalidRequest, SpecLocalError
from specdec_cli import render

OK, FAILURE, USAGE, INTERRUPTED = 0, 1, 2, 130


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Turn whatever a command raises into one line on stderr and its exit code."""
    try:
        if sys.stdout is None:
            raise SpecLocalError("standard output is closed: run specdec where its answer can go")
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        _discard_output()
        raise typer.Exit(OK) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except InvalidRequest as error:
        raise _failure(USAGE, str(error)) from None
    except SpecLocalError as error:
        raise _failure(FAILURE, str(error)) from None
    except OSError as error:
        _discard_output()
        raise _failure(
            FAILURE, f"{error.strerror or error}: {error.filename or 'while writing the answer'}"
        ) from None
    except MemoryError:
        raise _failure(FAILURE, "out of memory: take a smaller model or a smaller --ctx") from None


def _failure(code: int, message: str) -> typer.Exit:
    try:
        typer.echo(f"specdec: {' '.join(message.split())}", err=True)
    except OSError:
        render.discard(sys.stderr)
    return typer.Exit(code)


def _discard_output() -> None:
    if sys.stdout is not None:
        render.discard(sys.stdout)
