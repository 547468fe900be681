"""Answers of tiny models under grammars and JSON schemas, with and without draft tokens."""

import json
import random

import numpy as np
import pytest

from spec_local.core.sampling import SamplingSettings
from spec_local.grammar.matcher import Grammar
from spec_local.llama.tiny import FIRST_BYTE
from spec_local.session import Done, Session, Text
from spec_local.settings import GenerationSettings
from tests.llama.answers import text_of
from tests.unfiltered import unfiltered


def follows(grammar, text):
    """Return whether a text is the beginning of a text that a grammar accepts."""
    state = grammar.start()
    for byte in text.encode():
        state = state.after(FIRST_BYTE + byte) if state else None
    return state is not None


def test_masks_on_the_vocabulary_of_a_model(tiny_model):
    vocabulary = tiny_model.vocabulary
    mask = Grammar.from_gbnf(vocabulary, 'root ::= "the"').start().allowed()
    pieces = [vocabulary.piece(int(token)) for token in np.flatnonzero(mask)]
    assert sorted(pieces) == [b"t", b"t", b"th", b"the"]  # t as a letter and as a byte
    control = vocabulary.tokenize("<|im_start|>", parse_special=True)[0]
    for text, allowed in [
        ('root ::= "<|im_start|>"', False),
        ("root ::= .*", False),
        ("root ::= <|im_start|>", True),
    ]:
        assert Grammar.from_gbnf(vocabulary, text).start().allowed()[control] == allowed
    end = Grammar.from_gbnf(vocabulary, 'root ::= "a"?').start().allowed()
    assert {token for token in range(vocabulary.n_tokens) if vocabulary.is_end(token)} <= set(
        np.flatnonzero(end)
    )


PARTS = [
    '"a"', r'"\-"', r'"\x41"', "[a-z]", r"[\-a]", r"[^a\-c]", "[]", "[^]", "[^^]", "[--a]", "[a--]", "[z-a]",
    r"[a-\]]", "x", ".", "(", "(", ")", ")", "|", "*", "+", "?", "{2}", "{ 1 ,\t2 }", "{0}", "{0,}",
    "{3,5000}", "\n", "\r\n", "#c\n", " ", '""', '"\n"', r'"\UFFFFFFFF"', r"[\uD800-\uE001]",
    "<[5]>", "!<[5]>",
]  # fmt: skip


def test_what_llama_cpp_parses_can_be_used(tiny_model, capfd):
    rng, n = random.Random(0), 0
    for _ in range(1500):
        body = "".join(rng.choice(PARTS) + rng.choice(["", " "]) for _ in range(rng.randint(1, 7)))
        text = f'root ::= {body}\nx ::= "q"\n'
        lib, vocabulary = tiny_model._lib, tiny_model.vocabulary
        if parsed := lib.llama_sampler_init_grammar(vocabulary._handle, text.encode(), b"root"):
            lib.llama_sampler_free(parsed)
            Grammar.from_gbnf(vocabulary, text)
            n += 1
    assert n > 300
    capfd.readouterr()  # llama.cpp prints what it does not parse


@pytest.fixture
def session(tiny_model, tiny_draft, make_context):
    with Session(
        make_context(tiny_model, max_branches=16), make_context(tiny_draft, max_branches=16)
    ) as session:
        yield session


def answer(session, prompt="the people of", **settings):
    events = list(session.generate(prompt, GenerationSettings(**{"max_tokens": 120} | settings)))
    assert isinstance(events[-1], Done)
    return text_of(events), events


VARIANTS = {
    "plain": {"policy": "off"},
    "chain": {"policy": "fixed", "draft_max": 4},
    "block": {"policy": "fixed", "draft_max": 4, "verifier": "block"},
    "tree": {"policy": "fixed", "shape": "tree", "tree_nodes": 8},
    "lookup": {"policy": "fixed", "proposer": "lookup"},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize(
    "sampling", [SamplingSettings(temperature=0), unfiltered(top_k=40), unfiltered()], ids=str
)
def test_complete_answers_are_valid_under_the_schema(session, variant, sampling):
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"enum": ["the", "of"]},
            "c": {"type": "string", "maxLength": 8},
        },
        "required": ["a", "b"],
    }
    ended = 0
    for seed in range(2):
        text, events = answer(
            session, json_schema=json.dumps(schema), sampling=sampling, seed=seed, **variant
        )
        if events[-1].reason == "stop":
            ended += 1
            value = json.loads(text)
            assert list(value) in (["a", "b"], ["a", "b", "c"])
            assert type(value["a"]) is int
            assert value["b"] in ("the", "of")
            assert len(value.get("c", "")) <= 8
    assert ended


FORCED = '{"required": ["of", "n"], "properties": {"of": {"enum": ["the", "two"]}, "n": {"type": "null"}}}'


@pytest.mark.parametrize("schema", ["{}", FORCED])
def test_a_seed_gives_the_same_output_with_and_without_draft_tokens(session, schema):
    """Exact-match verification guarantees it, also under a grammar; tiny models have no near ties here."""
    for temperature in (0.0, 0.8):
        outputs = [
            answer(
                session,
                json_schema=schema,
                sampling=unfiltered(temperature=temperature, top_k=40),
                seed=3,
                verifier="exact-match",
                **variant,
            )[0]
            for variant in (VARIANTS["plain"], VARIANTS["chain"], VARIANTS["lookup"])
        ]
        assert len(set(outputs)) == 1, outputs


def test_forced_tokens_are_drafted(session):
    """Also where the only other drafter is a lookup that finds nothing; every step drafts what it can."""
    sampling = SamplingSettings(temperature=0)
    for variant in ("chain", "lookup"):
        text, events = answer(
            session, json_schema=FORCED, sampling=sampling, max_tokens=80, **VARIANTS[variant]
        )
        statistics = events[-1].statistics
        assert text.strip().startswith("{")
        assert statistics.draft_n_accepted > 5, text
        if variant == "lookup":
            assert {e.proposal.source for e in events if isinstance(e, Text)} >= {"forced"}


def test_a_cut_off_answer_is_the_beginning_of_one_that_follows_the_grammar(session, tiny_model):
    text, events = answer(session, grammar='root ::= "the " [a-z]{200}', max_tokens=9)
    assert events[-1].reason == "length"
    assert follows(Grammar.from_gbnf(tiny_model.vocabulary, 'root ::= "the " [a-z]{200}'), text)


def test_every_token_has_logprobs_also_where_an_answer_is_cut_off(session):
    variant = {"policy": "fixed", "draft_max": 4, "logprobs": 2}
    for settings in ({"grammar": 'root ::= "the people"'}, {"stops": ["o"]}, {}):
        _, events = answer(session, **settings, **variant, max_tokens=30)
        steps = [event for event in events if isinstance(event, Text)]
        for event in steps:
            assert [entry.token for entry in event.logprobs] == list(event.tokens)
            assert all(len(entry.top) == 2 and entry.logprob <= 0 for entry in event.logprobs)
        assert sum(len(event.tokens) for event in steps)
    assert all(not event.logprobs for event in answer(session, max_tokens=5)[1] if isinstance(event, Text))
