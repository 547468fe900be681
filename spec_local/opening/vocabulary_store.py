"""The shared tokens of a main and a draft model with different vocabularies, kept on disk.

To compare vocabularies of 150,000 tokens takes a second.
"""

import contextlib
from pathlib import Path

import numpy as np

from spec_local.llama import runtime
from spec_local.llama.model import Model
from spec_local.llama.vocabulary_map import VocabularyMap
from spec_local.system.files import read_bytes, write_atomically
from spec_local.system.folders import user_folder

_MAX_BYTES = 1 << 24  # 8 for each token of a vocabulary; the largest have a quarter of a million


def vocabulary_map(main: Model, draft: Model) -> VocabularyMap:
    """Map between the vocabularies of two models, compared now unless they were compared before.

    Raises:
        VocabularyMismatch: no token is shared.
    """
    ours, theirs = main.vocabulary, draft.vocabulary
    with contextlib.suppress(OSError, ValueError):
        path = _path(main, draft)
        ids = np.frombuffer(read_bytes(path, _MAX_BYTES), "<i4").reshape(2, -1)
        return VocabularyMap(ours, theirs, ids)
    found = VocabularyMap(ours, theirs)
    with contextlib.suppress(OSError):  # compared again next time
        write_atomically(
            _path(main, draft), np.stack([found.main_ids, found.draft_ids]).astype("<i4").tobytes()
        )
    return found


def _path(main: Model, draft: Model) -> Path:
    """The file for two models.

    Raises:
        OSError: a model's file no longer exists.
    """
    name = runtime.fingerprint(main.path, runtime.fingerprint(draft.path))
    return user_folder("cache") / "vocabularies" / name
