"""Proposers of every kind on the fake model, with verifiers that are lossless for them."""

from functools import partial

import numpy as np
import pytest

from spec_local.core.proposal import Proposal
from spec_local.datastore.context_index import ContextIndex
from spec_local.datastore.lookup import DatastoreLookup
from spec_local.lookups import LOOKUPS
from spec_local.lookups.forced import ForcedTokens
from spec_local.lookups.prompt_lookup import PromptLookup
from spec_local.lookups.recycling import Recycling
from spec_local.lookups.suffixes import SuffixLookup
from spec_local.policies.adaptive import Adaptive
from spec_local.policies.base import DraftReading, PolicyOptions
from spec_local.policies.cost_model import CostModel
from spec_local.policies.sharing import SharedCosts
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.proposers.shapes import Beam, BestFirst, Coupled, Drawn
from spec_local.testing import FakeModel
from spec_local.verifiers import VERIFIERS


class AlwaysWrong:
    """A proposer whose draft tokens are unrelated to the main model."""

    needs_logits = False
    head = main_costs = None

    async def prefill(self, history):
        pass

    async def propose(self, history, limit, rng):
        return Proposal.chain([(history[-1] + 1) % 3] * min(limit.depth, limit.nodes))

    def shorten(self, proposal):
        pass

    def commit(self, history):
        pass


class FakeDatastore:
    """A text in which every short context occurs.

    more: extra length of some matches, so that they are followed although the contexts differ.
    """

    index = ContextIndex.build(np.append(np.random.default_rng(0).integers(0, 3, 300), -1))

    def __init__(self, more=0):
        self.more = more

    def find(self, history, length):
        found = self.index.find(history, shortest=1)
        more = 0 if len(history) % 5 else self.more
        tokens = self.index.continuations([position for _, position in found], length)
        return [n + more for n, _ in found], tokens


class LookupProposer:
    """A proposer that proposes all candidates of a lookup, without a policy."""

    needs_logits = True
    head = main_costs = None

    def __init__(self, lookup, name=None):
        self.lookup = lookup
        assert name in (None, lookup.name)

    async def prefill(self, history):
        pass

    async def propose(self, history, limit, rng):
        found = self.lookup.find(history, limit)
        leaves = set(range(len(found.tokens))) - set(found.parents)
        assert found.depth <= limit.depth
        assert len(found.tokens) <= limit.nodes
        assert len(leaves) <= limit.branches
        assert len(found.confidence) == len(found.tokens)
        return found

    def shorten(self, proposal):
        pass

    def observe(self, tokens, logits):
        self.lookup.observe(tokens, logits)

    def commit(self, history):
        pass


def main_model(n_vocab, **kwargs):
    return FakeModel(n_vocab, seed=2, scale=1.0, **kwargs)


def draft(noise, shape=Chain, kind=DraftModel, vocabulary=None, lookups=lambda sampler: (), **options):
    """A draft model. vocabulary: the part that it drafts. lookups: whose tokens are staged."""

    def make(sampler, n_vocab, is_end=lambda token: False, model=None):
        part = vocabulary and vocabulary(n_vocab)
        model = model or main_model(n_vocab, noise=noise, draft_vocabulary=part)
        found = lookups(sampler)
        return kind(model, sampler, shape(), n_vocab=n_vocab, is_end=is_end, lookups=found, **options)

    return make


class ChangingVocabulary:
    """Another part of the vocabulary after each call: all but one token, or all."""

    def __init__(self, n_vocab):
        self._n_vocab, self._n_calls = n_vocab, 0

    def read(self, tokens):
        self._n_calls += 1

    @property
    def tokens(self):
        missing = self._n_calls % (self._n_vocab + 1)
        tokens = np.arange(self._n_vocab)
        return None if missing == self._n_vocab else tokens[tokens != missing]


def trimmed(shape=Chain):
    """A draft model that drafts a part of the vocabulary, another one in each call."""
    return draft(0.5, shape, vocabulary=ChangingVocabulary)


