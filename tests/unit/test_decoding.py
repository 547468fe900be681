"""The whole loop on the fake model: exact, for every proposer, shape and rule."""

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.constraint import Constraint
from spec_local.core.fake import FakeModel, FakeState, enumerate_outcomes
from spec_local.core.proposal import Proposal
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.datastore.lookup import DatastoreLookup
from spec_local.datastore.text_index import ContextIndex
from spec_local.engine.decoding import decode
from spec_local.engine.events import Finished, Prefilled, Step
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.lookups.prompt_lookup import PromptLookup
from spec_local.lookups.recycling import Recycling
from spec_local.lookups.suffixes import SuffixLookup
from spec_local.policies import Policy
from spec_local.proposers import Beam, BestFirst, Chain, DraftModel, Drawn
from spec_local.verifiers import VERIFIERS
from tests.exact import is_mains


class AlwaysWrong:
    """Guesses that have nothing to do with main."""

    needs_logits = False

    def prefill(self, history):
        return iter(())

    def propose(self, history, limit, rng, lap):
        return Proposal.chain([(history[-1] + 1) % 3] * min(limit.depth, limit.nodes))

    def commit(self, history):
        pass


class Kept:
    """A text in which everything has been said once.

    more: tokens that it sometimes pretends agree, so that it is followed beyond what differs.
    """

    index = ContextIndex.of(np.append(np.random.default_rng(0).integers(0, 3, 300), -1))

    def __init__(self, more=0):
        self.more = more

    def find(self, history, length):
        found = self.index.find(history, least=1)
        more = 0 if len(history) % 5 else self.more
        return [n + more for n, _ in found], self.index.continuations([place for _, place in found], length)


class Unjudged:
    """All that a lookup finds."""

    needs_logits = True

    def __init__(self, lookup):
        self.lookup = lookup

    def prefill(self, history):
        return iter(())

    def propose(self, history, limit, rng, lap):
        found = self.lookup.find(history, limit)
        return Proposal(found.tokens, found.parents, source=found.source)

    def observe(self, tokens, logits):
        self.lookup.observe(tokens, logits)

    def commit(self, history):
        pass


def main_model(n_vocab, **kwargs):
    return FakeModel(n_vocab, seed=2, scale=1.0, **kwargs)


def draft(noise, shape=Chain):
    def make(sampler, n_vocab, is_end=lambda token: False):
        return DraftModel(main_model(n_vocab, noise=noise), sampler, shape(), n_vocab=n_vocab, is_end=is_end)

    return make


def staged(how):
    """A draft that reads along what stood there before."""

    def make(sampler, n_vocab, is_end=lambda token: False):
        chain = Chain(how, Policy(how != "drawn", n_staged=2))
        ahead = PromptLookup(longest=3, shortest=1)
        model = main_model(n_vocab, noise=0.5)
        return DraftModel(model, sampler, chain, n_vocab=n_vocab, is_end=is_end, ahead=ahead)

    return make


def other_draft(more):
    """A draft that is not main's kin, and has more or fewer tokens."""

    def make(sampler, n_vocab, is_end=lambda token: False):
        return DraftModel(FakeModel(n_vocab + more, seed=4), sampler, Chain(), n_vocab=n_vocab, is_end=is_end)

    return make


