"""Reasoning before an answer under a grammar: free first, then constrained, whatever is drafted."""

import re
from functools import partial

import numpy as np
import pytest

from spec_local.core.constraint import Constraint
from spec_local.core.sampling import Sampler
from spec_local.lookups.forced import ForcedTokens
from spec_local.policies.base import Policy
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.proposers.shapes import BestFirst, Drawn
from spec_local.reasoning.markers import Splitter, markers_of
from spec_local.reasoning.thought import Thought, ThoughtTokens
from spec_local.testing import FakeModel, FakeState, enumerate_outcomes
from tests.unfiltered import unfiltered
from tests.unit.generation import generate

END = ""
ANSWER = ["a", "<", END]  # what it may be: "a" or "<a", and its end
WHOLE = ["a", "\n", "</think>", "<think>", END]
SPLIT = ["a", "<", "/think>", "think>", END]
MIXED = ["a", "<", "/think>\n", ">a", "</think", END]  # a token that ends the reasoning may go on
CLOSING = {"</think>": ["</think>", "\n", "\n"], "/think>": ["<", "/think>"]}  # by the third token


def answers(texts):
    """Whether these tokens are the beginning of an answer."""
    whole = "".join(texts)
    if END in texts[:-1]:
        return False
    return whole in ("a", "<a") if texts[-1:] == [END] else whole in ("", "a", "<", "<a")


def may_be(texts, *, is_open, budget=None, closing=()):
    """Whether these tokens are the beginning of an output: the rule in words of text, without states."""
    whole = "".join(texts)
    if not is_open and answers(texts):
        return True
    if END in texts and whole.count("</think>") == 0:
        return False
    if not is_open:
        if "<think>".startswith(whole) and whole:
            return True
        if whole.startswith("</think>"):
            return _after(texts, whole, 0, "</think>")
        if not whole.startswith("<think>"):
            return False
    start = 0 if is_open else len("<think>")
    return _in_budget(texts, start, budget, closing) and _after(texts, whole, start, "</think>")


def _after(texts, whole, start, marker):
    """Whether the reasoning goes on, or ends with a token, then up to two line breaks, then an answer."""
    end = whole.find(marker, start)
    if end < 0:
        return END not in texts
    lengths = np.cumsum([len(text) for text in texts]).tolist()
    last = next(i for i, length in enumerate(lengths) if length >= end + len(marker))
    after = whole[end + len(marker) : lengths[last]]
    if after.strip("\n"):
        return False
    rest, n_breaks = texts[last + 1 :], len(after)
    while rest and rest[0] and not rest[0].strip("\n") and n_breaks + len(rest[0]) <= 2:
        n_breaks += len(rest[0])
        rest = rest[1:]
    return answers(rest)


def _in_budget(texts, start, budget, closing):
    """Whether the reasoning is closed after so many tokens."""
    if budget is None:
        return True
    n, thought = 0, list(texts)
    while start > 0:
        start -= len(thought.pop(0))
    for n in range(len(thought)):
        if n == budget:
            begun = next(k for k in (1, 0) if thought[:n][n - k :] == closing[:k] and k <= n)
            rest = closing[begun:]
            return thought[n : n + len(rest)] == rest[: len(thought) - n]
        if "</think>" in "".join(thought[: n + 1]):
            return True
    return True


def state_of(pieces, *, is_open, budget=None, markers=None, prompt=None):
    markers = markers or markers_of("</think>")
    if prompt is None:
        prompt = markers.openings[0] if is_open else ""
    splitter = Splitter(markers, prompt)
    splitter.feed("")
    known = [piece.encode() for piece in pieces]
    tokens = ThoughtTokens(markers, known.__getitem__, len(pieces), lambda token: pieces[token] == END)
    closing = [pieces.index(text) for text in CLOSING.get(pieces[2], ())]

    def follow(answer):
        texts = [pieces[token] for token in answer]
        return {t for t, text in enumerate(pieces) if answers([*texts, text]) and END not in texts}

    return Thought(splitter, tokens, closing, budget, FakeState(len(pieces), follow)).start()


def reference(pieces, *, is_open, budget=None):
    """The same set of outputs as one constraint of whole texts."""

    def follow(answer):
        texts = [pieces[token] for token in answer]
        closing = CLOSING.get(pieces[2], ())
        return {
            t
            for t, text in enumerate(pieces)
            if may_be([*texts, text], is_open=is_open, budget=budget, closing=closing)
        }

    return FakeState(len(pieces), follow)


def outputs(state, pieces, rng, rule="exact-match", shape=None, *, drafting=False, begun=(), n=3):
    for token in begun:
        state = state.after(token)
    constraint = Constraint(state)
    sampler = Sampler(unfiltered(), constraint)
    v = len(pieces)
    draft = DraftModel(FakeModel(v, seed=9), sampler, shape, n_vocab=v) if drafting and shape else None
    lookups = [ForcedTokens(constraint)] if drafting else []
    proposer = CombinedProposer(Policy(), draft, lookups, constraint=constraint) if drafting else None
    is_end = (v - 1).__eq__
    options = {"draft_max": 2, "max_tokens": n, "sampler": sampler, "is_end": is_end}
    tokens, end = generate(FakeModel(v, seed=1), [0, 1, *begun], proposer, rng=rng, rule=rule, **options)
    return (*tokens, end.reason), end.statistics.draft_n_accepted


