"""Replay LogitSpec beside today's lookups, and counts of the text beside a draft model.

    python benchmarks/second_choices.py record --main main.gguf [--draft draft.gguf] --output FILE
    python benchmarks/second_choices.py logitspec FILE
    python benchmarks/second_choices.py counts FILE

`record`: the main model answers built-in and held-out prompts at temperature 0; the most probable tokens of
both models at each position are kept. `logitspec`: the engine and the adaptive policy generate the same
answers on the machines of `simulate.py`, with trees of suffix lookup and recycling, and with those of
LogitSpec (arXiv 2507.01449) besides: the token after the next one is looked for among the second choices for
the next one, each followed by what followed it in the text. `counts`: the draft model's logits plus a weight
times the logarithm of how often a token followed the longest match of the last one to four tokens. Weights
and probabilities are fitted to the built-in prompts. Rejected nodes have no logits in a replay.
"""

import math
import pickle
from argparse import Namespace
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import simulate
from common import chat_text, geometric_mean, note, parser, table, tokens_of
from numpy.typing import NDArray
from record_traces import answer_of, outputs_along
from simulate import GREEDY, PAIRS, Machine, Pair, ReplayContext
from traces import Group
from traces import Trace as DraftTrace

from spec_local import Session
from spec_local.bench.prompts import load
from spec_local.core.calls import Call, Logits
from spec_local.core.proposal import EMPTY, MAX_DRAFT, Limit, Proposal
from spec_local.core.rng import SeededRng
from spec_local.core.sequence import Limits, RollsBack
from spec_local.engine.engine import Engine
from spec_local.engine.events import Failed, Prefilled
from spec_local.engine.request import Request
from spec_local.lookups.automaton import SuffixAutomaton
from spec_local.lookups.base import match_confidence
from spec_local.lookups.best_first import best_first
from spec_local.lookups.recycling import Recycling
from spec_local.lookups.suffixes import SuffixLookup
from spec_local.policies.adaptive import Adaptive
from spec_local.policies.base import PolicyOptions
from spec_local.policies.experience import Experience
from spec_local.policies.sharing import SharedCosts
from spec_local.proposers.combined import CombinedProposer
from spec_local.verifiers import VERIFIERS

HELD_OUT = Path(__file__).with_name("held_out_prompts.toml")
N_TOP, N_MAIN_TOP = 64, 16  # tokens kept at each position, of the draft and of the main model
EDGES = (0.003, 0.01, 0.03, 0.1, 0.3)  # of a second choice's probability
LONGEST = 4  # tokens that counts match
WEIGHTS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5)
MACHINES = [Pair(pair.name, pair.main, None) for pair in PAIRS if pair.draft is not None][3:]


@dataclass
class Recorded:
    """An answer; top, log_p: the main model's tokens at each position, (n, 16); drafted: the draft's."""

    held_out: bool
    category: str
    prompt: list[int]
    answer: list[int]
    top: NDArray[np.int64]
    log_p: NDArray[np.float32]
    drafted: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None


