"""A small model of main's vocabulary guesses; a shape decides what it is asked to read.

Staged drafting (Spector and Ré 2023, arXiv 2308.04623, section 3.2) makes its chains quicker as it makes main's: where a
lookup finds how the text may go on, the draft reads that along, in the same call, and need not be called again for a
guess that turns out to be the copied token. The draft's probabilities are what they would have been, so that all
that follows from them is, too.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from spec_local.core.language_model import LanguageModel, Logits, common_prefix, prefill
from spec_local.core.proposal import ROOT, Proposal, is_chain, path_to
from spec_local.core.rng import Rng
from spec_local.core.sampling import Distribution, Sampler
from spec_local.errors import ContextOverflow
from spec_local.lookups.base import Lookup
from spec_local.policies.base import Policy
from spec_local.proposers.base import Lap, Limit
from spec_local.proposers.shapes import Ranked, Shape


class DraftModel:
    """Drafts with a language model through the same sampler as main.

    Args:
        model: its cache is this proposer's own.
        sampler: main's sampler, so that q is shaped as p is, under the same constraint.
        shape: what grows: a chain, a tree, beams.
        n_vocab: main's; a draft's padding beyond it is never guessed.
        is_end: nothing is guessed after such a token.
        ahead: finds what the draft may read along with a chain, as the shape's policy says; asked about tokens as the
            model reads them, and about texts that are taken back.
    """

    needs_logits = False

    def __init__(
        self,
        model: LanguageModel,
        sampler: Sampler,
        shape: Shape,
        *,
        n_vocab: int,
        is_end: Callable[[int], bool] = lambda token: False,
        ahead: Lookup | None = None,
    ) -> None:
        self.model = model
        self.shape = shape
        self._sampler = Sampler(sampler.settings, sampler.constraint, for_draft=True)
        self._n_vocab = n_vocab
        self._is_end = is_end
        self._ahead = ahead
        self._reader: _Reader | None = None
        self._proposal = Proposal()

    def prefill(self, history: Sequence[int]) -> Iterator[int]:
        history = self._readable(history)
        # A prompt beyond the draft's own context cannot be continued: see propose.
        if len(history) < self.model.n_ctx:
            # A draft of another vocabulary may need more tokens for the same text.
            with contextlib.suppress(ContextOverflow):
                yield from prefill(self.model, history[:-1])

    def drafted(self, output: Sequence[int]) -> Sequence[int]:
        """Tokens drafted along the output's path, up to the first that differs from it.

        Of a chain all of its tokens, truncated ones included; of a tree the first child of each accepted node.
        """
        if self._reader and is_chain(self._reader.parents):
            return self._reader.tokens
        children = self._proposal.children()
        found: list[int] = []
        for node in [ROOT, *self._proposal.follow(output)]:
            if node in children:
                found.append(self._proposal.tokens[children[node][0]])
        return found

    def unread(self, history: Sequence[int]) -> int:
        """How many tokens the model has to read for its first guess; 0 where it has no room."""
        n = len(self._readable(history))
        return n - len(self.model.cached) if n <= self.model.n_ctx else 0

    def propose(self, history: Sequence[int], limit: Limit, rng: Rng, lap: Lap) -> Proposal:
        model, history = self.model, self._readable(history)
        room = model.n_ctx - len(history) + 1
        if room < 1:
            return Proposal()
        branches = min(limit.branches, model.max_branches, model.max_tokens, model.max_logits, room)
        limit = Limit(min(limit.depth, room), min(limit.nodes, room), branches)
        try:
            model.truncate(common_prefix(model.cached, history[:-1]))
            self._reader = reader = _Reader(
                model,
                self._sampler,
                self._n_vocab,
                self._is_end,
                history,
                limit,
                lap,
                self._ahead,
                self.shape.policy,
            )
            self._proposal = replace(self.shape.build(reader, limit, rng), source="draft")
            reader.judge()
        except ContextOverflow:  # as above
            self._reader, self._proposal = None, Proposal()
        return self._proposal

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        pass

    def commit(self, history: Sequence[int]) -> None:
        history = self._readable(history)
        model, reader = self.model, self._reader
        if reader and common_prefix(model.cached, history) >= reader.place:
            said = history[reader.place :]
            path = self._proposal.follow(said)
            end = path[-1] if path else ROOT
            self.shape.learn(len(path), exhausted=end not in self._proposal.parents)
            model.commit(reader.path(said))
        model.truncate(common_prefix(model.cached, history))
        self._reader, self._proposal = None, Proposal()

    def _readable(self, history: Sequence[int]) -> Sequence[int]:
        """The history as the draft can read it: main's padding beyond the draft's vocabulary becomes token 0."""
        if self.model.n_vocab >= self._n_vocab:
            return history
        return [token if token < self.model.n_vocab else 0 for token in history]


@dataclass(frozen=True, slots=True)
class _DraftOutput:
    """See `spec_local.policies.base.DraftOutput`; to be asked before the model's next call, which overwrites the logits."""

    distribution: Distribution
    n_read: int
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
        limit: Limit,
        lap: Lap,
        ahead: Lookup | None,
        policy: Policy,
    ) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.place = len(history)
        self.is_end = is_end
        self._model, self._sampler, self._n_vocab = model, sampler, n_vocab
        self._history, self._limit, self._lap = history, limit, lap
        self._ahead, self._policy = ahead, policy
        self._recent = list(history[-sampler.window :]) if sampler.window else []
        self._read = {ROOT: ROOT}  # the model's number of each node that it has read
        # A chain is read as text; what does not stand is trimmed off. Of the last call for it:
        self._first = 0  # how many guesses there were
        self._copied: Sequence[int] = []  # what was read along after them
        self._confidence: Sequence[float] = ()  # in each of these
        self._rows: Logits = np.empty((0, 0), np.float32)  # after those guesses, and after each of these

    def add(self, token: int, parent: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def read(self) -> "_DraftOutput":
        guessed = self.tokens[self._first :]
        is_read = len(guessed) < len(self._rows) and guessed == self._copied[: len(guessed)]
        n_read = 0 if is_read else self._read_on()
        logits = self._rows[len(self.tokens) - self._first]
        last = len(self.tokens) - 1
        opinion = _DraftOutput(self._sampler.distribution(logits, self._before(last)), n_read, logits)
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
            logits = self._model.evaluate(self._unread(), 1)
        else:
            tokens = [self.tokens[n] for n in nodes]
            logits = self._model.decode_tree(tokens, [self._read[self.parents[n]] for n in nodes])
            n_read = len(self._read) - 1
            self._read.update(zip(nodes, range(n_read, n_read + len(nodes)), strict=True))
        self._lap("draft model")
        return logits[:, : self._n_vocab]

    def judge(self) -> None:
        """Tell the policy what became of the tokens that were read along last."""
        guessed = self.tokens[self._first :]
        # At the first guess that is another token the model is called again: there is at most one.
        n_known = min(len(self._copied), len(guessed))
        if n_known:
            self._policy.observe_staged(self._confidence[:n_known], common_prefix(self._copied, guessed))

    def _read_on(self) -> int:
        """Read the chain as far as it goes, and along with it what may follow; how many tokens were read."""
        model = self._model
        self.judge()
        if self.tokens:  # the last of them is new, and not what was read along
            model.truncate(self.place + len(self.tokens) - 1)
        n_before = len(model.cached)
        unread = self._unread()
        self._copy(len(unread))
        self._first = len(self.tokens)
        logits = model.evaluate([*unread, *self._copied], 1 + len(self._copied))
        self._rows = logits[:, : self._n_vocab]
        self._lap("draft model")
        return len(model.cached) - n_before

    def _unread(self) -> Sequence[int]:
        """The end of the text that goes with the next opinion, in one call of the draft.

        Usually one token, or two after a wholly accepted draft, whose last token the draft has not read.
        """
        model = self._model
        if self.tokens:
            return self.tokens[-1:]
        while self.place - len(model.cached) > model.max_tokens:
            start = len(model.cached)
            model.evaluate(self._history[start : start + model.max_tokens], 0)
            self._lap("draft model")
        return self._history[len(model.cached) :]

    def _copy(self, unread: int) -> None:
        """Choose what the next call shall read along with so many tokens that it has to."""
        model = self._model
        self._copied, self._confidence = [], ()
        left = self._limit.depth - len(self.tokens) - 1  # the last guess is not read
        most = min(left, model.max_logits - 1, model.max_tokens - unread)
        if not self._ahead or most < 1:
            return
        text = [*self._history, *self.tokens] if self.tokens else self._history
        found = self._ahead.find(text, Limit(most, most, 1))
        n_vocab = min(model.n_vocab, self._n_vocab)
        useful = list(takewhile(lambda t: 0 <= t < n_vocab and not self.is_end(t), found.tokens[:most]))
        confidence = found.confidence[: len(useful)]
        n = self._policy.n_staged(confidence, unread) if useful else 0
        self._lap("lookup")
        self._copied, self._confidence = useful[:n], confidence[:n]

    def _before(self, node: int) -> Sequence[int]:
        """The tokens that a penalty or a constraint looks at."""
        if not self._recent:
            return ()
        return [*self._recent, *(self.tokens[n] for n in path_to(self.parents, node))]
