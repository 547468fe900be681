"""Rows of a fake model that an engine advances together."""

from spec_local.core.sampling import Sampler
from spec_local.core.sampling_settings import UNCHANGED
from spec_local.engine.engine import Engine
from spec_local.engine.events import Step
from spec_local.engine.request import Request, RequestOptions
from spec_local.proposers.draft_model import DraftModel
from spec_local.verifiers import VERIFIERS


class RowRng:
    """The rng of one of several rows that share a `_ReplayRng`: its random numbers are its own."""

    def __init__(self, rng, row):
        self._rng, self._first = rng, 1000 * row
        self.accept, self.choose = rng.accept, rng.choose

    def choose_at(self, position, weights, tokens=None):
        return self._rng.choose_at(self._first + position, weights, tokens)

    def rank_at(self, position, weights, tokens, k):
        return self._rng.rank_at(self._first + position, weights, tokens, k)


def new_row(main, prompt, make=None, rule="exact-match", *, rng, how=None, draft=None, **kwargs):
    """A row of the engine on a new row of a fake main model, and if there is one, of a fake draft model.

    make: creates the proposer, given the sampler, the size of the vocabulary and the draft model's row.
    """
    sampler = Sampler(how or UNCHANGED)
    given = {"model": draft.new_sequence()} if draft else {}
    proposer = make(sampler, main.limits.n_vocab, **given) if make else None
    return Request(
        main.new_sequence(),
        prompt,
        RequestOptions(sampler=sampler, rng=rng, proposer=proposer, verifier=VERIFIERS[rule], **kwargs),
    )


def engine_with(*rows):
    """An engine to which these rows are added."""
    engine = Engine()
    for row in rows:
        engine.add(row)
    return engine


def finish(engine, answers=None):
    """Advance an engine until all rows have ended; return the last event of each.

    answers: receives the tokens of each row.
    """
    ends = {}
    while engine.requests:
        for row, event in engine.step():
            if isinstance(event, Step):
                if answers is not None:
                    answers.setdefault(row, []).extend(event.tokens)
                check_caches(row)
            ends[row] = event
    return ends


def check_caches(row):
    """Check that the caches contain only the row's history."""
    assert list(row.main.cached) == row.history[:-1]
    proposer = row._proposer
    if isinstance(proposer, DraftModel):
        cached = proposer.model.cached
        assert list(cached) == row.history[: len(cached)]