def best(row: Logits, n: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    tokens = np.argpartition(row, -n)[-n:]
    tokens = tokens[np.argsort(-row[tokens])]
    return tokens, row[tokens] - row.max() - np.log(np.exp(row - row.max()).sum())


def along(model: Any, prompt: Sequence[int], answer: Sequence[int], n: int) -> Any:
    found = [best(row, n) for _, row in outputs_along(model, prompt, answer)]
    return tuple(np.array(each) for each in zip(*found, strict=True))


def record(options: Namespace) -> None:
    texts = []
    with Session.open(
        options.main, options.draft, n_ctx=2048, branches=64, draft_vocab="all", prompt_cache="off"
    ) as session:
        model = session.main.model
        for path in (None, HELD_OUT):
            for entry in load(path):
                note(str(entry))
                prompt = tokens_of(model, chat_text(model, entry.text))
                answer = answer_of(session, prompt, 128)
                top, log_p = along(session.main, prompt, answer, N_MAIN_TOP)
                drafted = along(session.drafter, prompt, answer, N_TOP) if session.drafter else None
                texts.append(Recorded(path is not None, entry.category, prompt, answer, top, log_p, drafted))
    options.output.write_bytes(pickle.dumps(texts))


# LogitSpec ------------------------------------------------------------------------------------------------


class Rows:
    """The main model's rows of logits along an answer, over the tokens that occur at all."""

    def __init__(self, text: Recorded, n_vocab: int) -> None:
        self.text, self.n_vocab = text, n_vocab
        self.unknown = np.full(n_vocab, np.nan, np.float32)

    def __getitem__(self, at: int) -> Logits:
        row = np.full(self.n_vocab, -40, np.float32)
        row[self.text.top[at]] = self.text.log_p[at]
        row[self.text.answer[at]] = max(
            row[self.text.answer[at]],
            float(row.max()) + 1e-3 * (self.text.top[at, 0] != self.text.answer[at]),
        )  # rounding decides ties otherwise in calls of other sizes
        return row


class TreeReplay(RollsBack):
    """A `MainSequence` for trees that replays an answer; nodes that it does not contain have NaN."""

    def __init__(self, context: ReplayContext, text: Recorded, n_vocab: int) -> None:
        self.limits = Limits(
            n_vocab, 4096, context.max_tokens, MAX_DRAFT + 1, max_rollback=4096, max_branches=64
        )
        self.cached: list[int] = []
        self.context, self.own = context, simulate.Own()
        self._rows, self._start = Rows(text, n_vocab), len(text.prompt)
        self._text = [*text.prompt, *text.answer]
        self._tree: list[int] = []
        self._parents: list[int] = []

    def call(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        n_logits: int | None = None,
        *,
        positions: Sequence[int] | None = None,
        n_draft: int | None = None,
    ) -> Any:
        appends = parents is None
        if appends:
            self._tree, self._parents, parents = [], [], range(-1, len(tokens) - 1)
        assert parents is not None
        n = len(tokens) if n_logits is None else n_logits
        return Call(self, tokens, parents, n, positions, appends)

    def evaluated(self, call: Any) -> tuple[Logits, int]:
        self._tree += call.tokens
        self._parents += call.parents
        begin, rows = len(self.cached), []
        ends: list[int] = []  # of each node: the position after it, or -1 off the answer
        for node, parent in enumerate(self._parents):
            at = begin if parent < 0 else ends[parent]
            ends.append(at + 1 if 0 <= at < len(self._text) and self._text[at] == self._tree[node] else -1)
            if node >= len(self._tree) - call.n_logits:
                known = self._start <= ends[node] < len(self._text)
                rows.append(self._rows[ends[node] - self._start] if known else self._rows.unknown)
        return np.array(rows).reshape(len(rows), self.limits.n_vocab), begin

    def commit(self, path: Sequence[int]) -> None:
        self.cached += [self._tree[node] for node in path]
        self._tree, self._parents = [], []

    def truncate(self, length: int) -> None:
        del self.cached[length:]
        self._tree, self._parents = [], []


class ReplayedRecycling(Recycling):
    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        for token, row in zip(tokens, logits, strict=True):
            if not np.isnan(row[0]):
                super().observe([token], row[None])


Choice = tuple[int, int, int, int]
"""A second choice, the bin of its probability, the length of the match that it ends, and the state there."""


class LogitSpec:
    """Proposes the k second choices for the last token as the next ones, with what followed them."""

    name, needs_logits = "logitspec", True

    def __init__(self, k: int, rates: NDArray[np.float64] | None) -> None:
        self._k, self._rates = k, rates
        self._text = SuffixAutomaton()
        self.row: Logits | None = None

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        known = [row for row in logits if not np.isnan(row[0])]
        if known:
            self.row = known[-1].copy()

    def choices(self, history: Sequence[int]) -> Iterator[Choice]:
        text, row = self._text, self.row
        assert row is not None
        text.feed(history[len(text.text) :])
        contexts, state = [], text._link[text._last]
        while state >= 0:
            contexts.append(state)
            state = text._link[state]
        tokens, log_p = best(row, self._k + 1)
        others = [
            each for each in zip(tokens.tolist(), log_p.tolist(), strict=True) if each[0] != history[-1]
        ]
        for token, p in others[: self._k]:
            state = next((s for s in contexts if token in text._next[s]), -1)
            match = min(text._length[state], text.longest) + 1 if state >= 0 else 0
            after = text._cut(text._next[state][token])[1] if state >= 0 else 0
            yield token, bisect(EDGES, math.exp(p)), match, after

    def find(self, history: Sequence[int], limit: Limit) -> Proposal:
        if self.row is None:
            return EMPTY
        assert self._rates is not None
        first = [(t, float(self._rates[b, min(m, 3)]), after, m) for t, b, m, after in self.choices(history)]
        first.sort(key=lambda child: -child[1])

        def follow(child: tuple[int, float, int, int], depth: int) -> list[tuple[int, float, int, int]]:
            _, _, state, match = child
            seen, found = self._text.followers(state, 4) if match else (0, [])
            return [(t, match_confidence(match, seen, n / seen), s, match + 1) for t, n, s in found]

        return best_first(first, follow, limit, 0.01, self.name)


def fitted(texts: Sequence[Recorded], n_vocab: int) -> NDArray[np.float64]:
    """The share of second choices that are the token after the next one, by probability and match."""
    hits, n = (np.zeros((len(EDGES) + 1, 4)) for _ in range(2))
    for text in texts:
        lookup, rows = LogitSpec(N_MAIN_TOP - 1, None), Rows(text, n_vocab)
        for i in range(len(text.answer) - 1):
            lookup.row = rows[i]
            for token, bin_, match, _ in lookup.choices([*text.prompt, *text.answer[: i + 1]]):
                n[bin_, min(match, 3)] += 1
                hits[bin_, min(match, 3)] += token == text.answer[i + 1]
    return (hits + 0.2) / (n + 10)


def speed(
    texts: Sequence[Recorded], pair: Pair, n_vocab: int, k: int, rates: NDArray[np.float64]
) -> tuple[float, float]:
    """Tokens per call, and times the speed of plain decoding (mean over categories); k 0: no LogitSpec."""
    machine = Machine(pair, Group("", []))
    context, experience, main = ReplayContext("main", machine), Experience(), machine.measured("main")
    engine, recycling = Engine(None, clock=machine.clock), ReplayedRecycling()
    gains, n_calls = defaultdict[str, list[float]](list), 0
    for text in texts:
        options = PolicyOptions(
            costs=lambda: (SharedCosts(main), None),
            experience=experience,
            clock=machine.clock,
            tree_nodes=MAX_DRAFT,
        )
        lookups = [SuffixLookup(), recycling, *([LogitSpec(k, rates)] if k else [])]
        request = Request(
            TreeReplay(context, text, n_vocab),  # type: ignore[arg-type]
            text.prompt,
            sampler=GREEDY,
            rng=SeededRng(0),
            proposer=CombinedProposer(Adaptive(options), None, lookups, branches=MAX_DRAFT),
            verifier=VERIFIERS["exact-match"],
            draft_max=MAX_DRAFT,
            max_tokens=len(text.answer),
            clock=machine.clock,
        )
        engine.add(request)
        n_before, read = len(machine.calls), machine.now
        while request.statistics.predicted_n < len(text.answer):
            for _, event in engine.step():
                assert not isinstance(event, Failed), event
                read = machine.now if isinstance(event, Prefilled) else read
        assert request.history == [*text.prompt, *text.answer]
        engine.remove(request)
        n_calls += len(machine.calls) - n_before
        plain = len(text.answer) * float(pair.main[1])
        gains[text.category].append(plain / (machine.now.seconds - read.seconds))
    mean = geometric_mean([geometric_mean(each) for each in gains.values()])
    return sum(len(text.answer) for text in texts) / n_calls, mean


def logitspec(texts: Sequence[Recorded]) -> None:
    number: dict[int, int] = {}
    for text in texts:
        for token in [*text.prompt, *text.answer, *text.top.ravel().tolist()]:
            number.setdefault(token, len(number))
    for text in texts:
        text.prompt, text.answer = ([number[t] for t in part] for part in (text.prompt, text.answer))
        text.top = np.vectorize(number.__getitem__)(text.top)
    rates = fitted([text for text in texts if not text.held_out], len(number))
    rows: list[list[object]] = []
    for pair in MACHINES:
        for held_out in (False, True):
            some = [text for text in texts if text.held_out == held_out]
            found = {k: speed(some, pair, len(number), k, rates) for k in (0, 2, 4, 8)}
            rows += [
                [pair.name, "held out" if held_out else "built in", k, n, gain, f"{gain / found[0][1]:.3f}"]
                for k, (n, gain) in found.items()
            ]
    table(["machine", "prompts", "second choices", "tokens per call", "times plain", "relative"], rows)


# Counts ---------------------------------------------------------------------------------------------------

Position = tuple[list[int], NDArray[np.float64], int, Counter[int], int]
"""Tokens and their log probabilities, the length of the match, what followed it, and the answer's token."""


def positions(text: Recorded) -> Iterator[Position]:
    assert text.drafted
    known, history = defaultdict[tuple[int, ...], Counter[int]](Counter), list[int]()

    def append(token: int) -> None:
        for n in range(1, min(len(history), LONGEST) + 1):
            known[tuple(history[-n:])][token] += 1
        history.append(token)

    for token in text.prompt:
        append(token)
    for token, ids, log_p in zip(text.answer, *text.drafted, strict=True):
        match = next((n for n in range(LONGEST, 0, -1) if tuple(history[-n:]) in known), 0)
        found = Counter(known[tuple(history[-match:])] if match else {})  # which later tokens change
        others = [each for each in found if each not in ids]
        log_q = np.array([*log_p, *[log_p[-1] - 2] * len(others)], float)
        yield [*ids.tolist(), *others], log_q, match, found, token
        append(token)


def mixture(position: Position, weight: float) -> tuple[bool, float]:
    """Whether the most probable token is the answer's, and its probability."""
    ids, log_q, match, found, token = position
    if match and weight:
        log_q = log_q + weight * np.log([(found[each] + 0.02) / (found.total() + 1) for each in ids])
    first = int(log_q.argmax())
    return ids[first] == token, float(1 / np.exp(log_q - log_q[first]).sum())


def counts(texts: Sequence[Recorded]) -> None:
    def agreement(some: Sequence[Position], weight: float) -> int:
        return sum(mixture(each, weight)[0] for each in some)

    seen = [each for text in texts if not text.held_out for each in positions(text)]
    weights = {
        match: max(WEIGHTS, key=lambda w, m=match: agreement([each for each in seen if each[2] == m], w))
        for match in range(LONGEST + 1)
    }
    print(f"weights by length of the match: {weights}")
    texts = [text for text in texts if text.held_out]
    rows = []
    for pair in (each for each in PAIRS if each.draft is not None):
        gains = []
        for used in (dict.fromkeys(weights, 0.0), weights):
            groups, right = defaultdict[str, list[DraftTrace]](list), []
            for text in texts:
                ok, p = zip(*(mixture(each, used[each[2]]) for each in positions(text)), strict=True)
                groups[text.category].append(DraftTrace(text.prompt, text.answer, ok, p))
                right += ok
            found = []
            for group in (Group(name, each) for name, each in groups.items()):
                calls = simulate.adaptive_calls(pair, group)
                seconds = simulate.seconds(calls, pair, group)
                found.append(group.n_tokens * float(pair.main[1]) / seconds)
            gains.append((float(np.mean(right)), geometric_mean(found)))
        rows.append(
            [pair.name, *(f"{x:.3f}" for gain in gains for x in gain), f"{gains[1][1] / gains[0][1]:.3f}"]
        )
    table(["machine", "agreement", "times plain", "with counts", "times plain", "relative"], rows)


def main() -> None:
    arguments = parser(__doc__)
    commands = arguments.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--main", required=True)
    recording.add_argument("--draft", default="none")
    recording.add_argument("--output", type=Path, required=True)
    for name in ("logitspec", "counts"):
        commands.add_parser(name).add_argument("file", type=Path)
    options = arguments.parse_args()
    if options.command == "record":
        record(options)
    else:
        run = logitspec if options.command == "logitspec" else counts
        run(pickle.loads(options.file.read_bytes()))


if __name__ == "__main__":
    main()
