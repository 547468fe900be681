"""The user's own answers as training data: the main model reads them again.

Hidden states take a thousand times as much space as tokens. They are therefore not kept with the answers, and
what is written here is deleted after the training.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local import bfloat16
from spec_local.core.calls import run
from spec_local.core.sequence import common_prefix
from spec_local.datastore.answer_store import KeptAnswer
from spec_local.errors import InvalidRequest
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from spec_local.llama.sequence import LlamaSequence
from spec_local.text import counted
from spec_local.training import shards
from spec_local.training.dataset import OWN
from spec_local.training.generation import answers_to, top_logprobs
from spec_local.training.parallel_rows import texts_that_fit
from spec_local.training.prompts import TrainingPrompt
from spec_local.training.recipe import LIMITS, RunLimits
from spec_local.training.shards import TOP_K, Document, Shard

MIN_ANSWERS = 10
"""Minimum number of answers to learn from: one of them is held out."""
HOLD_OUT = 10
"""The last one of this number of answers is held out."""
_MIN_ANSWER = 4  # tokens; shorter ones have nothing to draft
_MAX_CONTEXT = 8192  # tokens; longer conversations are skipped
_TEMPERATURES = (0.4, 0.7, 1.0)  # of further answers, one for each prompt and temperature, on average
_CALL_TOKENS = 64  # in a call, each with its logits: 40 MB for the largest vocabularies


def usable(answers: Sequence[KeptAnswer], limits: RunLimits = LIMITS) -> list[KeptAnswer]:
    """Return the latest answers that a head can learn from, within the limits, the oldest first.

    Raises:
        InvalidRequest: there are too few.
    """
    found: list[KeptAnswer] = []
    room = limits.own
    for answer in reversed(answers):
        n_answer = len(answer.tokens) - answer.n_prompt
        if n_answer < _MIN_ANSWER or answer.n_prompt < 1 or len(answer.tokens) > _MAX_CONTEXT:
            continue
        room -= min(answer.n_prompt, limits.own_prompt) + min(n_answer, limits.own_answer)
        if room < 0:
            break
        found.append(answer)
    if len(found) < MIN_ANSWERS:
        raise InvalidRequest(
            f"{counted(len(found), 'answer')} of this model {'is' if len(found) == 1 else 'are'} kept, too "
            f"few to learn from: use it with `learn` until there are {MIN_ANSWERS}"
        )
    return found[::-1]


def read_again(
    answers: Sequence[KeptAnswer],
    model: Model,
    folder: Path,
    *,
    layers: tuple[int, ...],
    limits: RunLimits = LIMITS,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Document]:
    """Return the answers with the main model's states and candidates, after reading those that are new.

    Args:
        answers: the result of `usable`.
        model: the main model.
        folder: of the shards, which exists; those of other answers are deleted. It is not created again.
        layers: the layers whose outputs are recorded.
        limits: longer answers are cut; the main model reads all of a prompt, whose end is kept.
        on_progress: called with the number of answers that have been read, and of all.

    Raises:
        SpecLocalError: the model cannot read them.
        OSError: a shard cannot be written.
    """
    n_done = _n_read(answers, folder)
    new = answers[n_done:]
    if new:
        row = open_sequence(
            model,
            n_ctx=max(len(answer.tokens) for answer in new),
            max_tokens=_CALL_TOKENS,
            max_logits=_CALL_TOKENS,
            threads=threads,
            hidden=HiddenStates(layers),
        )
        try:
            for batch in _batches(new, limits.own_shard):
                documents = []
                for answer in batch:
                    on_progress(n_done, len(answers))
                    documents.append(_document(row, answer, limits))
                    n_done += 1
                shards.write(folder, shards.next_number(folder), Shard(documents, batch[-1].number))
        finally:
            row.close()
    documents = shards.read_documents(folder)
    n_train = len(documents) - len(documents) // HOLD_OUT
    return [replace(document, held_out=i >= n_train) for i, document in enumerate(documents)]


def answer_again(
    answers: Sequence[KeptAnswer],
    model: Model,
    folder: Path,
    *,
    limits: RunLimits = LIMITS,
    **options: Any,
) -> list[Document]:
    """Return further answers of the main model to the same prompts, at temperatures above 0.

    Args:
        answers: those to train on, a part of the result of `usable`. The prompts of the latest come first.
        limits: longer prompts than those that are kept are skipped.
        model, folder, options: as for `answers_to`, which see for the errors.
    """
    short = [answer for answer in reversed(answers) if answer.n_prompt <= limits.own_prompt]
    prompts = [TrainingPrompt(OWN, "", False, each.tokens[: each.n_prompt].tolist()) for each in short]
    n_ctx = limits.own_prompt + limits.answer
    return answers_to(
        prompts * len(_TEMPERATURES),
        model,
        folder,
        n_parallel=texts_that_fit(model, n_ctx, limits.n_parallel, model.offload),
        n_ctx=n_ctx,
        max_tokens=limits.answer,
        temperatures=_TEMPERATURES,
        **options,
    )


def _n_read(answers: Sequence[KeptAnswer], folder: Path) -> int:
    """Return the number of answers that an earlier run has read; delete those of other answers."""
    try:
        read = list(shards.read(folder))
        last = read[-1].next_prompt if read else 0
        n = sum(len(shard.documents) for shard in read)
        if n == sum(answer.number <= last for answer in answers):
            return n
    except InvalidRequest:  # damaged
        pass
    for path in folder.iterdir():  # not the folder: where it is gone, the answers have been deleted
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return 0


def _batches(answers: Sequence[KeptAnswer], shard_tokens: int) -> Iterator[Sequence[KeptAnswer]]:
    """Yield the answers of one shard after another."""
    start, n_tokens = 0, 0
    for i, answer in enumerate(answers):
        n_tokens += len(answer.tokens)
        if n_tokens >= shard_tokens or i + 1 == len(answers):
            yield answers[start : i + 1]
            start, n_tokens = i + 1, 0


def _document(row: LlamaSequence, answer: KeptAnswer, limits: RunLimits) -> Document:
    """Read an answer and its prompt; the beginning that is still in the cache only as far as needed."""
    tokens = answer.tokens[: answer.n_prompt + limits.own_answer].tolist()
    first = max(0, answer.n_prompt - limits.own_prompt)  # of the tokens whose states are kept
    row.truncate(min(common_prefix(row.cached, tokens), first))
    states: list[NDArray[np.uint16]] = []
    ids: list[NDArray[np.uint32]] = []
    logprobs: list[NDArray[np.float16]] = []
    at, end = len(row.cached), len(tokens) - 1  # nothing follows the last token
    while at < end:
        in_prompt = at < answer.n_prompt - 1
        stop = min(at + _CALL_TOKENS, answer.n_prompt - 1 if in_prompt else end)
        n = stop - at
        logits = run(row.call(tokens[at:stop], n_logits=0 if in_prompt else n))
        found = bfloat16.encode(row.states(range(n)))
        states.append(found[max(0, first - at) :])
        if not in_prompt:
            best, values = top_logprobs(np.array(logits), TOP_K)
            ids.append(best)
            logprobs.append(values.astype(np.float16))
        at = stop
    return Document(
        np.array(tokens[first:], np.uint32),
        answer.n_prompt - first,
        OWN,
        answer.temperature,
        False,
        np.concatenate(ids),
        np.concatenate(logprobs),
        np.concatenate(states),
    )
