"""Conversations of a benchmark, tokenized for a real model."""

import pytest

from spec_local.bench.prompts import Prompt
from spec_local.bench.runner import longest, tokenize
from spec_local.chat.conversation import Conversation
from spec_local.chat.template import ChatTemplate
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model

WHOLE = Prompt("c", "81", "the of", ("and to", "in is"))


@pytest.fixture(scope="module")
def bare_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("bare") / "bare.gguf"
    return Model(write_tiny_model(path, n_layers=1, chat_template=""))


def answer(model, text):
    return text, model.vocabulary.tokenize(text)


def test_a_conversation_is_that_of_a_chat(tiny_model):
    (first, other) = tokenize(tiny_model, [WHOLE, Prompt("c", "1", "the")])
    chat = Conversation(tiny_model, ChatTemplate(tiny_model))
    assert first.tokens == chat.ask("the of")
    second = first.following(*answer(tiny_model, "that it"))
    chat.answer(*answer(tiny_model, "that it"))
    assert second.tokens == chat.ask("and to")
    assert second.following("", []).prompt == WHOLE.turn(3)
    assert first.following(*answer(tiny_model, "that it")).tokens == second.tokens  # also a second time
    assert first.following(*answer(tiny_model, "is")).tokens != second.tokens
    assert second.prompt.name == "81 turn 2"
    assert other.following is second.following("", []).following is None


def test_without_a_chat_template_the_turns_are_joined(bare_model):
    assert not bare_model.chat_template
    (first,) = tokenize(bare_model, [WHOLE])
    second = first.following(*answer(bare_model, " that it"))
    text = b"".join(map(bare_model.vocabulary.piece, second.tokens)).decode()
    assert [part.strip() for part in text.split("\n\n")] == ["the of that it", "and to"]
    assert second.tokens[0] == first.tokens[0] not in second.tokens[1:]  # the beginning-of-sequence token


def test_the_length_of_a_conversation_with_its_answers(tiny_model, bare_model):
    for model in (tiny_model, bare_model):
        first, single = tokenize(model, [WHOLE, Prompt("c", "1", "the")])
        assert longest(single, 7) == len(single.tokens) + 7
        given = answer(model, " the of and to in")
        last = first.following(*given).following(*given)
        n = len(given[1])
        assert len(last.tokens) + n <= longest(first, n) <= len(last.tokens) + n + 4
