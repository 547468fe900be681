"""Load the generated training data for a draft model with a trimmed vocabulary."""

from pathlib import Path

import numpy as np

from spec_local.errors import InvalidRequest
from spec_local.llama.model import Model
from spec_local.training import shards
from spec_local.training.corpus import TokenMap, build
from spec_local.training.export import tokenize_vocabulary
from spec_local.training.vocabulary_trimming import select_tokens

_SAMPLE = 12_000  # number of held-out tokens; enough to resolve one percentage point


class Dataset:
    """Training and held-out corpora of a folder of shards.

    Args:
        main: the main model's file.
        folder: folder of the shards.
        n_vocab: maximum size of the draft model's vocabulary.

    Attributes:
        kept: uint32 (n_vocab,), the main model's tokens in the draft model's order.
        train, held_out: corpora of all texts.
        held_out_sample: a part of `held_out`, for evaluation during training.
        n_generated: number of tokens in all answers.
        coverage: share of the held-out tokens that the draft model has.
        n_ctx: the main model's training context.

    Raises:
        InvalidRequest: there is no text for training or evaluation, or a shard is damaged.
        ModelError: the main model's tokenizer cannot be trimmed.
    """

    def __init__(self, main: Path, folder: Path, n_vocab: int) -> None:
        documents = [document for shard in shards.read(folder) for document in shard.documents]
        train = [document for document in documents if not document.held_out]
        held_out = [document for document in documents if document.held_out]
        if not train or not held_out:
            raise InvalidRequest("too little training data: give more --minutes to continue")
        header = Model(main, weights=False)
        n_main, self.n_ctx = header.vocabulary.n_tokens, header.n_ctx_train
        header.close()
        counts = np.zeros(n_main, np.int64)
        for document in train:
            counts += np.bincount(document.tokens, minlength=n_main)
        self.kept = select_tokens(main, counts, n_vocab)
        token_map = TokenMap(tokenize_vocabulary(main, self.kept), self.kept, len(self.kept))
        ends = np.cumsum([len(document.top_ids) for document in held_out])
        self.train = build(train, token_map)
        self.held_out = build(held_out, token_map)
        self.held_out_sample = build(held_out[: 1 + int(np.searchsorted(ends, _SAMPLE))], token_map)
        self.n_generated = sum(len(document.top_ids) for document in documents)
        self.coverage = float(np.mean(self.held_out.next_tokens >= 0))
