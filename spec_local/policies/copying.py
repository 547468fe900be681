"""Candidates of several lookups, judged: what they are worth, what becomes of them, and which part of them to propose."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spec_local.core.proposal import ROOT, Proposal, is_chain
from spec_local.lookups.base import Candidates
from spec_local.policies.experience import Floats


@dataclass(frozen=True, slots=True)
class Candidate:
    """Nodes that may be proposed, and of each the chance that it stands if its parent does."""

    tokens: Sequence[int]
    parents: Sequence[int]
    chances: Floats
    source: str

    @property
    def is_chain(self) -> bool:
        return isinstance(self.parents, range) or is_chain(self.parents)

    @property
    def values(self) -> Floats:
        """Of each node the chance that it is reached, and stands."""
        if self.is_chain:
            found: Floats = self.chances.cumprod()
            return found
        values: list[float] = []
        for parent, chance in zip(self.parents, self.chances.tolist(), strict=True):
            values.append(chance if parent == ROOT else chance * values[parent])
        return np.array(values)

    def part(self, nodes: Sequence[int]) -> Proposal:
        """The proposal of some nodes, with all their ancestors among them."""
        if self.is_chain:
            return Proposal(self.tokens[: len(nodes)], self.parents[: len(nodes)], source=self.source)
        order = sorted(nodes)  # parents come before their children
        number = {node: i for i, node in enumerate(order)} | {ROOT: ROOT}
        parents = [number[self.parents[node]] for node in order]
        return Proposal([self.tokens[node] for node in order], parents, source=self.source)


def merged(candidates: Sequence[Candidate]) -> Candidate:
    """One tree of all: a path that several have found is as likely as the most hopeful of them says.

    The source is the first one's.
    """
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    known: dict[tuple[int, int], int] = {}
    for candidate in candidates:
        numbers = {ROOT: ROOT}
        for node, (token, parent) in enumerate(zip(candidate.tokens, candidate.parents, strict=True)):
            chance, place = float(candidate.chances[node]), (numbers[parent], token)
            if place not in known:
                known[place] = len(tokens)
                tokens.append(token)
                parents.append(numbers[parent])
                chances.append(chance)
            numbers[node] = known[place]
            chances[numbers[node]] = max(chances[numbers[node]], chance)
    return Candidate(tokens, parents, np.array(chances), candidates[0].source)


def fates(copies: Candidates, said: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """The nodes whose parents stood, and whether they stood themselves; those beyond what was said are not known."""
    standing = {ROOT: 0}  # and how many tokens were said before what follows them
    for node, (token, parent) in enumerate(zip(copies.tokens, copies.parents, strict=True)):
        place = standing.get(parent)
        if place is None or place == len(said):
            if isinstance(copies.parents, range):
                break
            continue
        yield node, token == said[place]
        if token == said[place]:
            standing[node] = place + 1
