"""Staged drafting: what a draft reads along changes how often it is called, and nothing else."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.constraint import Constraint
from spec_local.core.fake import FakeModel, FakeState, enumerate_outcomes
from spec_local.core.proposal import ROOT
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.engine.decoding import decode
from spec_local.engine.events import Finished, Step
from spec_local.errors import BackendError
from spec_local.lookups.base import Candidates
from spec_local.policies import Confidence, Policy
from spec_local.proposers import BestFirst, Chain, DraftModel, StringLevelDraft
from spec_local.proposers.vocabulary_map import IntersectionModel, VocabularyMap
from spec_local.verifiers import VERIFIERS
from tests.exact import assert_main_distribution

NEVER = 10**9


class Foresees:
    """A lookup that knows what a model finds most probable, and is wrong at every n-th place of a text."""

    name = "foresees"
    needs_logits = False

    def __init__(self, model, wrong_at=NEVER):
        self.model, self.wrong_at = model, wrong_at
        self.texts = []

    def find(self, history, limit):
        self.texts.append(list(history))
        text = list(history)
        for _ in range(min(limit.depth, limit.nodes)):
            best = int(self.model.logits(text).argmax())
            text.append((best + (len(text) % self.wrong_at == 0)) % self.model.n_vocab)
        tokens = text[len(history) :]
        return Candidates(
            tokens, range(ROOT, len(tokens) - 1), [0.5 + 0.01 * i for i in range(len(tokens))], "test"
        )


class Noted(Policy):
    """Records all that it is asked and observes."""

    def __init__(self, n_staged, may_truncate=True):
        super().__init__(may_truncate, n_staged)
        self.read, self.asked, self.judged, self.opinions = [], [], [], []

    def should_draft(self, output):
        self.read.append(output.n_read)
        self.opinions.append((output.confidence, output.entropy))
        return True

    def n_staged(self, confidence, n_unread):
        self.asked.append((list(confidence), n_unread))
        return super().n_staged(confidence, n_unread)

    def observe_staged(self, confidence, n_accepted):
        self.judged.append((list(confidence), n_accepted))


def main_model(n_vocab=8, **kwargs):
    return FakeModel(n_vocab, seed=2, scale=1.0, **kwargs)


def draft_model(n_vocab=8, **kwargs):
    return FakeModel(n_vocab, seed=2, scale=1.0, noise=0.5, **kwargs)


class Recorded(DraftModel):
    """Keeps every proposal, with the distributions that the loop's events leave out."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.proposals = []

    def propose(self, history, limit, rng, lap):
        found = super().propose(history, limit, rng, lap)
        rows = [found.distributions[i].dense(self._n_vocab).tolist() for i in sorted(found.distributions)]
        self.proposals.append((list(found.tokens), rows))
        return found


def run(proposer, how, rule="block", rng=None, prompt=(1, 2, 3), main=None, constraint=None, **kwargs):
    main, said = main or main_model(), list(prompt)
    event = None
    for event in decode(
        main,
        prompt,
        sampler=Sampler(how, constraint),
        proposer=proposer,
        verifier=VERIFIERS[rule],
        rng=rng or SeededRng(1),
        **kwargs,
    ):
        if isinstance(event, Step):
            said += event.tokens
            assert list(proposer.model.cached) == said[: len(proposer.model.cached)]
    assert isinstance(event, Finished)
    return said[len(prompt) :], event.statistics


# Each guess kind with the rules that are right for it.
KINDS = [
    ("drawn", "token"),
    ("drawn", "block"),
    ("coupled", "exact-match"),
    ("greedy", "token"),
    ("greedy", "block"),
]
KINDS += [("greedy", "exact-match"), ("drawn", "traversal")]
EVERY_KIND = pytest.mark.parametrize(("guess", "rule"), KINDS)
SETTINGS = {
    "as it is": SamplingSettings(),
    "greedy": SamplingSettings(temperature=0),
    "penalties": SamplingSettings(repeat_penalty=1.5, frequency_penalty=0.3, penalty_window=3),
    "top-k": SamplingSettings(temperature=0.7, top_k=2),
}
EVERY_SETTING = pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS.keys())
WRONG_AT = {"right": NEVER, "in between": 2, "wrong": 1}
EVERY_LOOKUP = pytest.mark.parametrize("wrong_at", WRONG_AT.values(), ids=WRONG_AT.keys())


