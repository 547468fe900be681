"""Generate training data: the main model's answers to prompts, with its top candidates.

A call reads all weights, whether for one token or for 64; many parallel sequences are therefore several times
as fast.

The main model also generates prompts: given the start of a user turn, it writes what users asked in its
training data (Xu et al. 2024, "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with
Nothing").
"""

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local.chat.messages import Message
from spec_local.chat.template import ChatTemplate
from spec_local.errors import ModelError
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.text import printable
from spec_local.training import shards
from spec_local.training.parallel_rows import next_outputs, open_parallel_rows
from spec_local.training.prompts import TrainingPrompt, is_held_out
from spec_local.training.recipe import LIMITS
from spec_local.training.shards import TOP_K, Document, Shard

TEMPERATURES = (0.0, 0.0, 0.5, 0.9)
"""Usual sampling temperatures."""
LONGEST_CALL = 30.0
"""Seconds between two progress values; in longer ones, the process was suspended."""
_DONE = "complete"  # file that exists once the prompts of a list have been answered
_BLOCK = 64  # columns of logits that are represented by their maximum
_MAX_PERIOD, _REPEATS = 32, 4  # an answer is in a loop if it repeats up to 32 tokens 4 times
_MAX_PASSAGES = 64  # number of latest answers that prompts may be about
_MIN_PASSAGE_WORDS = 40
_MIN_UNFINISHED = 16  # minimum number of tokens of an unfinished answer that is kept
_PROMPT_TEMPERATURE = 0.9  # for generated prompts
_PROMPT_LENGTHS = 4, 256  # minimum and maximum number of tokens in a generated prompt
_MARK = "specdec7431"  # placeholder for the prompt in a rendered template


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    """Progress of the data generation.

    n_tokens: number of tokens in all answers, including unfinished ones. rate: tokens per second in this run.
    n_documents, n_shards: numbers in this and earlier runs. n_bytes: size of the states of all documents and
    unfinished answers.
    """

    n_tokens: int
    rate: float
    n_documents: int
    n_shards: int
    n_bytes: int


