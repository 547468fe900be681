"""Decode one request: the engine with a single answer."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spec_local.core.sequence import MainSequence
from spec_local.engine.engine import Engine
from spec_local.engine.events import Event, Failed
from spec_local.engine.prefill import check_prompt
from spec_local.engine.request import Request

__all__ = ["check_prompt", "decode"]


def decode(
    main: MainSequence,
    prompt: Sequence[int],
    *,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> Iterator[Event]:
    """Continue a prompt with exactly the main model's distribution.

    Args:
        main, prompt, options: see `Request`.

    Yields:
        one `Prefilled`, a `Step` per call of the main model, one `Finished`. The iterator may be closed
        early: both caches then contain only tokens of the history.

    Raises:
        InvalidRequest, ContextOverflow: see `Request`; raised before anything is evaluated.
        BackendError: a call of a model failed; the caches contain a prefix of the history.
    """
    request = Request(main, prompt, clock=clock, **options)
    return _events(request, Engine(clock=clock))


def _events(request: Request, engine: Engine) -> Iterator[Event]:
    engine.add(request)
    try:
        while engine.requests:
            for _, event in engine.step():
                if isinstance(event, Failed):
                    raise event.exception
                yield event
    finally:
        engine.remove(request)
