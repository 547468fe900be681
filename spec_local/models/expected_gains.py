"""What the pairs of the catalog are expected to gain on this machine, without loading or downloading a model.

A call takes as long as reading its weights, by the times of products that were measured on this machine
(`specdec doctor --fix`), or else by usual ones. What others have published of a draft gives its acceptance
rate.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from spec_local import kernels
from spec_local.calibration.estimates import CPU_ESTIMATES, GPU_ESTIMATES
from spec_local.models import catalog
from spec_local.models.catalog import ModelEntry, PairEntry
from spec_local.models.file_names import QUANT
from spec_local.policies.cost_model import CallCosts, CostModel
from spec_local.policies.planner import plan_chain
from spec_local.system import machine

USUAL_RATE = 0.75
"""Acceptance rate of a small model of the same family for which none was published: 0.7 to 0.8 is usual."""
_NEARLY = 1.03  # ratio of speeds that count as equal: estimates are not more exact
_SIZES = (1, 2, 3, 4, 6, 8, 16)  # tokens of the calls whose costs are computed
_LONGEST = _SIZES[-1] - 1  # draft tokens of a step: the main model's call has one token more
_BLOCKS = ("p-eagle", "dflash", "dspark")  # kinds of heads that draft several tokens in a call
# Bytes that DSpark reads to correct one draft token: 256 numbers for each of 152,000 tokens, in Q8_0.
_CORRECTION = 41_000_000
# As CPU_ESTIMATES, with the kernels for AVX-512: Q4_K on a Zen 5 (benchmarks/processors.toml).
_ON_AVX512 = {2: 1.06, 4: 1.12, 8: 1.36, 16: 2.13}
_MIXED = re.compile(r"(Q[2-5]_K)_M")  # a third of the bytes has more bits
_GPU = re.compile(r"ggml-(cuda|hip|metal|musa|sycl|vulkan)")


@dataclass(frozen=True, slots=True)
class ExpectedGain:
    """The expected speed of a pair.

    speedup: over plain decoding, after the prompt. draft_length: draft tokens of a step; 0: plain decoding is
    faster. is_measured: the calls of both models were timed on this machine. n_rivals: number of other pairs
    with the same main model and a gain, if any acceptance of theirs was published. is_best: as fast as the
    fastest of them, or faster.
    """

    speedup: float
    draft_length: int
    is_measured: bool
    n_rivals: int = 0
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Products:
    """How long products with weights take.

    seconds: of one with a number of bytes that is the same for all, by type of weights and number of tokens.
    usual: the same in products of one token, for types that are not among them.
    """

    seconds: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    usual: Mapping[int, float] = field(default_factory=lambda: CPU_ESTIMATES)

    @classmethod
    def of_this_machine(cls) -> "Products":
        """What was measured on this machine. Never raises."""
        with suppress(OSError, ModuleNotFoundError):
            if any(_GPU.search(file.name) for file in (machine.llama_cpp_folder() / "lib").iterdir()):
                return cls(usual=GPU_ESTIMATES)
        status = kernels.status()
        seconds = {kind: t.with_kernels_up_to(status.limits.get(kind)) for kind, t in status.times.items()}
        return cls(seconds, _ON_AVX512 if "avx512" in (status.instruction_set or "") else CPU_ESTIMATES)

    def costs(self, *models: ModelEntry) -> list[CostModel]:
        """Costs of the calls of several models, in a unit that is the same for all; their sizes are known."""
        types = [_types(model) for model in models]
        if not all(shares and shares.keys() <= self.seconds.keys() for shares in types):
            usual = CostModel({1: 1.0}, self.usual)
            return [_costs(model, {n: usual.seconds(n) for n in _SIZES}) for model in models]
        return [
            _costs(
                model, {n: sum(part * self.seconds[kind][n] for kind, part in shares.items()) for n in _SIZES}
            )
            for model, shares in zip(models, types, strict=True)
        ]


def _costs(model: ModelEntry, of_byte: Mapping[int, float]) -> CostModel:
    """Costs of a model's calls.

    Args:
        of_byte: the time of a product, by number of tokens, for each byte of its weights.
    """
    dense, experts = reads(model) or 0, model.experts
    found = {}
    for n in _SIZES:
        found[n] = of_byte[n] * (dense - (experts.size if experts else 0))
        if experts:  # if they are chosen evenly, each computes a few tokens at most
            found[n] += of_byte[1] * experts.size * (1.0 - (1.0 - experts.used / experts.of) ** n)
        if model.head == "dspark":
            found[n] += of_byte[1] * _CORRECTION * n
    costs = CostModel(found)
    costs.drafts_blocks = model.head in _BLOCKS
    return costs


def reads(model: ModelEntry) -> int | None:
    """Bytes of the weights that a model's calls can read; None: unknown."""
    return model.reads or model.size or model.rounded_size


