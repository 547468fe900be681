"""The part of lookup candidates to verify."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spec_local.core.proposal import EMPTY, ROOT, Proposal
from spec_local.policies.acceptance_model import AcceptanceModel
from spec_local.policies.base import Offer
from spec_local.policies.choice import ExpectedStep, best_prefix
from spec_local.policies.cost_model import Floats
from spec_local.policies.loss_budget import LossBudget
from spec_local.policies.sharing import StepCosts


def best_candidates(
    offer: Offer,
    costs: StepCosts,
    acceptance: AcceptanceModel,
    budget: LossBudget,
    *,
    as_tree: bool,
) -> tuple[ExpectedStep, Proposal]:
    """The part of a lookup's candidates with the most expected tokens per second; it may be empty.

    as_tree: take the candidates of several lookups as one tree.
    """
    best, part, limit = ExpectedStep(1.0, costs.plain), EMPTY, offer.limit
    found = [acceptance.calibrated(each) for each in offer.candidates if _could_pay(each, costs, acceptance)]
    for each in [merged(found)] if as_tree and len(found) > 1 else found:
        values = path_values(each)
        n_max = limit.nodes if each.is_chain else min(limit.nodes, limit.branches)
        order = (-values).argsort(kind="stable")[:n_max]  # a parent comes before its equals
        n_max = costs.affordable(budget.may_lose("lookup", 1.0 - each.confidence[0]))
        step = best_prefix(values[order], costs.verifying[: n_max + 1])
        if step.rate > best.rate:
            best = step
            part = replace(each, values=values.tolist()).part(order[: step.n].tolist())
    return best, part


def _could_pay(candidates: Proposal, costs: StepCosts, acceptance: AcceptanceModel) -> bool:
    """Return whether the best part of these candidates may be worth the main model's time."""
    rate = acceptance.lookups[candidates.source].rate(candidates.confidence[0])
    return rate >= costs.needed[min(len(candidates.tokens), len(costs.needed)) - 1]


def path_values(candidates: Proposal) -> Floats:
    """Of each node the probability that it is accepted: the product of confidences along its path."""
    if candidates.is_chain:
        product: Floats = np.asarray(candidates.confidence, np.float64).cumprod()
        return product
    values: list[float] = []
    for parent, confidence in zip(candidates.parents, candidates.confidence, strict=True):
        values.append(confidence if parent == ROOT else confidence * values[parent])
    return np.array(values)


def merged(several: Sequence[Proposal]) -> Proposal:
    """One tree of all candidates; a path that several lookups found takes the highest confidence."""
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    known: dict[tuple[int, int], int] = {}
    for candidates in several:
        numbers = {ROOT: ROOT}
        for node, (token, parent) in enumerate(zip(candidates.tokens, candidates.parents, strict=True)):
            p, key = candidates.confidence[node], (numbers[parent], token)
            if key not in known:
                known[key] = len(tokens)
                tokens.append(token)
                parents.append(numbers[parent])
                confidence.append(p)
            numbers[node] = known[key]
            confidence[numbers[node]] = max(confidence[numbers[node]], p)
    return Proposal(tokens, parents, source=several[0].source, confidence=confidence)
