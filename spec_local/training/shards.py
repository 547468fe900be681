"""Training data on disk, in shards that are written atomically.

A shard is a NumPy archive of a few hundred documents, and a file with their hidden states beside it, which is
mapped into memory when it is read. The main model's top candidates and their probabilities are stored for
each token of an answer, because these soft targets contain several times as much information as the token
alone (Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2).
"""

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec_local.errors import InvalidRequest
from spec_local.system.files import opened, replacing

TOP_K = 16
"""Number of candidates stored per token."""
_STATES = ".states"
_PATTERN = "[0-9][0-9][0-9][0-9][0-9].npz"


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A prompt and the main model's answer.

    Attributes:
        tokens: uint32 (n,), prompt and answer, including the end token if there is one.
        n_prompt: number of prompt tokens.
        category: category of the prompt.
        temperature: temperature at which the answer was sampled.
        held_out: used for evaluation only, not for training.
        top_ids: uint32 (n - n_prompt, TOP_K), the main model's candidates for each answer token, the most
            probable first.
        top_logprobs: float16 (n - n_prompt, TOP_K), their natural log probabilities over the whole
            vocabulary, at temperature 1.
        states: bfloat16 (see `bfloat16`) (n - 1, layers * width), the main model's states of all tokens but
            the last.
    """

    tokens: NDArray[np.uint32]
    n_prompt: int
    category: str
    temperature: float
    held_out: bool
    top_ids: NDArray[np.uint32]
    top_logprobs: NDArray[np.float16]
    states: NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Shard:
    """Documents, and the index of the next prompt when they were written."""

    documents: Sequence[Document]
    next_prompt: int


def write(folder: Path, number: int, shard: Shard) -> None:
    """Write a shard atomically.

    Raises:
        OSError: it cannot be written, or its folder has been deleted, and with it what it is made from.
    """
    docs = shard.documents
    # First the states: a shard exists once its archive does.
    states, archive = (folder / f"{number:05}{suffix}" for suffix in (_STATES, ".npz"))
    with replacing(states, make_folder=False) as temporary, temporary.open("wb") as file:
        for doc in docs:
            file.write(np.ascontiguousarray(doc.states).data)
    with replacing(archive, make_folder=False) as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            next_prompt=shard.next_prompt,
            categories=[doc.category for doc in docs],
            tokens=np.concatenate([doc.tokens for doc in docs]),
            lengths=np.array([len(doc.tokens) for doc in docs], np.uint32),
            prompts=np.array([doc.n_prompt for doc in docs], np.uint32),
            temperatures=np.array([doc.temperature for doc in docs], np.float32),
            held_out=np.array([doc.held_out for doc in docs]),
            top_ids=np.concatenate([doc.top_ids for doc in docs]),
            top_logprobs=np.concatenate([doc.top_logprobs for doc in docs]),
            width=docs[0].states.shape[1],
        )


def next_number(folder: Path) -> int:
    """Return the number of the next shard."""
    return max((int(path.stem) for path in folder.glob(_PATTERN)), default=-1) + 1


def read(folder: Path) -> Iterable[Shard]:
    """Read the shards of a folder, in order.

    Raises:
        InvalidRequest: a file is damaged or not a shard.
        OSError: it cannot be read.
    """
    for path in sorted(folder.glob(_PATTERN)):
        try:
            with opened(path) as file, np.load(file, allow_pickle=False) as arrays:
                shard = _shard(path, {name: arrays[name] for name in arrays.files})
        except (ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
            raise InvalidRequest(
                f"{path} is damaged ({error}): delete it, and training continues with the other files"
            ) from None
        yield shard


def read_documents(folder: Path) -> list[Document]:
    """Return the documents of all shards of a folder, in order; see `read` for the errors."""
    return [document for shard in read(folder) for document in shard.documents]


def _shard(path: Path, arrays: dict[str, NDArray[np.generic]]) -> Shard:
    lengths, prompts = arrays["lengths"].tolist(), arrays["prompts"].tolist()
    ends = np.cumsum(lengths)[:-1]
    try:
        states = np.memmap(path.with_suffix(_STATES), np.uint16, "r").reshape(-1, int(arrays["width"]))
    except FileNotFoundError:
        raise ValueError("its states are missing") from None
    if len(states) != sum(lengths) - len(lengths):
        raise ValueError("its states are incomplete")
    answer_ends = np.cumsum(np.subtract(lengths, prompts))[:-1]
    rows = zip(
        np.split(arrays["tokens"], ends),
        prompts,
        arrays["categories"].tolist(),
        arrays["temperatures"].tolist(),
        arrays["held_out"].tolist(),
        np.split(arrays["top_ids"], answer_ends),
        np.split(arrays["top_logprobs"], answer_ends),
        np.split(states, np.cumsum(np.subtract(lengths, 1))[:-1]),
        strict=True,
    )
    return Shard([Document(*row) for row in rows], int(arrays["next_prompt"]))
