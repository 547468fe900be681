"""Decode one row: the engine with a single answer."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spec_local.core import language_model
from spec_local.engine.events import Event, Failed
from spec_local.engine.row import Row, check_prompt
from spec_local.engine.scheduler import Engine

__all__ = ["check_prompt", "decode"]


def decode(
    main: language_model.Row,
    prompt: Sequence[int],
    *,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> Iterator[Event]:
    """Continue a prompt with exactly the main model's distribution.

    Args:
        main, prompt, options: see `Row`.

    Yields:
        one `Prefilled`, a `Step` per call of the main model, one `Finished`. The iterator may be closed
        early: both caches then contain only tokens of the history.

    Raises:
        InvalidRequest, ContextOverflow: see `Row`; raised before anything is evaluated.
        BackendError: a call of a model failed; the caches contain a prefix of the history.
    """
    row = Row(main, prompt, clock=clock, **options)
    return _events(row, Engine(clock=clock))


def _events(row: Row, engine: Engine) -> Iterator[Event]:
    engine.add(row)
    try:
        while engine.rows:
            for _, event in engine.step():
                if isinstance(event, Failed):
                    raise event.error
                yield event
    finally:
        engine.remove(row)