class ChangingWindow(DraftModel):
    """Drafts from another part of the history in each step: from its last one or two tokens, or from all."""

    _n_steps = 0

    async def propose(self, history, limit, rng):
        self._n_steps += 1
        window = self._n_steps % 3
        reading = DraftReading(1, window) if 0 < window < len(history) else DraftReading(1)
        return await super().propose(history, limit, rng, reading=reading)


def windowed(shape=Chain, vocabulary=None):
    """A draft model that has read different parts of the history, and may draft a part of the vocabulary."""
    return draft(0.5, shape, ChangingWindow, vocabulary)


def staged(how):
    """A draft model with staged tokens from prompt lookup."""
    return draft(
        0.5, lambda: Chain(how), lookups=lambda sampler: [PromptLookup(longest=3, shortest=1)], n_staged=2
    )


def forced(sampler, n_vocab, is_end=None):
    """Forced tokens alone; there are none without a constraint."""
    return LookupProposer(ForcedTokens(sampler.constraint)) if sampler.constraint else None


def staged_forced(how):
    """A draft model with staged forced tokens."""

    def lookups(sampler):
        return [ForcedTokens(sampler.constraint)] if sampler.constraint else []

    return draft(0.5, lambda: Chain(how), lookups=lookups, n_staged=2)


def other_draft(more):
    """A draft model that is unrelated to the main model, with more or fewer tokens."""

    def make(sampler, n_vocab, is_end=lambda token: False):
        return DraftModel(FakeModel(n_vocab + more, seed=4), sampler, Chain(), n_vocab=n_vocab, is_end=is_end)

    return make


PROPOSERS = {
    "plain": lambda sampler, n_vocab, is_end=None: None,
    "draft": draft(0.5),
    "perfect draft": draft(0.0),
    "unrelated draft": draft(5.0),
    "greedy draft": draft(0.5, lambda: Chain("greedy")),
    "staged draft": staged("drawn"),
    "smaller draft": other_draft(-1),
    "larger draft": other_draft(2),
    "lookup": lambda sampler, n_vocab, is_end=None: LookupProposer(PromptLookup(longest=3, shortest=1)),
    "suffix": lambda sampler, n_vocab, is_end=None: LookupProposer(SuffixLookup(shortest=1)),
    "recycling": lambda sampler, n_vocab, is_end=None: LookupProposer(Recycling()),
    "datastore": lambda sampler, n_vocab, is_end=None: LookupProposer(DatastoreLookup(FakeDatastore())),
    "datastore, followed": lambda sampler, n_vocab, is_end=None: LookupProposer(
        DatastoreLookup(FakeDatastore(more=7))
    ),
    "always wrong": lambda sampler, n_vocab, is_end=None: AlwaysWrong(),
    "best first": draft(0.5, lambda: BestFirst(6, 3)),
    "perfect best first": draft(0.0, lambda: BestFirst(6, 3)),
    "beam": draft(0.5, lambda: Beam(2, 6)),
    "coupled tree": draft(0.5, lambda: Coupled(4, 2)),
    "perfect coupled tree": draft(0.0, lambda: Coupled(4, 2)),
    "unrelated coupled tree": draft(5.0, lambda: Coupled(4, 2)),
    "forced": forced,
    "staged forced": staged_forced("drawn"),
}
for _name, _kind in LOOKUPS.items():
    PROPOSERS.setdefault(
        _name, lambda sampler, n_vocab, is_end=None, kind=_kind, name=_name: LookupProposer(kind(), name)
    )
DRAWN = {name: v.drawing for name, v in VERIFIERS.items() if v.drawing not in ("chosen", "one")}
# Every verifier is lossless for a drawn chain; a drawn tree needs one of its own.
CASES = {f"draft, {rule}": (PROPOSERS["draft"], rule) for rule in VERIFIERS}
CASES |= {
    f"{name}, {rule}": (PROPOSERS[name], rule)
    for name in ("perfect draft", "unrelated draft", "staged draft", "smaller draft", "larger draft")
    for rule in ("token", "block")
}
# Chosen nodes are accepted by exact match, whatever the verifier: a chain and a tree with each kind of
# verifier, the other proposers with one of them in turn.
_KINDS = ("exact-match", "token", "block", "traversal")
for _name in PROPOSERS:
    if _name in ("greedy draft", "best first"):
        CASES |= {f"{_name}, {rule}": (PROPOSERS[_name], rule) for rule in _KINDS}
    elif f"{_name}, block" not in CASES:
        _rule = _KINDS[(len(CASES) - len(VERIFIERS) + 1) % len(_KINDS)]  # the same with another verifier
        CASES[f"{_name}, {_rule}"] = PROPOSERS[_name], _rule
