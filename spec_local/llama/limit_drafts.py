"""Let calls that draft compute only a part of the output matrix.

See `spec_local.core.draft_vocabulary`.
"""

from typing import Literal

from spec_local import kernels
from spec_local.core.draft_vocabulary import USUAL_FIRST, DraftVocabulary
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
        wanted: ``auto``: the usual number, for a vocabulary of twice as many or more.
    """
    if wanted == "all" or not sequence.can_be_limited or sequence.limits.draft_tokens is not None:
        return
    n_first = min(sequence.limits.n_vocab, USUAL_FIRST if wanted == "auto" else wanted)
    if wanted == "auto" and 2 * n_first > sequence.limits.n_vocab:
        return
    if not kernels.installed() or sequence.model.is_on_gpu:
        return
    ends = [token for token in (vocabulary.eos, vocabulary.eot) if 0 <= token < sequence.limits.n_vocab]
    sequence.limit(DraftVocabulary(sequence.limits.n_vocab, n_first, ends))
