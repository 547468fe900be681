"""Let calls that draft compute only a part of the output rows.

See `spec_local.core.draft_vocabulary`.
"""

from typing import Literal

from spec_local import kernels
from spec_local.core.draft_vocabulary import USUAL_FIRST, DraftVocabulary
from spec_local.llama.native_context import NativeRow
from spec_local.llama.vocabulary import Vocabulary

DraftVocab = int | Literal["auto", "all"]
"""The first tokens of the vocabulary that are always drafted."""


def limit_drafts(row: NativeRow, vocabulary: Vocabulary, wanted: DraftVocab = "auto") -> None:
    """Compute only some output rows in a row's calls from now on, if that takes less time.

    It does with specdec's CPU kernels, and if tokens are drafted one by one. Heads that were trained for a
    part of the vocabulary draft that part.

    Args:
        vocabulary: the row's; that of the main model for a head, whose file may have none.
        wanted: ``auto``: the usual number, for a vocabulary of twice as many or more.
    """
    if wanted == "all" or not row.can_be_limited or row.draft_tokens is not None:
        return
    n_first = min(row.n_vocab, USUAL_FIRST if wanted == "auto" else wanted)
    if wanted == "auto" and 2 * n_first > row.n_vocab:
        return
    if not kernels.installed() or row.model.is_on_gpu:
        return
    ends = [token for token in (vocabulary.eos, vocabulary.eot) if 0 <= token < row.n_vocab]
    row.limit(DraftVocabulary(row.n_vocab, n_first, ends))
