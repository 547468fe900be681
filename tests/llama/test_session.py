"""Sessions on llama.cpp: output, cache contents and finish reasons."""

import itertools

import numpy as np
import pytest

from spec_local.chat.conversation import Conversation
from spec_local.chat.template import ChatTemplate
from spec_local.core import calls
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.engine.events import Prefilled
from spec_local.errors import ContextOverflow, InvalidRequest, ModelFileError
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from spec_local.llama.sequence import LlamaSequence
from spec_local.llama.tiny import write_tiny_model
from spec_local.policies.cost_model import CostModel
from spec_local.session import Done, Session, Text
from spec_local.settings import CHAIN_VERIFIERS, GenerationSettings
from spec_local.verifiers import VERIFIERS
from spec_local.verifiers.base import Verifier
from tests.llama.answers import text_of, tokens_of
from tests.recorded_calls import record_calls
from tests.unfiltered import unfiltered

pytestmark = pytest.mark.usefixtures("own_cache", "unchecked")

GREEDY = SamplingSettings(temperature=0)
WARM = unfiltered(temperature=1.0)
# Few different tokens, so that lookups find many matches.
FEW = unfiltered(1.0, logit_bias=dict.fromkeys(range(270, 275), 9.0))
PROMPT = "one two three one two three one two"
# Logits from calls of different sizes differ by rounding, by at most this much.
GAP = 0.05


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Main models, and draft models that often agree with them. F32 reduces rounding differences."""
    folder = tmp_path_factory.mktemp("session")
    made = {
        name: Model(write_tiny_model(folder / f"{name}.gguf", tensor_type="F32", **kwargs))
        for name, kwargs in {
            "main": {},
            "draft": {"noise": 0.05},
            "ending": {"end_scale": 1.5},
            "other": {"extra_tokens": ["wine", "two"]},
            "another": {"extra_tokens": ["beer", "one two", "th"], "noise": 0.05},
        }.items()
    }
    yield made
    for model in made.values():
        model.close()


@pytest.fixture(scope="module")
def prompt(models):
    return models["main"].vocabulary.tokenize(PROMPT, add_special=True)


@pytest.fixture
def make_session(models, make_context):
    def make(main="main", draft="draft", **kwargs):
        kwargs = {"n_ctx": 512, "max_branches": 64} | kwargs
        contexts = [make_context(models[name], **kwargs) for name in (main, draft) if name]
        return Session(*contexts)

    return make


def run(session, prompt=PROMPT, **kwargs):
    """Return the tokens, the text and the last event of an answer; by default greedy, with policy fixed."""
    how = {name: kwargs.pop(name) for name in ("cancelled", "clock") if name in kwargs}
    settings = GenerationSettings(**{"sampling": GREEDY, "policy": "fixed"} | kwargs)
    events = list(session.generate(prompt, settings, **how))
    if not isinstance(events[0], Done):
        assert isinstance(events[0], Prefilled)
    assert all(isinstance(e, Text) for e in events[1:-1])
    assert isinstance(events[-1], Done)
    return tokens_of(events), text_of(events), events[-1]


FLAT = {1: 1.0, 64: 1.0}  # seconds by tokens per call: many cost no more than one
CHEAP = {1: 0.01, 64: 0.01}


def simulate_costs(session, main, draft=None):
    """Replace the measured costs of a session by these; calls advance the returned clock accordingly."""
    now = [0.0]

    def simulate(context, costs):
        decode, model = context.context.decode, CostModel(costs)

        def timed(calls):
            now[0] += model.seconds(sum(len(call.tokens) for call in calls))
            return decode(calls)

        context.context.decode = timed
        return CostModel(costs)

    session._costs.calls = simulate(session.main, main), simulate(session.draft, draft) if draft else None
    return lambda: now[0]


def check_caches(session, history, tolerance=GAP):
    """Check that both caches hold a prefix of the history, and that their logits are those of new contexts.

    The logits of tiny models have a standard deviation of 3: a wrong token changes them by far more than GAP.
    """
    for context in filter(None, (session.main, session.draft)):
        cached = list(context.cached)
        assert cached == history[: len(cached)]
        if context is session.main:
            assert len(cached) >= len(history) - 1
        if len(cached) == context.n_ctx:
            cached.pop()
            context.truncate(len(cached))
        n_vocab = context.limits.n_vocab
        probe = history[len(cached)] if len(cached) < len(history) else 7
        ours = calls.run(context.call([probe], n_logits=1)).copy()
        fresh = open_sequence(context.model, n_ctx=context.n_ctx, max_tokens=64, max_logits=1, threads=1)
        for start in range(0, len(cached), 64):
            calls.run(fresh.call(cached[start : start + 64], n_logits=0))
        theirs = calls.run(fresh.call([probe], n_logits=1)).copy()
        fresh.close()
        assert ours.shape == (1, n_vocab)
        np.testing.assert_allclose(ours, theirs, atol=tolerance)
        context.truncate(len(cached))


def check_equal_except_near_ties(session, prompt, ours, theirs, sampling=GREEDY, seed=0, tolerance=GAP):
    """Check that two outputs are equal, or differ first at tokens of nearly equal probability.

    Changing each logit by the tolerance, or half of it for greedy tokens, selects either of them.
    """
    change = tolerance if sampling.temperature else tolerance / 2
    if ours == theirs:
        return
    at = next(i for i in range(min(len(ours), len(theirs))) if ours[i] != theirs[i])
    context = open_sequence(
        session.main.model, n_ctx=session.main.n_ctx, max_tokens=512, max_logits=1, threads=1
    )
    logits = calls.run(context.call([*prompt, *theirs[:at]], n_logits=1))[0].copy()
    context.close()
    for favourite, other in ((ours[at], theirs[at]), (theirs[at], ours[at])):
        moved = logits.copy()
        moved[favourite] += change
        moved[other] -= change
        found = Sampler(sampling).distribution(moved, [*prompt, *theirs[:at]])
        index = SeededRng(seed).choose_at(len(prompt) + at, found.probs, found.ids)
        drawn = index if found.ids is None else int(found.ids[index])
        assert drawn == favourite, f"token {at} differs, and it is not a near-tie"


SAMPLINGS = {
    "greedy": GREEDY,
    "all": WARM,
    "nucleus": unfiltered(1.0, top_k=40, top_p=0.95, min_p=0.05),
    "penalty": unfiltered(1.0, repeat_penalty=1.3),
}
REPETITIVE = {"logit_bias": {300: 1000.0, 301: 900.0}, "dry_multiplier": 999.0}
VARIANTS = {
    "chain": {"proposer": "draft", "draft_max": 4},
    "short chain": {"proposer": "draft", "draft_max": 1},
    "long chain": {"proposer": "draft", "draft_max": 64},
    "lookup": {"proposer": "lookup"},
    "adaptive lookup": {"proposer": "lookup", "policy": "adaptive"},
    "adaptive": {"policy": "adaptive"},
    "short adaptive": {"policy": "adaptive", "draft_max": 2},
    "any shape": {"policy": "adaptive", "shape": "auto", "draft_max": 8},
    "confidence": {"policy": "confidence", "draft_p_min": 0.3},
    "confidence, tree": {"policy": "confidence", "draft_p_min": 0.3, "shape": "tree"},
    "tree": {"shape": "tree", "draft_max": 6, "tree_nodes": 10},
    "large tree": {"shape": "tree", "draft_max": 64, "tree_nodes": 64},
    "adaptive tree": {"shape": "tree", "policy": "adaptive"},
    "beam": {"shape": "beam", "draft_max": 4, "tree_nodes": 16, "beam_width": 3},
    "adaptive beam": {"shape": "beam", "policy": "adaptive"},
}


@pytest.fixture(scope="module")
def plain(models, prompt):
    """The tokens of plain decoding, by the name of the sampling settings."""
    context = open_sequence(models["main"], n_ctx=512, max_tokens=64, max_logits=64, threads=1)
    yield {
        name: run(Session(context), prompt, policy="off", sampling=sampling, seed=0, max_tokens=60)[0]
        for name, sampling in SAMPLINGS.items()
    }
    context.close()


def test_sequence_breakers_are_texts(make_session, prompt):
    session = make_session()
    text = session.main.model.vocabulary.detokenize([300])
    for breakers, output in (((), [300, 300, 300, 301]), (("", text), [300] * 4)):
        how = unfiltered(0, **REPETITIVE, dry_sequence_breakers=breakers)
        assert run(session, prompt, sampling=how, max_tokens=4)[0] == output


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_seed_gives_the_output_of_plain_decoding_whatever_drafts(
    make_session, prompt, plain, name, variant
):
    session, how = make_session(), {"sampling": SAMPLINGS[name], "seed": 0, "max_tokens": 60}
    clock = simulate_costs(session, FLAT, CHEAP)  # at which trees pay
    tokens, output, done = run(session, prompt, clock=clock, **how | VARIANTS[variant])
    check_equal_except_near_ties(session, prompt, tokens, plain[name], SAMPLINGS[name])
    assert output == session.main.model.vocabulary.detokenize(tokens)
    s = done.statistics
    assert s.predicted_n == 60 == s.n_steps + s.draft_n_accepted
    if "lookup" not in variant:
        assert s.draft_n >= s.draft_n_accepted > 0
    check_caches(session, [*prompt, *tokens])


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_temperature_0_equals_plain_decoding(make_session, prompt, plain, verifier, shape):
    if shape == "tree" and verifier in CHAIN_VERIFIERS:
        pytest.skip("refused")
    session = make_session()
    tokens, _, done = run(session, prompt, verifier=verifier, shape=shape, max_tokens=60)
    check_equal_except_near_ties(session, prompt, tokens, plain["greedy"])
    assert done.statistics.draft_n > done.statistics.draft_n_accepted > 10  # some are rejected
    check_caches(session, [*prompt, *tokens])


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize(
    "name", [name for name, verifier in VERIFIERS.items() if verifier.drawing != "chosen"]
)
def test_the_verifier_that_was_asked_for_verifies(make_session, prompt, monkeypatch, shape, name):
    if shape == "tree" and name in CHAIN_VERIFIERS:
        pytest.skip("refused")
    verifier, sizes = VERIFIERS[name], []

    def rule(proposal, *args):
        sizes.append(len(proposal.tokens))
        return verifier._rule(proposal, *args)

    target = VERIFIERS._targets[name].replace(":", ".")
    monkeypatch.setattr(target, Verifier(verifier.drawing, rule))
    how = {"proposer": "draft", "shape": shape, "verifier": name, "sampling": WARM, "seed": 1}
    _, _, done = run(make_session(), prompt, max_tokens=20, **how)
    assert sum(sizes) == done.statistics.draft_n > 0


def test_plain_decoding_is_the_argmax_of_single_calls(make_session, make_context, models, prompt):
    """This is an independent reference for the comparisons above."""
    session = make_session(draft=None)
    tokens, text, done = run(session, prompt, proposer="none", max_tokens=40)
    context = make_context(models["main"], n_ctx=512)
    unread, expected = prompt, []
    for _ in range(40):
        token = int(calls.run(context.call(unread, n_logits=1))[0].argmax())
        expected.append(token)
        unread = [token]
    check_equal_except_near_ties(session, prompt, tokens, expected)
    assert text == session.main.model.vocabulary.detokenize(tokens)
    assert done.reason == "length"


@pytest.mark.parametrize(
    "settings",
    [
        *({"proposer": proposer} for proposer in ("draft", "lookup", "none")),
        *({"shape": "tree", "verifier": verifier} for verifier in ("auto", "traversal", "spectr")),
        {"shape": "beam"},
    ],
    ids=str,
)
def test_caches_after_any_number_of_tokens(make_session, prompt, settings):
    session = make_session()
    for n, temperature in ((0, 0.0), (1, 1.5), (2, 0.0), (4, 1.5), (5, 0.0), (30, 1.5)):
        how = {"sampling": unfiltered(temperature), "max_tokens": n, "seed": n, "draft_max": 6}
        tokens, _, done = run(session, prompt, **how | settings)
        assert len(tokens) == n == done.statistics.predicted_n
        assert done.reason == "length"
        check_caches(session, [*prompt, *tokens])


def test_the_ledger_counts_the_measuring_of_costs(make_session, prompt, monkeypatch):
    session, measured = make_session(), []
    now = simulate_costs(session, FLAT, CHEAP)
    known = session._costs.of
    monkeypatch.setattr(session._costs, "of", lambda *rows: measured.append(1) or known(*rows))
    settings = {"max_tokens": 20, "clock": lambda: now() + min(1, len(measured))}  # seconds, the first time
    saved = [run(session, prompt, policy="adaptive", **settings)[2].statistics.saved_s for _ in range(2)]
    assert [each["measuring"] for each in saved] == pytest.approx([-1.0, 0.0])
    assert all(set(each) > {"measuring"} for each in saved)
    assert run(session, prompt, policy="off", **settings)[2].statistics.saved_s == {}


def test_auto_drafts_trees_only_where_they_are_possible(make_session, prompt):
    def steps(session, **kwargs):
        settings = {"shape": "auto", "policy": "adaptive", "clock": simulate_costs(session, FLAT, CHEAP)}
        return run(session, prompt, max_tokens=60, **settings | kwargs)[2].statistics.steps_by

    assert steps(make_session())["tree"] > 5
    for session, kwargs in [
        (make_session(), {"verifier": "block"}),
        (make_session(), {"shape": "chain"}),
        (make_session(max_branches=1), {}),
    ]:
        found = steps(session, **kwargs)
        assert found["draft"] > 5, kwargs
        assert "tree" not in found, kwargs
    for shape in ("tree", "beam"):
        with pytest.raises(InvalidRequest, match="branches=64"):
            run(make_session(max_branches=1), shape=shape)


@pytest.mark.parametrize("sampling", [GREEDY, FEW], ids=["greedy", "drawn"])
def test_caches_after_several_turns_with_adaptive(make_session, sampling):
    session = make_session(n_ctx=1024)
    clock = simulate_costs(session, {1: 1.0, 2: 1.3, 64: 20.0}, {1: 0.35, 64: 2.0})  # drafting hardly pays
    model = session.main.model
    conversation, seen = Conversation(model, ChatTemplate(model)), set()
    changes = set()
    for turn in range(4):
        prompt = conversation.ask(["one two three", "word " * 20, "x", "one two three one two three"][turn])
        settings = GenerationSettings(sampling, seed=turn, max_tokens=100)
        output, kinds, text = [], [], ""
        for event in session.generate(prompt, settings, clock=clock):
            if isinstance(event, Text):
                output += event.tokens
                kinds.append(event.proposal.source if event.proposal.tokens else "none")
            if isinstance(event, Text):
                text += event.text
        check_caches(session, [*prompt, *output])
        conversation.answer(text, output)
        seen |= set(kinds)
        changes |= set(itertools.pairwise(kinds))
        alone = make_session(draft=None, n_ctx=1024)
        how = {"sampling": sampling, "seed": turn, "max_tokens": 100}
        plain, _, _ = run(alone, prompt, policy="off", **how)
        check_equal_except_near_ties(session, prompt, output, plain, sampling, turn)
    assert {"draft", "suffix", "none"} <= seen <= {"draft", "none", *LOOKUPS}
    assert {("none", "draft"), ("draft", "none")} <= changes


@pytest.mark.parametrize("sampling", [GREEDY, FEW], ids=["greedy", "drawn"])
def test_staged_tokens_do_not_change_the_output(make_session, sampling):
    def generate(**kwargs):
        session = make_session()
        clock = simulate_costs(session, FLAT, {1: 0.1, 64: 3.0})
        calls = record_calls(session.draft)
        prompt = session.main.model.vocabulary.tokenize("one two three " * 6, add_special=True)
        settings = {"policy": "adaptive", "proposer": "draft", "sampling": sampling, "seed": 3}
        tokens, _, _ = run(session, prompt, max_tokens=60, clock=clock, **settings | kwargs)
        check_caches(session, [*prompt, *tokens])
        return session, prompt, tokens, [call.n_logits for call in calls]

    session, prompt, tokens, rows = generate(staged=4)
    assert max(rows) > 1
    _, _, without, alone = generate()
    assert max(alone) == 1
    check_equal_except_near_ties(session, prompt, tokens, without, sampling, 3)


LOOKUPS = {"suffix", "recycling"}  # the lookups of proposer auto


@pytest.mark.parametrize(
    ("settings", "expected", "expected_alone"),
    [
        ({}, ["draft", "suffix"], ["suffix"]),
        ({"policy": "fixed"}, ["draft"], ["suffix"]),
        ({"proposer": "lookup"}, ["lookup"], ["lookup"]),
        ({"proposer": "draft"}, ["draft"], ["draft"]),
        ({"proposer": "none"}, [], []),
        ({"policy": "off"}, [], []),
        ({"draft_max": 0}, [], []),
    ],
    ids=str,
)
def test_proposers_by_settings(make_session, settings, expected, expected_alone):
    assert make_session().proposers(GenerationSettings(**settings)) == expected
    assert make_session(draft=None).proposers(GenerationSettings(**settings)) == expected_alone


def test_costs_are_measured_once_and_only_if_needed(make_session, prompt):
    session = make_session()
    for settings in (
        *({"policy": policy} for policy in ("off", "fixed", "confidence")),
        {"policy": "adaptive", "proposer": "none"},
        {"policy": "adaptive", "draft_max": 0},
    ):
        run(session, max_tokens=3, **settings)
        assert session.known_costs == (None, None)
    tokens, _, _ = run(session, prompt, policy="adaptive", max_tokens=20)
    known = session.known_costs
    assert all(known)
    check_caches(session, [*prompt, *tokens])  # unchanged by the measurement
    run(session, prompt, policy="adaptive", max_tokens=20)
    assert session.known_costs is known


def test_seeds(make_session):
    session = make_session()
    warm = {"sampling": unfiltered(temperature=1.0, top_p=0.95), "max_tokens": 30}
    for verifier in ("block", "spectr"):  # whose output depends on the drafts
        first, again = (run(session, seed=3, verifier=verifier, **warm)[0] for _ in range(2))
        assert first == again
    for proposer in ("draft", "lookup", "none"):
        first, again, other = (run(session, seed=seed, proposer=proposer, **warm)[0] for seed in (3, 3, 4))
        assert first == again != other
    assert run(session, **warm)[0] != run(session, **warm)[0]  # without a seed, answers differ


@pytest.mark.parametrize("proposer", ["draft", "lookup", "none"])
def test_the_end_of_the_context(make_session, prompt, proposer):
    session = make_session(n_ctx=64)
    tokens, _, done = run(session, prompt, proposer=proposer, draft_max=8)
    assert done.reason == "context"
    # All tokens of the context are evaluated, and one more is sampled.
    assert len(prompt) + len(tokens) == 65
    assert len(session.main.cached) == 64
    again, _, _ = run(session, prompt, proposer=proposer, max_tokens=10)
    assert again == tokens[:10]
    full = (prompt * 10)[:64]
    tokens, _, done = run(session, full)
    assert (len(tokens), done.reason) == (1, "context")
    with pytest.raises(ContextOverflow, match="65 tokens but the context only 64"):
        run(session, (prompt * 10)[:65])
    check_caches(session, [*full, *tokens])


@pytest.mark.parametrize("end", ["cancelled", "closed"])
@pytest.mark.parametrize("proposer", ["draft", "none"])
def test_an_answer_that_ended_early_can_be_continued(make_session, prompt, proposer, end):
    whole, _, _ = run(make_session(), prompt, proposer=proposer, max_tokens=40)
    session, tokens = make_session(), []
    events = session.generate(
        prompt,
        GenerationSettings(GREEDY, policy="fixed", proposer=proposer),
        cancelled=lambda: end == "cancelled" and len(tokens) > 5,
    )
    for event in events:
        tokens += event.tokens if isinstance(event, Text) else []
        if end == "closed" and len(tokens) > 5:
            events.close()
    assert end == "closed" or event.reason == "cancelled"
    assert 5 < len(tokens) < 40
    check_caches(session, [*prompt, *tokens])
    rest, _, done = run(session, [*prompt, *tokens], proposer=proposer, max_tokens=40 - len(tokens))
    assert [*tokens, *rest] == whole
    assert done.statistics.prompt_n == 0  # nothing is evaluated twice


def test_cancelling_during_prefill(make_session):
    session = make_session()
    prompt = session.main.model.vocabulary.tokenize(PROMPT * 8, add_special=True)
    for n_chunks in range(2):
        answers = iter([False] * n_chunks + [True])
        settings = GenerationSettings(GREEDY, policy="fixed")
        events = list(session.generate(prompt, settings, cancelled=lambda answers=answers: next(answers)))
        assert [type(e) for e in events] == [Done]
        assert events[0].reason == "cancelled"
        assert len(session.main.cached) == 64 * n_chunks  # the chunk that was evaluated
    tokens, _, done = run(session, prompt, max_tokens=5)
    assert done.statistics.cached_n == 64
    check_caches(session, [*prompt, *tokens])


@pytest.mark.parametrize("end", ["close", "drop", "session"])
def test_an_unfinished_answer_of_closed_contexts(models, make_context, monkeypatch, end):
    """Its caches cannot be rolled back any more, which is no error, also not one in a destructor."""
    raised = []
    monkeypatch.setattr("sys.unraisablehook", raised.append)
    main, draft = make_context(models["main"]), make_context(models["draft"])
    session = Session(main, draft)
    events = session.generate(PROMPT, GenerationSettings(policy="fixed", proposer="draft"))
    for _ in range(3):
        next(events)
    draft.close()
    main.close()
    if end == "close":
        events.close()
    elif end == "session":
        session.close()
    del events
    assert raised == []


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_a_draft_model_with_another_vocabulary(make_session, sampling, policy):
    """Over several turns. With exact-match, a seed gives the same output for all proposers."""
    session, plain = make_session("other", "another"), make_session("other", None)
    assert session.vocabulary_map
    assert 0.8 < session.vocabulary_map.share < 1
    history = session.main.model.vocabulary.tokenize(PROMPT, add_special=True)
    tested = accepted = 0
    for seed in range(3):
        how = {"sampling": sampling, "seed": seed, "max_tokens": 20, "policy": policy, "proposer": "draft"}
        tokens, text, done = run(session, history, **how)
        assert (tokens, text) == run(plain, history, **how | {"proposer": "none"})[:2]
        tested += done.statistics.draft_n
        accepted += done.statistics.draft_n_accepted
        history = [*history, *tokens, *session.main.model.vocabulary.tokenize(" and then")]
    if policy == "fixed":
        assert accepted > (0.2 if sampling is GREEDY else 0.0) * tested


def test_recurrent_models_generate_with_drafts(recurrent_model, make_context):
    session = Session(make_context(recurrent_model), make_context(recurrent_model))
    expected, _, done = run(session, policy="off", max_tokens=30)
    assert done.statistics.draft_n == 0
    assert session.proposers(GenerationSettings()) == ["draft", "suffix"]
    for settings in (
        {"policy": "fixed", "proposer": "draft"},
        {"policy": "fixed", "proposer": "lookup"},
        {"policy": "adaptive"},
        {"policy": "adaptive", "verifier": "block"},
    ):
        tokens, _, done = run(session, max_tokens=30, **settings)
        assert tokens == expected
        if settings.get("proposer") == "draft":
            assert done.statistics.draft_n_accepted == done.statistics.draft_n > 15


@pytest.mark.parametrize("shape", ["tree", "beam"])
def test_a_recurrent_model_has_no_trees(recurrent_model, tiny_model, make_context, shape):
    for main, draft in ((recurrent_model, tiny_model), (tiny_model, recurrent_model)):
        session = Session(make_context(main, max_branches=64), make_context(draft, max_branches=64))
        with pytest.raises(InvalidRequest, match="use the shape chain"):
            run(session, shape=shape)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"proposer": "oracle"}, {"verifier": "none"}, {"shape": "star"}, {"seed": -1}, {"max_tokens": -1}),
        *({"draft_max": -1}, {"draft_max": 65}, {"tree_nodes": 0}, {"tree_nodes": 65}, {"beam_width": 0}),
        *({"policy": "confidence", "shape": "auto"}, {"shape": "tree", "verifier": "block"}),
    ],
    ids=str,
)
def test_invalid_settings(wrong):
    with pytest.raises(InvalidRequest, match="give"):
        GenerationSettings(**wrong)


def test_invalid_requests(make_session):
    session = make_session(draft=None)
    for kwargs, what in [
        ({"proposer": "draft"}, "`draft=FILE`"),
        ({"sampling": unfiltered(logit_bias={10**6: 1.0})}, "1000000"),
    ]:
        with pytest.raises(InvalidRequest, match=what):
            run(session, **kwargs)
    with pytest.raises(InvalidRequest, match="-1"):
        unfiltered(logit_bias={-1: 1.0})
    with pytest.raises(InvalidRequest, match="empty"):
        run(session, [])
    with pytest.raises(InvalidRequest, match="outside"):
        run(session, [5, 10**6, 5])
    assert len(run(session, max_tokens=5)[0]) == 5  # still usable


def test_an_end_token_is_reported_and_not_output(make_session):
    session = make_session("ending", "draft")
    ends, vocabulary = set(), session.main.model.vocabulary
    for seed in range(10):
        tokens, _, done = run(session, sampling=WARM, seed=seed, max_tokens=60)
        assert not any(map(vocabulary.is_end, tokens))
        assert done.end_token is None or vocabulary.is_end(done.end_token)
        assert (done.end_token is not None) == (done.reason == "stop")
        assert done.statistics.predicted_n == len(tokens) + (done.end_token is not None)
        ends.add(done.end_token)
    assert len(ends) > 1  # an end token, and none


@pytest.mark.parametrize(("used", "n"), [("", 1), ("avx2:1", 0)])
def test_kernels_that_are_not_used_are_reported(tmp_path, pretend_kernels, used, n):
    pretend_kernels(used)
    notices = []
    with Session.open(write_tiny_model(tmp_path / "m.gguf", n_layers=1), log=notices.append, threads=1):
        assert len([line for line in notices if "CPU kernels are not used (not built)" in line]) == n


def test_opening(tmp_path):
    path = write_tiny_model(tmp_path / "m.gguf", n_layers=1, n_ctx=96)
    notices = []
    draft = write_tiny_model(tmp_path / "d.gguf", n_layers=1, n_ctx=96, noise=0.05)
    with Session.open(path, draft, log=notices.append, threads=1) as session:
        assert session.main.n_ctx == session.draft.n_ctx == 96
        assert notices == []
        assert len(run(session, max_tokens=5)[0]) == 5
        assert notices == []
    session.close()  # a second time has no effect
    with Session.open(path, n_ctx=500, log=notices.append, threads=1) as session:
        assert session.main.n_ctx == 96
        assert len(notices) == 1
    with Session.open(path, n_ctx=50, log=notices.append, threads=1) as session:
        assert session.main.n_ctx == 50
        assert len(notices) == 1
    long = write_tiny_model(tmp_path / "long.gguf", n_layers=1, n_ctx=9000)
    with Session.open(long, threads=1) as session:
        assert session.main.n_ctx == 4096


@pytest.mark.parametrize("failure", ["draft model", "draft context"])
def test_a_failed_open_frees_everything(tmp_path, monkeypatch, free_memory, failure):
    good = write_tiny_model(tmp_path / "m.gguf", n_layers=1)
    made = []
    for kind in (Model, LlamaSequence):
        original = kind.__init__

        def init(self, *args, original=original, **kwargs):
            original(self, *args, **kwargs)
            made.append(self)

        monkeypatch.setattr(kind, "__init__", init)
    draft = tmp_path / "absent.gguf"
    if failure == "draft context":
        draft = write_tiny_model(tmp_path / "draft.gguf", n_layers=40)  # its context does not fit
        free_memory(8 << 20)
    with pytest.raises(ModelFileError if failure == "draft model" else ContextOverflow):
        Session.open(good, draft, threads=1)
    assert [type(each) for each in made] == [Model] + [Model, LlamaSequence] * (failure == "draft context")
    assert not any(each.is_open for each in made)


# With the starter model


@pytest.mark.starter
def test_starter_lookup_repeats_a_list_without_changing_it(starter):
    context = open_sequence(starter, n_ctx=512, threads=1, max_tokens=256)
    session = Session(context)
    prompt = starter.vocabulary.tokenize("1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2,")
    plain, _, _ = run(session, prompt, proposer="none", max_tokens=24)
    tokens, text, done = run(session, prompt, proposer="lookup", max_tokens=24)
    check_equal_except_near_ties(session, prompt, tokens, plain, tolerance=0.5)
    assert "3, 4, 5, 6, 1, 2" in text
    assert done.statistics.draft_n_accepted >= 12
    assert done.statistics.n_steps <= 12
    check_caches(session, [*prompt, *tokens], 1.0)
    context.close()


@pytest.mark.starter
def test_starter_as_its_own_draft(starter):
    """The same model as main and draft: most draft tokens are accepted, and nothing is evaluated twice."""
    contexts = [open_sequence(starter, n_ctx=512, threads=1, max_tokens=256) for _ in range(2)]
    session = Session(*contexts)
    conversation = Conversation(starter, ChatTemplate(starter))
    first = conversation.ask("Tell me a long story about a lighthouse.")
    warm = {"sampling": unfiltered(0.7, top_k=40), "seed": 1, "max_tokens": 12}
    tokens, text, done = run(session, first, **warm)
    assert done.reason == "length"
    assert done.statistics.acceptance_rate > 0.8
    check_caches(session, [*first, *tokens], 1.0)
    conversation.answer(text, tokens)
    second = conversation.ask("And one more?")
    _, _, done = run(session, second, max_tokens=2)
    assert done.statistics.cached_n == len(first) + len(tokens) - 1
    assert done.statistics.prompt_n == len(second) - done.statistics.cached_n - 1
    for context in contexts:
        context.close()
