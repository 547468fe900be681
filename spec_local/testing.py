"""A fake language model, an enumerating rng, and the engine with one answer: all without a model file.

They are part of the package so that you can prove your own proposers and verifiers lossless, too.
"""

import copy
import functools
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from spec_local.core.calls import Call, Logits
from spec_local.core.proposal import ROOT, check_path
from spec_local.core.sequence import Limits, MainSequence, States, common_prefix
from spec_local.engine.engine import Engine
from spec_local.engine.events import Event, Failed
from spec_local.engine.request import Request, RequestOptions
from spec_local.errors import ContextOverflow, InvalidRequest
from spec_local.llama.draft_vocabulary import DraftVocabulary
from spec_local.llama.rollback import KeptStates, RollsBack

Outcome = TypeVar("Outcome", bound=Hashable)
_USUAL = Limits(n_vocab=16, n_ctx=256, max_tokens=32, max_logits=17, max_branches=16, max_rollback=0)
"""Limits of a fake model, unless others are given."""


class FakeContext:
    """A `Context` of fake sequences.

    Args:
        max_tokens, max_logits: limits of a call.

    Attributes:
        calls: number of tokens of each call, by sequence.
        kept: histories whose states are kept.
    """

    def __init__(self, n_vocab: int, max_tokens: int, max_logits: int) -> None:
        self.max_tokens, self.max_logits = max_tokens, max_logits
        self.sequences: list[FakeModel] = []
        self.calls: list[list[int]] = []
        self.kept: set[tuple[int, ...]] = set()
        self._buffer = np.full((max_logits, n_vocab), np.nan, np.float32)

    def decode(self, calls: Sequence[Call["FakeModel"]]) -> Sequence[Logits]:
        n_logits = sum(call.n_logits for call in calls)
        if sum(len(call.tokens) for call in calls) > self.max_tokens or n_logits > self.max_logits:
            raise InvalidRequest("too many tokens or logits in one call")
        if len({id(call.sequence) for call in calls}) < len(calls):
            raise InvalidRequest("two calls of one sequence")
        self.calls.append([len(call.tokens) for call in calls])
        self._buffer[:] = np.nan  # as in llama.cpp, a call overwrites the logits of the one before
        found, start = [], 0
        for call in calls:
            end = start + call.n_logits
            call.sequence.fill(call, self._buffer[start:end])
            found.append(self._buffer[start:end])
            start = end
        return found


@functools.lru_cache(1 << 16)  # an enumeration asks for each of them thousands of times
def _random_logits(
    n_vocab: int, seed: int, noise: float, scale: float, context: tuple[int, ...]
) -> NDArray[np.float32]:
    key = [seed, *(t + 2 for t in context)]
    values = np.random.default_rng(key).normal(size=n_vocab)
    if noise:
        values += noise * np.random.default_rng([*key, 1]).normal(size=n_vocab)
    return (values * scale).astype(np.float32)


def fake_state(history: Sequence[int]) -> tuple[float, float]:
    """The hidden state of a fake model after this history: its length, and a sum that tells it apart."""
    return len(history), sum((i + 1) * (token + 1) for i, token in enumerate(history))


