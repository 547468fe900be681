"""Calls of a head that fail or are interrupted lose no states: the next ones have a reference's logits."""

import gc
import random
from types import SimpleNamespace

import numpy as np
import pytest

from spec_local.core.calls import run, together
from spec_local.llama import runtime
from tests.broken_llama import FAILURES
from tests.llama.test_gemma_assistant import BranchedWalk
from tests.llama.test_heads import NOISE, PROMPT, Pair, Walk
from tests.tiny_architectures import write_tiny
from tests.tiny_block_heads import write_tiny_block_head
from tests.tiny_gemma import write_tiny_assistant, write_tiny_gemma
from tests.tiny_heads import write_tiny_eagle, write_tiny_main
from tests.tiny_layered_heads import write_layered_eagle
from tests.tiny_mtp import write_tiny_mtp

pytestmark = pytest.mark.usefixtures("f32_caches")

SOME = ("aborted half-way", "fatal", "no slot", "interrupted after")
CASES = [(kind, failure) for kind in ("eagle", "mtp", "chained", "assistant") for failure in SOME]
CASES += [(kind, failure) for kind in ("layered", "peagle", "dspark") for failure in FAILURES]


@pytest.fixture(scope="module")
def paths(folder):
    main = write_tiny_main(folder / "main.gguf")
    return {
        "eagle": (main, write_tiny_eagle(folder / "eagle.gguf")),
        "layered": (main, write_layered_eagle(folder / "layered.gguf", main)),
        "peagle": (main, write_layered_eagle(folder / "peagle.gguf", main, "peagle")),
        "mtp": (write_tiny(folder / "mtp.gguf", "qwen35", n_mtp=1), None),
        "dspark": (main, write_tiny_block_head(folder / "dspark.gguf", "dspark")),
        "chained": (write_tiny_mtp(folder / "three.gguf", "step35", n_mtp=3), None),
        "assistant": (write_tiny_gemma(folder / "gemma.gguf"), write_tiny_assistant(folder / "head.gguf")),
    }


@pytest.mark.parametrize(("kind", "failure"), CASES)
def test_a_failed_call_loses_no_states(paths, monkeypatch, kind, failure):
    """The first, second or third call of a draft of two rows fails."""
    pair, prompt, n_failed = Pair(kind, *paths[kind]), PROMPT[:20], 0
    mains, heads = pair.open(2)
    reference = pair.reference(mains[0])
    reference.n_drafted = 3  # in a block
    decode, error = FAILURES[failure]
    usual = SimpleNamespace(llama_decode=runtime.library().llama_decode)
    for failing in (1, 2, 3):
        rows = []
        for main, head in zip(mains, heads, strict=True):
            row = (BranchedWalk if kind == "assistant" else Walk)(main, head, prompt, reference)
            head.truncate(0)
            main.truncate(0)
            call = main.call(prompt[:-1], range(-1, 18), 0)
            main.context.decode([call])
            row.read(call, range(19))
            rows.append(row)
        calls = []

        def sometimes(handle, batch, calls=calls, failing=failing):
            calls.append(batch)
            return (
                decode(usual, handle, batch) if len(calls) == failing else usual.llama_decode(handle, batch)
            )

        tasks, caught = [row.draft(3, random.Random(0), check=False) for row in rows], None
        with monkeypatch.context() as patch:
            patch.setattr(runtime.library(), "llama_decode", sometimes)
            try:
                results = together(tasks)
            except KeyboardInterrupt as interrupt:  # which keeps the tasks
                caught, results = interrupt, [interrupt] * 2
        if len(calls) < failing:
            assert results == [None, None]
            break
        n_failed += 1
        assert all(isinstance(result, error) for result in results)
        for row in rows:
            known, n_cached = [*prompt, *row.drafted], len(row.head.cached)
            assert row.head.cached == known[:n_cached]
            assert n_cached < len(known)  # without the token of the failed call, which is evaluated again
            found = run(row.head.call(known[n_cached:], n_logits=1, n_draft=3))[0].copy()
            row.drafted = [*row.drafted, 0]
            assert np.allclose(found, row.expected()[-1], atol=NOISE)
            row.head.truncate(len(prompt) - 1)
        assert together([row.draft(3, random.Random(0)) for row in rows]) == [None, None]
        cached = [list(row.head.cached) for row in rows]
        del caught, results, tasks
        gc.collect()
        assert [row.head.cached for row in rows] == cached
    assert n_failed >= 2
    pair.close()