@dataclass(slots=True)
class _Sequence:
    """An unfinished answer or self-generated prompt; pending: tokens that are not evaluated yet."""

    prompt: TrainingPrompt
    prompt_tokens: Sequence[int]
    temperature: float
    pending: Sequence[int]
    is_prompt: bool = False
    tokens: list[int] = field(default_factory=list)
    top_ids: list[NDArray[np.uint32]] = field(default_factory=list)
    top_logprobs: list[NDArray[np.float16]] = field(default_factory=list)
    states: list[NDArray[np.uint16]] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        """Size of the states."""
        return (len(self.prompt_tokens) + len(self.tokens)) * self.states[0][0].nbytes if self.states else 0

    def document(self) -> Document:
        n = len(self.top_logprobs)  # fewer than tokens if a signal arrived in between
        n_states = len(self.prompt_tokens) + n - 1  # the last token has not been evaluated
        return Document(
            np.array([*self.prompt_tokens, *self.tokens[:n]], np.uint32),
            len(self.prompt_tokens),
            self.prompt.category,
            self.temperature,
            self.prompt.held_out,
            np.array(self.top_ids[:n]),
            np.array(self.top_logprobs),
            np.concatenate(self.states)[:n_states],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """How data is generated.

    layers: the layers whose outputs are recorded for each token.
    n_parallel: number of sequences that are generated in parallel.
    n_ctx: maximum number of tokens in a prompt and its answer; longer prompts are skipped.
    max_tokens: maximum number of tokens in an answer.
    shard_tokens, shard_seconds: a shard is written when either is reached.
    temperatures: one is selected at random for each answer.
    seed: random seed for sampling.
    threads: number of threads; None: one per physical core.
    """

    layers: tuple[int, ...]
    n_parallel: int = LIMITS.n_parallel
    n_ctx: int = 768
    max_tokens: int = LIMITS.answer
    shard_tokens: int = LIMITS.shard
    shard_seconds: float = 300.0
    temperatures: Sequence[float] = TEMPERATURES
    seed: int = 0
    threads: int | None = None


class DataGenerator:
    """Answers a stream of prompts and writes the answers into shards.

    Args:
        model: the main model, or a copy in a precision that is faster on this machine.
        folder: folder of the shards; generation continues after existing ones. It is created, in an existing
            one.
        next_prompt: returns the prompt with a given number, or None after the last one; also receives
            passages that it may be about. A prompt without text is generated by the main model, if its
            template shows where a user turn starts.

    Raises:
        ContextOverflow, BackendError: as `spec_local.llama.open.open_sequences`.
        InvalidRequest: a shard is damaged.
        ModelError: the chat template leaves no room for a prompt and an answer.
    """

    def __init__(
        self,
        model: Model,
        folder: Path,
        next_prompt: Callable[[int, Sequence[str]], TrainingPrompt | None],
        options: DataOptions,
    ) -> None:
        self._folder, self._next_prompt, self._options = folder, next_prompt, options
        self._vocabulary = model.vocabulary
        self._template = ChatTemplate(model) if model.chat_template else None
        self._user_turn = self._around_prompt()
        folder.mkdir(exist_ok=True)
        self._n_shards, self._written_at = shards.next_number(folder), time.monotonic()
        self._n_tokens = self._n_documents = self._n_bytes = self._prompt_number = 0
        self._passages: list[str] = []
        for shard in shards.read(folder):
            self._prompt_number = shard.next_prompt
            for document in shard.documents:
                self._count(document)
        self._rng = np.random.default_rng([options.seed, self._prompt_number])
        self._rows = open_parallel_rows(
            model, options.n_parallel, options.n_ctx, options.threads, HiddenStates(options.layers)
        )
        needed = len(self._tokenize("Why?"))
        if not self._fits(needed):
            raise ModelError(
                f"the chat template of {model.path.name} takes {needed} tokens, which leaves too little of "
                f"{options.n_ctx} for an answer: no draft model can be trained for this model"
            )
        self._finished: list[Document] = []

    def run(self) -> Generator[GenerationProgress]:
        """Generate until there are no more prompts, or the generator is closed, and then free the caches.

        Unfinished answers are saved. Call this only once.

        Yields:
            Progress after every call of the model.

        Raises:
            OSError: a shard cannot be written.
            BackendError: llama.cpp failed.
        """
        running: dict[int, _Sequence] = {}
        logits_buffer = np.empty((len(self._rows), self._vocabulary.n_tokens), np.float32)
        before, start = self._n_tokens, time.monotonic()
        try:
            while True:
                for slot in range(len(self._rows)):
                    if slot not in running and (started := self._start()):
                        running[slot] = started
                if not running:
                    return
                batch = [(slot, running[slot]) for slot in sorted(running)]
                logits, states = next_outputs(
                    [self._rows[slot] for slot, _ in batch],
                    [sequence.pending for _, sequence in batch],
                    with_states=True,
                    logits=logits_buffer[: len(batch)],
                )
                ids, logprobs = top_logprobs(logits, TOP_K)
                temperatures = [_PROMPT_TEMPERATURE if s.is_prompt else s.temperature for _, s in batch]
                for i, choice in enumerate(self._sample(logprobs, temperatures)):
                    slot, sequence = batch[i]
                    sequence.states.append(states[i])
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
                    self._rows[slot].truncate(0)
                n_tokens = self._n_tokens + sum(
                    len(sequence.tokens) for sequence in running.values() if not sequence.is_prompt
                )
                rate = (n_tokens - before) / (time.monotonic() - start)
                n_bytes = self._n_bytes + sum(each.n_bytes for each in running.values())
                yield GenerationProgress(n_tokens, rate, self._n_documents, self._n_shards, n_bytes)
        finally:
            for sequence in running.values():
                if len(sequence.tokens) >= _MIN_UNFINISHED and not sequence.is_prompt:
                    self._finish(sequence)
            self._write()
            self._rows[0].close()

    def _start(self) -> _Sequence | None:
        """Start a sequence with the next prompt that leaves room for an answer; None: there is none."""
        while prompt := self._next_prompt(self._prompt_number, self._passages):
            temperatures = self._options.temperatures
            temperature = temperatures[int(self._rng.integers(len(temperatures)))]
            self._prompt_number += 1
            if prompt.text or prompt.tokens:
                tokens = prompt.tokens or self._tokenize(prompt.text)
                if self._fits(len(tokens)):
                    return _Sequence(prompt, tokens, temperature, tokens)
            elif self._user_turn and self._fits(len(self._user_turn[0])):
                head = self._user_turn[0]
                return _Sequence(prompt, head, temperature, head, is_prompt=True)
        return None

    def _tokenize(self, prompt: str) -> Sequence[int]:
        if not self._template:
            return self._vocabulary.tokenize(prompt, add_special=True)
        rendered = self._template.render([Message(role="user", content=prompt)])
        return rendered.tokens(self._vocabulary)

    def _fits(self, n_prompt: int) -> bool:
        return n_prompt + self._options.max_tokens <= self._rows[0].n_ctx

    def _around_prompt(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """Return the template's tokens before and after a prompt; None: there is no such template."""
        if not self._template:
            return None
        rendered = self._template.render([Message(role="user", content=_MARK)])
        before, mark, after = str(rendered).partition(_MARK)
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
        # Decided by the text, as the main model generates some prompts repeatedly.
        prompt = replace(sequence.prompt, held_out=is_held_out(self._detokenize(words)))
        return _Sequence(prompt, prompt_tokens, sequence.temperature, tail, states=sequence.states)

    def _sample(self, logprobs: NDArray[np.float32], temperatures: Sequence[float]) -> list[int]:
        """Sample a candidate for each row at its temperature, by adding Gumbel noise (Gumbel 1954)."""
        noise = self._rng.gumbel(size=logprobs.shape)
        choices: list[int] = np.argmax(logprobs + np.reshape(temperatures, (-1, 1)) * noise, axis=1).tolist()
        return choices

    def _is_over(self, tokens: list[int]) -> bool:
        if self._vocabulary.is_end(tokens[-1]) or len(tokens) == self._options.max_tokens:
            return True
        return len(tokens) % 16 == 0 and any(
            tokens[-period * _REPEATS :] == tokens[-period:] * _REPEATS
            for period in range(1, min(_MAX_PERIOD, len(tokens) // _REPEATS) + 1)
        )

    def _finish(self, sequence: _Sequence) -> None:
        document = sequence.document()
        self._finished.append(document)
        self._count(document)
        is_late = time.monotonic() - self._written_at > self._options.shard_seconds
        if is_late or sum(len(document.tokens) for document in self._finished) >= self._options.shard_tokens:
            self._write()

    def _count(self, document: Document) -> None:
        answer = document.tokens[document.n_prompt :]
        self._n_tokens += len(answer)
        self._n_documents += 1
        self._n_bytes += document.states.nbytes
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


def answers_to(
    prompts: Sequence[TrainingPrompt],
    model: Model,
    folder: Path,
    *,
    whole: bool = False,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> list[Document]:
    """Return the main model's answers to a list of prompts; what an earlier run has finished is kept.

    Args:
        model, folder: as for `DataGenerator`. options: fields of `DataOptions`.
        whole: begin anew after a run that was killed, which has lost the answers that were not finished.
        seconds: maximum time of this run.
        on_progress: called with the number of finished answers, and of all.

    Raises:
        SpecLocalError: the model cannot answer.
        OSError: a shard cannot be written.
    """
    if not (folder / _DONE).exists():
        if whole:
            shutil.rmtree(folder, ignore_errors=True)

        def prompt(i: int, _: Sequence[str]) -> TrainingPrompt | None:
            return prompts[i] if i < len(prompts) else None

        generator = DataGenerator(model, folder, prompt, DataOptions(**options))
        spent, last = 0.0, clock()
        with contextlib.closing(generator.run()) as running:
            for progress in running:
                on_progress(progress.n_documents, len(prompts))
                now = clock()
                spent += min(now - last, LONGEST_CALL)
                last = now
                if spent >= seconds:
                    break
        (folder / _DONE).touch()
    return shards.read_documents(folder)


def top_logprobs(logits: NDArray[np.float32], n: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Find the most probable tokens of each row.

    Args:
        logits: float32 (rows, columns); overwritten.

    Returns:
        uint32 and float32 (rows, n): tokens and their log probabilities at temperature 1, the most probable
        first.
    """
    rows, columns = logits.shape
    shifted = np.subtract(logits, np.max(logits, axis=1, keepdims=True), out=logits)
    # The n largest columns are in the n blocks with the largest maxima, so that only these are sorted.
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