class FakeModel(RollsBack):
    """A sequence of a fake model: a `MainSequence`. Logits are a random function of the last `order` tokens.

    It raises an error wherever llama.cpp would fail.

    Args:
        n_vocab: size of the vocabulary.
        seed: equal seeds give equal models.
        noise: deviation of the logits from those at noise 0, for a draft model that resembles its main model.
        scale: standard deviation of the logits; a large one gives confident predictions.
        order: number of tokens that the next one depends on.
        draft_vocabulary: the tokens that have logits, of this sequence alone; None: all.
        limits: fields of `Limits`, such as ``n_ctx=8``. `max_rollback` is only for one that cannot roll back
            to any length, which has no branches.

    Attributes:
        calls: number of tokens of each call of this sequence.
        positions: of each token of the history.
    """

    def __init__(
        self,
        n_vocab: int = 16,
        seed: int = 0,
        *,
        noise: float = 0.0,
        scale: float = 2.0,
        order: int = 2,
        draft_vocabulary: DraftVocabulary | None = None,
        **limits: Any,
    ) -> None:
        tokens = draft_vocabulary.tokens if draft_vocabulary else None
        own = replace(_USUAL, n_vocab=n_vocab, draft_tokens=tokens, **limits)
        is_free = own.rollback == "any"
        self.limits = replace(own, max_rollback=own.n_ctx) if is_free else replace(own, max_branches=1)
        self._draft_vocabulary = draft_vocabulary
        self._states = KeptStates(own.max_rollback)
        self._seed, self._noise, self._scale, self._order = seed, noise, scale, order
        self._tokens: list[int] = []
        self._tree: list[tuple[int, int]] = []  # token and parent of each node
        self.positions: list[int] = []
        self._tree_positions: list[int] = []
        self.calls: list[int] = []
        self.context = FakeContext(n_vocab, own.max_tokens, own.max_logits)
        self.context.sequences.append(self)

    def new_sequence(self) -> "FakeModel":
        """Another sequence of the same model, which shares its calls."""
        new = copy.copy(self)
        new._tokens, new._tree, new.calls = [], [], []
        new.positions, new._tree_positions = [], []
        new._states = KeptStates(0 if self.limits.rollback == "any" else self.limits.max_rollback)
        self.context.sequences.append(new)
        return new

    @property
    def n_vocab(self) -> int:
        return self.limits.n_vocab

    @property
    def cached(self) -> Sequence[int]:
        return self._tokens

    def logits(self, history: Sequence[int]) -> NDArray[np.float32]:
        """float32 (V,) after this history, regardless of the cache."""
        context = (len(history) if len(history) < self._order else -1, *history[-self._order :])
        return _random_logits(self.n_vocab, self._seed, self._noise, self._scale, context).copy()

    def call(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        n_logits: int | None = None,
        *,
        positions: Sequence[int] | None = None,
        n_draft: int | None = None,
    ) -> Call["FakeModel"]:
        appends, limits = parents is None, self.limits
        if parents is None:
            self.commit(())
            parents = range(ROOT, len(tokens) - 1)
        n_logits = len(tokens) if n_logits is None else n_logits
        if not 1 <= len(tokens) <= limits.max_tokens or not 0 <= n_logits <= min(
            len(tokens), limits.max_logits
        ):
            raise InvalidRequest(f"{len(tokens)} tokens and {n_logits} logits in one call")
        if min(tokens) < 0 or max(tokens) >= limits.n_vocab:
            raise InvalidRequest("a token is outside the vocabulary")
        if len(parents) != len(tokens):
            raise InvalidRequest(f"{len(tokens)} tokens have {len(parents)} parents")
        n_before = len(self._tree)
        for node, parent in enumerate(parents, n_before):
            if not ROOT <= parent < node:
                raise InvalidRequest("the parent of a node does not exist")
        n_nodes = n_before + len(tokens)
        inner = {parent for _, parent in self._tree}.union(parents) - {ROOT}
        if n_nodes - len(inner) > limits.max_branches:
            raise InvalidRequest(f"a tree of more than {limits.max_branches} branches")
        if len(self._tokens) + n_nodes > limits.n_ctx:
            raise ContextOverflow("the context is full")
        return Call(self, tokens, parents, n_logits, self._numbered(parents, positions), appends)

    def _numbered(self, parents: Sequence[int], positions: Sequence[int] | None) -> Sequence[int]:
        """The positions of new nodes."""
        known, last = self._tree_positions.copy(), self.positions[-1] if self.positions else -1
        for i, parent in enumerate(parents):
            above = last if parent == ROOT else known[parent]
            known.append(above + 1 if positions is None else positions[i])
            if known[-1] <= above or (positions is not None and len(positions) != len(parents)):
                raise InvalidRequest("positions must ascend")
        return known[len(self._tree_positions) :]

    def fill(self, call: Call[Any], logits: Logits) -> None:
        """Add the nodes of a call to the tree, and write their logits."""
        self.calls.append(len(call.tokens))
        self._states.on_evaluated(len(call.tokens))
        self._tree += zip(call.tokens, call.parents, strict=True)
        self._tree_positions += call.positions or ()
        for i in range(call.n_logits):
            logits[i] = self.logits(self._history_of(len(self._tree) - call.n_logits + i))
        if self._draft_vocabulary:
            self._may_draft(call.tokens)
            if (tokens := self.limits.draft_tokens) is not None:
                logits[:, np.setdiff1d(np.arange(self.n_vocab), tokens)] = np.nan

    def _history_of(self, node: int) -> list[int]:
        """The history, and the tokens of a node and those above it."""
        path = []
        while node >= 0:
            token, node = self._tree[node]
            path.append(token)
        return [*self._tokens, *reversed(path)]

    def _may_draft(self, tokens: Sequence[int]) -> None:
        if self._draft_vocabulary:
            self._draft_vocabulary.read(tokens)
            self.limits = replace(self.limits, draft_tokens=self._draft_vocabulary.tokens)

    def commit(self, path: Sequence[int]) -> States:
        check_path(path, [parent for _, parent in self._tree])
        states = [fake_state(self._history_of(node)) for node in path]
        if self.limits.rollback != "any":
            self._take_back(len(self._tokens) + len(path))
        else:
            self._tokens.extend(self._tree[node][0] for node in path)
            self.positions += [self._tree_positions[node] for node in path]
            self._clear()
        return np.array(states, np.float32)

    def _clear(self) -> None:
        self._tree.clear()
        self._tree_positions.clear()

    def truncate(self, length: int) -> None:
        if not 0 <= length <= len(self._tokens):
            raise InvalidRequest(f"cannot truncate {len(self._tokens)} tokens to {length}")
        if self.limits.rollback != "any":
            self._take_back(length)
        else:
            del self._tokens[length:], self.positions[length:]
            self._clear()

    def checkpoint(self) -> bool:
        if self.limits.rollback == "any":
            return True
        if self._tree:
            raise InvalidRequest("a tree has no checkpoint")
        if self._states.has_rolled_back:
            return False
        if self._states.lacks(len(self._tokens)):
            self._states.on_copied()
            self._states.checkpoint = len(self._tokens)
        return True

    def stops(self, tokens: Sequence[int]) -> Sequence[int]:
        """The length of all tokens, if it cannot roll back to any."""
        return (
            ()
            if self.limits.rollback in ("any", "none") or len(self._tokens) == len(tokens)
            else [len(tokens)]
        )

    def keep(self) -> None:
        """See `ModelSequence.keep`: for all sequences."""
        if self.limits.rollback not in ("any", "none"):
            self.context.kept.add(tuple(self._tokens))

    def _take_back(self, length: int) -> None:
        """As `spec_local.llama.recurrent.RecurrentSequence` does."""
        self._tokens.extend(token for token, _ in self._tree)  # the tree is a chain
        self.positions += self._tree_positions
        self._clear()
        n = len(self._tokens) - length
        if not n:
            return
        if length and self._states.can_remove(n):
            self._states.on_removed(length)
        else:
            length = self._states.nearest(length)
            self._states.on_replaced()
        del self._tokens[length:], self.positions[length:]

    def reuse(self, tokens: Sequence[int], text: Sequence[int] = ()) -> int:
        if self.limits.rollback == "any":
            known = (common_prefix(each._tokens, tokens) for each in self.context.sequences)
            if (n := max(known)) > common_prefix(self._tokens, tokens):
                self._replace(tokens[:n])
        self.truncate(common_prefix(self._tokens, tokens))
        kept = max((k for k in self.context.kept if tuple(tokens[: len(k)]) == k), key=len, default=())
        if len(kept) > len(self._tokens):
            self._replace(kept)
            self._states.on_replaced()
        self._may_draft(text)
        return len(self._tokens)

    def _replace(self, tokens: Sequence[int]) -> None:
        self._tokens[:] = tokens
        self.positions[:] = range(len(tokens))


