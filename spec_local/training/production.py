"""Main answers questions in many parallel texts, and what it thinks of each token is kept: what a draft learns from.

A call of a model reads all weights, whether for one token or for sixty-four, so that many texts together are written
several times as fast as one after another.

Main asks questions, too: given the beginning of a person's turn, it writes what people asked it in its training (Xu et al.
2024, "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing").
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec_local.chat.template import ChatTemplate, Message
from spec_local.core.text import printable
from spec_local.errors import ModelError
from spec_local.llama.model import Model
from spec_local.llama.parallel import ParallelContext
from spec_local.training import shards
from spec_local.training.questions import Question, is_held_out
from spec_local.training.shards import TOP, Document, Shard

TEMPERATURES = (0.0, 0.0, 0.5, 0.9)
"""Of which each answer gets one by chance: people ask both for the best answer and for a free one."""
_SHARD, _SOON = (
    32768,
    300.0,
)  # tokens, or seconds, after which what is finished becomes a file: a kill loses so much at most
_BLOCK = 64  # columns of the logits whose maximum stands for them
_PERIODS, _ROUNDS = 32, 4  # an answer that repeats so many tokens so often goes on for ever
_POOL = 64  # answers that are kept as texts to ask about
_LEAST_WORDS = 40  # of such a text
_SHORTEST = 16  # tokens of an unfinished answer that are worth keeping
_ASKING = 0.9  # temperature at which main asks
_QUESTION = 4, 256  # tokens of a question of main's own, at least and at most
_MARK = "specdec7431"  # stands where a question would in a rendered template


@dataclass(frozen=True, slots=True)
class Progress:
    """tokens, documents: answers, those under way included. rate: tokens a second, in this run. n_files: grows with every
    shard that is on disk.
    """

    tokens: int
    rate: float
    documents: int
    n_files: int


@dataclass(slots=True)
class _Text:
    """An answer on its way, or a question that main asks itself. unread: tokens that main has not read yet."""

    question: Question
    prompt: Sequence[int]
    temperature: float
    unread: Sequence[int]
    is_question: bool = False
    tokens: list[int] = field(default_factory=list)
    ids: list[NDArray[np.uint32]] = field(default_factory=list)
    logprobs: list[NDArray[np.float16]] = field(default_factory=list)

    def document(self) -> Document:
        n = len(self.logprobs)  # a signal may have come between a token and its candidates
        return Document(
            np.array([*self.prompt, *self.tokens[:n]], np.uint32),
            len(self.prompt),
            self.question.category,
            self.temperature,
            self.question.held_out,
            np.array(self.ids[:n]),
            np.array(self.logprobs),
        )


class Production:
    """Answers to a stream of questions, written into shards.

    Args:
        model: main, or a copy of it in a precision that this machine multiplies faster.
        folder: of the shards; those that are there are gone on from.
        ask: the question of a number, and texts that it may be about; one without a text main asks itself, if its template
            tells where a question begins.
        n_texts: in parallel.
        n_ctx: tokens of a question and its answer; longer questions are passed over.
        longest: tokens of an answer, at most.
        seed: of the sampling.
        threads: None: one per physical core.

    Raises:
        ContextOverflow, BackendError: as of `ParallelContext`.
        InvalidRequest: a shard is damaged.
        ModelError: main's chat template leaves no room for a question and an answer.
    """

    def __init__(
        self,
        model: Model,
        folder: Path,
        ask: Callable[[int, Sequence[str]], Question],
        *,
        n_texts: int = 64,
        n_ctx: int = 768,
        longest: int = 320,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        self._folder, self._ask, self._longest = folder, ask, longest
        self._vocabulary = model.vocabulary
        self._template = ChatTemplate(model) if model.chat_template else None
        self._around = self._turn()
        self._n_shards, self._written_at = shards.following(folder), time.monotonic()
        self._n_tokens = self._n_documents = self._n_asked = 0
        self._pool: list[str] = []
        for shard in shards.read(folder):
            self._n_asked = shard.n_asked
            for document in shard.documents:
                self._count(document)
        self._rng = np.random.default_rng([seed, self._n_asked])
        self._parallel = ParallelContext(model, n_texts, n_ctx, threads=threads)
        needed = len(self._prompt("Why?"))
        if not self._fits(needed):
            raise ModelError(
                f"the chat template of {model.path.name} takes {needed} tokens, which leaves too little of {n_ctx} for an answer: "
                "no draft can be made of this model"
            )
        self._finished: list[Document] = []

    def run(self) -> Generator[Progress]:
        """Write until the caller stops, once; leaving keeps what is written by then, and frees the caches.

        Yields:
            what there is, after every call of main.

        Raises:
            OSError: a shard cannot be written.
            BackendError: llama.cpp failed.
        """
        texts: dict[int, _Text] = {}
        before, start = self._n_tokens, time.monotonic()
        try:
            while True:
                for slot in range(self._parallel.n_sequences):
                    if slot not in texts:
                        texts[slot] = self._next()
                new = {slot: texts[slot].unread for slot in sorted(texts)}
                ids, logprobs = most_likely(self._parallel.evaluate(new), TOP)
                chosen = self._choose(
                    logprobs, [_ASKING if texts[s].is_question else texts[s].temperature for s in new]
                )
                for i, slot in enumerate(new):
                    text = texts[slot]
                    text.unread = [int(ids[i, chosen[i]])]
                    text.tokens += text.unread
                    text.ids.append(ids[i])
                    text.logprobs.append(logprobs[i].astype(np.float16))
                    if not self._is_over(text.tokens):
                        continue
                    del texts[slot]
                    if not text.is_question:
                        self._finish(text)
                    elif asked := self._asked(text):
                        texts[slot] = asked
                        continue
                    self._parallel.clear(slot)
                under_way = sum(len(text.tokens) for text in texts.values() if not text.is_question)
                n_tokens = self._n_tokens + under_way
                rate = (n_tokens - before) / (time.monotonic() - start)
                yield Progress(n_tokens, rate, self._n_documents, self._n_shards)
        finally:
            for text in texts.values():
                if len(text.tokens) >= _SHORTEST and not text.is_question:
                    self._finish(text)
            self._write()
            self._parallel.close()  # before its model goes: see `free_context`

    def _next(self) -> _Text:
        """The next question that leaves room for an answer."""
        while True:
            question = self._ask(self._n_asked, self._pool)
            temperature = TEMPERATURES[int(self._rng.integers(len(TEMPERATURES)))]
            self._n_asked += 1
            if question.text:
                prompt = self._prompt(question.text)
                if self._fits(len(prompt)):
                    return _Text(question, prompt, temperature, prompt)
            elif self._around and self._fits(len(self._around[0])):
                head = self._around[0]
                return _Text(question, head, temperature, head, is_question=True)

    def _prompt(self, question: str) -> Sequence[int]:
        if self._template:
            question = self._template.render([Message(role="user", content=question)])
        return self._vocabulary.tokenize(question, add_special=True, parse_special=bool(self._template))

    def _fits(self, n_prompt: int) -> bool:
        """Whether a question of so many tokens leaves room for an answer."""
        return n_prompt + self._longest <= self._parallel.n_ctx

    def _turn(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """What stands before and after a question; None: that cannot be told."""
        if not self._template:
            return None
        before, mark, after = self._template.render([Message(role="user", content=_MARK)]).partition(_MARK)
        if not mark or not after.strip():
            return None
        head = self._vocabulary.tokenize(before, add_special=True, parse_special=True)
        return head, self._vocabulary.continuation(after)

    def _asked(self, text: _Text) -> _Text | None:
        """The answer to a question that main has asked; None: it is none."""
        assert self._around
        question = text.tokens[:-1]
        shortest, longest = _QUESTION
        is_whole = self._vocabulary.is_end(text.tokens[-1])
        head, rest = self._around
        prompt = [*head, *question, *rest]
        if not is_whole or not shortest <= len(question) <= longest or not self._fits(len(prompt)):
            return None
        # By what is asked, not by its number: main asks some questions again and again.
        asked = replace(text.question, held_out=is_held_out(self._words(question)))
        return _Text(asked, prompt, text.temperature, rest)

    def _choose(self, logprobs: NDArray[np.float32], temperatures: Sequence[float]) -> NDArray[np.intp]:
        """Of each row of candidates one, at its temperature: the largest after Gumbel noise (Gumbel 1954)."""
        noise = self._rng.gumbel(size=logprobs.shape)
        chosen: NDArray[np.intp] = np.argmax(logprobs + np.reshape(temperatures, (-1, 1)) * noise, axis=1)
        return chosen

    def _is_over(self, tokens: list[int]) -> bool:
        if self._vocabulary.is_end(tokens[-1]) or len(tokens) == self._longest:
            return True
        return len(tokens) % 16 == 0 and any(
            tokens[-period * _ROUNDS :] == tokens[-period:] * _ROUNDS
            for period in range(1, min(_PERIODS, len(tokens) // _ROUNDS) + 1)
        )

    def _finish(self, text: _Text) -> None:
        document = text.document()
        self._finished.append(document)
        self._count(document)
        is_late = time.monotonic() - self._written_at > _SOON
        if is_late or sum(len(document.tokens) for document in self._finished) >= _SHARD:
            self._write()

    def _count(self, document: Document) -> None:
        answer = document.tokens[document.n_prompt :]
        self._n_tokens += len(answer)
        self._n_documents += 1
        text = self._words(answer.tolist())
        if len(text.split()) >= _LEAST_WORDS and not document.held_out:
            self._pool = [*self._pool[1 - _POOL :], text]

    def _words(self, tokens: Sequence[int]) -> str:
        return printable(self._vocabulary.detokenize(tokens)).strip()

    def _write(self) -> None:
        if self._finished:
            shards.write(self._folder, self._n_shards, Shard(self._finished, self._n_asked))
            self._n_shards += 1
            self._finished, self._written_at = [], time.monotonic()


def most_likely(logits: NDArray[np.float32], n: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """The best columns of each row.

    Args:
        logits: float32 (rows, columns).

    Returns:
        uint32 and float32 (rows, n): columns and their log-probabilities at temperature 1, best first.
    """
    rows, columns = logits.shape
    top = np.max(logits, axis=1, keepdims=True)
    shifted = logits - top
    # The n best lie in the n blocks whose best are the best: far less to sort than all columns.
    n_blocks = columns // _BLOCK
    whole = shifted[:, : n_blocks * _BLOCK].reshape(rows, _BLOCK, n_blocks)
    if n_blocks > n:
        best = np.argpartition(whole.max(axis=1), n_blocks - n, axis=1)[:, -n:]
        inside = best[:, None, :] + n_blocks * np.arange(_BLOCK)[:, None]
        rest = np.broadcast_to(np.arange(n_blocks * _BLOCK, columns), (rows, columns % _BLOCK))
        places = np.concatenate([inside.reshape(rows, -1), rest], axis=1)
    else:
        places = np.broadcast_to(np.arange(columns), (rows, columns))
    values = np.take_along_axis(shifted, places, axis=1)
    order = np.argpartition(values, values.shape[1] - n, axis=1)[:, -n:]
    order = np.take_along_axis(order, np.argsort(-np.take_along_axis(values, order, axis=1), axis=1), axis=1)
    np.exp(shifted, out=shifted)
    total = np.log(shifted.sum(axis=1, keepdims=True))
    return (
        np.take_along_axis(places, order, axis=1).astype(np.uint32),
        np.take_along_axis(values, order, axis=1) - total,
    )
