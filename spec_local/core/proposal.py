"""A proposal: a tree of draft tokens, usually a chain.

A parent has a lower number than its children. The root, −1, stands for the context.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from spec_local.core.sampling import Distribution
from spec_local.errors import InvalidRequest

ROOT = -1
MAX_DRAFT = 64
"""Maximum number of draft tokens per step: the main model's context reserves logits for each."""
MAX_STAGED = 8
"""Maximum number of staged tokens per call: the draft model's context reserves logits for each."""

Drawing = Literal["chosen", "one", "with replacement", "without replacement"]
"""The way in which the children of a node were selected; it determines the verifiers that are lossless.

chosen: by any method (most probable tokens, a lookup, a beam), without probabilities.
one: at most one child per node, drawn from q.
with replacement: each drawn from q; a token drawn twice is one node that occurs twice in `draws`.
without replacement: each drawn from q without the tokens drawn before it.
"""


@dataclass(frozen=True, slots=True)
class CallLoad:
    """What the main model's call of a step evaluates; it decides what the time of draft tokens is.

    n_parallel: requests that share the call. n_read: other tokens: of prompts, and accepted ones that are
    evaluated again. n_others: requests that are evaluated in calls of their own. n_running: requests that
    share a call as soon as all prompts have been read.
    """

    n_parallel: int = 1
    n_read: int = 0
    n_others: int = 0
    n_running: int = 1

    @property
    def is_comparable(self) -> bool:
        """True if the call's time shows what those of as many requests take."""
        return not self.n_read and (self.n_parallel > 1 or not self.n_others)

    @property
    def is_alone(self) -> bool:
        """True if nothing but one request's call happens in the step."""
        return self.n_parallel == 1 and not self.n_read and not self.n_others


ALONE = CallLoad()


@dataclass(frozen=True, slots=True)
class Limit:
    """Maximum size of a proposal: depth, number of nodes, number of leaves; each at least 1.

    load: of the call that will verify it.
    """

    depth: int
    nodes: int
    branches: int
    load: CallLoad = ALONE


def check_path(path: Sequence[int], parents: Sequence[int]) -> None:
    """Raise InvalidRequest if nodes are not a path from the root; `parents` has the parent of each node."""
    above = ROOT
    for node in path:
        if not 0 <= node < len(parents) or parents[node] != above:
            raise InvalidRequest(f"node {node} is not a child of node {above}: give a path from the root")
        above = node


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from a child of the root down to this node; empty for the root."""
    nodes = []
    while node != ROOT:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


def depth_of(parents: Sequence[int]) -> int:
    """Number of nodes on the longest path."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return max(depths, default=0)


def is_chain(parents: Sequence[int]) -> bool:
    """Return whether no node has siblings; True if there are no nodes."""
    return isinstance(parents, range) or all(parent == node - 1 for node, parent in enumerate(parents))


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree of draft tokens, whoever made it: candidates of a lookup, or drafts of a model.

    tokens, parents: one of each per node; the parents of a chain are the range −1, 0, 1, …
    drawing: how siblings were selected.
    distributions: by parent, the q that its first child was drawn from; empty for chosen nodes.
    draws: nodes in the order in which they were drawn; None: in the order of their numbers.
    source: name of the proposer, for statistics.
    confidence: estimated probability that each node is accepted if its parent is; empty: unknown.
    values: estimated probability that each node is accepted, at most its parent's; empty: unknown.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    drawing: Drawing = "chosen"
    distributions: Mapping[int, Distribution] = field(default_factory=dict)
    draws: Sequence[int] | None = None
    source: str = "none"
    confidence: Sequence[float] = ()
    values: Sequence[float] = ()

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        distributions: Sequence[Distribution] = (),
        source: str = "none",
        confidence: Sequence[float] = (),
    ) -> "Proposal":
        """A single path. Token i was drawn from distribution i; without distributions, tokens were chosen."""
        return cls(
            tokens,
            range(ROOT, len(tokens) - 1),
            "one" if distributions else "chosen",
            dict(enumerate(distributions, ROOT)),
            source=source,
            confidence=confidence,
        )

    @property
    def is_chain(self) -> bool:
        return is_chain(self.parents)

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path."""
        return depth_of(self.parents)

    def path(self, node: int) -> list[int]:
        """See `path_to`."""
        return path_to(self.parents, node)

    def children(self) -> dict[int, list[int]]:
        """Children of each inner node, in draw order (a node drawn twice occurs twice)."""
        by_parent: dict[int, list[int]] = {}
        for node in range(len(self.tokens)) if self.draws is None else self.draws:
            by_parent.setdefault(self.parents[node], []).append(node)
        return by_parent

    def first(self, n: int) -> "Proposal":
        """The first n nodes of a chain."""
        return replace(
            self,
            tokens=self.tokens[:n],
            parents=self.parents[:n],
            distributions={node: q for node, q in self.distributions.items() if node < n - 1},
            confidence=self.confidence[:n],
            values=self.values[:n],
        )

    def part(self, nodes: Iterable[int]) -> "Proposal":
        """The proposal of some chosen nodes, all of their ancestors among them."""
        order = sorted(nodes)  # parents come before their children
        if self.is_chain:
            return self.first(len(order))
        number = {node: i for i, node in enumerate(order)} | {ROOT: ROOT}
        parents = [number[self.parents[node]] for node in order]
        confidence, values = (
            [each[node] for node in order] if each else () for each in (self.confidence, self.values)
        )
        return Proposal(
            [self.tokens[node] for node in order],
            parents,
            source=self.source,
            confidence=confidence,
            values=values,
        )

    def without_distributions(self) -> "Proposal":
        """The tokens, to keep: a distribution over a whole vocabulary takes a megabyte."""
        if not self.tokens:
            return EMPTY
        return Proposal(self.tokens, self.parents, source=self.source, values=self.values)

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The longest path whose tokens are a prefix of these."""
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
"""A proposal without nodes."""