class FakeState:
    """A `spec_local.core.constraint.State` given by a function.

    Args:
        rule: returns the tokens that may follow an answer.
    """

    def __init__(
        self, n_vocab: int, rule: Callable[[tuple[int, ...]], Collection[int]], answer: tuple[int, ...] = ()
    ) -> None:
        self.answer = answer
        self._n_vocab, self._rule = n_vocab, rule

    def allows(self, tokens: NDArray[np.intp]) -> NDArray[np.bool_]:
        allowed = self._rule(self.answer)
        return np.array([token in allowed for token in tokens.tolist()], bool)

    def allowed(self) -> NDArray[np.bool_]:
        return self.allows(np.arange(self._n_vocab))

    def n_allowed(self, tokens: Sequence[int]) -> int:
        allowed = (token in self._rule((*self.answer, *tokens[:n])) for n, token in enumerate(tokens))
        return sum(takewhile(bool, allowed))

    def after(self, token: int) -> "FakeState | None":
        if token not in self._rule(self.answer):
            return None
        return FakeState(self._n_vocab, self._rule, (*self.answer, token))

    def forced(self, n: int) -> list[tuple[int, float]]:
        tokens: list[int] = []
        while len(tokens) < n and len(allowed := self._rule((*self.answer, *tokens))) == 1:
            tokens += allowed
        return [(token, 1.0) for token in tokens]