def _types(model: ModelEntry) -> dict[str, float]:
    """Shares of a model's bytes by type, as the name of its file tells; empty: it does not."""
    names = QUANT.findall(model.file or model.files[0])
    name = names[-1].upper() if names else ""
    if mixed := _MIXED.fullmatch(name):
        return {mixed[1]: 0.67, "Q6_K": 0.33}
    return {name: 1.0} if name else {}


def expected_gains(
    products: Products | None = None, files: Mapping[str, Path] = {}
) -> dict[str, ExpectedGain]:
    """The expected gains of the catalog's pairs, by name, where one can be estimated.

    Args:
        products: None: those of this machine.
        files: models on this machine, by name: if calls of a pair were timed here, their costs are used.
    """
    of_machine = products or Products.of_this_machine()
    found, groups = {}, defaultdict(list)
    for name, pair in catalog.pairs().items():
        if gain := _measured(pair, files) or estimated(pair, of_machine):
            found[name] = gain
            groups[pair.main].append(name)
    for names in groups.values():
        # Without a published rate, all of them would be compared at the same one.
        if len(names) > 1 and any(catalog.pairs()[name].acceptance for name in names):
            fastest = max(found[name].speedup for name in names)
            for name in names:
                gain = found[name]
                is_best = gain.draft_length > 0 and gain.speedup * _NEARLY >= fastest
                found[name] = replace(gain, n_rivals=len(names) - 1, is_best=is_best)
    return found


def estimated(pair: PairEntry, products: Products) -> ExpectedGain | None:
    """The gain of a pair by the sizes of its models; None: a size or a head's acceptance is unknown."""
    main, draft = (catalog.models().get(name) for name in (pair.main, pair.draft))
    if not (main and draft and reads(main) and reads(draft)) or (draft.head and not pair.acceptance):
        return None
    return planned(pair, *products.costs(main, draft))


def planned(pair: PairEntry, main: CallCosts, draft: CallCosts) -> ExpectedGain:
    """The gain of a pair whose calls have these costs."""
    rate, longest = _acceptance(pair)
    plan = plan_chain((rate,), main, draft, longest, longest)
    return ExpectedGain(plan.speed * main.seconds(1), len(plan.parents), False)


def _acceptance(pair: PairEntry) -> tuple[float, int]:
    """The acceptance rate and the most draft tokens of a step.

    A head drafts no more than where it was measured: its rate falls with each token. Small models keep
    theirs.
    """
    if not pair.acceptance:
        return USUAL_RATE, _LONGEST
    draft = catalog.models().get(pair.draft)
    is_head = draft is not None and draft.head is not None
    return pair.acceptance.rate, min(_LONGEST, pair.acceptance.draft) if is_head else _LONGEST


def _measured(pair: PairEntry, files: Mapping[str, Path]) -> ExpectedGain | None:
    """The gain of a pair that is on this machine, by measured costs; None: there are none."""
    draft = catalog.models().get(pair.draft)
    head = draft.head if draft else None
    if not {pair.main, pair.draft} <= files.keys() or (head and not pair.acceptance):
        return None
    from spec_local.calibration.cost_store import Conditions  # these take long to import
    from spec_local.llama.devices import OFFLOADED
    from spec_local.models.pairs import USUAL_CONTEXT, expectation

    verifying, drafting = (
        Conditions.of_file(files[name], OFFLOADED, USUAL_CONTEXT) for name in (pair.main, pair.draft)
    )
    drafting = replace(drafting, is_head=head is not None, branching=head in _BLOCKS)
    rate, longest = _acceptance(pair)
    found = expectation(verifying, drafting, None, [rate], max_draft=longest, drafts_blocks=head in _BLOCKS)
    return ExpectedGain(found.speedups[0].speedup, found.speedups[0].draft_length, True) if found else None
