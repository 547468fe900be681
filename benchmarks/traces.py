"""Answers to replay in `simulate.py`: recorded, synthetic and adversarial ones."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spec_local.bench.theory import lookup_run_lengths
from spec_local.core.calls import Logits
from spec_local.core.proposal import MAX_DRAFT
from spec_local.lookups.prompt_lookup import PromptLookup
from spec_local.lookups.suffixes import SuffixLookup

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Trace:
    """An answer, and what the draft model predicts at each of its positions.

    right: whether the draft model's most probable token is the main model's. confidence: the probability of
    that token at temperature 1. windows: the same of a draft model that has read only so many tokens of the
    end of the prompt.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    right: Sequence[bool]
    confidence: Sequence[float]
    windows: Mapping[int, "Trace"] = field(default_factory=dict)

    def first(self, n: int) -> "Trace":
        """The same with the first n tokens of the answer."""
        windows = {window: trace.first(n) for window, trace in self.windows.items()}
        return Trace(self.prompt, self.answer[:n], self.right[:n], self.confidence[:n], windows)

    def from_token(self, token: int) -> "Trace":
        """The same with another first token, which no lookup finds."""
        windows = {window: trace.from_token(token) for window, trace in self.windows.items()}
        return replace(self, prompt=[token, *self.prompt[1:]], windows=windows)

    @cached_property
    def n_vocab(self) -> int:
        return max(*self.prompt, *self.answer) + 2  # the last token stands for a wrong draft token

    def rows(self, tokens: Sequence[int], probabilities: Sequence[float]) -> Logits:
        """Logits (positions, V) that give these tokens these probabilities, and all others an equal share."""
        p = np.clip(probabilities, 2 / self.n_vocab, 0.9995)
        rows = np.zeros((len(tokens), self.n_vocab), np.float32)
        rows[np.arange(len(tokens)), tokens] = np.log(p / (1 - p) * (self.n_vocab - 1))
        return rows

    @cached_property
    def main_logits(self) -> Logits:
        return self.rows(self.answer, [0.9] * len(self.answer))

    @cached_property
    def draft_logits(self) -> Logits:
        wrong = self.n_vocab - 1
        best = [token if ok else wrong for token, ok in zip(self.answer, self.right, strict=True)]
        return self.rows(best, self.confidence)

    @cached_property
    def mistaken_logits(self) -> Logits:
        """The draft model's logits after a draft token that was wrong."""
        return self.rows([self.n_vocab - 1] * len(self.answer), self.confidence)

    @cached_property
    def lookup_runs(self) -> list[int]:
        """At each position the number of tokens that a lookup predicts correctly."""
        return lookup_run_lengths(SuffixLookup(), self.prompt, self.answer, MAX_DRAFT - 1)


def _text(rng: np.random.Generator, n: int) -> list[int]:
    """Random tokens, with almost no repetition that a lookup could find."""
    return [int(token) for token in rng.integers(0, 400, n)]


def _predictions(
    rng: np.random.Generator, accepted: Sequence[float], believed: Sequence[float] | None = None
) -> tuple[list[bool], list[float]]:
    """Draw for each draft token whether it is right, and the draft model's confidence in it.

    accepted: mean acceptance rate at each position. believed: mean confidence there; None: the confidences
    are the acceptance rates.
    """
    truth = np.clip(accepted, 1e-3, 1 - 1e-3)
    confidence = rng.beta(3 * truth, 3 * (1 - truth))
    right = rng.random(len(confidence)) < (confidence if believed is None else truth)
    if believed is not None:
        belief = np.clip(believed, 1e-3, 1 - 1e-3)
        confidence = rng.beta(3 * belief, 3 * (1 - belief))
    return right.tolist(), confidence.tolist()


def drafted(accepted: Sequence[float], believed: Sequence[float] | None = None, seed: int = 0) -> list[Trace]:
    """Two answers for which lookups find nothing."""
    traces = []
    for i in range(2):
        rng = np.random.default_rng([seed, i])
        prompt, answer = _text(rng, 60), _text(rng, len(accepted))
        traces.append(Trace(prompt, answer, *_predictions(rng, accepted, believed)))
    return traces


def quotations(n: int = 256, seed: int = 1) -> list[Trace]:
    """Two answers that quote long passages of their prompts, with some other tokens in between."""
    traces = []
    for i in range(2):
        rng = np.random.default_rng([seed, i])
        prompt = _text(rng, 400)
        answer: list[int] = []
        while len(answer) < n:
            start, length = int(rng.integers(0, 250)), int(rng.integers(40, 140))
            answer += _text(rng, 8) + prompt[start : start + length]
        traces.append(Trace(prompt, answer[:n], *_predictions(rng, [0.8] * n)))
    return traces


