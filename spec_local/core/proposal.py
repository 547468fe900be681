"""A proposal: a tree of guessed tokens, of which a chain is the simplest.

Nodes are numbered so that a parent comes before its children. The parent −1 is the root: the text so far.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from spec_local.core.sampling import Distribution

ROOT = -1

Drawing = Literal["chosen", "one", "with replacement", "without replacement", "top and one"]
"""How the children of a node came about, which decides the rules that are lossless for them.

chosen: by any means (the most probable tokens, a copy, a beam); nothing is known of their probability.
one: at most one child a node, drawn from q.
with replacement: each drawn from q; a token that is drawn twice is one node, and stands twice in `draws`.
without replacement: each drawn from q without the tokens drawn before it.
top and one: the most probable tokens of q, and one drawn from the rest of it, last.
"""


@dataclass(frozen=True, slots=True)
class Limit:
    """How large a proposal may be: its depth, its nodes and its leaves; each at least 1."""

    depth: int
    nodes: int
    branches: int


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root's child down to this one; none for the root."""
    nodes = []
    while node != ROOT:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


def depth_of(parents: Sequence[int]) -> int:
    """Nodes of the longest path."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return max(depths, default=0)


def is_chain(parents: Sequence[int]) -> bool:
    """Whether no node has siblings; also of no nodes at all."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree of guesses.

    tokens, parents: one of each per node.
    drawing: how children were drawn.
    distributions: q by parent, where children were drawn from one; it is what the first child was drawn from.
    draws: nodes in the order in which they were drawn; None: in the order of their numbers.
    source: who guessed, for those who count.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    drawing: Drawing = "chosen"
    distributions: Mapping[int, Distribution] = field(default_factory=dict)
    draws: Sequence[int] | None = None
    source: str = "none"

    @classmethod
    def chain(
        cls, tokens: Sequence[int], distributions: Sequence[Distribution] = (), source: str = "none"
    ) -> "Proposal":
        """One path: token i was drawn from distribution i, or chosen where there are none."""
        return cls(
            tokens,
            range(ROOT, len(tokens) - 1),
            "one" if distributions else "chosen",
            dict(enumerate(distributions, ROOT)),
            source=source,
        )

    @property
    def is_chain(self) -> bool:
        return is_chain(self.parents)

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return depth_of(self.parents)

    def path(self, node: int) -> list[int]:
        """See `path_to`."""
        return path_to(self.parents, node)

    def children(self) -> dict[int, list[int]]:
        """Children in draw order (a node drawn twice stands twice) by parent; leaves are not in it."""
        by_parent: dict[int, list[int]] = {}
        for node in range(len(self.tokens)) if self.draws is None else self.draws:
            by_parent.setdefault(self.parents[node], []).append(node)
        return by_parent

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The longest path that starts to spell these tokens."""
        nodes = {
            (parent, token): n
            for n, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))
        }
        path: list[int] = []
        for token in tokens:
            node = nodes.get((path[-1] if path else ROOT, token))
            if node is None:
                break
            path.append(node)
        return path


EMPTY = Proposal()
"""No guesses: what most steps have, so that it is not made each time."""