@EVERY_KIND
@EVERY_LOOKUP
@EVERY_SETTING
def test_the_first_three_tokens_have_exactly_mains_distribution(cached_logits, guess, rule, wrong_at, how):
    n_vocab, prompt, sampler, main = 3, [0, 1, 2, 0, 1], Sampler(how), main_model(3)

    def answer(rng):
        ahead = Foresees(draft_model(n_vocab), wrong_at)
        chain = Chain(guess, Policy(guess != "drawn", n_staged=2))
        proposer = DraftModel(draft_model(n_vocab), sampler, chain, n_vocab=n_vocab, ahead=ahead)
        limits = {"draft_max": 3, "max_tokens": 3, "main": main_model(n_vocab), "prompt": prompt}
        return tuple(run(proposer, how, rule, rng, **limits)[0])

    assert_main_distribution(enumerate_outcomes(answer), main, sampler, prompt)


@EVERY_KIND
@EVERY_LOOKUP
@EVERY_SETTING
def test_every_guess_is_drawn_from_the_same_probabilities_as_without(guess, rule, wrong_at, how):
    found = []
    for n_staged in (0, 1, 3, 8):
        chain, small = Chain(guess, Policy(guess != "drawn", n_staged)), draft_model()
        ahead = Foresees(draft_model(), wrong_at)
        proposer = Recorded(small, Sampler(how), chain, n_vocab=8, ahead=ahead)
        tokens, statistics = run(proposer, how, rule, draft_max=6, max_tokens=60)
        found.append((tokens, proposer.proposals, statistics.draft_n, statistics.draft_n_accepted))
        assert len(small.calls) > 0
    assert found[1:] == found[:1] * 3


@EVERY_KIND
@pytest.mark.parametrize("allowed", [{0, 1, 5}, {3}], ids=str)
def test_under_a_constraint_too(guess, rule, allowed):
    found = []
    for n_staged in (0, 3):
        constraint = Constraint(FakeState(8, lambda answer: allowed if len(answer) % 3 else {2, 4}))
        how, chain = SamplingSettings(), Chain(guess, Policy(guess != "drawn", n_staged))
        sampler = Sampler(how, constraint)
        ahead = Foresees(draft_model(), 3)
        proposer = Recorded(draft_model(), sampler, chain, n_vocab=8, ahead=ahead)
        tokens, _ = run(proposer, how, rule, draft_max=5, max_tokens=40, constraint=constraint)
        assert all(t in (allowed if i % 3 else {2, 4}) for i, t in enumerate(tokens))
        found.append((tokens, proposer.proposals))
    assert found[0] == found[1]


def test_a_lookup_that_is_right_makes_all_guesses_in_one_call():
    how, small = SamplingSettings(temperature=0), main_model()
    chain = Chain(policy=Policy(n_staged=8))
    proposer = DraftModel(small, Sampler(how), chain, n_vocab=8, ahead=Foresees(main_model()))
    _, statistics = run(proposer, how, draft_max=4, max_tokens=50)
    assert statistics.n_steps == 10
    # The last token of the prompt, or the last guess and main's own token; and three of four guesses with it.
    assert small.calls == [2, 1 + 3, *[2 + 3] * 9]


def test_a_lookup_that_is_wrong_costs_no_call():
    how, small = SamplingSettings(temperature=0), main_model()
    chain = Chain(policy=Policy(n_staged=2))
    proposer = DraftModel(small, Sampler(how), chain, n_vocab=8, ahead=Foresees(main_model(), 1))
    run(proposer, how, draft_max=4, max_tokens=50)
    # Never more is read along than could be of use: nothing after the third guess.
    assert small.calls == [2, 3, 3, 2, 1, *[4, 3, 2, 1] * 9]


def test_in_between_each_right_token_saves_a_call():
    how, calls = SamplingSettings(temperature=0), {}
    for n_staged in (0, 1, 2, 4):
        small = draft_model()
        chain = Chain(policy=Policy(n_staged=n_staged))
        proposer = DraftModel(small, Sampler(how), chain, n_vocab=8, ahead=Foresees(draft_model(), 3))
        run(proposer, how, draft_max=6, max_tokens=80)
        calls[n_staged] = len(small.calls)
    assert calls[0] > calls[1] > calls[2] == calls[4]


