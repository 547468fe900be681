"""What main wrote, and what it thought while writing, in files that appear whole or not at all.

A shard is a NumPy archive of some hundred documents. Of each token that main wrote, its most likely candidates are kept
with their probabilities: to learn from them is worth several times the token alone (Hinton et al. 2015, "Distilling the
Knowledge in a Neural Network", section 2).
"""

import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec_local.errors import InvalidRequest
from spec_local.files import replacing

TOP = 16
"""Candidates that are kept of each token."""
_FILES = "[0-9][0-9][0-9][0-9][0-9].npz"


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A prompt and main's answer.

    Attributes:
        tokens: uint32 (n,), the prompt's and the answer's, with the token that ended it, if one did.
        n_prompt: how many of them are the prompt's.
        category: what kind of prompt it was.
        temperature: at which the answer was sampled.
        held_out: it is for measuring, and never learned from.
        top_ids: uint32 (n - n_prompt, TOP): before each token of the answer, main's most likely ones, best first.
        top_logprobs: float16 (n - n_prompt, TOP): their natural log-probabilities over the whole vocabulary, at temperature 1.
    """

    tokens: NDArray[np.uint32]
    n_prompt: int
    category: str
    temperature: float
    held_out: bool
    top_ids: NDArray[np.uint32]
    top_logprobs: NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Shard:
    """Some documents, and the number of the question that was next when they were written."""

    documents: Sequence[Document]
    n_asked: int


def write(folder: Path, number: int, shard: Shard) -> None:
    """Raises OSError where it cannot be written; then no file of this number is there."""
    docs = shard.documents
    about = {
        "n_asked": shard.n_asked,
        "categories": [doc.category for doc in docs],
    }
    with replacing(folder / f"{number:05}.npz") as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            about=np.frombuffer(json.dumps(about).encode(), np.uint8),
            tokens=np.concatenate([doc.tokens for doc in docs]),
            lengths=np.array([len(doc.tokens) for doc in docs], np.uint32),
            prompts=np.array([doc.n_prompt for doc in docs], np.uint32),
            temperatures=np.array([doc.temperature for doc in docs], np.float32),
            held_out=np.array([doc.held_out for doc in docs]),
            top_ids=np.concatenate([doc.top_ids for doc in docs]),
            top_logprobs=np.concatenate([doc.top_logprobs for doc in docs]),
        )


def following(folder: Path) -> int:
    """The number of the next shard."""
    return max((int(path.stem) for path in folder.glob(_FILES)), default=-1) + 1


def read(folder: Path) -> Iterable[Shard]:
    """The shards of a folder, in order.

    Raises:
        InvalidRequest: a file is none of ours, or damaged.
        OSError: it cannot be read.
    """
    for path in sorted(folder.glob(_FILES)):
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                shard = _shard({name: arrays[name] for name in arrays.files})
        except (ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
            raise InvalidRequest(
                f"{path} is damaged ({error}): delete it; what it held is lost, and the draft learns from the rest"
            ) from None
        yield shard


def _shard(arrays: dict[str, NDArray[np.generic]]) -> Shard:
    about = json.loads(arrays["about"].tobytes())
    lengths, prompts = arrays["lengths"].tolist(), arrays["prompts"].tolist()
    ends = np.cumsum(lengths)[:-1]
    answers = np.cumsum(np.subtract(lengths, prompts))[:-1]
    rows = zip(
        np.split(arrays["tokens"], ends),
        prompts,
        about["categories"],
        arrays["temperatures"].tolist(),
        arrays["held_out"].tolist(),
        np.split(arrays["top_ids"], answers),
        np.split(arrays["top_logprobs"], answers),
        strict=True,
    )
    return Shard([Document(*row) for row in rows], int(about["n_asked"]))