PROPOSERS = {
    "plain": lambda sampler, n_vocab, is_end=None: None,
    "draft": draft(0.5),
    "perfect draft": draft(0.0),
    "unlike draft": draft(5.0),
    "greedy draft": draft(0.5, lambda: Chain("greedy")),
    "staged draft": staged("drawn"),
    "smaller draft": other_draft(-1),
    "larger draft": other_draft(2),
    "lookup": lambda sampler, n_vocab, is_end=None: Unjudged(PromptLookup(longest=3, shortest=1)),
    "suffix": lambda sampler, n_vocab, is_end=None: Unjudged(SuffixLookup(shortest=1)),
    "recycling": lambda sampler, n_vocab, is_end=None: Unjudged(Recycling()),
    "stored": lambda sampler, n_vocab, is_end=None: Unjudged(DatastoreLookup(Kept())),
    "followed": lambda sampler, n_vocab, is_end=None: Unjudged(DatastoreLookup(Kept(more=7))),
    "always wrong": lambda sampler, n_vocab, is_end=None: AlwaysWrong(),
    "best first": draft(0.5, lambda: BestFirst(6, 3)),
    "perfect best first": draft(0.0, lambda: BestFirst(6, 3)),
    "beam": draft(0.5, lambda: Beam(2, 6)),
}
DRAWN = {
    "specinfer": "with replacement",
    "spectr": "with replacement",
    "sequoia": "without replacement",
    "traversal": "without replacement",
    "top-one": "top and one",
}
# Every rule is right for a drawn chain, and for what is not drawn; a drawn tree has rules of its own.
WAYS = {f"{name}, {rule}": (make, rule) for name, make in PROPOSERS.items() for rule in ("token", "block")}
WAYS |= {f"draft, {rule}": (PROPOSERS["draft"], rule) for rule in VERIFIERS}
WAYS |= {
    f"{name}, {rule}": (PROPOSERS[name], rule)
    for name in ("best first", "beam", "suffix", "recycling", "stored", "followed")
    for rule in ("exact-match", "traversal")
}
for _rule, _drawing in DRAWN.items():
    PROPOSERS[_drawing] = draft(0.5, partial(Drawn, _drawing, 3, 2))
    WAYS[f"tree, {_rule}"] = PROPOSERS[_drawing], _rule
    if _rule != "spectr":  # where p = q its enumeration is long: test_tree_verifiers has it
        WAYS[f"perfect tree, {_rule}"] = draft(0.0, partial(Drawn, _drawing, 3, 2)), _rule
    WAYS[f"unlike tree, {_rule}"] = draft(5.0, partial(Drawn, _drawing, 3, 2)), _rule
WAYS["staged coupled, exact_match"] = staged("coupled"), "exact-match"
WAYS["tree, exact_match"] = PROPOSERS["top and one"], "exact-match"
WAYS["one, block"] = draft(0.5, partial(Drawn, "one", 3, 1)), "block"
EVERY_WAY = pytest.mark.parametrize(("make", "rule"), WAYS.values(), ids=WAYS.keys())


SHAPES = {
    "chain": (Chain, "block"),
    "best first": (partial(BestFirst, 12), "exact-match"),
    "beam": (partial(Beam, 4, 12), "exact-match"),
    "tree": (partial(Drawn, "top and one", 12), "top-one"),
    "traversed": (partial(Drawn, "without replacement", 12), "traversal"),
}
EVERY_SHAPE = pytest.mark.parametrize(("shape", "rule"), SHAPES.values(), ids=SHAPES.keys())


@pytest.fixture(autouse=True)
def _remember(remember_logits, remember_rho):
    pass


def say(main, prompt, proposer, how=None, rng=None, rule="block", constraint=None, **kwargs):
    """All tokens said, and the last event; after each step both caches must hold what was said, no more."""
    said, event = list(prompt), None
    for event in decode(
        main,
        prompt,
        sampler=Sampler(how or SamplingSettings(temperature=0), constraint),
        proposer=proposer,
        verifier=VERIFIERS[rule],
        rng=rng or SeededRng(0),
        **kwargs,
    ):
        if isinstance(event, Step):
            said += event.tokens
            assert 0 <= len(event.tokens) - event.n_accepted <= 1
            assert list(main.cached) == said[:-1]
            holds_only(proposer, said)
    assert isinstance(event, Finished)
    assert list(main.cached) == said[: len(main.cached)]
    return said[len(prompt) :], event


