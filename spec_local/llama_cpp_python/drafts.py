"""Draft models for the `draft_model` argument of llama-cpp-python's `Llama`.

    from llama_cpp import Llama
    from spec_local.llama_cpp_python import GGUFDraft, LookupDraft
    from spec_local.lookups.suffixes import SuffixLookup

    llama = Llama("main.gguf", draft_model=LookupDraft(SuffixLookup()), logits_all=True)
    llama = Llama("main.gguf", draft_model=GGUFDraft("draft.gguf", "main.gguf"), logits_all=True)

`Llama` samples from the main model at every position and accepts a draft token if it is that sample, so a
draft does not change the distribution of the output. `Llama` does not check two conditions:

- ``logits_all=True`` is required. Otherwise, its buffer ends after n_batch tokens, and it raises ValueError.
- The draft tokens and the token before them must fit into a batch: n must be less than n_batch (512 by
default).
"""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel
from numpy.typing import NDArray

from spec_local.core.calls import run
from spec_local.core.language_model import LanguageModel
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.errors import InvalidRequest
from spec_local.llama.compatibility import difference
from spec_local.llama.headers import open_header
from spec_local.llama.model import Model
from spec_local.llama.open import open_row
from spec_local.llama.setup.probe import check_model_file
from spec_local.lookups.base import Lookup
from spec_local.policies.thresholds import Confidence
from spec_local.proposers.base import Limit
from spec_local.proposers.draft_model import DraftModel
from spec_local.proposers.shapes import Chain
from spec_local.proposers.vocabulary_map import IntersectionModel, VocabularyMap

_MAX_DRAFT = 64


class _Draft(LlamaDraftModel):  # type: ignore[misc]
    """A draft model as `Llama` calls it before each step.

    Args:
        n: maximum number of draft tokens per call, 1 to 64.
        p_min: minimum probability of a draft token, 0 to 1.
    """

    def __init__(self, n: int, p_min: float) -> None:
        if not 1 <= n <= _MAX_DRAFT:
            raise InvalidRequest(f"the number of draft tokens is {n}: give 1 to {_MAX_DRAFT}")
        if not 0 <= p_min <= 1:  # NaN is rejected, too
            raise InvalidRequest(f"p_min is {p_min}: give 0 to 1")
        self._n, self._p_min = n, p_min
        self._ids: NDArray[np.intc] = np.empty(0, np.intc)
        self._history: list[int] = []

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """Return draft tokens to follow `input_ids`.

        Args:
            input_ids: intc (length,): the history, a view of an array that `Llama` changes later.

        Returns:
            intc (m,), where m is 0 to n.
        """
        known = len(self._ids)
        if np.array_equal(input_ids[:known], self._ids):
            self._history.extend(input_ids[known:].tolist())
        else:
            self._history = input_ids.tolist()  # lookups recognize a different history by the new list
        self._ids = input_ids.copy()
        # Llama truncates drafts to llama.cpp's context, which can be longer than its own array.
        free = self._n if input_ids.base is None else np.size(input_ids.base) - len(input_ids)
        n = min(self._n, free)
        return np.array(self._propose(self._history, n) if self._history and n > 0 else (), np.intc)

    @abstractmethod
    def _propose(self, history: Sequence[int], n: int) -> Sequence[int]:
        """Return at most `n` draft tokens."""


class LookupDraft(_Draft):
    """Drafts from the history, without a draft model; works with every main model.

    Args:
        lookup: for example `spec_local.lookups.suffixes.SuffixLookup`.
        n: maximum number of draft tokens per call.
        p_min: a draft is cut where its estimated probability of being accepted as a whole falls below this.

    Raises:
        InvalidRequest: a number is out of range.
    """

    def __init__(self, lookup: Lookup, *, n: int = 10, p_min: float = 0.5) -> None:
        super().__init__(n, p_min)
        self._lookup = lookup

    def _propose(self, history: Sequence[int], n: int) -> Sequence[int]:
        found = self._lookup.find(history, Limit(n, n, 1))
        accepted = np.cumprod(found.confidence)
        return found.tokens[: int(np.count_nonzero(accepted >= self._p_min))]


class GGUFDraft(_Draft):
    """Drafts from a small GGUF model. Close it, or use it in a ``with`` statement, to free its memory.

    Once it has been created, llama.cpp's log is no longer printed, but quoted in error messages.

    Args:
        draft: the draft model. With a different vocabulary, it drafts only tokens that both models have.
        main: the model that `Llama` loads; only the header of this file is read.
        n: maximum number of draft tokens per call.
        p_min: a draft ends before a token whose probability under the draft model is lower than this.
        n_ctx: context length of the draft model, in tokens; nothing is drafted for a longer history.
        threads, gpu_layers: see `LlamaRow` and `Model`.

    Raises:
        ModelFileError, ModelError: a file cannot be used, or the draft model is recurrent.
        VocabularyMismatch: the models have no token in common.
        InvalidRequest: a number is out of range.
        ContextOverflow: there is not enough memory for the context.
        BackendError: llama.cpp failed.
    """

    def __init__(
        self,
        draft: Path | str,
        main: Path | str,
        *,
        n: int = 4,
        p_min: float = 0.75,
        n_ctx: int = 4096,
        threads: int | None = None,
        gpu_layers: int = -1,
    ) -> None:
        super().__init__(n, p_min)
        with ExitStack() as stack:
            self._main = open_header(Path(main))
            stack.callback(self._main.close)
            vocabulary = self._main.vocabulary
            check_model_file(Path(draft), gpu_layers=gpu_layers)
            model = Model(draft, gpu_layers=gpu_layers)
            stack.callback(model.close)
            context = open_row(model, n_ctx=model.n_ctx(n_ctx), max_logits=1, threads=threads, max_rollback=0)
            stack.callback(context.close)
            drafter: LanguageModel = context
            if difference(vocabulary, model.vocabulary):
                shared = VocabularyMap(vocabulary, model.vocabulary)
                drafter = IntersectionModel(context, shared, vocabulary.n_tokens)
            self._draft = DraftModel(
                drafter,
                Sampler(SamplingSettings(temperature=0)),
                Chain(policy=Confidence(p_min)),
                n_vocab=vocabulary.n_tokens,
                is_end=vocabulary.is_end,
            )
            self.close = stack.pop_all().close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _propose(self, history: Sequence[int], n: int) -> Sequence[int]:
        rng = SeededRng(0)  # not used at temperature 0
        return run(self._draft.propose(history, Limit(n, n, 1), rng)).tokens
