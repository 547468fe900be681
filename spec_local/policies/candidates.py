"""Values of lookup candidates, and one tree of several candidates."""

from collections.abc import Sequence

import numpy as np

from spec_local.core.proposal import ROOT, Proposal
from spec_local.policies.acceptance_model import Floats


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