def holds_only(proposer, said):
    """The draft's cache is a part of what was said; what it has no token for is token 0 there."""
    if isinstance(proposer, DraftModel):
        cached, n_vocab = list(proposer.model.cached), proposer.model.n_vocab
        assert cached == [token if token < n_vocab else 0 for token in said[: len(cached)]]


def reference(main, prompt, n):
    """Greedy decoding, written out."""
    history = list(prompt)
    for _ in range(n):
        history.append(int(main.logits(history).argmax()))
    return history[len(prompt) :]


@EVERY_WAY
@pytest.mark.parametrize("draft_max", [0, 1, 3, 8])
def test_temperature_0_is_plain_decoding_token_for_token(make, rule, draft_max):
    main, how = main_model(8, n_ctx=128), SamplingSettings(temperature=0)
    for prompt in ([1], [1, 2, 3, 1, 2, 3, 1], list(range(8)) * 5):
        proposer = make(Sampler(how), 8)
        tokens, end = say(main, prompt, proposer, how, rule=rule, draft_max=draft_max, max_tokens=60)
        assert tokens == reference(main, prompt, 60)
        assert end.reason == "length"


SETTINGS = {
    "as it is": SamplingSettings(),
    "top-k": SamplingSettings(temperature=0.7, top_k=2),
    "top-p and min-p": SamplingSettings(top_p=0.8, min_p=0.1),
    "penalties": SamplingSettings(
        repeat_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.2, penalty_window=3
    ),
    "bias": SamplingSettings(logit_bias={0: -np.inf, 1: 2.0}),
}


@EVERY_WAY
@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_first_three_tokens_have_exactly_mains_distribution(make, rule, how):
    n_vocab, prompt = 3, [0, 1, 2, 0, 1]
    sampler, main = Sampler(how), main_model(n_vocab)

    def run(rng):
        proposer = make(sampler, n_vocab)
        return tuple(say(main_model(n_vocab), prompt, proposer, how, rng, rule, draft_max=2, max_tokens=3)[0])

    is_mains(enumerate_outcomes(run), main, sampler, prompt)


CONSTRAINTS = {
    "no token twice in a row": lambda n_vocab, answer: set(range(n_vocab)) - set(answer[-1:]),
    "by place": lambda n_vocab, answer: {(len(answer) + sum(answer)) % n_vocab, n_vocab - 1},
    "one": lambda n_vocab, answer: {len(answer) % n_vocab},
}
EVERY_CONSTRAINT = pytest.mark.parametrize("allowed", CONSTRAINTS.values(), ids=CONSTRAINTS.keys())


def masked(logits, tokens):
    """What may not follow has no probability."""
    return np.where(np.isin(np.arange(len(logits)), list(tokens)), logits, np.float32(-np.inf))


@EVERY_WAY
@EVERY_CONSTRAINT
@pytest.mark.parametrize(
    "how",
    [SETTINGS["as it is"], SETTINGS["top-k"], SETTINGS["penalties"]],
    ids=["as it is", "top-k", "penalties"],
)
def test_the_same_under_a_constraint(make, rule, allowed, how):
    """The answer's first token is the constraint's first; main and draft share one constraint."""
    n_vocab, prompt = 3, [0, 1, 2, 0, 1]
    main = main_model(n_vocab)

    def run(rng):
        constraint = Constraint(FakeState(n_vocab, partial(allowed, n_vocab)))
        proposer = make(Sampler(how, constraint), n_vocab)
        limits = {"draft_max": 2, "max_tokens": 3}
        return tuple(say(main_model(n_vocab), prompt, proposer, how, rng, rule, constraint, **limits)[0])

    said = enumerate_outcomes(run)
    for tokens in itertools.product(range(n_vocab), repeat=3):
        expected = 1.0
        for i, token in enumerate(tokens):
            may_follow = allowed(n_vocab, tokens[:i])
            if token not in may_follow:
                expected = 0.0
                break
            history = [*prompt, *tokens[:i]]
            p = Sampler(how).distribution(masked(main.logits(history), may_follow), history)
            expected *= p.dense(n_vocab)[token]
        assert said.get(tokens, 0.0) == pytest.approx(expected, abs=1e-12)


