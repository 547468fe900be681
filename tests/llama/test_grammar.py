"""llama.cpp's grammars: what may follow, and that no grammar takes this process down."""

import gc
import json
import signal
import subprocess
import sys
import threading
from typing import Annotated, Literal

import numpy as np
import pydantic
import pytest
from pydantic import Field

from spec_local.child_process import ChildResult
from spec_local.core.sampling import SamplingSettings
from spec_local.errors import InvalidRequest
from spec_local.grammar.json_schema import to_gbnf
from spec_local.llama import grammar as module
from spec_local.llama import grammar_probe
from spec_local.llama.grammar import Grammar
from spec_local.llama.grammar_probe import check_grammar
from spec_local.llama.model import Model
from spec_local.llama.tiny import FIRST_BYTE
from spec_local.session import Done, Session, Text
from spec_local.settings import GenerationSettings

JSON = to_gbnf("{}")


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("platformdirs.user_cache_dir", lambda name: str(folder))
        yield


def after(grammar, model, text):
    """The state after a text; None: it may not be said. Byte by byte, so that every border is crossed."""
    state = grammar.start()
    for byte in text.encode("utf-8", "surrogateescape"):
        state = state.after(FIRST_BYTE + byte) if state else None
    return state


def says(grammar, model, text):
    """Whether a grammar holds a whole text."""
    state = after(grammar, model, text)
    return state is not None and bool(state.allows(np.array([model.vocabulary.eos]))[0])


GRAMMARS = {
    "json": (JSON, ["", "{", '{"', '{"é', '{"a": [1, ', '{"a":"b"}', '"\\']),
    "letters": ("root ::= [a-z]+", ["", "a", "abc"]),
    "not è": ("root ::= [^è]*", ["", "x"]),  # é is one token here, and its first byte is that of è
    "escaped": (r"root ::= [^\u00e8]*", ["", "x"]),
    "characters": ('root ::= "é" [ก-๛]+ "🙂"', ["", "é", "éกิ", "éก🙂"]),
    "anything": ("root ::= .*", ["", "a"]),
    "a token": ('root ::= !<[5]> "a" | "<b>"', ["", "<"]),
    "nothing": ("root ::= ", [""]),
}


@pytest.mark.parametrize(("text", "prefixes"), GRAMMARS.values(), ids=GRAMMARS.keys())
def test_all_that_may_follow_is_found_with_few_questions(tiny_model, text, prefixes):
    grammar, every = Grammar(tiny_model, text), np.arange(tiny_model.vocabulary.n_tokens)
    for prefix in prefixes:
        state = after(grammar, tiny_model, prefix)
        np.testing.assert_array_equal(state.allowed(), state.allows(every))
        for token in every[::37]:
            assert state.allows(np.array([token]))[0] == state.allowed()[token]
            assert (state.after(int(token)) is not None) == (
                state.allowed()[token] and not tiny_model.vocabulary.is_end(int(token))
            )


def test_questions_are_fewer_than_tokens(tiny_model):
    words, asked = module._Words.of(tiny_model.vocabulary, True), []
    state = Grammar(tiny_model, 'root ::= "the"').start()

    def allows(tokens):
        asked.append(len(tokens))
        return state.allows(tokens)

    assert words.search(allows).sum() == 4  # t as a letter and as a byte, th, the
    assert sum(asked) < tiny_model.vocabulary.n_tokens / 2


def test_a_text_may_end_where_it_is_whole_and_only_there(tiny_model):
    grammar = Grammar(tiny_model, 'root ::= "a" "b"? | "cd"')
    for text, whole in [("", False), ("a", True), ("ab", True), ("c", False), ("cd", True), ("abc", False)]:
        assert says(grammar, tiny_model, text) == whole
    characters = Grammar(tiny_model, "root ::= [é🙂]*")
    cut = after(characters, tiny_model, b"\xf0\x9f".decode("utf-8", "surrogateescape"))
    assert cut is not None
    assert not cut.allows(np.array([tiny_model.vocabulary.eos]))[0]
    assert says(characters, tiny_model, "🙂é")


