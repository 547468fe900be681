"""A small model of main's vocabulary guesses; a shape decides what it is asked to read."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from spec_local.dice import Dice
from spec_local.errors import ContextOverflow
from spec_local.language_model import LanguageModel, Logits, common_prefix, prefill
from spec_local.proposal import ROOT, Proposal, is_chain, path_to
from spec_local.proposers.base import Lap, Limit
from spec_local.proposers.shapes import Ranked, Shape
from spec_local.sampling import Distribution, Sampler


class DraftModel:
    """Drafts with a language model through the same sampler as main.

    Args:
        model: its cache is this proposer's own.
        sampler: main's sampler, so that q is shaped as p is, under the same constraint.
        shape: what grows: a chain, a tree, beams.
        n_vocab: main's; a draft's padding beyond it is never guessed.
        is_end: nothing is guessed after such a token.
    """

    def __init__(
        self,
        model: LanguageModel,
        sampler: Sampler,
        shape: Shape,
        *,
        n_vocab: int,
        is_end: Callable[[int], bool] = lambda token: False,
    ) -> None:
        self.model = model
        self.shape = shape
        self._sampler = Sampler(sampler.settings, sampler.constraint, guessing=True)
        self._n_vocab = n_vocab
        self._is_end = is_end
        self._reader: _Reader | None = None
        self._proposal = Proposal()

    def prefill(self, history: Sequence[int]) -> Iterator[int]:
        history = self._readable(history)
        # A prompt beyond the draft's own context cannot be continued: see propose.
        if len(history) < self.model.n_ctx:
            # A draft of another vocabulary may need more tokens for the same text.
            with contextlib.suppress(ContextOverflow):
                yield from prefill(self.model, history[:-1])

    @property
    def guesses(self) -> Sequence[int]:
        """All guesses of the last chain, those that were not proposed among them; of a tree those that were."""
        return (
            self._reader.tokens if self._reader and is_chain(self._reader.parents) else self._proposal.tokens
        )

    def unread(self, history: Sequence[int]) -> int:
        """How many tokens the model has to read for its first guess; 0 where it has no room."""
        n = len(self._readable(history))
        return n - len(self.model.cached) if n <= self.model.n_ctx else 0

    def propose(self, history: Sequence[int], limit: Limit, dice: Dice, lap: Lap) -> Proposal:
        model, history = self.model, self._readable(history)
        room = model.n_ctx - len(history) + 1
        if room < 1:
            return Proposal()
        branches = min(limit.branches, model.max_branches, model.max_tokens, model.max_logits, room)
        limit = Limit(min(limit.depth, room), min(limit.nodes, room), branches)
        try:
            unread = self._unread(history)
            self._reader = _Reader(model, self._sampler, self._n_vocab, self._is_end, history, unread, lap)
            self._proposal = replace(self.shape.grow(self._reader, limit, dice), source="draft")
        except ContextOverflow:  # as above
            self._reader, self._proposal = None, Proposal()
        return self._proposal

    def commit(self, history: Sequence[int]) -> None:
        history = self._readable(history)
        n = common_prefix(self.model.cached, history)
        if self._reader and n == len(self.model.cached):
            path = self._proposal.follow(history[n:])
            end = path[-1] if path else ROOT
            self.shape.learn(len(path), exhausted=end not in self._proposal.parents)
            self.model.keep(self._reader.path(history[n:]))
        else:
            self.model.trim(n)
        self._reader, self._proposal = None, Proposal()

    def _unread(self, history: Sequence[int]) -> Sequence[int]:
        """The end of the history that goes with the first guess, in the same call of the draft.

        Usually one token, or two after a wholly accepted draft, whose last token the draft has not read.
        """
        model = self.model
        model.trim(common_prefix(model.cached, history[:-1]))
        while len(history) - len(model.cached) > model.max_tokens:
            start = len(model.cached)
            model.evaluate(history[start : start + model.max_tokens], 0)
        return history[len(model.cached) :]

    def _readable(self, history: Sequence[int]) -> Sequence[int]:
        """The history as the draft can read it: main's padding beyond the draft's vocabulary becomes token 0."""
        if self.model.n_vocab >= self._n_vocab:
            return history
        return [token if token < self.model.n_vocab else 0 for token in history]


@dataclass(frozen=True, slots=True)
class _Opinion:
    """See `spec_local.policies.base.Opinion`; to be asked before the model's next call, which overwrites the logits."""

    distribution: Distribution
    _logits: NDArray[np.float32]

    @property
    def confidence(self) -> float:
        probs = self.distribution.probs
        if len(probs) > 1:
            return float(probs @ probs)
        return float(1.0 / np.exp(self._logits - self._logits.max()).sum(dtype=np.float64))

    @property
    def entropy(self) -> float:
        probs = self.distribution.probs
        if len(probs) == 1:
            probs = np.exp(self._logits - self._logits.max(), dtype=np.float64)
            probs /= probs.sum()
        probs = probs[probs > 0]
        return float(-(probs * np.log(probs)).sum())


class _Reader:
    """The draft's opinion on a growing tree: see `spec_local.proposers.shapes.Reader`."""

    def __init__(
        self,
        model: LanguageModel,
        sampler: Sampler,
        n_vocab: int,
        is_end: Callable[[int], bool],
        history: Sequence[int],
        unread: Sequence[int],
        lap: Lap,
    ) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.place = len(history)
        self.is_end = is_end
        self._model, self._sampler, self._n_vocab = model, sampler, n_vocab
        self._unread, self._lap = unread, lap
        self._recent = list(history[-sampler.window :]) if sampler.window else []
        self._read = {ROOT: ROOT}  # the model's number of each node that it has read

    def add(self, token: int, parent: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def read(self, node: int) -> "_Opinion":
        logits = self._evaluate([node])[0]
        opinion = _Opinion(self._sampler.distribution(logits, self._before(node)), logits)
        self._lap("draft sampling")
        return opinion

    def distributions(self, nodes: Sequence[int]) -> list[Distribution]:
        logits = self._evaluate(nodes)
        found = [
            self._sampler.distribution(row, self._before(n)) for row, n in zip(logits, nodes, strict=True)
        ]
        self._lap("draft sampling")
        return found

    def most_probable(self, nodes: Sequence[int], k: int) -> list[Ranked]:
        logits = self._evaluate(nodes)
        found = [
            self._sampler.most_probable(row, k, self._before(n)) for row, n in zip(logits, nodes, strict=True)
        ]
        self._lap("draft sampling")
        return found

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The model's nodes that spell the beginning of these tokens."""
        path = Proposal(self.tokens, self.parents).follow(tokens)
        return [self._read[node] for node in takewhile(self._read.__contains__, path)]

    def _evaluate(self, nodes: Sequence[int]) -> Logits:
        if nodes[0] == ROOT:  # comes first, and alone
            logits = self._model.evaluate(self._unread, 1)
        else:
            tokens = [self.tokens[n] for n in nodes]
            logits = self._model.grow(tokens, [self._read[self.parents[n]] for n in nodes])
            n_read = len(self._read) - 1
            self._read.update(zip(nodes, range(n_read, n_read + len(nodes)), strict=True))
        self._lap("draft model")
        return logits[:, : self._n_vocab]

    def _before(self, node: int) -> Sequence[int]:
        """The tokens that a penalty or a constraint looks at."""
        if not self._recent:
            return ()
        return [*self._recent, *(self.tokens[n] for n in path_to(self.parents, node))]