@EVERY_WAY
@EVERY_CONSTRAINT
def test_temperature_0_under_a_constraint_is_plain_decoding(make, rule, allowed):
    main, how, prompt, expected = main_model(8), SamplingSettings(temperature=0), [1, 2, 3], []
    for _ in range(40):
        logits = masked(main.logits([*prompt, *expected]), allowed(8, tuple(expected)))
        expected.append(int(logits.argmax()))
    constraint = Constraint(FakeState(8, partial(allowed, 8)))
    proposer = make(Sampler(how, constraint), 8)
    tokens, _ = say(main, prompt, proposer, how, rule=rule, constraint=constraint, max_tokens=40)
    assert tokens == expected


@EVERY_SHAPE
@EVERY_CONSTRAINT
def test_a_draft_guesses_what_may_follow(shape, rule, allowed):
    how, constraint = SamplingSettings(), Constraint(FakeState(8, partial(allowed, 8)))
    proposer = DraftModel(main_model(8, noise=0.5), Sampler(how, constraint), shape(), n_vocab=8)
    said = []
    for event in decode(
        main_model(8),
        [1, 2, 3],
        sampler=Sampler(how, constraint),
        proposer=proposer,
        verifier=VERIFIERS[rule],
        rng=SeededRng(0),
        max_tokens=40,
    ):
        if isinstance(event, Step):
            for node, token in enumerate(event.proposal.tokens):
                above = [event.proposal.tokens[n] for n in event.proposal.path(node)[:-1]]
                assert token in allowed(8, (*said, *above))
            said += event.tokens
            assert constraint._node.state.answer == tuple(said)  # no state of an earlier step is kept
    assert len(said) == 40


def test_the_enumeration_notices_a_shape_that_drops_what_is_improbable():
    """So it is not blind: a draft must not take back what it has drawn."""

    class Choosy(Chain):
        def build(self, reader, limit, rng):
            proposal = super().build(reader, limit, rng)
            q = proposal.distributions[-1].dense(3)
            return proposal if q[proposal.tokens[0]] > 0.4 else Proposal()

    with pytest.raises(AssertionError):
        test_the_first_three_tokens_have_exactly_mains_distribution(
            draft(0.5, Choosy), "block", SamplingSettings()
        )


@EVERY_WAY
def test_a_seed_repeats_what_is_said(make, rule):
    how = SamplingSettings()
    first, second = (
        say(main_model(8), [1], make(Sampler(how), 8), how, SeededRng(5), rule, max_tokens=50)[0]
        for _ in range(2)
    )
    assert first == second


@EVERY_WAY
@pytest.mark.parametrize("temperature", [0, 1])
def test_nothing_is_said_after_an_end_token(make, rule, temperature):
    how = SamplingSettings(temperature=temperature)
    for seed in range(10):
        main = FakeModel(6, seed=seed)
        # A proposer may know end tokens, and need not.
        proposer = make(Sampler(how), 6, *([lambda t: t == 3] if seed % 2 else []))
        tokens, end = say(
            main, [1, 2], proposer, how, SeededRng(seed), rule, is_end=lambda t: t == 3, max_tokens=40
        )
        assert end.reason == ("stop" if 3 in tokens else "length")
        assert 3 not in tokens[:-1]


@EVERY_WAY
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_full_context_ends_the_answer(make, rule, temperature):
    how = SamplingSettings(temperature=temperature)
    main = main_model(8, n_ctx=20)
    tokens, end = say(main, [1, 2, 3], make(Sampler(how), 8), how, rule=rule)
    assert end.reason == "context"
    assert temperature or tokens == reference(main, [1, 2, 3], len(tokens))
    assert len(main.cached) == 20