def same(found, expected):
    return found.keys() == expected.keys() and all(abs(found[k] - expected[k]) < 1e-12 for k in expected)


CASES = [
    (WHOLE, {"is_open": True}, []),
    (WHOLE, {"is_open": True}, ["a", "</think>"]),
    (WHOLE, {"is_open": True, "budget": 1}, []),
    (WHOLE, {"is_open": True, "budget": 2}, ["a", "\n"]),
    (WHOLE, {"is_open": True, "budget": 0}, []),
    (WHOLE, {"is_open": False}, []),
    (WHOLE, {"is_open": False}, ["<think>", "a"]),
    (WHOLE, {"is_open": False, "budget": 1}, ["<think>"]),
    (SPLIT, {"is_open": True}, ["a"]),
    (SPLIT, {"is_open": True}, ["<", "/think>"]),
    (SPLIT, {"is_open": True, "budget": 1}, []),
    (SPLIT, {"is_open": False}, []),
    (SPLIT, {"is_open": False}, ["<", "think>"]),
    (MIXED, {"is_open": True}, ["<"]),
]
every_case = pytest.mark.parametrize(("pieces", "how", "begun"), CASES)


@every_case
def test_plain_decoding_follows_the_rule(pieces, how, begun):
    begun = [pieces.index(text) for text in begun]
    run = partial(outputs, pieces=pieces, begun=begun, n=4)
    found = enumerate_outcomes(lambda rng: run(state_of(pieces, **how), rng=rng)[0])
    assert same(found, enumerate_outcomes(lambda rng: run(reference(pieces, **how), rng=rng)[0]))
    ended = {"".join(pieces[t] for t in tokens[:-1]) for tokens in found if tokens[-1] == "stop"}
    before = "".join(pieces[t] for t in begun)
    assert all(re.search("(^|[>\n])<?a$", before + text) for text in ended)


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ("exact-match", None),
        ("token", Chain("drawn")),
        ("exact-match", Chain("coupled")),
        ("exact-match", BestFirst(3)),
        ("traversal", Drawn("without replacement", 3)),
    ],
    ids=["forced", "token", "coupled", "best first", "traversal"],
)
@every_case
def test_drafts_do_not_change_the_distribution(rule, shape, pieces, how, begun):
    begun = [pieces.index(text) for text in begun]
    n_drafted = 0

    def run(rng, drafting):
        nonlocal n_drafted
        state, n = state_of(pieces, **how), 3 if rule == "exact-match" else 2  # more take seconds
        tokens, n_accepted = outputs(state, pieces, rng, rule, shape, drafting=drafting, begun=begun, n=n)
        n_drafted += n_accepted
        return tokens

    plain = enumerate_outcomes(partial(run, drafting=False))
    assert same(enumerate_outcomes(partial(run, drafting=True)), plain)
    assert n_drafted or not shape  # few of these states force a text


GEMMA = markers_of("<channel|>")
GPT_OSS = markers_of("<|start|>assistant<|channel|>final<|message|>")
HEADER = "<|start|>assistant"
MORE_CASES = [
    (["a", "\n", "<channel|>a", "<|channel>thought", "<channel", "|>", END], {"markers": GEMMA}),
    (["a", "<|channel|>", "analysis", "<|message|>", "<|end|>", HEADER, END], {"markers": GPT_OSS}),
    (["a", "<|channel|>final", "<|message|>", HEADER, HEADER + "<|channel|>", END], {"markers": GPT_OSS}),
    (
        ["a", "<|channel|>", "analysis", "<|message|>", "<|end|>", HEADER, END],
        {"markers": GPT_OSS.before_calls, "prompt": HEADER},
    ),
]


@pytest.mark.parametrize(
    ("pieces", "how"),
    [
        *((pieces, how) for pieces, how, _ in CASES),
        *((pieces, how | {"is_open": is_open}) for pieces, how in MORE_CASES for is_open in (True, False)),
    ],
)
def test_the_ways_to_ask_for_allowed_tokens_agree(pieces, how):
    states = [state_of(pieces, **how)]
    everything = np.arange(len(pieces))
    for _ in range(4):
        following = []
        for state in states:
            allowed = state.allowed()
            assert state.allows(everything).tolist() == allowed.tolist()
            assert [state.n_allowed([token]) == 1 for token in everything] == allowed.tolist()
            following += [state.after(t) for t in allowed.nonzero()[0].tolist() if pieces[t] != END]
        assert all(following)
        states = following


def test_calls_of_gpt_oss_follow_a_thought():
    """The header before the calls' own part ends it; without a thought, they follow the prompt's header."""
    pieces = ["a", "<|channel|>", "analysis", "<|message|>", "<|end|>", HEADER, END]
    state = state_of(pieces, is_open=False, markers=GPT_OSS.before_calls, prompt=HEADER)
    texts = ["<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "a", "<|end|>", HEADER, "a"]
    choices = []
    for text in texts:
        choices.append("".join(pieces[t][-1:] for t in state.allowed().nonzero()[0]))
        assert state.n_allowed([pieces.index(text)])
        state = state.after(pieces.index(text))
    free = "a>s>>t"
    assert choices == ["a>", "as", ">", *[free] * 5, "a"]  # "analysis" begins with "a"
    assert state.allowed().tolist() == [text == END for text in pieces]
