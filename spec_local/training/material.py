"""What main wrote, as its draft reads it: to learn from, and held out."""

from pathlib import Path

import numpy as np

from spec_local.errors import InvalidRequest
from spec_local.llama.model import Model
from spec_local.training import shards
from spec_local.training.corpus import Reader, build
from spec_local.training.export import spellings
from spec_local.training.trimming import choose

_SAMPLE = 12_000  # tokens held out: one in a hundred more or less is seen with these


class Material:
    """The texts in a folder of shards, and the tokens of main's that a draft of them knows.

    Args:
        main: its file.
        folder: of the shards.
        n_tokens: that the draft knows, at most.

    Attributes:
        kept: int (n_vocab,), main's tokens in the draft's order.
        learned, held_out: all texts of either kind. sample: some of those held out, to measure with meanwhile.
        n_written: tokens of all answers. coverage: share of those held out that the draft can say.
        n_ctx: tokens that main was trained for.

    Raises:
        InvalidRequest: there is nothing to learn from, or nothing to measure with; or a shard is damaged.
        ModelError: main's tokenizer is of a kind that cannot be trimmed.
    """

    def __init__(self, main: Path, folder: Path, n_tokens: int) -> None:
        documents = [document for shard in shards.read(folder) for document in shard.documents]
        learned = [document for document in documents if not document.held_out]
        if len(learned) in (0, len(documents)):
            raise InvalidRequest(
                "main has written too little to learn from: give more --minutes, and it goes on"
            )
        header = Model(main, weights=False)
        n_main, self.n_ctx = header.vocabulary.n_tokens, header.n_ctx_train
        header.close()
        counts = np.zeros(n_main, np.int64)
        for document in learned:
            counts += np.bincount(document.tokens, minlength=n_main)
        self.kept = choose(main, counts, n_tokens)
        reader = Reader(spellings(main, self.kept), self.kept, len(self.kept))
        self.learned = build(learned, reader)
        held_out = [document for document in documents if document.held_out]
        self.held_out = build(held_out, reader)
        ends = np.cumsum([len(document.top_ids) for document in held_out])
        self.sample = build(held_out[: 1 + int(np.searchsorted(ends, _SAMPLE))], reader)
        self.n_written = sum(len(document.top_ids) for document in documents)
        self.coverage = float(np.mean(self.held_out.said >= 0))
