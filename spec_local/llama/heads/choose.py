"""Choose the head that drafts for a main model: a file of its own, or layers of the model's file."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spec_local.errors import ModelError
from spec_local.llama.heads import dflash, eagle, gemma, mtp, parallel_eagle
from spec_local.llama.heads.base import HeadSequence
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.sequence import LlamaSequence


@dataclass(frozen=True, slots=True)
class Chosen:
    """A head.

    hidden: hidden states that the main model's context keeps. open: creates the head's sequences,
    given the main model's. max_draft, drafts_blocks: see `spec_local.core.sequence.Limits`.
    """

    hidden: HiddenStates
    open: Callable[[Sequence[LlamaSequence]], Sequence[HeadSequence]]
    max_draft: int = sys.maxsize
    drafts_blocks: bool = False


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of head. name: its name with an article, for messages. Errors: see `choose_head`."""

    name: Callable[[Model], str]
    hidden_states: Callable[[Model, Model], HiddenStates]
    open: Callable[[Model, Sequence[LlamaSequence]], Sequence[HeadSequence]]
    max_draft: Callable[[Model], int] = lambda head: sys.maxsize
    drafts_blocks: bool = False


_PARALLEL_EAGLE = _Kind(
    lambda head: "a P-EAGLE head",
    eagle.hidden_states,
    parallel_eagle.open_parallel_sequences,
    lambda head: parallel_eagle.block_format(head).n_drafted,
    drafts_blocks=True,
)
_KINDS = {
    "eagle3": _Kind(lambda head: "an EAGLE-3 head", eagle.hidden_states, eagle.open_eagle_sequences),
    "gemma4-assistant": _Kind(
        lambda head: "a Gemma 4 assistant",
        gemma.hidden_states,
        gemma.open_assistant_sequences,
    ),
    "dflash": _Kind(
        dflash.kind_of,
        dflash.hidden_states,
        dflash.open_block_sequences,
        dflash.n_drafted,
        drafts_blocks=True,
    ),
}
"""By architecture."""
_MTP_FILE = _Kind(
    lambda head: "a file with layers for multi-token prediction",
    mtp.hidden_states,
    lambda head, mains: mtp.open_mtp_sequences(mains, head),
    mtp.max_draft,
)


def _kind(head: Model) -> _Kind:
    if head.architecture == "eagle3" and parallel_eagle.is_parallel(head):
        return _PARALLEL_EAGLE
    return _MTP_FILE if head.is_mtp_file else _KINDS[head.architecture]


def choose_head(
    main: Model, draft: Model | None = None, *, log: Callable[[str], None] = lambda line: None
) -> Chosen | None:
    """Return the head to draft with; None: there is none, or the draft is an ordinary model.

    Args:
        log: called with one line that says which head is used.

    Raises:
        ModelError: the draft is a head that does not fit the main model, or the main model is a head.
    """
    if main.is_head:
        name = _kind(main).name(main)
        raise ModelError(f"{main.path.name} is {name}: give it as the draft of the model it is for")
    if draft:
        if not draft.is_head:
            return None
        kind = _kind(draft)
        hidden = kind.hidden_states(draft, main)
        log(f"draft: {draft.path.name}, {kind.name(draft)}")
        max_draft = kind.max_draft(draft)
        return Chosen(hidden, lambda mains: kind.open(draft, mains), max_draft, kind.drafts_blocks)
    if not main.n_nextn:
        return None
    if not mtp.has_mtp(main):
        log(
            f"{main.path.name}: llama.cpp cannot evaluate its layers for multi-token prediction "
            f"({mtp.why_not(main)})"
        )
        return None
    layers = "the layer" if main.n_nextn == 1 else f"the {main.n_nextn} layers"
    log(f"draft: {layers} for multi-token prediction of {main.path.name} (`draft=none` turns it off)")
    return Chosen(mtp.HIDDEN_STATES, mtp.open_mtp_sequences, mtp.max_draft(main))
