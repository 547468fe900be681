"""Let calls that draft compute only a part of the output matrix.

See `spec_local.llama.draft_vocabulary`.
"""

from typing import Literal

from spec_local import kernels
from spec_local.llama.draft_vocabulary import DraftVocabulary, usual_first
from spec_local.llama.sequence import NativeSequence
from spec_local.llama.vocabulary import Vocabulary

DraftVocab = int | Literal["auto", "all"]
"""The first tokens of the vocabulary that are always drafted."""


def limit_drafts(sequence: NativeSequence, vocabulary: Vocabulary, wanted: DraftVocab = "auto") -> None:
    """Compute only a part of the output matrix in a sequence's calls from now on, if that takes less time.

    It does with specdec's CPU kernels, and if tokens are drafted one by one. Heads that were trained for a
    part of the vocabulary draft that part.

    Args:
        vocabulary: the sequence's; that of the main model for a head, whose file may have none.
        wanted: ``auto``: see `usual_first`.
    """
    if wanted == "all" or not sequence.can_be_limited or sequence.limits.draft_tokens is not None:
        return
    n_vocab = sequence.limits.n_vocab
    n_first = usual_first(n_vocab) if wanted == "auto" else min(n_vocab, wanted)
    if n_first is None:
        return
    if not kernels.installed() or sequence.model.is_on_gpu:
        return
    ends = [token for token in (vocabulary.eos, vocabulary.eot) if 0 <= token < n_vocab]
    sequence.limit(DraftVocabulary(n_vocab, n_first, ends))