@pytest.mark.parametrize("wrong_at", [1, 2, 3, 5, NEVER])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_policy_hears_what_was_read_and_what_became_of_it(wrong_at, temperature):
    how, small, policy = SamplingSettings(temperature=temperature), draft_model(), Noted(3)
    ahead = Foresees(draft_model(), wrong_at)
    proposer = DraftModel(small, Sampler(how), Chain("greedy", policy), n_vocab=8, ahead=ahead)
    run(proposer, how, "exact-match", draft_max=6, max_tokens=60)
    assert sum(policy.read) == sum(small.calls[1:])  # the first was the prompt's
    assert [n for n in policy.read if n] == small.calls[1:]
    saved = policy.read.count(0)
    assert sum(n_stood for _, n_stood in policy.judged) >= saved
    for confidence, n_stood in policy.judged:
        assert confidence == [0.5 + 0.01 * i for i in range(len(confidence))]
        assert n_stood <= len(confidence) <= min(n_stood + 1, 3)
    if wrong_at == 1:
        assert saved == 0
        assert {n_stood for _, n_stood in policy.judged} == {0}
    if wrong_at == NEVER:
        assert all(len(confidence) == n_stood for confidence, n_stood in policy.judged)
    assert all(1 <= unread <= 2 and 1 <= len(confidence) <= 5 for confidence, unread in policy.asked)


def test_a_policy_sees_the_same_opinions_with_and_without():
    for how in SETTINGS.values():
        seen = []
        for n_staged in (0, 4):
            policy = Noted(n_staged)
            proposer = DraftModel(
                draft_model(),
                Sampler(how),
                Chain("greedy", policy),
                n_vocab=8,
                ahead=Foresees(draft_model(), 4),
            )
            run(proposer, how, "exact-match", draft_max=6, max_tokens=60)
            seen.append(policy.opinions)
        assert seen[0] == seen[1]


def test_a_chain_that_ends_early_leaves_nothing_behind():
    """What was read along, and never guessed, is no part of the text."""
    how, small = SamplingSettings(temperature=0), draft_model()
    chain = Chain(policy=Confidence(0.35, n_staged=4))
    proposer = DraftModel(small, Sampler(how), chain, n_vocab=8, ahead=Foresees(draft_model()))
    tokens, statistics = run(proposer, how, draft_max=8, max_tokens=60)
    plain, _ = run(DraftModel(draft_model(), Sampler(how), Chain(), n_vocab=8), how, max_tokens=60)
    assert tokens == plain
    assert 0 < statistics.draft_n < 8 * statistics.n_steps


class Garbage:
    """A lookup of which nothing can be expected."""

    name = "garbage"
    needs_logits = False

    def __init__(self, answers):
        self.answers = itertools.cycle(answers)

    def find(self, history, limit):
        tokens = next(self.answers)
        return Candidates(tokens, range(ROOT, len(tokens) - 1), [0.5] * len(tokens))


@settings(max_examples=150, deadline=None)
@given(
    answers=st.lists(st.lists(st.integers(-2, 11), max_size=12), min_size=1, max_size=6),
    prompts=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=20), min_size=1, max_size=3),
    n_staged=st.integers(0, 40),
    draft_max=st.integers(1, 8),
    n_ctx=st.integers(2, 40),
    max_tokens=st.integers(1, 12),
    max_logits=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_nothing_that_a_lookup_says_can_do_harm(
    answers, prompts, n_staged, draft_max, n_ctx, max_tokens, max_logits, temperature
):
    how, found = SamplingSettings(temperature=temperature), []
    for ahead in (None, Garbage(answers)):
        limits = {"n_ctx": n_ctx, "max_tokens": max_tokens, "max_logits": min(max_logits, max_tokens)}
        proposer = DraftModel(
            draft_model(**limits),
            Sampler(how),
            Chain("drawn", Policy(False, n_staged)),
            n_vocab=8,
            is_end=lambda token: token == 7,
            ahead=ahead,
        )
        main = main_model()
        ends = {"is_end": lambda token: token == 7, "draft_max": draft_max, "max_tokens": 20}
        found.append([run(proposer, how, main=main, prompt=prompt, **ends)[0] for prompt in prompts])
    assert found[0] == found[1]


class Failing(FakeModel):
    """Its n-th call fails, after it was made."""

    left = NEVER

    def decode_tree(self, tokens, parents, n_logits=None):
        logits = super().decode_tree(tokens, parents, n_logits)
        self.left -= 1
        if self.left < 0:
            raise BackendError("no")
        return logits


def test_a_failing_draft_leaves_only_what_was_said():
    how, wanted = SamplingSettings(temperature=0), main_model()
    for fails_at in range(10):
        small, main = Failing(8, seed=2, scale=1.0, noise=0.5), main_model()
        chain = Chain(policy=Policy(n_staged=3))
        proposer = DraftModel(small, Sampler(how), chain, n_vocab=8, ahead=Foresees(draft_model(), 3))
        said, small.left = [1, 2, 3], fails_at
        events = decode(main, said, sampler=Sampler(how), proposer=proposer, rng=SeededRng(0))
        with pytest.raises(BackendError):
            said.extend(token for event in events if isinstance(event, Step) for token in event.tokens)
        assert list(small.cached) == said[: len(small.cached)]
        small.left = NEVER
        tokens, _ = run(proposer, how, prompt=said, main=main, max_tokens=9)
        for token in tokens:
            assert token == int(wanted.logits(said).argmax())
            said.append(token)