def test_control_tokens_are_no_text_unless_a_grammar_names_tokens(tiny_model):
    start = tiny_model.vocabulary.tokenize("<|im_start|>", parse_special=True)[0]
    for text, may_follow in [
        (r'root ::= "<|im_start|>"', False),
        ("root ::= .*", False),
        ("root ::= <|im_start|>", True),
    ]:
        assert Grammar(tiny_model, text).start().allows(np.array([start]))[0] == may_follow


def test_states_are_values(tiny_model):
    grammar = Grammar(tiny_model, 'root ::= "ab" | "ac"')
    a = after(grammar, tiny_model, "a")
    b, c = after(grammar, tiny_model, "ab"), after(grammar, tiny_model, "ac")
    first = a.allowed().copy()
    for _ in range(3):
        assert a.after(int(np.flatnonzero(first)[0])) is not None
    a._allowed = None
    np.testing.assert_array_equal(a.allowed(), first)
    assert not b.allowed()[first].any()
    assert not c.allowed()[first].any()


def test_a_token_beyond_the_vocabulary_is_an_error_and_no_crash(tiny_model):
    state = Grammar(tiny_model, JSON).start()
    for token in (-1, tiny_model.vocabulary.n_tokens, 2**31 - 1):
        with pytest.raises(InvalidRequest):
            state.allows(np.array([1, token]))
    assert len(state.allows(np.zeros(0, np.intp))) == 0


def test_every_state_is_freed(tiny_model, monkeypatch):
    grammar = Grammar(tiny_model, JSON)
    alive, lib = [0], grammar._lib

    class Counting:
        def __getattr__(self, name):
            return getattr(lib, name)

        def llama_sampler_clone(self, handle):
            alive[0] += 1
            return lib.llama_sampler_clone(handle)

        def llama_sampler_free(self, handle):
            alive[0] -= 1
            lib.llama_sampler_free(handle)

    monkeypatch.setattr(grammar, "_lib", Counting())
    state = after(grammar, tiny_model, '{"a": [1, 2]}')
    assert alive[0] == 1
    del state
    gc.collect()
    assert alive[0] == 0


BAD = {
    "syntax": ('root ::= "a', "unexpected end of input"),
    "undefined": ("root ::= x", "Undefined rule identifier 'x'"),
    "no root": ('foo ::= "a"', "'root'"),
    "left recursion": ('root ::= root "a" | "b"', "left recursion"),
    "deep for a thread": ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "nested too deeply"),
    "deep": ("root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000, "nested too deeply"),
    "many": ('root ::= ("a"{1,2000}){1,2000}', "number of rules"),
    "token": ("root ::= <nonsense>", "invalid token"),
    "empty": (" \n", "empty"),
    "comment": ("# nothing", "cannot be used"),
    "NUL": ('root ::= "a"\0', "NUL"),
    "no UTF-8": ('root ::= "\udc80"', "UTF-8"),
    "huge": ('root ::= "' + "a" * (1 << 20) + '"', "at most 1048576"),
    "noise": (bytes(range(1, 256)).decode("latin-1"), "expecting name"),
}


@pytest.mark.parametrize(("text", "why"), BAD.values(), ids=BAD.keys())
def test_a_grammar_that_cannot_be_used_is_one_line(tiny_model, text, why, capfd):
    with pytest.raises(InvalidRequest, match=why) as caught:
        check_grammar(tiny_model.path, text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert capfd.readouterr() == ("", "")


def test_a_grammar_is_tried_once(tiny_model, monkeypatch):
    notes, text = [], 'root ::= "tried once"'
    check_grammar(tiny_model.path, text, log=notes.append)
    monkeypatch.setattr(grammar_probe, "run_child", None)
    check_grammar(tiny_model.path, text, log=notes.append)
    assert notes == ["checking the grammar (first use with this model)"]


def test_a_grammar_that_grows_ever_more_ambiguous_is_given_up(tiny_model, monkeypatch):
    """Each a doubles the ways in which what was said can be read."""
    monkeypatch.setattr(module, "_PATIENCE", 0.02)
    rules = 'root ::= e\ne ::= "a" | "a" e x | "a" e y\nx ::= "x"\ny ::= "y"'
    state = Grammar(tiny_model, rules).start()

    def go_on(state):
        for _ in range(40):
            state = state.after(FIRST_BYTE + ord("a"))

    with pytest.raises(InvalidRequest, match="too long"):
        go_on(state)


def test_a_grammar_without_end_has_a_limit(tiny_model, tmp_path):
    """Each rule asks twice of the one below whether it is left-recursive."""
    file = tmp_path / "grammar.gbnf"
    file.write_text(
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} | r{i + 1}\n" for i in range(60)) + 'r60 ::= "a"'
    )
    script = "import sys; from spec_local.llama import grammar_probe as g; g._CHILD_SECONDS = 1; g._main(*sys.argv[1:])"
    command = [sys.executable, "-c", script, tiny_model.path, file]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:  # it ends with its standard input
        assert child.wait(60) == -signal.SIGXCPU