def traps(match: int, accepted: float, n: int = 192, seed: int = 2) -> list[Trace]:
    """Two answers whose n-grams of `match` tokens all occur in the prompt, followed by a different token."""
    traces = []
    for i in range(2):
        rng = np.random.default_rng([seed, i])
        answer = _text(rng, n)
        prompt = _text(rng, match)
        for end in reversed(range(n)):  # backwards, so that the last occurrence of an n-gram is its trap
            before = [*prompt[:match], *answer[:end]][-match:]
            prompt += [*before, (answer[end] + 1 + int(rng.integers(0, 300))) % 400]
        prompt += prompt[:match]
        assert not any(lookup_run_lengths(PromptLookup(), prompt, answer, 1))
        traces.append(Trace(prompt, answer, *_predictions(rng, [accepted] * n)))
    return traces


TRACES = Path(__file__).with_name("traces.json")


def recorded(path: Path = TRACES) -> dict[str, list[Trace]]:
    """Real answers by category: see `record_traces.py`."""
    groups: dict[str, list[Trace]] = {}
    for entry in json.loads(path.read_text()):
        text = entry["prompt"], entry["answer"]
        windows = {int(n): Trace(*text, *_predicted(each)) for n, each in entry.get("windows", {}).items()}
        groups.setdefault(entry["category"], []).append(Trace(*text, *_predicted(entry), windows))
    return groups


def _predicted(entry: Mapping[str, Sequence[int]]) -> tuple[list[bool], list[float]]:
    return [bool(ok) for ok in entry["right"]], [per_mille / 1000 for per_mille in entry["per_mille"]]


@dataclass(frozen=True, eq=False)
class Group:
    """The answers of one session, and the conditions under which they are generated.

    slower: factors on the costs of the main and the draft model in the second half of the session.
    noisy: times vary by a few percent, and occasionally another process slows some calls by 10 to 30 times.
    draft: cost of a call of the draft model as a share of the main model's; None: as on the machine.
    slow_phases: every few seconds, all calls take half as long again for some seconds.
    """

    name: str
    traces: Sequence[Trace]
    kind: Literal["real", "made", "adversarial"] = "made"
    slower: tuple[float, float] = (1.0, 1.0)
    noisy: bool = False
    draft: float | None = None
    slow_phases: bool = False

    @property
    def n_tokens(self) -> int:
        return sum(len(trace.answer) for trace in self.traces)


def groups(path: Path = TRACES) -> list[Group]:
    """All groups; path: of the recorded answers."""
    n, real = 256, recorded(path)
    mixed = [trace for several in zip(*real.values(), strict=True) for trace in several]
    good, half = drafted([0.8] * n, seed=10), n // 2
    stretches = [0.96 if i // 40 % 2 else 0.4 for i in range(n)]
    found = [Group(name, traces, "real") for name, traces in real.items()]
    found.append(Group("all categories in turn", mixed, "real"))
    found += [Group(f"acceptance {a}", drafted([a] * n, seed=10)) for a in (0.3, 0.5, 0.7, 0.8, 0.9, 0.97)]
    found += [
        Group("long quotes", quotations()),
        Group("code and prose in turn", drafted(stretches, seed=11)),
    ]
    return found + [
        replace(group, kind="adversarial")
        for group in (
            Group("slow draft model", good, draft=1.2),
            Group("always wrong", drafted([0.0] * n, [0.4] * n)),
            Group("always wrong, confident", drafted([0.0] * n, [0.97] * n)),
            Group("half right, confident", drafted([0.5] * n, [0.97] * n)),
            Group("collapse", drafted([0.9] * half + [0.05] * half, [0.9] * n)),
            Group("good in the end", drafted([0.05] * n + [0.9] * n)),
            Group("main 3 × slower", good, slower=(3.0, 1.0)),
            Group("both 3 × slower", good, slower=(3.0, 3.0)),
            Group("noisy neighbour, 0.8", good, noisy=True),
            Group("noisy neighbour, 0.3", drafted([0.3] * n, seed=10), noisy=True),
            Group("lookup trap", traps(3, 0.0)),
            Group("deep lookup trap", traps(12, 0.0)),
            Group("lookup trap, draft 0.8", traps(3, 0.8)),
        )
    ]
