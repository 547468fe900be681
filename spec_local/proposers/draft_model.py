"""Drafting with a language model: a chain, or the tree of another shape (`spec_local.proposers.shapes`).

Staged drafting (Spector and Ré 2023, arXiv 2308.04623, section 3.2) shortens chains of calls: where a lookup
finds tokens that may come next, the draft model reads them in the same call, and is not called again for a
draft token that equals the staged one. The draft model's probabilities are the same as without staging.

The draft model may read only the end of a long history, behind its first token: many models attend to that
one wherever they are (Xiao et al. 2023, arXiv 2309.17453).
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spec_local.core.calls import Logits
from spec_local.core.proposal import ROOT, Limit, Proposal, is_chain, path_to
from spec_local.core.rng import Rng
from spec_local.core.sampling import Distribution, Sampler, chosen
from spec_local.core.sequence import Head, ModelSequence, common_prefix, prefill
from spec_local.core.span import text_of
from spec_local.errors import ContextOverflow
from spec_local.lookups.base import Lookup
from spec_local.policies.base import ALWAYS, WINDOWS, DraftReading, Policy
from spec_local.policies.sharing import SharedCosts

Ranked = tuple[NDArray[np.intp], NDArray[np.float64]]
"""Tokens by falling probability, and their probabilities (n,)."""
Selection = Literal["drawn", "coupled", "greedy"]


@dataclass(slots=True)
class Window:
    """The part of a history that a draft model's cache has.

    start: the first token after that of the history which is read; 0: all are.
    """

    start: int = 0


class Shape(ABC):
    """Chooses the tree to draft."""

    @abstractmethod
    async def build(self, tree: "DraftTree", limit: Limit, rng: Rng, policy: Policy = ALWAYS) -> Proposal:
        """Grow a tree within the limit, and propose it or a part of it.

        Args:
            policy: decides on the length of a chain.
        """

    def observe(self, n_accepted: int, exhausted: bool) -> None:  # noqa: B027
        """Learn from verification.

        Args:
            n_accepted: accepted tokens of the last proposal.
            exhausted: whether a whole path was accepted.
        """


class Chain(Shape):
    """One token after another, as many as are wanted.

    Args:
        selection: ``drawn`` from q, for a verifier that uses q; ``coupled``: drawn from q with random
            numbers of the position, which the main model's draw shares (see `spec_local.core.rng`), for
            exact-match verification; ``greedy``: the most probable token. At temperature 0 all are the same.
    """

    def __init__(self, selection: Selection = "drawn") -> None:
        self._selection = selection

    async def build(self, tree: "DraftTree", limit: Limit, rng: Rng, policy: Policy = ALWAYS) -> Proposal:
        distributions: list[Distribution] = []
        node = ROOT
        with suppress(ContextOverflow):
            while len(tree.tokens) < min(limit.depth, limit.nodes) and policy.wants_call():
                output = await tree.next_output()
                if not policy.wants_token(output):
                    break
                q = output.distribution
                distributions.append(q)
                if self._selection == "coupled":
                    token = q.draw(rng, tree.position + len(tree.tokens))
                else:
                    token = (q.most_probable() if self._selection == "greedy" else q).draw(rng)
                node = tree.add(token, node)
                if tree.is_end(token):
                    break
        return Proposal.chain(tree.tokens, distributions if self._selection == "drawn" else ())


class DraftModel:
    """Drafts with a language model through the same sampler as the main model.

    Args:
        model: the draft model, or a head; its cache belongs to this proposer.
        sampler: the main model's, so that q has the same settings and constraint as p.
        shape: a chain, a tree or beams, unless `propose` is given another one.
        n_vocab: of the main model; padding of the draft model beyond it is never drafted.
        is_end: whether a token ends the draft.
        lookups: propose tokens to stage with a chain; the first one that finds any is used. Their histories
            contain draft tokens, which may be gone from the next one.
        n_staged: maximum number of tokens to stage in a call.
        window: of the draft model's cache; kept with it from answer to answer.
    """

    needs_logits = False
    main_costs: SharedCosts | None = None

    def __init__(
        self,
        model: ModelSequence,
        sampler: Sampler,
        shape: Shape,
        *,
        n_vocab: int,
        is_end: Callable[[int], bool] = lambda token: False,
        lookups: Sequence[Lookup] = (),
        n_staged: int = 0,
        window: Window | None = None,
    ) -> None:
        self.model = model
        self.head = model if isinstance(model, Head) else None
        self.shape = self._used = shape
        self.is_end = is_end
        self.lookups, self.n_staged = lookups, n_staged
        self.sampler = sampler.for_draft()
        self.n_vocab = n_vocab
        self._window = window or Window()
        self._tree: DraftTree | None = None
        self._proposal = Proposal()
        self._is_prefix = False  # the cache is known to be a prefix of what is read of the history

    async def prefill(self, history: Sequence[int], reading: DraftReading | None = None) -> None:
        """See `Proposer.prefill`.

        Args:
            reading: one of `readings`; None: the part that has been read before.
        """
        self._use(reading, len(history))
        whole = self._readable(history)
        history = self._part(whole)
        # A prompt beyond the draft model's own context cannot be continued: see propose.
        if len(history) < self.model.limits.n_ctx:
            # A draft model with a different vocabulary may need more tokens for the same text.
            with suppress(ContextOverflow):
                await prefill(self.model, history[:-1], whole if history is not whole else ())

    def recall(self, history: Sequence[int]) -> None:
        """Reuse what is known of a history, so that `readings` are of the rest; a head does so by itself."""
        part = self._part(self._readable(history))
        if not self.head and len(part) < self.model.limits.n_ctx:
            self.model.reuse(part[:-1])

    def drafted(self, output: Sequence[int]) -> Sequence[int]:
        """Tokens drafted along the output's path, up to the first that differs from it.

        Of a chain all of its tokens, truncated ones included; of a tree the first child of each accepted
        node.
        """
        if self._tree and is_chain(self._tree.parents):
            return self._tree.tokens
        children = self._proposal.children()
        found: list[int] = []
        for node in [ROOT, *self._proposal.follow(output)]:
            if node in children:
                found.append(self._proposal.tokens[children[node][0]])
        return found

    def readings(self, history: Sequence[int]) -> list[DraftReading]:
        """The parts of the history to draft from, as in `Offer.readings`; the cache has a prefix of it."""
        n, n_ctx, start = len(history), self.model.limits.n_ctx, self._window.start
        n_read = len(self.model.cached)
        if start >= n or (start and 2 * n_read <= n - start):  # of an earlier text, mostly
            start = n_read = 0
        n_part = n - start + (start > 0)
        # The last one is always read again.
        own = DraftReading(max(1, n_part - n_read), n - start if start else None)
        fits = n_part <= n_ctx
        if self.head or (fits and own.n_unread <= WINDOWS[0]):
            return [own] * fits
        windows = [w for w in WINDOWS if w < min(n - 1, n_ctx // 2)]
        if n > n_ctx:
            windows.append(n_ctx // 2)  # so that the answer may grow
        others = [DraftReading(1 + w, w) for w in windows if not fits or w < own.n_unread]
        if start and n <= n_ctx:
            others.append(DraftReading(n))
        return sorted([*others, *[own] * fits], key=lambda each: each.window or n)

    def _use(self, reading: DraftReading | None, n: int) -> None:
        """Draft from this part of a history of n tokens from now on."""
        if reading:
            start = n - reading.window if reading.window else 0
            self._is_prefix &= start == self._window.start
            self._window.start = start

    async def propose(
        self,
        history: Sequence[int],
        limit: Limit,
        rng: Rng,
        shape: Shape | None = None,
        policy: Policy = ALWAYS,
        reading: DraftReading | None = None,
        position: int | None = None,
    ) -> Proposal:
        """See `Proposer.propose`.

        Args:
            shape: of this draft; None: the usual one.
            policy: decides on the length of a chain.
            reading: see `prefill`.
            position: index of the first draft token in the main model's history, of which this one may be
                the text alone; None: they are equally long.
        """
        self._use(reading, len(history))
        model, whole = self.model, self._readable(history)
        history = self._part(whole)
        own = model.limits
        room = own.n_ctx - len(history) + 1
        if room < 1:
            return Proposal()
        branches = min(limit.branches, own.max_branches, own.max_tokens, own.max_logits, room)
        depth = min(limit.depth, room, own.max_draft)
        limit = Limit(depth, min(limit.nodes, room), branches, limit.load)
        n_known = len(model.cached) if self._is_prefix else common_prefix(model.cached, history)
        model.truncate(min(n_known, len(history) - 1))  # the last one is always read again
        self._is_prefix = False
        self._used = shape or self.shape
        self._tree = DraftTree(self, whole, history, limit)
        if position is not None:
            self._tree.position = position
        proposal = await self._used.build(self._tree, limit, rng, policy)
        self._proposal = replace(proposal, source="draft")
        return self._proposal

    def shorten(self, proposal: Proposal) -> None:
        self._proposal = proposal

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        pass

    def commit(self, history: Sequence[int]) -> None:
        history = self._part(self._readable(history))
        model, tree = self.model, self._tree
        if tree and len(model.cached) >= (n := tree.n_history):
            output = history[n:]
            path = self._proposal.follow(output)
            end = path[-1] if path else ROOT
            self._used.observe(len(path), exhausted=end not in self._proposal.parents)
            if nodes := tree.evaluated_path(output):
                model.commit(nodes)
            cached = model.cached
            n = min(n, len(cached))  # less where the model could not roll back
            while n < min(len(cached), len(history)) and cached[n] == history[n]:
                n += 1
        else:
            n = common_prefix(model.cached, history)
        model.truncate(n)
        self._tree, self._proposal, self._is_prefix = None, Proposal(), True

    def _part(self, history: Sequence[int]) -> Sequence[int]:
        """The part of the history that is drafted from."""
        start = self._window.start
        return [history[0], *history[start:]] if start else history

    def _readable(self, history: Sequence[int]) -> Sequence[int]:
        """The history in draft model tokens: main model padding beyond its vocabulary becomes token 0."""
        n_vocab = self.model.limits.n_vocab
        return history if n_vocab >= self.n_vocab else [t if t < n_vocab else 0 for t in history]


@dataclass(frozen=True, slots=True)
class ChainOutput:
    """The draft model's output after a chain: a `DraftOutput`, until the next call overwrites the logits.

    distribution: q. n_read: see `DraftOutput`.
    """

    distribution: Distribution
    n_read: int
    _logits: NDArray[np.float32]
    _tokens: NDArray[np.intp] | None

    @property
    def confidence(self) -> float:
        probs = self.distribution.probs
        if len(probs) > 1:
            return float(probs @ probs)
        logits = self._logits if self._tokens is None else chosen(self._logits, self._tokens)
        return float(1.0 / np.exp(logits - logits.max()).sum(dtype=np.float64))


class DraftTree:
    """A growing tree of draft tokens, and a draft model that evaluates a level of it in one call.

    Attributes:
        tokens, parents: of each node.
        n_history: number of tokens before the tree that the draft model reads.
        position: index of its first level in the main model's history, which draws there with the same rng.
        is_end: whether nothing can follow a token.
    """

    def __init__(self, draft: DraftModel, whole: Sequence[int], history: Sequence[int], limit: Limit) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.n_history, self.position = len(history), len(whole)
        self.is_end = draft.is_end
        self._model, self._sampler, self._n_vocab = draft.model, draft.sampler, draft.n_vocab
        self._lookups, self._max_staged = draft.lookups, draft.n_staged
        self._whole, self._history, self._limit = whole, history, limit
        self._recent = list(whole[-self._sampler.window :]) if self._sampler.window else []
        if draft.head and self._recent and min(self._recent) < 0:
            self._recent = list(text_of(self._recent))
        self._evaluated = {ROOT: ROOT}  # the model's number of each evaluated node
        # A chain is evaluated without nodes, and rejected tokens are truncated. Of the last call for it:
        self._n_before = 0  # draft tokens that were in the chain
        self._staged: Sequence[int] = []
        self._found: Logits = np.empty((0, 0), np.float32)  # after the chain, and after each staged token
        self._drafted: NDArray[np.intp] | None = None  # the tokens that have logits in the last call

    def add(self, token: int, parent: int) -> int:
        """Add a node; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    async def next_output(self) -> ChainOutput:
        """The output after a tree that is a chain."""
        drafted = self.tokens[self._n_before :]
        is_known = len(drafted) < len(self._found) and drafted == self._staged[: len(drafted)]
        n_read = 0 if is_known else await self._extend()
        logits, last = self._found[len(self.tokens) - self._n_before], len(self.tokens) - 1
        q = self._sampler.distribution(logits, self._sampler_history(last), self._drafted)
        return ChainOutput(q, n_read, logits, self._drafted)

    async def distributions(self, nodes: Sequence[int]) -> list[Distribution]:
        """The draft model's distribution after each node, in ONE call; the first call is for `ROOT` alone."""
        found = zip(await self._evaluate(nodes), nodes, strict=True)
        return [self._sampler.distribution(x, self._sampler_history(n), self._drafted) for x, n in found]

    async def most_probable(self, nodes: Sequence[int], k: int) -> list[Ranked]:
        """The k most probable tokens after each; at temperature 0 with the probabilities at temperature 1."""
        found = zip(await self._evaluate(nodes), nodes, strict=True)
        return [self._sampler.most_probable(x, k, self._sampler_history(n), self._drafted) for x, n in found]

    def evaluated_path(self, tokens: Sequence[int]) -> list[int]:
        """The model's numbers of the nodes on the longest evaluated path that is a prefix of these tokens."""
        if len(self._evaluated) == 1:  # a chain, which has no nodes
            return []
        path = Proposal(self.tokens, self.parents).follow(tokens)
        return [self._evaluated[node] for node in takewhile(self._evaluated.__contains__, path)]

    async def _evaluate(self, nodes: Sequence[int]) -> Logits:
        if nodes[0] == ROOT:  # comes first, and alone
            unread = await self._unread()
            logits = await self._call(unread, 1)
        else:
            tokens = [self.tokens[n] for n in nodes]
            parents = [self._evaluated[self.parents[n]] for n in nodes]
            try:
                logits = await self._model.call(tokens, parents, n_draft=self._limit.depth)
            except ContextOverflow:  # the model has discarded all nodes
                self._evaluated = {ROOT: ROOT}
                raise
            n_evaluated = len(self._evaluated) - 1
            self._evaluated.update(zip(nodes, range(n_evaluated, n_evaluated + len(nodes)), strict=True))
        return self._received(logits)

    async def _extend(self) -> int:
        """Evaluate the rest of the chain and staged tokens in one call; returns `n_read`."""
        model = self._model
        if self.tokens:  # the last one is new, and differs from the staged one
            model.truncate(self.n_history + len(self.tokens) - 1)
        if len(self.tokens) == 1:
            model.checkpoint()  # of the history
        n_cached = len(model.cached)
        unread = await self._unread()
        self._stage(len(unread))
        self._n_before = len(self.tokens)
        try:
            logits = await self._call([*unread, *self._staged], 1 + len(self._staged))
        except ContextOverflow:  # a main model token may be several tokens of a different vocabulary
            if not self._staged:
                raise
            self._staged = []
            model.truncate(n_cached)
            logits = await self._call(unread, 1)
        self._found = self._received(logits)
        if self._model.limits.drafts_blocks:
            return 0 if self.tokens else self._limit.depth
        return len(model.cached) - n_cached

    def _call(self, tokens: Sequence[int], n_logits: int) -> Awaitable[Logits]:
        return self._model.call(tokens, n_logits=n_logits, n_draft=self._limit.depth)

    def _received(self, logits: Logits) -> Logits:
        """The logits of a call without padding, after noting which tokens have any."""
        tokens = self._model.limits.draft_tokens
        self._drafted = None if tokens is None else tokens[: tokens.searchsorted(self._n_vocab)]
        return logits[:, : self._n_vocab]

    async def _unread(self) -> Sequence[int]:
        """The last tokens of history and chain, which fit in one call; reads those before them.

        Usually one token, or two after a draft that was accepted as a whole: its last token was not
        evaluated.
        """
        model = self._model
        if self.tokens:
            return self.tokens[-1:]
        most = model.limits.max_tokens
        while self.n_history - len(model.cached) > most:
            start = len(model.cached)
            await model.call(self._history[start : start + most], n_logits=0)
        return self._history[len(model.cached) :]

    def _stage(self, n_unread: int) -> None:
        """Choose the tokens to stage in the next call, which has to read `n_unread` others."""
        model = self._model
        self._staged = []
        left = self._limit.depth - len(self.tokens) - 1  # the last draft token is not evaluated
        own = model.limits
        n_max = min(self._max_staged, left, own.max_logits - 1, own.max_tokens - n_unread)
        if not self._lookups or n_max < 1 or own.rollback != "any":
            return
        history = [*self._whole, *self.tokens] if self.tokens else self._whole
        limit = Limit(n_max, n_max, 1)
        found = next(filter(None, (lookup.find(history, limit).tokens for lookup in self._lookups)), ())
        n_vocab = min(own.n_vocab, self._n_vocab)
        self._staged = list(takewhile(lambda t: 0 <= t < n_vocab and not self.is_end(t), found[:n_max]))

    def _sampler_history(self, node: int) -> Sequence[int]:
        """The tokens up to this node that penalties and constraints depend on."""
        if not self._recent:
            return ()
        return [*self._recent, *(self.tokens[n] for n in path_to(self.parents, node))]
