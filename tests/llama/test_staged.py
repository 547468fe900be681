"""Staged tokens on llama.cpp: the same drafts from fewer calls, with sliding windows, too."""

import pytest

from spec_local.core.proposal import Proposal
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.engine.decoding import decode
from spec_local.engine.events import Finished, Step
from spec_local.proposers.draft_model import DraftModel
from spec_local.proposers.shapes import Chain
from spec_local.verifiers import VERIFIERS
from tests.recorded_calls import record_calls

PROMPT = list(range(5, 45))


class KnownText:
    """A lookup that drafts from the expected output, with a wrong token at every fourth position."""

    name = "known text"
    needs_logits = False

    def __init__(self, text):
        self.text = text

    def find(self, history, limit):
        start = len(history)
        tokens = [t + (i % 4 == 0) for i, t in enumerate(self.text[start : start + limit.depth], start)]
        return Proposal.chain(tokens)


@pytest.mark.parametrize("model", ["tiny_draft", "window_model"])
def test_staged_tokens_give_the_same_drafts_in_fewer_calls(model, request, make_context):
    model, greedy = request.getfixturevalue(model), SamplingSettings(temperature=0)
    main = model if model.has_window else request.getfixturevalue("tiny_model")
    text: list[int] = []
    found, calls = [], []
    for n_staged in (0, 4):
        small = make_context(model, max_logits=5)
        recorded = record_calls(small)
        n_vocab, lookup = main.vocabulary.n_tokens, KnownText(text)
        proposer = DraftModel(
            small, Sampler(greedy), Chain(), n_vocab=n_vocab, lookup=lookup, n_staged=n_staged
        )
        steps, history = [], list(PROMPT)
        for event in decode(
            make_context(main),
            PROMPT,
            sampler=Sampler(greedy),
            proposer=proposer,
            verifier=VERIFIERS["exact-match"],
            rng=SeededRng(0),
            draft_max=6,
            max_tokens=60,
        ):
            if isinstance(event, Step):
                steps.append((list(event.tokens), list(event.proposal.tokens)))
                history += event.tokens
                assert list(small.cached) == history[: len(small.cached)]
        assert isinstance(event, Finished)
        assert event.statistics.draft_n_accepted > 20
        text = history
        found.append(steps)
        calls.append(len(recorded))
    assert found[0] == found[1]
    assert calls[1] < 0.85 * calls[0]
