"""Check whether a head fits a main model; otherwise llama.cpp would abort the process, or draft nonsense."""

from spec_local.errors import ModelError
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model


def difference(head: Model, main: Model, width: int | None, *, owns_tokens: bool = False) -> str | None:
    """Return the reason why a head does not fit a main model; None: it fits.

    Args:
        width: width of the hidden states that the head was trained for.
        owns_tokens: it has token embeddings and an output matrix of its own, so its width may be another.
    """
    n_vocab, layers = head.vocabulary.n_tokens, head.target_layers
    if width != main.n_embd:
        return f"hidden states of width {width} against {main.n_embd}"
    if not layers:
        return "its file names no layers to read"
    if len(set(layers)) < len(layers):
        return "it reads a layer twice"
    if min(layers) < 1:
        return "it reads the token embeddings"
    if max(layers) > main.n_layers:
        return f"it reads layers up to {max(layers) - 1}, but there are only {main.n_layers}"
    if n_vocab != main.vocabulary.n_tokens:
        return f"{n_vocab} tokens against {main.vocabulary.n_tokens}"
    if head.n_embd != main.n_embd and not owns_tokens:
        return f"its own width is {head.n_embd}, that of the token embeddings {main.n_embd}"
    return None


def check_fit(head: Model, main: Model, kind: str, why: str | None) -> None:
    """Raise an error if a head does not fit a main model.

    Args:
        kind: in the error message, such as ``an EAGLE-3 head``.
        why: why it does not fit; None: it does.
    """
    if why:
        raise ModelError(
            f"{head.path.name} is {kind} for another model ({why}): "
            f"use one that was made for {main.path.name}"
        )


def layer_inputs(head: Model, main: Model, kind: str, why: str | None) -> HiddenStates:
    """The hidden states that a head reads; its file lists the layers whose inputs these are.

    Args:
        kind, why: see `check_fit`.

    Raises:
        ModelError: it does not fit, or reads the output of the last layer, which llama.cpp computes only for
            tokens whose logits are wanted.
    """
    check_fit(head, main, kind, why)
    if max(head.target_layers) == main.n_layers:
        raise ModelError(
            f"{head.path.name} is {kind} that reads the last layer of {main.path.name}, which is not "
            "supported: use another draft"
        )
    return HiddenStates(tuple(layer - 1 for layer in head.target_layers))
