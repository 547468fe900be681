"""Choose the head that drafts for a main model: an EAGLE-3 file, or a layer of the model's own file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spec_local.errors import ModelError
from spec_local.llama.context import Context
from spec_local.llama.eagle import hidden_states, open_eagle_rows
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.llama_head import LlamaHead
from spec_local.llama.model import Model
from spec_local.llama.mtp import HIDDEN_STATES, has_mtp, open_mtp_rows


@dataclass(frozen=True, slots=True)
class Chosen:
    """A head. hidden: what the main model's context keeps. open: creates its rows, given the main model's."""

    hidden: HiddenStates
    open: Callable[[Sequence[Context]], Sequence[LlamaHead]]


def choose_head(
    main: Model, draft: Model | None = None, *, log: Callable[[str], None] = lambda line: None
) -> Chosen | None:
    """Return the head to draft with; None: there is none, or the draft is a model of its own.

    Args:
        log: called with one line that says which.

    Raises:
        ModelError: the draft is a head that does not fit the main model, or the main model is a head.
    """
    if main.is_eagle:
        raise ModelError(f"{main.path.name} is an EAGLE-3 head: give it as the draft of the model it is for")
    if draft:
        if not draft.is_eagle:
            return None
        hidden = hidden_states(draft, main)
        log(f"draft: {draft.path.name}, an EAGLE-3 head")
        return Chosen(hidden, lambda mains: open_eagle_rows(draft, mains))
    if not main.n_nextn:
        return None
    if not has_mtp(main):
        log(f"{main.path.name} has {main.n_nextn} layers for multi-token prediction, which are not supported")
        return None
    log(f"draft: the layer for multi-token prediction of {main.path.name}")
    return Chosen(HIDDEN_STATES, open_mtp_rows)