class _ReplayRng:
    """Rng that replays a script of branches, then takes the first branch each time and records the others."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = list(script)
        self._ranges: dict[int, tuple[float, float]] = {}  # what is known of the random number of a position
        self.taken: list[int] = []
        self.options: list[list[int]] = []
        self.probability = 1.0

    def _branch(self, probabilities: Sequence[float]) -> int:
        possible = [i for i, p in enumerate(probabilities) if p]
        step = len(self.taken)
        branch = self._script[step] if step < len(self._script) else possible[0]
        self.taken.append(branch)
        self.options.append(possible)
        self.probability *= probabilities[branch]
        return branch

    def accept(self, probability: float) -> bool:
        probability = min(1.0, max(0.0, float(probability)))
        return bool(self._branch([1.0 - probability, probability]))

    def choose(self, weights: NDArray[np.float64]) -> int:
        return self._branch((weights / weights.sum()).tolist())

    def choose_at(
        self, position: int, weights: NDArray[np.float64], tokens: NDArray[np.intp] | None = None
    ) -> int:
        """The inverse of the cumulative distribution at one random number of the position."""
        return int(self.rank_at(position, weights, tokens, 1)[0][0])

    def rank_at(
        self, position: int, weights: NDArray[np.float64], tokens: NDArray[np.intp] | None, k: int
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """The same at k random numbers, 1/k apart, of which `choose_at` uses the first."""
        sums = weights.cumsum()
        cumulative = (sums / sums[-1]).tolist()
        shifts = [i / k for i in range(k)]
        at = self._uniform_at(position, {(end - shift) % 1.0 for end in cumulative for shift in shifts})
        found = dict.fromkeys(bisect_right(cumulative, (at + shift) % 1.0) for shift in shifts)
        return np.array(list(found)), np.full(len(found), 1.0 / len(found))

    def _uniform_at(self, position: int, cuts: Collection[float]) -> float:
        """The random number of a position: which of the parts that the cuts make, and there its middle."""
        low, high = self._ranges.get(position, (0.0, 1.0))
        edges = [low, *sorted(cut for cut in cuts if low < cut < high), high]
        part = self._branch([(end - start) / (high - low) for start, end in pairwise(edges)])
        self._ranges[position] = edges[part], edges[part + 1]
        return (edges[part] + edges[part + 1]) / 2.0


def enumerate_outcomes(run: Callable[[_ReplayRng], Outcome]) -> dict[Outcome, float]:
    """The exact distribution of the return value of `run(rng)`, summed over all branches of its randomness.

    `run` must be a pure function of its rng. Probabilities are float64 sums, accurate to about 1e-14.
    """
    outcomes: dict[Outcome, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        rng = _ReplayRng(script)
        outcomes[run(rng)] += rng.probability
        script = None
        for step in reversed(range(len(rng.taken))):
            later = [o for o in rng.options[step] if o > rng.taken[step]]
            if later:
                script = [*rng.taken[:step], later[0]]
                break
    return dict(outcomes)


def decode(
    main: MainSequence,
    prompt: Sequence[int],
    *,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> Iterator[Event]:
    """Continue a prompt with exactly the main model's distribution: the engine with a single answer.

    Args:
        main, prompt: see `Request`. options: fields of `RequestOptions`.

    Yields:
        one `Prefilled`, a `Step` per call of the main model, one `Finished`. The iterator may be closed
        early: both caches then contain only tokens of the history.

    Raises:
        InvalidRequest, ContextOverflow: see `Request`; raised before anything is evaluated.
        BackendError: a call of a model failed; the caches contain a prefix of the history.
    """
    request = Request(main, prompt, RequestOptions(clock=clock, **options))
    return _events(request, Engine(clock=clock))


def _events(request: Request, engine: Engine) -> Iterator[Event]:
    engine.add(request)
    try:
        while engine.requests:
            for _, event in engine.step():
                if isinstance(event, Failed):
                    raise event.exception
                yield event
    finally:
        engine.remove(request)