@EVERY_SHAPE
def test_a_draft_of_a_short_context_falls_silent_and_nothing_else_happens(shape, rule):
    how = SamplingSettings(temperature=0)
    main = main_model(8)
    small = DraftModel(main_model(8, n_ctx=10, noise=0.3), Sampler(how), shape(), n_vocab=8)
    for prompt in ([1, 2], [1] * 30):
        assert say(main, prompt, small, how, rule=rule, max_tokens=30)[0] == reference(main, prompt, 30)


@EVERY_SHAPE
@pytest.mark.parametrize(
    "limits", [{"max_branches": 1}, {"max_branches": 3}, {"max_tokens": 3}, {"max_logits": 4}], ids=str
)
@pytest.mark.parametrize("whose", ["main", "draft"])
def test_a_model_is_asked_for_no_more_than_it_can(shape, rule, limits, whose):
    for temperature in (0, 1):
        how = SamplingSettings(temperature=temperature)
        main = main_model(8, **(limits if whose == "main" else {}))
        small = main_model(8, noise=0.5, **(limits if whose == "draft" else {}))
        proposer = DraftModel(small, Sampler(how), shape(), n_vocab=8)
        tokens, end = say(main, [1, 2, 3], proposer, how, rule=rule, draft_max=8, max_tokens=30)
        assert len(tokens) == 30
        assert temperature or tokens == reference(main, [1, 2, 3], 30)
        assert end.statistics.draft_n > 0


@EVERY_WAY
def test_closing_early_leaves_only_what_was_said(make, rule):
    for temperature, n_events in itertools.product((0, 1), (0, 1, 5)):
        how = SamplingSettings(temperature=temperature)
        main, proposer = main_model(8), make(Sampler(how), 8)
        events = decode(
            main,
            [1, 2, 3],
            sampler=Sampler(how),
            proposer=proposer,
            verifier=VERIFIERS[rule],
            rng=SeededRng(0),
        )
        said = [1, 2, 3]
        for event in itertools.islice(events, n_events):
            said += event.tokens if isinstance(event, Step) else []
        events.close()
        assert list(main.cached) == (said[:-1] if n_events else [])
        holds_only(proposer, said)


class Failing(FakeModel):
    """Its n-th call fails, before or after the model has taken the tokens."""

    def __init__(self, *args, fails_at, late, **kwargs):
        super().__init__(*args, **kwargs)
        self.left, self.late = fails_at, late

    def evaluate(self, tokens, n_logits):
        return self._call(super().evaluate, tokens, n_logits)

    def decode_tree(self, tokens, parents, n_logits=None):
        return self._call(super().decode_tree, tokens, parents, n_logits)

    def _call(self, call, *args):
        self.left -= 1
        if self.left < 0 and not self.late:
            raise BackendError("no")
        logits = call(*args)
        if self.left < 0:
            raise BackendError("no")
        return logits


@EVERY_SHAPE
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fails", ["main", "draft"])
def test_a_failing_model_leaves_only_what_was_said(fails, late, shape, rule):
    """Be it in `evaluate` or in `grow`; and the next answer is as if nothing had happened."""
    how = SamplingSettings()
    for fails_at in range(12):
        kinds = {
            who: partial(Failing, fails_at=fails_at, late=late) if who == fails else FakeModel
            for who in ("main", "draft")
        }
        main = kinds["main"](8, seed=2, scale=1.0)
        model = kinds["draft"](8, seed=2, scale=1.0, noise=0.3)
        proposer = DraftModel(model, Sampler(how), shape(), n_vocab=8)
        said = [1, 2]
        events = decode(
            main, said, sampler=Sampler(how), proposer=proposer, verifier=VERIFIERS[rule], rng=SeededRng(0)
        )
        with pytest.raises(BackendError):
            said.extend(token for event in events if isinstance(event, Step) for token in event.tokens)
        for cached in (main.cached, model.cached):
            assert list(cached) == said[: len(cached)]
        for failing in (main, model):
            failing.left = 10**9
        tokens, _ = say(main, said, proposer, rule=rule, max_tokens=9)
        assert tokens == reference(main, said, 9)


