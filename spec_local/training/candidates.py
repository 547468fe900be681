"""Candidates for the draft model before training: pruned from the main model, or new."""

from collections.abc import Collection
from dataclasses import dataclass

from spec_local.errors import ModelError
from spec_local.training.dataset import Dataset
from spec_local.training.initial_weights import pruned_weights, random_weights, rescaled
from spec_local.training.model_shape import ModelShape, Weights
from spec_local.training.recipe import WIDTHS, Recipe, Size

NEW = "2 new layers"
PRUNED = {"2 layers of the main model": (0, -1), "1 layer of the main model": (0,)}
_MAX_WEIGHTS = 60_000_000  # about the maximum that a laptop can train
_NEW_RATE, _PRUNED_RATE = 3e-3, 1e-3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model before training, and the learning rate that suits it."""

    name: str
    shape: ModelShape
    weights: Weights
    learning_rate: float


def candidates(recipe: Recipe, dataset: Dataset, names: Collection[str] = (*PRUNED, NEW)) -> list[Candidate]:
    """Build the models with these names, except pruned ones that are too large or not possible."""
    found = []
    for name, layers in PRUNED.items():
        if name not in names:
            continue
        try:
            shape, weights = pruned_weights(recipe.main, dataset.kept, layers)
        except ModelError:  # an architecture that cannot be pruned
            break
        if sum(values.size for values in weights.values()) <= _MAX_WEIGHTS:
            found.append(Candidate(name, shape, rescaled(shape, weights), _PRUNED_RATE))
    if NEW in names:
        shape = _new_shape(recipe.size, len(dataset.kept), dataset.n_ctx)
        found.append(Candidate(NEW, shape, random_weights(shape, recipe.seed), _NEW_RATE))
    return found


def _new_shape(size: Size, n_vocab: int, n_ctx: int) -> ModelShape:
    width, n_head = WIDTHS[size]
    return ModelShape(
        n_vocab=n_vocab,
        n_embd=width,
        n_layers=2,
        n_head=n_head,
        n_head_kv=n_head,
        head_dim=width // n_head,
        n_ff=-(-8 * width // 3 // 64) * 64,
        n_ctx=n_ctx or 2048,
    )
