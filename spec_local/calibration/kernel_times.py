"""Compare the calls of a session with the products that the choice of the CPU kernels was measured with."""

from collections.abc import Mapping

from spec_local.kernels.choice import Times, most_tokens
from spec_local.llama.model import Model
from spec_local.policies.cost_model import CostModel

_SIZES = (4, 8)  # tokens: such calls consist of products; at other sizes, other work weighs more
# A call that takes so many times as long as predicted: attention to 16,000 tokens makes it 1.5 times on AVX2.
_CONTRADICTS = 1.6
_KNOWN = 0.9  # of a model's bytes have types that were measured


def slower_than_measured(model: Model, costs: CostModel, times: Mapping[str, Times]) -> bool:
    """Whether calls of four and of eight tokens take much longer, in calls of one, than products predict.

    Args:
        costs: of the session.
        times: of products, by type of weights; empty if nothing was measured.
    """
    sizes = model.bytes_by_type
    known = {kind: size for kind, size in sizes.items() if kind in times}
    if model.is_on_gpu or model.n_experts or sum(known.values()) < _KNOWN * sum(sizes.values()):
        return False  # of experts, larger calls read more
    observed = costs.costs.keys() - costs.estimates.keys()
    return {1, *_SIZES} <= observed and all(
        costs.seconds(n) / costs.seconds(1) > _CONTRADICTS * predicted(n, known, times) for n in _SIZES
    )


def predicted(n: int, sizes: Mapping[str, int], times: Mapping[str, Times]) -> float:
    """The time of products of n tokens in those of one, of a model with so many bytes of each type."""

    def seconds(tokens: int) -> float:
        total = 0.0
        for kind, size in sizes.items():
            total += size * times[kind].with_kernels_up_to(most_tokens(kind, times[kind]))[tokens]
        return total

    return seconds(n) / seconds(1)
