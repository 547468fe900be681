"""One answer on fake models, whose caches are checked after each step, and models that fail."""

from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.engine.events import Finished, Step
from spec_local.errors import BackendError
from spec_local.proposers.draft_model import DraftModel
from spec_local.testing import FakeModel, decode
from spec_local.verifiers import VERIFIERS

GREEDY = SamplingSettings(temperature=0)


def events_of(main, prompt, proposer, how=GREEDY, rng=None, rule="block", constraint=None, **options):
    """The events of one answer. rule: a verifier, or its name."""
    verifier = rule if callable(rule) else VERIFIERS[rule]
    options = {"sampler": Sampler(how, constraint), "rng": rng or SeededRng(0)} | options
    return decode(main, prompt, proposer=proposer, verifier=verifier, **options)


def generate(main, prompt, proposer, *args, **kwargs):
    """All generated tokens and the last event of `events_of`; checks both caches after each step."""
    history, event = list(prompt), None
    for event in events_of(main, prompt, proposer, *args, **kwargs):
        if isinstance(event, Step):
            history += event.tokens
            assert 0 <= len(event.tokens) - event.n_accepted <= 1
            assert list(main.cached) == history[: len(main.cached)]
            assert len(main.cached) == len(history) - 1 or main.limits.rollback != "any"
            assert len(main.cached) < len(history)
            check_draft_cache(proposer, history)
    assert isinstance(event, Finished)
    assert list(main.cached) == history[: len(main.cached)]
    return history[len(prompt) :], event


def check_draft_cache(proposer, history):
    """Check that the draft model's cache is a prefix of what it reads, with 0 for tokens that it lacks."""
    if isinstance(proposer, DraftModel):
        history = proposer._part(history)
        cached, n_vocab = list(proposer.model.cached), proposer.model.limits.n_vocab
        assert cached == [token if token < n_vocab else 0 for token in history[: len(cached)]]


class Failing(FakeModel):
    """A model that fails after `left` calls: before or, if `late`, after its cache has changed."""

    left, late = 10**9, False

    def fill(self, call, rows):
        self.left -= 1
        if self.left < 0 and not self.late:
            raise BackendError("no")
        super().fill(call, rows)
        if self.left < 0:
            raise BackendError("no")
