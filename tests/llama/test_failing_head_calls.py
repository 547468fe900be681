"""Calls of a head that fail or are interrupted: the next ones give what they would have given."""

import gc
import random

import numpy as np
import pytest

from spec_local.errors import BackendError, ContextOverflow
from spec_local.llama import runtime
from tests.llama.test_heads import NOISE, Pair
from tests.tiny_gemma import write_tiny_assistant, write_tiny_gemma
from tests.tiny_mtp import write_tiny_mtp

pytestmark = pytest.mark.usefixtures("f32_caches")


@pytest.fixture(scope="module")
def paths(folder):
    return {
        "chained": (write_tiny_mtp(folder / "three.gguf", "step35", n_mtp=3), None),
        "assistant": (
            write_tiny_gemma(folder / "gemma.gguf"),
            write_tiny_assistant(folder / "assistant.gguf"),
        ),
    }


@pytest.fixture(params=["chained", "assistant"])
def pair(request, paths):
    made = Pair(request.param, *paths[request.param])
    yield made
    made.close()


TOKENS, DRAFTED = random.Random(0).choices(range(5, 800), k=20), [30, 31]


def read(main, head):
    """The main model's tokens after those that the head has received."""
    n = head.n_received
    main.truncate(n)
    main.evaluate(TOKENS[n:-1], 0)
    head.receive(n, TOKENS[n:-1], main.states(range(len(TOKENS) - 1 - n)))


def draft(head, n=3):
    """The logits of n calls: after the history, and after each draft token; continues what there is."""
    found, known = [], [*TOKENS, *DRAFTED]
    for _ in range(n):
        if (start := len(head.cached)) >= len(TOKENS) - 1 + n:
            break
        found.append(head.evaluate(known[start : max(start + 1, len(TOKENS))], 1)[0].copy())
    return found


@pytest.mark.parametrize("n_before", [0, 1, 2])
@pytest.mark.parametrize(
    ("answer", "error"), [(1, ContextOverflow), (-3, BackendError), (KeyboardInterrupt, KeyboardInterrupt)]
)
def test_the_same_calls_after_a_failure(pair, monkeypatch, n_before, answer, error):
    """Of the first, second or third draft token."""
    mains, heads = pair.open(2)
    for main, head in zip(mains, heads, strict=True):
        read(main, head)
    expected = draft(heads[0])
    main, head = mains[1], heads[1]
    draft(head, n_before)
    decode = runtime.library().llama_decode

    def fail(context, batch):
        if isinstance(answer, int):
            return answer
        raise answer

    monkeypatch.setattr(runtime.library(), "llama_decode", fail)
    with pytest.raises(error) as caught:  # which keeps the generators of the call
        draft(head, n_before + 1)
    monkeypatch.setattr(runtime.library(), "llama_decode", decode)
    assert head.cached == [*TOKENS, *DRAFTED][: len(head.cached)]
    assert len(head.cached) <= len(TOKENS) - 1 + n_before
    again = draft(head)
    assert len(again) >= 3 - n_before
    assert np.allclose(again, expected[3 - len(again) :], atol=NOISE)
    del caught
    gc.collect()
    assert head.cached == [*TOKENS, *DRAFTED]
    head.truncate(10)
    read(main, head)
    assert np.allclose(draft(head), expected, atol=NOISE)
