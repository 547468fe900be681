"""Shapes of a draft: what a draft model is asked to read, and which guesses come of it.

A shape that draws tokens (`Drawn`) decides how many children a node gets before it draws any of them; every rule is
lossless then. A shape that chooses tokens (`BestFirst`, `Beam`) may look at anything, and is judged by
exact_match.
"""

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from spec_local.core.proposal import ROOT, Drawing, Proposal, path_to
from spec_local.core.rng import Rng
from spec_local.core.sampling import Distribution
from spec_local.policies.base import DraftOutput, Policy
from spec_local.policies.cost_model import CostModel
from spec_local.policies.planner import worth_verifying
from spec_local.proposers.base import Limit

Ranked = tuple[NDArray[np.intp], NDArray[np.float64]]
"""Tokens, the most probable first, and their probabilities (n,)."""


class Read(DraftOutput, Protocol):
    """The draft's opinion, and the distribution that it is of."""

    @property
    def distribution(self) -> Distribution:
        """q."""


class Reader(Protocol):
    """A growing tree, and a draft model that reads a level of it in one call."""

    tokens: list[int]
    parents: list[int]
    place: int
    """How many tokens the text has."""

    def add(self, token: int, parent: int) -> int:
        """A new node; its number."""

    def is_end(self, token: int) -> bool:
        """Whether nothing can follow a token."""

    def read(self) -> Read:
        """The draft's opinion after the chain so far."""

    def distributions(self, nodes: Sequence[int]) -> list[Distribution]:
        """The draft's distribution after each node, in ONE call: first of all after `ROOT` alone."""

    def most_probable(self, nodes: Sequence[int], k: int) -> list[Ranked]:
        """The same, the k most probable tokens only; also where temperature is 0 with real probabilities."""


class Shape(ABC):
    """What grows on a reader.

    Attributes:
        policy: says how many copied tokens the draft reads along with a chain.
    """

    policy = Policy()

    @abstractmethod
    def build(self, reader: Reader, limit: Limit, rng: Rng) -> Proposal:
        """Ask the reader, and propose a tree within the limits."""

    def learn(self, n_accepted: int, exhausted: bool) -> None:  # noqa: B027
        """Hear how far the last proposal was accepted, and whether it simply went no further."""


Guess = Literal["drawn", "coupled", "greedy"]


class Chain(Shape):
    """One token after another, for as long as a policy likes.

    Args:
        how: ``drawn`` from the draft's distribution, to be judged by a rule that knows of it; ``coupled``: drawn with the
            randomness of the place, which main's own draw shares (see `spec_local.core.rng`), to be judged by exact_match;
            ``greedy``: the most probable. At temperature 0 all are the same.
        policy: is asked before each call of the draft model and after it, and at the end.
    """

    def __init__(self, how: Guess = "drawn", policy: Policy | None = None) -> None:
        self._how, self.policy = how, policy or Policy()

    def build(self, reader: Reader, limit: Limit, rng: Rng) -> Proposal:
        distributions: list[Distribution] = []
        node = ROOT
        while len(reader.tokens) < min(limit.depth, limit.nodes) and self.policy.should_continue():
            opinion = reader.read()
            if not self.policy.should_draft(opinion):
                break
            q = opinion.distribution
            distributions.append(q)
            if self._how == "coupled":
                token = q.draw(rng, reader.place + len(reader.tokens))
            else:
                token = (q.most_probable() if self._how == "greedy" else q).draw(rng)
            node = reader.add(token, node)
            if reader.is_end(token):
                break
        n = self.policy.truncate(len(reader.tokens))
        return Proposal.chain(reader.tokens[:n], distributions[:n] if self._how == "drawn" else ())