@pytest.mark.parametrize(
    ("crash", "why"), [("SIGXCPU", "too long"), ("SIGSEGV", r"takes llama.cpp down \(SIGSEGV\)")]
)
def test_what_becomes_of_the_child_is_told_and_tried_again(tiny_model, monkeypatch, crash, why):
    monkeypatch.setattr(grammar_probe, "run_child", lambda *arguments: ChildResult(crash, None, {}))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=why):
            check_grammar(tiny_model.path, 'root ::= "one that kills"')


def test_a_model_that_was_closed_is_told(tiny_path):
    model = Model(tiny_path, weights=False)
    grammar = Grammar(model, 'root ::= "a" "b"')
    state = grammar.start()
    model.close()
    for ask in (grammar.start, state.allowed, lambda: state.after(FIRST_BYTE + ord("a"))):
        with pytest.raises(InvalidRequest, match="closed"):
            ask()


def test_a_thread_of_a_small_stack_reads_what_the_child_could(tiny_model):
    deepest, found = "root ::= " + "(" * 700 + '"a"' + ")" * 700, []
    previous = threading.stack_size(1 << 20)
    try:
        thread = threading.Thread(target=lambda: found.append(Grammar(tiny_model, deepest)))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(previous)
    assert says(found[0], tiny_model, "a")


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 3},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", 'q"\n']}, "minItems": 1, "maxItems": 2},
    },
    "required": ["age"],
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": ["number", "null"]}, "below": {"items": {"$ref": "#/$defs/node"}}},
            "required": ["v", "below"],
        }
    },
}
SCHEMAS = {
    "any": (True, ["{}", "[1, -2.5e+3, true, null]", '"é🙂\\n\\u00e9"', '{ "a":\n   {"b": []}}'],
            ["", "[", "01", "+1", ".5", '"\n"', '"\\ud800"', "nul", "1 ", "[1,]", '{"a"}', '{"a":  1}']),
    "object": (PERSON, ['{"age":1}', '{"name": "abc", "age": -3, "tags": ["a", "q\\"\\n"]}', '{"age": 0, "tags":["a"]}'],
               ["{}", '{"name":"a"}', '{"age":"1"}', '{"age":1.5}', '{"name":"","age":1}', '{"name":"abcd","age":1}',
                '{"age":1,"name":"a"}', '{"age":1,"tags":[]}', '{"age":1,"tags":["b"]}', '{"age":1,"tags":["a","a","a"]}',
                '{"age":1,"x":1}', '{"age":1,}', '{"name":"a" "age":1}']),
    "recursive": (TREE, ['{"v":1,"below":[]}', '{"v":null,"below":[{"v":2.5,"below":[]},{"v":3,"below":[]}]}'],
                  ['{"v":1}', '{"v":1,"below":[1]}', '{"v":"x","below":[]}']),
    "all optional": ({"properties": {"a": {"type": "null"}, "b": {"type": "boolean"}}},
                     ["{}", '{"a":null}', '{"b":true}', '{"a":null,"b":false}'], ['{"b":true,"a":null}', '{,"b":true}', "[]"]),
    "map": ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{}", '{"x":1, "y":2}'], ['{"x":"1"}']),
    "closed": ({"type": "object", "additionalProperties": False}, ["{}"], ['{"x":1}']),
    "tuple": ({"type": "array", "prefixItems": [{"type": "number"}, {"const": {"u": "m"}}]}, ['[1.5, {"u": "m"}]'],
              ["[1.5]", '[1.5, {"u": "k"}]', '[1.5, {"u": "m"}, 1]']),
    "none": ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    "enum of a type": ({"type": "integer", "enum": [1, "1", True, None, 2]}, ["1", "2"], ['"1"', "true", "null"]),
    "range": ({"type": "integer", "minimum": -12, "exclusiveMaximum": 105}, ["-12", "-9", "0", "7", "42", "99", "100", "104"],
              ["-13", "-0", "00", "105", "200", "1000", "1.0", "1e1", "-", ""]),
    "64 bits": ({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}, [str(-(2**63)), "-1", "0", str(2**64 - 1)],
                [str(-(2**63) - 1), str(2**64), "-0", "1" + "0" * 20]),
    "share": ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, ["0", "0.0", "0.5", "0." + "9" * 14],
              ["1", "1.0", "-0.5", "0.", "0." + "9" * 15, "5e-1"]),
    "positive": ({"type": ["number", "null"], "exclusiveMinimum": 0.25}, ["null", "0.250001", "0.3", "1", "9" * 16],
                 ["0.25", "0.250", "0.2", "0", "-1"]),
    "zero": ({"type": "integer"}, ["0", "10", "-1"], ["-0", "01", "-01"]),
    "keys": ({"type": "object", "propertyNames": {"$ref": "#/$defs/k"}, "$defs": {"k": {"enum": ["a", "b"]}}, "maxProperties": 2,
              "minProperties": 1, "additionalProperties": {"type": "integer", "minimum": 5}},
             ['{"a":5}', '{"a":5, "b":61}'], ["{}", '{"c":5}', '{"a":4}', '{"a":5,"b":5,"a":5}', "{5:5}"]),
    "date": ({"type": "string", "format": "date"}, ['"2024-12-31"', '"2023-02-28"', '"2023-04-30"', '"2023-10-01"'],
             ['"2023-02-29"', '"2023-04-31"', '"2023-13-01"', '"2023-00-10"', '"2023-01-00"', '"23-01-01"', "2023-01-01"]),
    "date-time": ({"type": "string", "format": "date-time"}, ['"2024-12-31T23:59:59Z"', '"2024-01-01T00:00:00.5+02:00"'],
                  ['"2024-12-31"', '"2024-12-31T24:00:00Z"', '"2024-12-31T23:59:59"']),
    "uuid": ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123e4567"']),
    "email": ({"type": "string", "format": "email"}, ['"whatever"'], ["1"]),
    "escaped pointer": ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}}}, ["null"], ["1"]),
    "names of rules": ({"properties": {"root": {"type": "null"}, "ref-0": {"type": "null"}, "a b": {"type": "null"},
                                       "a-b": {"type": "boolean"}, '"\\': {"type": "null"}}, "required": ["a-b"]},
                       ['{"root":null,"ref-0":null,"a b":null,"a-b":true,"\\"\\\\":null}'], ['{"a-b":null}', "{}"]),
    "one of": ({"oneOf": [{"type": "string"}, {"allOf": [{"type": "null"}]}]}, ['"a"', "null"], ["1"]),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), SCHEMAS.values(), ids=SCHEMAS.keys())
