"""Generate training data: the main model's answers to prompts, with its top candidates.

A call reads all weights, for one token or for 64, so many parallel sequences are several times as fast.

The main model also generates prompts: given the start of a user turn, it writes what users asked in its
training data (Xu et al. 2024, "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with
Nothing").
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
from spec_local.training.prompts import Prompt, is_held_out
from spec_local.training.shards import TOP_K, Document, Shard

TEMPERATURES = (0.0, 0.0, 0.5, 0.9)
"""Each answer gets one at random."""
_SHARD_TOKENS, _SHARD_SECONDS = 32768, 300.0  # a shard is written after either
_BLOCK = 64  # columns of logits that are represented by their maximum
_MAX_PERIOD, _REPEATS = 32, 4  # an answer that repeats up to so many tokens so often is in a loop
_MAX_PASSAGES = 64  # latest answers that prompts may be about
_MIN_PASSAGE_WORDS = 40
_MIN_UNFINISHED = 16  # tokens of an unfinished answer that is worth keeping
_PROMPT_TEMPERATURE = 0.9  # of generated prompts
_PROMPT_LENGTHS = 4, 256  # tokens of a generated prompt, at least and at most
_MARK = "specdec7431"  # stands for the prompt in a rendered template


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    """n_tokens: of all answers, unfinished ones included. rate: tokens per second of this run.

    n_documents, n_shards: of this and earlier runs.
    """

    n_tokens: int
    rate: float
    n_documents: int
    n_shards: int


@dataclass(slots=True)
class _Sequence:
    """An unfinished answer, or an unfinished prompt of the main model; pending: tokens not evaluated yet."""

    prompt: Prompt
    prompt_tokens: Sequence[int]
    temperature: float
    pending: Sequence[int]
    is_prompt: bool = False
    tokens: list[int] = field(default_factory=list)
    top_ids: list[NDArray[np.uint32]] = field(default_factory=list)
    top_logprobs: list[NDArray[np.float16]] = field(default_factory=list)

    def document(self) -> Document:
        n = len(self.top_logprobs)  # fewer than tokens if a signal came in between
        return Document(
            np.array([*self.prompt_tokens, *self.tokens[:n]], np.uint32),
            len(self.prompt_tokens),
            self.prompt.category,
            self.temperature,
            self.prompt.held_out,
            np.array(self.top_ids[:n]),
            np.array(self.top_logprobs),
        )


class DataGenerator:
    """Answers a stream of prompts and writes the answers into shards.

    Args:
        model: the main model, or a copy in a precision that is faster here.
        folder: of the shards; existing ones are continued.
        next_prompt: returns the prompt of a number, given passages that it may be about. A prompt without
            text is left to the main model, if its template shows where a user turn starts.
        n_parallel: sequences.
        n_ctx: tokens of a prompt and its answer; longer prompts are skipped.
        max_tokens: of an answer.
        seed: of the sampling.
        threads: None: one per physical core.

    Raises:
        ContextOverflow, BackendError: as `ParallelContext`.
        InvalidRequest: a shard is damaged.
        ModelError: the chat template leaves no room for a prompt and an answer.
    """

    def __init__(
        self,
        model: Model,
        folder: Path,
        next_prompt: Callable[[int, Sequence[str]], Prompt],
        *,
        n_parallel: int = 64,
        n_ctx: int = 768,
        max_tokens: int = 320,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        self._folder, self._next_prompt, self._max_tokens = folder, next_prompt, max_tokens
        self._vocabulary = model.vocabulary
        self._template = ChatTemplate(model) if model.chat_template else None
        self._user_turn = self._around_prompt()
        self._n_shards, self._written_at = shards.next_number(folder), time.monotonic()
        self._n_tokens = self._n_documents = self._prompt_number = 0
        self._passages: list[str] = []
        for shard in shards.read(folder):
            self._prompt_number = shard.next_prompt
            for document in shard.documents:
                self._count(document)
        self._rng = np.random.default_rng([seed, self._prompt_number])
        self._parallel = ParallelContext(model, n_parallel, n_ctx, threads=threads)
        needed = len(self._tokenize("Why?"))
        if not self._fits(needed):
            raise ModelError(
                f"the chat template of {model.path.name} takes {needed} tokens, which leaves too little of "
                f"{n_ctx} for an answer: no draft can be trained for this model"
            )
        self._finished: list[Document] = []

    def run(self) -> Generator[GenerationProgress]:
        """Generate until closed, once; closing saves unfinished answers and frees the caches.

        Yields:
            Progress after every call of the model.

        Raises:
            OSError: a shard cannot be written.
            BackendError: llama.cpp failed.
        """
        running: dict[int, _Sequence] = {}
        before, start = self._n_tokens, time.monotonic()
        try:
            while True:
                for slot in range(self._parallel.n_sequences):
                    if slot not in running:
                        running[slot] = self._start()
                batch = [(slot, running[slot]) for slot in sorted(running)]
                logits = self._parallel.evaluate({slot: sequence.pending for slot, sequence in batch})
                ids, logprobs = top_logprobs(logits, TOP_K)
                temperatures = [_PROMPT_TEMPERATURE if s.is_prompt else s.temperature for _, s in batch]
                for i, choice in enumerate(self._sample(logprobs, temperatures)):
                    slot, sequence = batch[i]
                    sequence.pending = [int(ids[i, choice])]
                    sequence.tokens += sequence.pending
                    sequence.top_ids.append(ids[i])
                    sequence.top_logprobs.append(logprobs[i].astype(np.float16))
                    if not self._is_over(sequence.tokens):
                        continue
                    del running[slot]
                    if not sequence.is_prompt:
                        self._finish(sequence)
                    elif answer := self._answer_to(sequence):
                        running[slot] = answer
                        continue
                    self._parallel.clear(slot)
                n_tokens = self._n_tokens + sum(
                    len(sequence.tokens) for sequence in running.values() if not sequence.is_prompt
                )
                rate = (n_tokens - before) / (time.monotonic() - start)
                yield GenerationProgress(n_tokens, rate, self._n_documents, self._n_shards)
        finally:
            for sequence in running.values():
                if len(sequence.tokens) >= _MIN_UNFINISHED and not sequence.is_prompt:
                    self._finish(sequence)
            self._write()
            self._parallel.close()  # before the model is freed: see `free_context`

    def _start(self) -> _Sequence:
        """Start the next prompt that leaves room for an answer."""
        while True:
            prompt = self._next_prompt(self._prompt_number, self._passages)
            temperature = TEMPERATURES[int(self._rng.integers(len(TEMPERATURES)))]
            self._prompt_number += 1
            if prompt.text:
                tokens = self._tokenize(prompt.text)
                if self._fits(len(tokens)):
                    return _Sequence(prompt, tokens, temperature, tokens)
            elif self._user_turn and self._fits(len(self._user_turn[0])):
                head = self._user_turn[0]
                return _Sequence(prompt, head, temperature, head, is_prompt=True)

    def _tokenize(self, prompt: str) -> Sequence[int]:
        if self._template:
            prompt = self._template.render([Message(role="user", content=prompt)])
        return self._vocabulary.tokenize(prompt, add_special=True, parse_special=bool(self._template))

    def _fits(self, n_prompt: int) -> bool:
        return n_prompt + self._max_tokens <= self._parallel.n_ctx

    def _around_prompt(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """The template's tokens before and after a prompt; None: there is no such template."""
        if not self._template:
            return None
        before, mark, after = self._template.render([Message(role="user", content=_MARK)]).partition(_MARK)
        if not mark or not after.strip():
            return None
        head = self._vocabulary.tokenize(before, add_special=True, parse_special=True)
        return head, self._vocabulary.continuation(after)

    def _answer_to(self, sequence: _Sequence) -> _Sequence | None:
        """Start the answer to a generated prompt; None: the prompt is unusable."""
        assert self._user_turn
        words = sequence.tokens[:-1]
        shortest, longest = _PROMPT_LENGTHS
        is_whole = self._vocabulary.is_end(sequence.tokens[-1])
        head, tail = self._user_turn
        prompt_tokens = [*head, *words, *tail]
        if not is_whole or not shortest <= len(words) <= longest or not self._fits(len(prompt_tokens)):
            return None
        # Decided by its text: the main model generates some prompts repeatedly.
        prompt = replace(sequence.prompt, held_out=is_held_out(self._detokenize(words)))
        return _Sequence(prompt, prompt_tokens, sequence.temperature, tail)

    def _sample(self, logprobs: NDArray[np.float32], temperatures: Sequence[float]) -> list[int]:
        """Sample a candidate of each row at its temperature, by adding Gumbel noise (Gumbel 1954)."""
        noise = self._rng.gumbel(size=logprobs.shape)
        choices: list[int] = np.argmax(logprobs + np.reshape(temperatures, (-1, 1)) * noise, axis=1).tolist()
        return choices

    def _is_over(self, tokens: list[int]) -> bool:
        if self._vocabulary.is_end(tokens[-1]) or len(tokens) == self._max_tokens:
            return True
        return len(tokens) % 16 == 0 and any(
            tokens[-period * _REPEATS :] == tokens[-period:] * _REPEATS
            for period in range(1, min(_MAX_PERIOD, len(tokens) // _REPEATS) + 1)
        )

    def _finish(self, sequence: _Sequence) -> None:
        document = sequence.document()
        self._finished.append(document)
        self._count(document)
        is_late = time.monotonic() - self._written_at > _SHARD_SECONDS
        if is_late or sum(len(document.tokens) for document in self._finished) >= _SHARD_TOKENS:
            self._write()

    def _count(self, document: Document) -> None:
        answer = document.tokens[document.n_prompt :]
        self._n_tokens += len(answer)
        self._n_documents += 1
        text = self._detokenize(answer.tolist())
        if len(text.split()) >= _MIN_PASSAGE_WORDS and not document.held_out:
            self._passages = [*self._passages[1 - _MAX_PASSAGES :], text]

    def _detokenize(self, tokens: Sequence[int]) -> str:
        return printable(self._vocabulary.detokenize(tokens)).strip()

    def _write(self) -> None:
        if self._finished:
            shards.write(self._folder, self._n_shards, Shard(self._finished, self._prompt_number))
            self._n_shards += 1
            self._finished, self._written_at = [], time.monotonic()


def top_logprobs(logits: NDArray[np.float32], n: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Find the most likely tokens of each row.

    Args:
        logits: float32 (rows, columns).

    Returns:
        uint32 and float32 (rows, n): tokens and their log-probabilities at temperature 1, best first.
    """
    rows, columns = logits.shape
    shifted = logits - np.max(logits, axis=1, keepdims=True)
    # The n best columns lie in the n blocks with the highest maxima: far less to sort.
    n_blocks = columns // _BLOCK
    blocks = shifted[:, : n_blocks * _BLOCK].reshape(rows, _BLOCK, n_blocks)
    if n_blocks > n:
        best = np.argpartition(blocks.max(axis=1), n_blocks - n, axis=1)[:, -n:]
        inside = best[:, None, :] + n_blocks * np.arange(_BLOCK)[:, None]
        rest = np.broadcast_to(np.arange(n_blocks * _BLOCK, columns), (rows, columns % _BLOCK))
        candidates = np.concatenate([inside.reshape(rows, -1), rest], axis=1)
    else:
        candidates = np.broadcast_to(np.arange(columns), (rows, columns))
    values = np.take_along_axis(shifted, candidates, axis=1)
    order = np.argpartition(values, values.shape[1] - n, axis=1)[:, -n:]
    order = np.take_along_axis(order, np.argsort(-np.take_along_axis(values, order, axis=1), axis=1), axis=1)
    np.exp(shifted, out=shifted)
    total = np.log(shifted.sum(axis=1, keepdims=True))
    return (
        np.take_along_axis(candidates, order, axis=1).astype(np.uint32),
        np.take_along_axis(values, order, axis=1) - total,
    )