class Drawn(Shape):
    """A tree of drawn children.

    A node has a budget of nodes below it, and shares it out among its children as if each went on as a chain that
    is accepted as usual: where the draft is sure, that gives a chain, and where it is not, branches.

    Args:
        drawing: how children are drawn; the verifier's.
        nodes: most nodes of a tree.
        width: most children of a node.
    """

    def __init__(self, drawing: Drawing, nodes: int, width: int = 4) -> None:
        self._drawing: Drawing = drawing
        self._nodes, self._width = nodes, 1 if drawing == "one" else width
        self._stood, self._tested = 8.0, 10.0  # how often a guess stood, at first as if 8 of 10 had

    def build(self, reader: Reader, limit: Limit, rng: Rng) -> Proposal:
        usual = min(0.98, max(0.05, self._stood / self._tested))
        distributions: dict[int, Distribution] = {}
        draws: list[int] = []
        level = {ROOT: min(limit.nodes, limit.branches, self._nodes)}
        depth = 0
        while level and depth < limit.depth:
            below: dict[int, int] = {}
            for (parent, budget), q in zip(level.items(), reader.distributions(list(level)), strict=True):
                distributions[parent] = q
                shares = self._share(q, budget, usual, limit.depth - depth)
                by_token: dict[int, int] = {}
                for token, share in zip(
                    draw_children(q, len(shares), self._drawing, rng), shares, strict=True
                ):
                    if token not in by_token:
                        by_token[token] = reader.add(token, parent)
                    node = by_token[token]
                    draws.append(node)
                    if share > 1 and not reader.is_end(token):
                        below[node] = below.get(node, 0) + share - 1
            level, depth = below, depth + 1
        return Proposal(reader.tokens, reader.parents, self._drawing, distributions, draws)

    def learn(self, n_accepted: int, exhausted: bool) -> None:
        self._stood = 0.98 * self._stood + n_accepted
        self._tested = 0.98 * self._tested + n_accepted + (not exhausted)

    def _share(self, q: Distribution, budget: int, usual: float, depth: int) -> list[int]:
        """How many nodes each child gets, itself included: the best way to spend the budget on 1 to `width` chains."""
        top = q.top(min(self._width, budget))[1]
        chain = usual ** np.arange(min(budget, depth))
        best, shares = 0.0, [budget]
        for n in range(1, len(top) + 1):
            values = np.outer(self._chances(top, n, usual), chain)
            order = np.argsort(-values, axis=None, kind="stable")[:budget]
            value = float(values.ravel()[order].sum())
            counts = np.bincount(order // len(chain), minlength=n)
            if value > best and counts.all():
                best, shares = value, counts.tolist()
        return shares

    def _chances(self, top: NDArray[np.float64], n: int, usual: float) -> NDArray[np.float64]:
        """The chance that main goes to each of n children, as far as q tells before they are drawn."""
        # Figures measured with a 0.5B draft for a 1.5B main (docs/trees.md), bent to what this draft usually gets.
        bent = math.log(usual) / math.log(0.85)
        if self._drawing == "top and one" and n > 1:
            chosen = 0.9 * top[: n - 1]
            return np.append(chosen, 0.7**bent * (1.0 - chosen.sum()))
        sure = float((top**2).sum())  # the chance of drawing the same token twice
        first = (0.35 + 0.62 * sure) ** bent
        second = (1.0 - first) * 0.5 * first
        return np.append(first, second * 0.5 ** np.arange(n - 1, dtype=np.float64))


def draw_children(q: Distribution, n: int, drawing: Drawing, rng: Rng) -> list[int]:
    """n tokens for the children of a node, in draw order; q must be able to give so many."""
    if drawing == "with replacement":
        return [q.draw(rng) for _ in range(n)]
    if drawing == "top and one":
        top = q.top(n - 1)[0].tolist() if n > 1 else []
        return [*top, q.without(top).draw(rng)]
    drawn: list[int] = []
    for _ in range(n):
        drawn.append(q.without(drawn).draw(rng))
    return drawn


class BestFirst(Shape):
    """The n most probable nodes of the tree that the draft spans, wherever they are.

    OPT-Tree (Wang et al. 2024, arXiv 2406.17276) and EAGLE-2 (Li et al. 2024, arXiv 2406.16858): a node is worth the
    product of the probabilities on its path, which is at most its parent's. So the best n are found by
    reading, level by level, all that are among the best n so far.

    Args:
        nodes: most nodes of a tree.
        width: most children of a node.
        costs: main's and the draft's, where only those nodes shall be proposed that are worth main's time.
    """

    def __init__(self, nodes: int, width: int = 8, costs: tuple[CostModel, CostModel] | None = None) -> None:
        self._nodes, self._width, self._costs = nodes, width, costs

    def build(self, reader: Reader, limit: Limit, rng: Rng) -> Proposal:
        n = min(limit.nodes, limit.branches, self._nodes)
        values: list[float] = []
        depths: list[int] = []
        read: set[int] = set()
        level, spent = [ROOT], 0.0
        while level:
            ranked = reader.most_probable(level, min(n, self._width))
            spent += self._costs[1].seconds(len(level)) if self._costs else 0.0
            read.update(level)
            for parent, (tokens, probs) in zip(level, ranked, strict=True):
                worth, depth = (1.0, 0) if parent == ROOT else (values[parent], depths[parent])
                for token, prob in zip(tokens.tolist(), probs.tolist(), strict=True):
                    reader.add(token, parent)
                    values.append(worth * prob)
                    depths.append(depth + 1)
            best = heapq.nlargest(n, range(len(values)), key=values.__getitem__)
            level = [
                node
                for node in best
                if node not in read and depths[node] < limit.depth and not reader.is_end(reader.tokens[node])
            ][: limit.branches - len(read)]
        if self._costs:
            best = best[: worth_verifying([values[node] for node in best], spent, self._costs[0])]
        return _part(reader, best)


class Beam(Shape):
    """The paths of a beam search, merged where they begin alike.

    Args:
        width: paths.
        nodes: most nodes of the merged tree; the search stops where it would grow larger.
    """

    def __init__(self, width: int, nodes: int) -> None:
        self._width, self._nodes = width, nodes

    def build(self, reader: Reader, limit: Limit, rng: Rng) -> Proposal:
        most = min(limit.nodes, self._nodes)
        width = min(self._width, most, limit.branches)
        n_read = 0
        beams = {ROOT: 1.0}
        kept: set[int] = set()
        for _ in range(limit.depth):
            level = [b for b in beams if b == ROOT or not reader.is_end(reader.tokens[b])]
            n_read += len(level)
            if not level or n_read > limit.branches:
                break
            candidates = [(worth, b, None) for b, worth in beams.items() if b not in level]
            for parent, (tokens, probs) in zip(level, reader.most_probable(level, width), strict=True):
                for token, prob in zip(tokens.tolist(), probs.tolist(), strict=True):
                    candidates.append((beams[parent] * prob, parent, token))
            best = heapq.nlargest(width, candidates, key=lambda c: c[0])
            beams = {node if token is None else reader.add(token, node): worth for worth, node, token in best}
            merged = {node for beam in beams for node in path_to(reader.parents, beam)}
            if len(merged) > most:
                break
            kept = merged
        return _part(reader, kept)


def _part(reader: Reader, nodes: Sequence[int] | set[int]) -> Proposal:
    """The proposal of some nodes of what was read, with all their ancestors among them."""
    order = sorted(nodes)  # parents come before their children
    number = {node: i for i, node in enumerate(order)} | {ROOT: ROOT}
    return Proposal([reader.tokens[n] for n in order], [number[reader.parents[n]] for n in order])