@EVERY_SHAPE
def test_a_failing_rule_leaves_no_guesses_behind(shape, rule):
    class Broken:
        drawing = VERIFIERS[rule].drawing

        def __call__(self, proposal, p, n_vocab, rng, position):
            raise ValueError("no")

    how, main, small = SamplingSettings(), main_model(8), main_model(8, noise=0.3)
    proposer = DraftModel(small, Sampler(how), shape(), n_vocab=8)
    with pytest.raises(ValueError, match="no"):
        list(
            decode(main, [1, 2], sampler=Sampler(how), proposer=proposer, verifier=Broken(), rng=SeededRng(0))
        )
    assert list(main.cached) == [1]
    assert list(small.cached) == [1, 2]
    for idle in (main, small):
        with pytest.raises(InvalidRequest):
            idle.commit([0])


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=30), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    way=st.sampled_from(sorted(SHAPES)),
)
def test_both_caches_are_reused_and_never_believed_too_far(prompts, seed, way):
    """Turns, edits and repetitions in any order say what a fresh model would."""
    how = SamplingSettings(temperature=0)
    shape, rule = SHAPES[way]
    main, small = FakeModel(5, max_tokens=7), FakeModel(5, noise=0.5, max_tokens=3)
    proposer = DraftModel(small, Sampler(how), shape(), n_vocab=5)
    for prompt in prompts:
        tokens, end = say(main, prompt, proposer, how, SeededRng(seed), rule, max_tokens=9)
        assert tokens == reference(main, prompt, 9)
        assert end.statistics.prompt_n + end.statistics.cached_n == len(prompt) - 1


@EVERY_SHAPE
def test_a_second_turn_evaluates_only_what_is_new(shape, rule):
    how = SamplingSettings(temperature=0)
    main, small = main_model(8), main_model(8, noise=0.5)
    proposer = DraftModel(small, Sampler(how), shape(), n_vocab=8)
    prompt = [1, 2, 3] * 10
    tokens, _ = say(main, prompt, proposer, how, rule=rule, max_tokens=20)
    main.calls.clear()
    small.calls.clear()
    events = decode(main, [*prompt, *tokens, 5, 6], sampler=Sampler(how), proposer=proposer, rng=SeededRng(0))
    assert isinstance(next(events), Prefilled)
    assert sum(main.calls) == 2  # the last token said, and one new; the other goes with the first step
    assert sum(small.calls) <= 6


def test_cancelling_between_chunks_of_the_prompt_and_between_steps():
    for after in range(12):
        main, answers = FakeModel(8, max_tokens=4), iter([False] * after)
        tokens, end = say(main, [1, 2, 3] * 5, None, cancelled=partial(next, answers, True))
        assert end.reason == "cancelled"
        assert list(main.cached) == ([1, 2, 3] * 5 + tokens)[: len(main.cached)]


def test_impossible_requests_fail_before_anything_is_evaluated():
    main, sampler = FakeModel(8, n_ctx=20), Sampler(SamplingSettings())
    for prompt, error in [([], InvalidRequest), ([1] * 21, ContextOverflow)]:
        with pytest.raises(error):
            decode(main, prompt, sampler=sampler, rng=SeededRng(0))
    for numbers in ({"draft_max": -1}, {"max_tokens": -1}):
        with pytest.raises(InvalidRequest):
            decode(main, [1], sampler=sampler, rng=SeededRng(0), **numbers)
    assert main.calls == []
    assert say(main, [1] * 20, None)[1].reason == "context"


PARTS = {"draft model", "draft sampling", "main model", "main sampling", "verify", "commit"}