def test_a_schema_holds_what_is_valid_under_it_and_nothing_else(tiny_model, schema, valid, invalid):
    grammar = Grammar(tiny_model, to_gbnf(json.dumps(schema)))
    for text in valid:
        json.loads(text)
        assert says(grammar, tiny_model, text), text
    for text in invalid:
        assert not says(grammar, tiny_model, text), text


def test_whitespace_cannot_go_on_for_ever(tiny_model):
    grammar = Grammar(tiny_model, JSON)
    for text in ("{" + " " * 2, "{\n" + " " * 21, "{\n\n", " {"):
        assert after(grammar, tiny_model, text) is None
    assert after(grammar, tiny_model, "{\n" + " " * 20) is not None


@pytest.fixture
def session(tiny_model, tiny_draft, make_context):
    with Session(
        make_context(tiny_model, max_branches=16), make_context(tiny_draft, max_branches=16)
    ) as session:
        yield session


def answer(session, prompt="the people of", **settings):
    events = list(session.generate(prompt, GenerationSettings(**{"max_tokens": 120} | settings)))
    assert isinstance(events[-1], Done)
    return "".join(e.text for e in events if isinstance(e, (Text, Done))), events


WAYS = {
    "plain": {"policy": "off"},
    "chain": {"policy": "fixed", "draft_max": 4},
    "drawn": {"policy": "fixed", "draft_max": 4, "verifier": "block"},
    "tree": {"policy": "fixed", "shape": "tree", "tree_nodes": 8},
    "lookup": {"policy": "fixed", "proposer": "lookup"},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize(
    "sampling", [SamplingSettings(temperature=0), SamplingSettings(top_k=40), SamplingSettings()], ids=str
)
def test_every_answer_that_ends_is_what_the_schema_asks_for(session, way, sampling):
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
    for seed in range(4):
        text, events = answer(session, json_schema=json.dumps(schema), sampling=sampling, seed=seed, **way)
        if events[-1].reason == "stop":
            ended += 1
            value = json.loads(text)
            assert list(value) in (["a", "b"], ["a", "b", "c"])
            assert type(value["a"]) is int
            assert value["b"] in ("the", "of")
            assert len(value.get("c", "")) <= 8
    assert ended


class Order(pydantic.BaseModel):
    kind: Literal["order"]
    count: Annotated[int, Field(gt=0, le=144)]
    balance: Annotated[int, Field(ge=-(10**12), lt=10**12)] | None
    share: Annotated[float, Field(ge=0, lt=1)]
    seats: Annotated[list[Annotated[int, Field(ge=10, le=12)]], Field(max_length=2)]
    stock: Annotated[dict[Literal["red", "blue"], pydantic.NonNegativeInt], Field(min_length=1, max_length=2)]


def test_every_answer_that_ends_is_taken_by_the_model_of_pydantic(session):
    schema, seen = json.dumps(Order.model_json_schema()), set()
    for seed in range(6):
        text, events = answer(session, max_tokens=250, json_schema=schema, seed=seed, **WAYS["chain"])
        if events[-1].reason == "stop":
            seen.add(Order.model_validate_json(text).model_dump_json())
    assert len(seen) > 2


def test_a_seed_says_the_same_with_guesses_and_without(session):
    """Membership's promise, which a grammar does not touch; tiny models have no near ties here."""
    for temperature in (0.0, 0.8):
        said = [
            answer(
                session,
                grammar=JSON,
                sampling=SamplingSettings(temperature=temperature, top_k=40),
                seed=3,
                verifier="exact-match",
                **way,
            )[0]
            for way in (WAYS["plain"], WAYS["chain"], WAYS["lookup"])
        ]
        assert len(set(said)) == 1, said


def test_a_cut_answer_says_so_and_begins_what_the_grammar_holds(session, tiny_model):
    text, events = answer(session, grammar='root ::= "the " [a-z]{200}', max_tokens=9)
    assert events[-1].reason == "length"
    assert after(Grammar(tiny_model, 'root ::= "the " [a-z]{200}'), tiny_model, text) is not None


def test_turns_of_a_session_begin_their_grammar_anew(session):
    for _ in range(2):
        assert answer(session, grammar='root ::= "of" | "in"')[0] in ("of", "in")
    assert answer(session, grammar='root ::= "was"')[0] == "was"
    assert answer(session)[1][-1].reason == "length"


def test_logprobs_are_as_many_as_tokens_also_where_an_answer_is_cut(session):
    way = {"policy": "fixed", "draft_max": 4, "logprobs": 2}
    for settings in ({"grammar": 'root ::= "the people"'}, {"stops": ["o"]}, {}):
        _, events = answer(session, **settings, **way, max_tokens=30)
        steps = [event for event in events if isinstance(event, Text)]
        for event in steps:
            assert [entry.token for entry in event.logprobs] == list(event.tokens)
            assert all(len(entry.top) == 2 and entry.logprob <= 0 for entry in event.logprobs)
        assert sum(len(event.tokens) for event in steps)
    assert all(not event.logprobs for event in answer(session, max_tokens=5)[1] if isinstance(event, Text))