for _rule, _drawing in DRAWN.items():
    PROPOSERS[_drawing] = draft(0.5, partial(Drawn, _drawing, 3, 2))
    CASES[f"tree, {_rule}"] = PROPOSERS[_drawing], _rule
    if _rule != "spectr":  # slow where p = q, and enumerated in test_tree_verifiers
        CASES[f"perfect tree, {_rule}"] = draft(0.0, partial(Drawn, _drawing, 3, 2)), _rule
    CASES[f"unrelated tree, {_rule}"] = draft(5.0, partial(Drawn, _drawing, 3, 2)), _rule
    CASES[f"trimmed tree, {_rule}"] = trimmed(partial(Drawn, _drawing, 3, 2)), _rule
    CASES[f"windowed tree, {_rule}"] = windowed(partial(Drawn, _drawing, 3, 2), ChangingVocabulary), _rule
CASES["staged coupled, exact-match"] = staged("coupled"), "exact-match"
CASES |= {f"staged forced, {rule}": (PROPOSERS["staged forced"], rule) for rule in ("token", "block")}
CASES |= {f"forced, {rule}": (PROPOSERS["forced"], rule) for rule in _KINDS}
CASES["staged forced coupled, exact-match"] = staged_forced("coupled"), "exact-match"
CASES["tree, exact-match"] = draft(0.5, partial(Drawn, "without replacement", 2, 2)), "exact-match"
CASES["one, block"] = draft(0.5, partial(Drawn, "one", 3, 1)), "block"
CASES |= {f"trimmed draft, {rule}": (trimmed(), rule) for rule in ("exact-match", "token", "block")}
CASES["trimmed coupled tree, exact-match"] = trimmed(lambda: Coupled(4, 2)), "exact-match"
CASES["trimmed best first, traversal"] = trimmed(lambda: BestFirst(6, 3)), "traversal"
CASES["trimmed beam, block"] = trimmed(lambda: Beam(2, 6)), "block"
CASES |= {f"windowed draft, {rule}": (windowed(), rule) for rule in ("exact-match", "token", "block")}
CASES["windowed coupled tree, exact-match"] = (
    windowed(lambda: Coupled(4, 2), ChangingVocabulary),
    "exact-match",
)
CASES["windowed best first, block"] = windowed(lambda: BestFirst(6, 3), ChangingVocabulary), "block"
CASES["windowed beam, traversal"] = windowed(lambda: Beam(2, 6)), "traversal"
EVERY_CASE = pytest.mark.parametrize(("make", "rule"), CASES.values(), ids=CASES.keys())


SHAPES = {
    "chain": (Chain, "block"),
    "best first": (partial(BestFirst, 12), "exact-match"),
    "beam": (partial(Beam, 4, 12), "exact-match"),
    "coupled tree": (partial(Coupled, 12), "exact-match"),
    "tree": (partial(Drawn, "without replacement", 12), "traversal"),
}
EVERY_SHAPE = pytest.mark.parametrize(("shape", "rule"), SHAPES.values(), ids=SHAPES.keys())


def adaptive(main, draft=None, experience=None, **options):
    """The adaptive policy; main, draft: costs, also as seconds a call by number of tokens."""
    main, draft = (CostModel(costs) if isinstance(costs, dict) else costs for costs in (main, draft))
    main = SharedCosts(main) if isinstance(main, CostModel) else main
    return Adaptive(PolicyOptions(costs=lambda: (main, draft), experience=experience, **options))
