"""The end of a command: a one-line error message and an exit code."""

import contextlib
import signal
import sys
from collections.abc import Iterator

import typer

from spec_local.errors import InvalidRequest, SpecLocalError, as_failure
from spec_local.system.files import is_full
from specdec_cli import last_resort, render

OK, FAILURE, USAGE, CUT_SHORT, INTERRUPTED = 0, 1, 2, 3, 130


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Turn any exception of a command into one line on stderr and an exit code."""
    try:
        if sys.stdout is None:
            raise SpecLocalError("standard output is closed: redirect it to a file or a pipe")
        render.prepare_stdout()
        with _unwinding(), last_resort.counting_signals():
            yield
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
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
        raise _failure(FAILURE, _of_the_disk(error)) from None
    except MemoryError as error:
        raise _failure(FAILURE, str(as_failure(error))) from None


def _of_the_disk(error: OSError) -> str:
    where = error.filename or "while writing the answer"
    full = ": the disk is full, and what was complete is kept; free some space, and run this again"
    return f"{error.strerror or error}: {where}" + full * is_full(error)


@contextlib.contextmanager
def _unwinding() -> Iterator[None]:
    """Raise SystemExit on SIGTERM or SIGHUP, which closes open resources; a second one kills the process."""

    def on_signal(signum: int) -> None:
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        if signum == signal.SIGHUP:  # a closed terminal sends it twice, at any time until the end
            del previous[signum]
        signal.signal(signum, signal.SIG_IGN if signum == signal.SIGHUP else signal.SIG_DFL)
        raise SystemExit(last_resort.BY_SIGNAL + signum)

    usual = (signal.SIG_DFL, signal.default_int_handler)
    handled = [s for s in (signal.SIGINT, *render.ENDING) if signal.getsignal(s) in usual]
    with last_resort.handling(handled, on_signal) as previous:
        try:
            yield
        except SystemExit:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                try:
                    stream.flush()
                except OSError:  # the terminal is closed
                    render.discard(stream)
            raise


def _failure(code: int, message: str) -> typer.Exit:
    render.error(message)
    return typer.Exit(code)


def _discard_output() -> None:
    if sys.stdout is not None:
        render.discard(sys.stdout)
