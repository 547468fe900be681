"""Guesses for llama-cpp-python's own `Llama`: from earlier text, or of a GGUF draft model.

    from llama_cpp import Llama
    from spec_local.llama_cpp_python import GGUFDraft, LookupDraft
    from spec_local.lookups.suffixes import SuffixLookup

    llama = Llama("main.gguf", draft_model=LookupDraft(SuffixLookup()), logits_all=True)
    llama = Llama("main.gguf", draft_model=GGUFDraft("draft.gguf", "main.gguf"), logits_all=True)

`Llama` draws a token of main's at every place and goes on for as long as the guesses were just these, so that no guess can
change the distribution of what it says. What it does not see to itself:

- Without ``logits_all=True`` its buffer ends after n_batch tokens of text, and it raises ValueError there.
- A guess must fit into a batch with the token before it: n must be below its n_batch (512 unless you say otherwise).
"""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel
from numpy.typing import NDArray

from spec_local.core.language_model import LanguageModel
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.errors import InvalidRequest
from spec_local.llama.compatibility import difference
from spec_local.llama.context import Context
from spec_local.llama.headers import open_header
from spec_local.llama.model import Model
from spec_local.llama.probe import check_model_file
from spec_local.lookups.base import Lookup
from spec_local.policies import Confidence
from spec_local.proposers import Chain, DraftModel, Limit
from spec_local.proposers.vocabulary_map import IntersectionModel, VocabularyMap

_MOST = 64


class _Draft(LlamaDraftModel):  # type: ignore[misc]
    """What `Llama` calls after each token of its own.

    Args:
        n: most guesses a call, 1 to 64.
        p_min: guesses end where one is less probable than this, 0 to 1.
    """

    def __init__(self, n: int, p_min: float) -> None:
        if not 1 <= n <= _MOST:
            raise InvalidRequest(f"the number of guesses is {n}: give 1 to {_MOST}")
        if not 0 <= p_min <= 1:  # catches NaN too
            raise InvalidRequest(f"p_min is {p_min}: give 0 to 1")
        self._n, self._p_min = n, p_min
        self._ids: NDArray[np.intc] = np.empty(0, np.intc)
        self._history: list[int] = []

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """What may follow these tokens.

        Args:
            input_ids: intc (n,): all tokens so far. A view of an array that `Llama` will write into.

        Returns:
            intc (m,), m at most what the constructor was told; none are a fine answer.
        """
        known = len(self._ids)
        if np.array_equal(input_ids[:known], self._ids):
            self._history.extend(input_ids[known:].tolist())
        else:
            self._history = input_ids.tolist()  # another list, by which a lookup sees that it is another text
        self._ids = input_ids.copy()
        # Llama cuts what is beyond llama.cpp's context, but that may be longer than its own array.
        room = self._n if input_ids.base is None else np.size(input_ids.base) - len(input_ids)
        n = min(self._n, room)
        return np.array(self._guess(self._history, n) if self._history and n > 0 else (), np.intc)

    @abstractmethod
    def _guess(self, history: Sequence[int], n: int) -> Sequence[int]:
        """At most n tokens."""


class LookupDraft(_Draft):
    """What a lookup finds in the text so far. It costs no model, and works with every main.

    Args:
        lookup: who finds it, such as `spec_local.lookups.suffixes.SuffixLookup`.
        n, p_min: most guesses a call; a copy ends where the chance that all of it stands, as the lookup sees it, falls
            below p_min.

    Raises:
        InvalidRequest: a number is out of range.
    """

    def __init__(self, lookup: Lookup, *, n: int = 10, p_min: float = 0.5) -> None:
        super().__init__(n, p_min)
        self._lookup = lookup

    def _guess(self, history: Sequence[int], n: int) -> Sequence[int]:
        found = self._lookup.find(history, Limit(n, n, 1))
        standing = np.cumprod(found.confidence)
        return found.tokens[: int(np.count_nonzero(standing >= self._p_min))]


class GGUFDraft(_Draft):
    """What a small model finds most probable. Close it, or use it in a ``with``, to free its memory.

    llama.cpp's own log is no longer printed then: errors quote it.

    Args:
        draft: the small model. Where its vocabulary is another than main's it guesses the tokens of both.
        main: the model that `Llama` loads; of this file only the header is read.
        n: most guesses a call.
        p_min: guesses end where the draft is less sure than this of its next one.
        n_ctx: tokens of the draft's context; a longer text gets no guesses.
        threads, gpu_layers: see `Context` and `Model`.

    Raises:
        ModelFileError, ModelError: a file cannot be used, or the draft is a recurrent model.
        VocabularyMismatch: the models have no token in common.
        InvalidRequest: a number is out of range.
        ContextOverflow: there is no memory for the context.
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
            self._main = open_header(Path(main))  # its vocabulary ends with it
            stack.callback(self._main.close)
            mains = self._main.vocabulary
            check_model_file(Path(draft), gpu_layers=gpu_layers)
            model = Model(draft, gpu_layers=gpu_layers)
            stack.callback(model.close)
            model.check_can_roll_back()
            context = Context(model, n_ctx=model.n_ctx(n_ctx), max_logits=1, threads=threads)
            stack.callback(context.close)
            guesser: LanguageModel = context
            if difference(mains, model.vocabulary):
                guesser = IntersectionModel(context, VocabularyMap(mains, model.vocabulary), mains.n_tokens)
            self._draft = DraftModel(
                guesser,
                Sampler(SamplingSettings(temperature=0)),
                Chain(policy=Confidence(p_min)),
                n_vocab=mains.n_tokens,
                is_end=mains.is_end,
            )
            self.close = stack.pop_all().close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _guess(self, history: Sequence[int], n: int) -> Sequence[int]:
        rng = SeededRng(0)  # at temperature 0 nothing is left to it
        return self._draft.propose(history, Limit(n, n, 1), rng, lambda part: None).tokens
