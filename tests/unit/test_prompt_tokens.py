"""The tokens of prompts without a chat template."""

import pytest

from spec_local.errors import ContextOverflow, InvalidRequest, ModelError
from spec_local.server.supervision.events import Infill
from spec_local.server.supervision.prompt_tokens import infill_tokens, prompt_tokens

BOS, PRE, SUF, MID, REPO, SEP = 900, 901, 902, 903, 904, 905


class Letters:
    """A vocabulary in which each character is a token, and ``<x>`` a control token."""

    n_tokens, bos, eos, eot, add_bos = 1000, BOS, 999, -1, True
    fill_in, repository, file_separator = (PRE, SUF, MID), REPO, SEP

    def check_length(self, text, n_ctx):
        if len(text) > n_ctx:
            raise ContextOverflow("too long")

    def tokenize(self, text, *, add_special=False, parse_special=False):
        return ([self.bos] if add_special and self.add_bos else []) + self.continuation(
            text, parse_special=parse_special
        )

    def continuation(self, text, *, parse_special=True):
        if parse_special:
            text = text.replace("<x>", chr(800))
        return [ord(character) for character in text]


def letters(**changes):
    vocabulary = Letters()
    vars(vocabulary).update(changes)
    return vocabulary


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [BOS, 97, 98]),
        (" ", [BOS, 32]),
        ([5, "a", 6], [5, 97, 6]),  # the client's own tokens begin it
        (["a", 5, "<x>"], [BOS, 97, 5, 800]),
        ([5, 6], [5, 6]),
        ("", [BOS]),
    ],
)
def test_prompts(prompt, tokens):
    assert prompt_tokens(letters(), prompt, 10, parse_special=True) == tokens


def test_names_of_control_tokens_are_text_unless_they_are_parsed():
    assert prompt_tokens(letters(), "<x>", 10, parse_special=False) == [BOS, ord("<"), ord("x"), ord(">")]


def test_an_empty_prompt_begins_a_text():
    no_bos = {"add_bos": False}
    assert prompt_tokens(letters(**no_bos), "", 10, parse_special=True) == [BOS]
    assert prompt_tokens(letters(bos=-1, **no_bos), "", 10, parse_special=True) == [999]
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        prompt_tokens(letters(bos=-1, eos=-1, **no_bos), "", 10, parse_special=True)


def test_tokens_that_do_not_exist():
    with pytest.raises(InvalidRequest, match="prompt has token 1000: give 0 to 999"):
        prompt_tokens(letters(), [1, 1000], 10, parse_special=True)


def codes(text):
    return [ord(character) for character in text]


GAP = Infill("ab", "yz", "c", [("f.py", "x")])


def test_a_gap_after_other_files():
    repository = [REPO, *codes("myproject\n"), SEP, *codes("f.py\n"), *codes("x"), SEP, *codes("filename\n")]
    gap = [BOS, PRE, *codes("abc"), SUF, *codes("yz"), MID]
    assert infill_tokens(letters(), GAP, 200, None) == [*repository, *gap]
    plain = letters(repository=None, file_separator=None, add_bos=False)
    assert infill_tokens(plain, GAP, 200, None) == [*codes("\n\n--- snippet ---\n\nx"), *gap[1:]]


@pytest.mark.parametrize("n_predict", [None, 10, 100_000])
def test_a_gap_fits_the_context(n_predict):
    """The text next to the gap is kept, and the ends of other files."""
    long = Infill("a" * 500 + "b", "y" + "z" * 500, "", [("f", "x" * 500)])
    tokens = infill_tokens(letters(), long, 100, n_predict)
    answer = 10 if n_predict == 10 else 25
    assert 90 - answer <= len(tokens) <= 100 - answer
    assert tokens[tokens.index(SUF) - 1 : tokens.index(SUF) + 2] == [ord("b"), SUF, ord("y")]
    assert tokens.count(ord("a")) > 2 * tokens.count(ord("z")) > 0


def test_other_files_stay_in_the_cache_while_the_text_around_the_gap_grows():
    files = [(f"{i}.py", "x" * 40) for i in range(9)]

    def prompt(around, n_predict):
        return infill_tokens(letters(), Infill(around, around, "", files), 400, n_predict)

    read = prompt("", 0)  # as editors do, before there is a question
    n_common = read.index(PRE) + 1
    assert n_common > 200
    for length in (1, 20, 50):
        assert prompt("a" * length, 64)[:n_common] == read[:n_common]


def test_a_model_without_gaps():
    with pytest.raises(ModelError, match="/infill needs"):
        infill_tokens(letters(fill_in=None), GAP, 200, None)
