"""Check whether a head fits a main model; otherwise llama.cpp would abort the process, or draft nonsense."""

from collections.abc import Sequence

from spec_local.errors import ModelError
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model


def difference(
    main: Model, width: int | None, layers: Sequence[int], n_vocab: int, own_width: int | None = None
) -> str | None:
    """Return the reason why a head does not fit a main model; None: it fits.

    Args:
        width: width of the hidden states that the head was trained for.
        layers: numbers of the main model's layers whose inputs it reads.
        n_vocab: number of tokens.
        own_width: that of its own hidden states, if it needs the main model's embeddings or output matrix.
    """
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
    if own_width not in (None, main.n_embd):
        return f"its own width is {own_width}, that of the token embeddings {main.n_embd}"
    return None


def check_fit(name: str, kind: str, main: Model, why: str | None) -> None:
    """Raise an error if a head does not fit a main model.

    Args:
        name: of its file or folder, for the error message.
        kind: likewise, such as ``an EAGLE-3 head``.
        why: why it does not fit; None: it does.
    """
    if why:
        raise ModelError(
            f"{name} is {kind} for another model ({why}): use one that was made for {main.path.name}, "
            "or its own main model"
        )


def layer_inputs(name: str, kind: str, main: Model, layers: Sequence[int], why: str | None) -> HiddenStates:
    """The hidden states that a head reads: the inputs of `layers`.

    Args:
        name, kind, why: see `check_fit`.

    Raises:
        ModelError: it does not fit, or reads the output of the last layer, which llama.cpp computes only for
            tokens whose logits are wanted.
    """
    check_fit(name, kind, main, why)
    if max(layers) == main.n_layers:
        raise ModelError(
            f"{name} is {kind} that reads the last layer of {main.path.name}, which is not supported: "
            "use another draft"
        )
    return HiddenStates(tuple(layer - 1 for layer in layers))
