"""GBNF grammars as constraints: the language stays the same, and no grammar crashes or blocks the process."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_local.errors import InvalidRequest
from spec_local.grammar.matcher import Grammar
from tests.byte_vocabulary import END, VOCABULARY, accepts, after

JSON = r"""
root ::= value
value ::= object | array | string | number | "true" | "false" | "null"  # comments are ignored
object ::= "{" ws (string ws ":" ws value ("," ws string ws ":" ws value)*)? ws "}"
array ::= "[" ws (value ("," ws value)*)? ws "]"
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws ::= | " " | "\n" [ \t]{0,20}
"""


def gbnf(text):
    return Grammar.from_gbnf(VOCABULARY, text)


GRAMMARS = {
    "json": (JSON, ["", "{", '{"', '{"é', '{"a": [1, ', '{"a":"b"}', '"\\']),
    "letters": ("root ::= [a-z]+", ["", "a", "abc"]),
    "not è": ("root ::= [^è]*", ["", "x"]),  # its first byte is that of é, which is a token
    "escaped": (r"root ::= [^\u00e8]*", ["", "x"]),
    "characters": ('root ::= "é" [ก-๛]+ "🙂"', ["", "é", "éกิ", "éก🙂"]),
    "anything": ("root ::= .*", ["", "a"]),
    "a token": ('root ::= !<[5]> "a" | "<b>"', ["", "<"]),
    "nothing": ("root ::= ", [""]),
}


@pytest.mark.parametrize(("text", "prefixes"), GRAMMARS.values(), ids=GRAMMARS.keys())
def test_the_mask_contains_the_tokens_that_are_allowed_one_by_one(text, prefixes):
    grammar = gbnf(text)
    for prefix in prefixes:
        mask = after(grammar, prefix).allowed()
        assert mask.shape == (VOCABULARY.n_tokens,)
        state = after(grammar, prefix)
        for token in range(VOCABULARY.n_tokens):
            assert state.allows(np.array([token]))[0] == mask[token]
            assert (state.after(token) is not None) == (mask[token] and not VOCABULARY.is_end(token))


LANGUAGES = {
    "ends": ('root ::= "a" "b"? | "cd"', ["a", "ab", "cd"], ["", "c", "abc"]),
    "not greedy": ('root ::= name "z"\nname ::= [a-z]+', ["az", "zz", "abcz"], ["z", "ab"]),
    "overlapping": ('root ::= "ab" "cd" | "abce"', ["abcd", "abce"], ["ab", "abc", "abcde"]),
    "JSON": (JSON, ["[]", '{"a": [1, -2.5e+3, true, null]}', '"é\\n🙂"'],
        ["", "01", "[1,]", '"\n"', '{"a"}']),
    "recursive": ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["((x)", "()"]),
    "left-recursive": ('root ::= root "a" | "b"', ["b", "baa"], ["", "a", "bb"]),
    "repeated": ('root ::= ("ab"){2,3} "c"{0} [0-9]{2} x{1,}\nx-y ::= "."\nx ::= x-y', ["abab12.",
        "ababab12.."], ["ab12.", "abab12"]),
    "lines": ('root ::= (\n  "a" | # first\n  "b"\n)+\n\n', ["ab", "ba"], ["", "c"]),
    "escapes": (r'root ::= "\x41\u00e9\U0001F642\n\"\\" [\]\[\x61-\x63-]', ['Aé🙂\n"\\]', 'Aé🙂\n"\\b',
        'Aé🙂\n"\\-'], ['Aé🙂\n"\\d']),
    "signs": ("root ::= [/a.*+?|()$#&~^-]+ [^^/]", ["/a.*+?|()$#&~^-x"], ["x", "a^", "a/"]),
    "names": ('root ::= aB a-b a_b A\naB ::= "1"\na-b ::= "2"\na_b ::= "3"\nA ::= "4"', ["1234"], ["1"]),
    "empty": ('root ::= "a" ("" | "b") () (| "c")', ["a", "ab", "abc", "ac"], ["", "acb"]),
    "nested": ("root ::= " + "(" * 2400 + '"a"' + ")" * 2400, ["a"], ["", "aa"]),
    "hyphens": (r'root ::= [a\-c]+ "\-" [\--0]', ["a-c-.", "c---"], ["b--", "a-"]),
    "repeated repetitions": ('root ::= "ab"{2}? "c"*? [de]{2}{3} ("f"+)*', ["dededd", "ababcceeeeeeff"],
        ["abdedede", "dedede" * 2]),
    "repeated often": ('root ::= "a"' + "?" * 400, ["", "a"], ["aa"]),
    "counts with spaces": ('root ::= ("a"{ 1 ,\t2 # at most 9\n})', ["a", "aa"], ["", "aaa"]),
    "repeated nothing": ('root ::= ""* ()+ "a"{0}{2} "b"', ["b"], ["", "ab"]),
    "counts as nested options": (
        'root ::= ("a" "b" ("a" "b" ("a" "b")?)?)? ("c" ("d")?)? ("e" | ("e")?)? x?\nx ::= "f" ("f" x)?',
        ["", "ab", "ababab", "abc", "cd", "e", "f", "fff"], ["abababab", "d", "cc", "ee", "ff"]),
    "empty sets": ('root ::= "a" [] [^]? "b"', ["ab"], ["a", "axb"]),
    "characters that do not exist": (
        r'root ::= [z-a\UFFFFFFFFb-\UFFFFFFFF] | "\uD800" | [^\uD800]{2} | [\uD800-\uE001]{3}',
        ["b", "é", "aa", "\ue000\ue001\ue000"], ["a", "\ue002\ue000\ue000"]),
    "ambiguous": ('root ::= e\ne ::= "a" | e e', ["a" * 40], [""]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "valid", "invalid"), LANGUAGES.values(), ids=LANGUAGES.keys())
def test_a_grammar_accepts_its_language(text, valid, invalid):
    grammar = gbnf(text)
    assert [t for t in valid + invalid if accepts(grammar, t)] == valid


REGULAR = st.recursive(
    st.sampled_from(['"a"', '"b"', '"ab"', "[ab]", "[^a]", "."]),
    lambda inner: (
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}"])).map(lambda x: f"({x[0]}){x[1]}")
        | st.lists(inner, min_size=1, max_size=3).map(" ".join)
        | st.lists(inner, min_size=1, max_size=3).map(lambda x: f"({' | '.join(x)})")
    ),
    max_leaves=6,
)


@given(REGULAR, st.lists(st.text("abc", max_size=6), min_size=8, max_size=8))
def test_a_grammar_without_recursion_accepts_what_its_regular_expression_matches(expression, texts):
    grammar = gbnf(f"root ::= rule\nrule ::= {expression}")
    pattern = re.compile(expression.replace(" ", "").replace('"', ""))
    for text in texts:
        assert accepts(grammar, text) == bool(pattern.fullmatch(text)), text


def test_an_answer_does_not_end_within_a_character():
    grammar = gbnf("root ::= [é🙂]*")
    cut = after(grammar, b"\xf0\x9f".decode("utf-8", "surrogateescape"))
    assert cut is not None
    assert not cut.allows(END)[0]
    assert accepts(grammar, "🙂é")


def test_every_end_token_ends_a_complete_answer_and_nothing_follows_it():
    state = after(gbnf('root ::= "a"'), "a")
    assert np.flatnonzero(state.allowed()).tolist() == [VOCABULARY.end, VOCABULARY.turn]
    assert state.after(VOCABULARY.end) is None


def test_control_tokens_are_allowed_only_where_a_grammar_names_them():
    for text, allowed in [
        (r'root ::= "<|control|>"', False),
        ("root ::= .*", False),
        ("root ::= <|control|>", True),
        (f"root ::= <[{VOCABULARY.control}]>", True),
        ("root ::= !<|control|>", False),
        ("root ::= !<[5]>", True),
    ]:
        assert gbnf(text).start().allows(np.array([VOCABULARY.control]))[0] == allowed, text


@pytest.mark.parametrize(
    "text",
    [
        "root ::= a\na ::= root",
        'root ::= "x" b\nb ::= b',
        r"root ::= [^\x00-\U0010ffff]",
        r'root ::= "\UFFFFFFFF"',
        "root ::= [z-a]",
    ],
)
def test_a_grammar_without_a_text_is_an_error_that_says_why(text):
    state = gbnf(text).start()
    state = state.after(ord("x")) if '"x"' in text else state
    with pytest.raises(InvalidRequest, match="a rule refers only to itself, or a set is empty"):
        state.allowed()


def test_a_token_outside_the_vocabulary_is_an_error():
    state = gbnf(JSON).start()
    for token in (-1, VOCABULARY.n_tokens, 2**31 - 1):
        with pytest.raises(InvalidRequest):
            state.allows(np.array([1, token]))
    assert len(state.allows(np.zeros(0, np.intp))) == 0
    assert state.allowed().any()


INVALID = {
    "syntax": ('root ::= "a', "unexpected end of input"),
    "an open set": ("root ::= [a", "unexpected end of input"),
    "an open group": ('root ::= ("a"', r"expecting '\)'"),
    "a group across rules": ('root ::= ("a"\nx ::= "b"', r"expecting '\)' before the rule x"),
    "a closed group": ('root ::= "a")', r"unexpected '\)'"),
    "repeated nothing": ("root ::= *", r"expecting an item before \*"),
    "undefined": ("root ::= x", "Undefined rule identifier 'x'"),
    "no root": ('foo ::= "a"', "'root'"),
    "no rule": ("what is this", "expecting ::="),
    "no name": ('"a"', "expecting a name"),
    "escape": (r'root ::= "\q"', r"unknown escape \\q"),
    "token": ("root ::= <nonsense>", "invalid token"),
    "token outside": ("root ::= <[99999]>", "cannot be used"),
    "empty": (" \n", "empty"),
    "comment": ("# nothing", "cannot be used"),
    "NUL": ('root ::= "a"\0', "unexpected"),
    "not UTF-8": ('root ::= "\udc80"', "UTF-8"),
    "huge": ('root ::= "' + "a" * (1 << 20) + '"', "at most 1048576"),
    "noise": (bytes(range(1, 256)).decode("latin-1"), "unexpected"),
}


@pytest.mark.parametrize(("text", "reason"), INVALID.values(), ids=INVALID.keys())
def test_an_unusable_grammar_is_a_one_line_error(text, reason, capfd):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        gbnf(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert capfd.readouterr() == ("", "")