def test_a_tree_reads_nothing_along():
    how, small, ahead = SamplingSettings(temperature=0), draft_model(), Foresees(draft_model())
    proposer = DraftModel(small, Sampler(how), BestFirst(6, 3), n_vocab=8, ahead=ahead)
    run(proposer, how, "exact-match", max_tokens=30)
    assert ahead.texts == []


class Letters:
    """A vocabulary whose tokens are pieces of text."""

    bos = eos = eot = -1
    add_bos = False

    def __init__(self, *pieces):
        self.pieces, self.n_tokens = pieces, len(pieces)

    def piece(self, token):
        return self.pieces[token]

    text = piece

    def tokenize(self, text):
        tokens, rest = [], text.encode()
        while rest:
            longest = max((p for p in self.pieces if rest.startswith(p)), key=len)
            tokens.append(self.pieces.index(longest))
            rest = rest[len(longest) :]
        return tokens


MAIN, DRAFT = Letters(b"a", b"b", b"ab", b"c"), Letters(b"c", b"b", b"a", b"cc")


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("wrong_at", [1, 2, NEVER])
def test_a_translated_draft_reads_along_too(temperature, wrong_at):
    """One token of main's may be two of the draft's, so that a call of it is more than one of the model."""
    how, found, n_calls = SamplingSettings(temperature=temperature), [], []
    for n_staged in (0, 3):
        other = FakeModel(4, seed=5, max_logits=5)
        translated = IntersectionModel(other, VocabularyMap(MAIN, DRAFT), 4)
        chain = Chain("drawn", Policy(False, n_staged))
        known = IntersectionModel(FakeModel(4, seed=5), VocabularyMap(MAIN, DRAFT), 4)
        known.logits = lambda text, known=known: _after(known, text)
        ahead = Foresees(known, wrong_at)
        proposer = Recorded(translated, Sampler(how), chain, n_vocab=4, ahead=ahead)
        main = FakeModel(4, seed=3)
        tokens, _ = run(proposer, how, main=main, prompt=[0, 2, 1], draft_max=5, max_tokens=40)
        found.append((tokens, proposer.proposals))
        n_calls.append(len(other.calls))
    assert found[0] == found[1]
    if wrong_at == NEVER and not temperature:
        assert n_calls[1] < 0.8 * n_calls[0]


def _after(model, text):
    model.truncate(0)
    return model.evaluate(text, 1)[0].copy()


@pytest.mark.parametrize("wrong_at", [1, 2, NEVER])
def test_a_draft_that_is_spelled_again_reads_along_in_its_own_tokens(wrong_at):
    how, found, n_calls = SamplingSettings(temperature=0), [], []
    for n_staged in (0, 3):
        other = FakeModel(4, seed=5)
        ahead = Foresees(FakeModel(4, seed=5), wrong_at)
        chain, translation = Chain("greedy", Policy(True, n_staged)), VocabularyMap(MAIN, DRAFT)
        proposer = StringLevelDraft(other, Sampler(how), chain, translation, ahead=ahead)
        said = []
        for event in decode(
            FakeModel(4, seed=3),
            [0, 2, 1],
            sampler=Sampler(how),
            proposer=proposer,
            verifier=VERIFIERS["exact-match"],
            rng=SeededRng(0),
            draft_max=5,
            max_tokens=40,
        ):
            if isinstance(event, Step):
                said.append((event.tokens, event.proposal.tokens))
        found.append(said)
        n_calls.append(len(other.calls))
    assert found[0] == found[1]
    assert n_calls[1] <= n_calls[0]
    if wrong_at == NEVER:
        assert n_calls[1] < 0.6 * n_calls[0]


def test_rows_are_views_until_they_are_used():
    """An opinion must be asked before the next call, and is: a fake model's old rows are not numbers."""
    how = SamplingSettings(temperature=0)
    policy = Noted(5)
    proposer = DraftModel(
        draft_model(), Sampler(how), Chain(policy=policy), n_vocab=8, ahead=Foresees(draft_model(), 4)
    )
    run(proposer, how, draft_max=6, max_tokens=30)
    assert np.isfinite(policy.opinions).all()