def test_statistics_count_what_happened():
    how, ticks = SamplingSettings(temperature=0), itertools.count()
    proposer = DraftModel(FakeModel(8), Sampler(how), Chain(), n_vocab=8)
    tokens, end = say(
        FakeModel(8), [1, 2, 3], proposer, how, draft_max=3, max_tokens=40, clock=lambda: float(next(ticks))
    )
    statistics = end.statistics
    assert statistics.prompt_n == 2
    assert statistics.predicted_n == len(tokens) == 40
    assert statistics.n_steps == 10  # a perfect draft: every step says its three guesses and one more
    assert statistics.tokens_per_step == 4
    assert statistics.acceptance_rate == 1
    assert statistics.tested_at == statistics.accepted_at == [10, 10, 10]
    assert statistics.predicted_s == pytest.approx(sum(statistics.profile.values()))
    assert set(statistics.profile) == PARTS


@EVERY_SHAPE
def test_statistics_of_a_tree_are_those_of_its_steps(shape, rule):
    how, main = SamplingSettings(), main_model(8)
    ticks = itertools.count()
    events = list(
        decode(
            main,
            [1, 2, 3],
            sampler=Sampler(how),
            rng=SeededRng(1),
            proposer=DraftModel(main_model(8, noise=0.4), Sampler(how), shape(), n_vocab=8),
            verifier=VERIFIERS[rule],
            max_tokens=60,
            clock=lambda: float(next(ticks)),
        )
    )
    steps, statistics = [e for e in events if isinstance(e, Step)], events[-1].statistics
    for step in steps:
        assert len(step.tokens) == step.n_accepted + 1
        assert len(step.proposal.follow(step.tokens)) >= step.n_accepted
    assert statistics.n_steps == len(steps)
    assert statistics.predicted_n == sum(len(step.tokens) for step in steps) == 60
    assert statistics.draft_n == sum(len(step.proposal.tokens) for step in steps)
    assert statistics.draft_n_accepted == sum(step.n_accepted for step in steps) > 0
    depths = range(max(step.proposal.depth for step in steps))
    assert statistics.tested_at == [sum(s.proposal.depth > n for s in steps) for n in depths]
    assert statistics.accepted_at == [sum(s.n_accepted > n for s in steps) for n in depths]
    assert statistics.predicted_s == pytest.approx(sum(statistics.profile.values()))
    assert set(statistics.profile) == PARTS


def test_a_draft_is_called_once_per_guess_also_after_a_wholly_accepted_draft():
    how, small = SamplingSettings(temperature=0), FakeModel(8)
    proposer = DraftModel(small, Sampler(how), Chain(), n_vocab=8)
    say(FakeModel(8), [1, 2, 3], proposer, how, draft_max=3, max_tokens=40)
    assert small.calls == [2, *[1, 1, 1], *[2, 1, 1] * 9]


@EVERY_SHAPE
def test_main_is_called_once_a_step_and_the_draft_once_a_level(shape, rule):
    how, main, small = SamplingSettings(temperature=0), main_model(8), main_model(8, noise=0.3)
    proposer = DraftModel(small, Sampler(how), shape(), n_vocab=8)
    _, end = say(main, [1, 2, 3], proposer, how, rule=rule, draft_max=3, max_tokens=40)
    assert len(main.calls) == 1 + end.statistics.n_steps  # the prompt
    assert sum(main.calls) == 2 + end.statistics.n_steps + end.statistics.draft_n
    assert len(small.calls) <= 1 + 3 * end.statistics.n_steps


@EVERY_SHAPE
def test_a_perfect_draft_is_always_right(shape, rule):
    """Also above temperature 0 where a guess is drawn, and each step says a whole path and one token more."""
    for temperature in (0, 1) if shape is Chain else (0,):
        how = SamplingSettings(temperature=temperature)
        proposer = DraftModel(main_model(8), Sampler(how), shape(), n_vocab=8)
        _, end = say(main_model(8), [1, 2, 3], proposer, how, SeededRng(3), rule, draft_max=1, max_tokens=40)
        assert end.statistics.n_steps == 20
