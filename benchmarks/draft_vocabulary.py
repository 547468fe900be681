"""Compare parts of a draft model's vocabulary: costs of calls, loss of agreement, and speed.

    python benchmarks/draft_vocabulary.py --main main.gguf --draft draft.gguf

The main model answers held-out prompts at temperature 0. For each number of first tokens (`--draft-vocab`),
the draft model's most probable token among those that it could draft is compared with the answer, and calls
of one token are timed: in turns, on one thread, in its processor time, which other programs hardly change.
Speed is that of the best number of draft tokens per step (1 to 8, in hindsight, for each category of prompts)
on the machines of `simulate.py`, whose costs of a draft call are scaled; relative to all tokens.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common import chat_text, geometric_mean, model_options, note, table, tokens_of
from numpy.typing import NDArray
from record_traces import answer_of, outputs_along
from simulate import PAIRS, Pair

from spec_local import Session
from spec_local.bench.prompts import load, select
from spec_local.bench.theory import run_lengths
from spec_local.core.calls import run
from spec_local.llama.draft_vocabulary import DraftVocabulary
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from spec_local.llama.sequence import LlamaSequence

SIZES = (8192, 16_384, 32_768, 49_152, 65_536, 98_304)
_N_READ = 96  # tokens of the history of a timed call
_MAX_DRAFT = 8


@dataclass
class Drafted:
    """An answer's draft tokens: whether each is the main model's, and the rows that its call computed."""

    right: list[bool] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


def drafted(draft: LlamaSequence, prompt: Sequence[int], answer: Sequence[int]) -> dict[int, Drafted]:
    """The draft tokens along an answer, by number of first tokens; the largest number is all."""
    n_vocab = draft.limits.n_vocab
    sizes = [n for n in (*SIZES, n_vocab) if n <= n_vocab]
    parts = {n: DraftVocabulary(n_vocab, n) for n in sizes}
    found = {n: Drafted() for n in sizes}
    for part in parts.values():
        part.read(prompt)
    for (token, logits), wanted in zip(outputs_along(draft, prompt, answer), answer, strict=True):
        for n, part in parts.items():
            part.read([token])
            ids = np.arange(n_vocab) if part.tokens is None else part.tokens
            found[n].right.append(int(ids[logits[ids].argmax()]) == wanted)
            found[n].rows.append(len(ids))
    return found


def call_costs(path: Path, rounds: int) -> dict[int, float]:
    """The time of a call of one token by rows of the output matrix, relative to one that computes all."""
    draft = open_sequence(Model(path), n_ctx=2 * _N_READ, max_logits=1, threads=1)
    n_vocab = draft.limits.n_vocab
    run(draft.call(range(300, 300 + _N_READ), n_logits=0))
    seconds = defaultdict[int, list[float]](list)
    for number in range(rounds):
        for n in np.random.default_rng(number).permutation([n for n in (*SIZES, n_vocab) if n <= n_vocab]):
            draft.limit(DraftVocabulary(n_vocab, int(n)))
            started = time.process_time()
            run(draft.call([300 + number], n_logits=1))
            seconds[int(n)].append(time.process_time() - started)
            draft.truncate(_N_READ)
    draft.model.close()
    return {n: float(np.median(each) / np.median(seconds[n_vocab])) for n, each in sorted(seconds.items())}


def speed(answers: Sequence[Drafted], pair: Pair, costs: Mapping[int, float]) -> float:
    """Tokens per plain step with the best number of draft tokens per step."""
    assert pair.draft is not None
    plain, found = float(pair.main[1]), []
    for k in range(1, _MAX_DRAFT + 1):
        seconds = n = 0.0
        for answer in answers:
            rows: NDArray[np.float64] = np.interp(answer.rows, list(costs), list(costs.values()))
            runs, at = run_lengths(answer.right), 0
            while at < len(runs):
                drafting = k * float(pair.draft[1]) * float(rows[at : at + k].mean())
                seconds += float(pair.main[k + 1]) + drafting
                at += min(runs[at], k) + 1
            n += len(runs)
        found.append(n * plain / seconds)
    return max(found)


def main() -> None:
    arguments = model_options(__doc__, draft="required", n=128)
    arguments.add_argument("--prompts", type=Path, default=Path(__file__).with_name("held_out_prompts.toml"))
    arguments.add_argument("--per-category", type=int, default=6, help="maximum number of prompts of each")
    arguments.add_argument("--rounds", type=int, default=70, help="timed calls of each size")
    options = arguments.parse_args()
    groups = defaultdict[str, list[dict[int, Drafted]]](list)
    # All logits of the draft model are computed, and those that it would not compute are left out.
    with Session.open(
        options.main, options.draft, n_ctx=options.ctx, branches=64, draft_vocab="all", prompt_cache="off"
    ) as session:
        assert isinstance(session.draft, LlamaSequence)
        model = session.main.model
        for entry in select(load(options.prompts), per_category=options.per_category):
            note(str(entry))
            prompt = tokens_of(model, chat_text(model, entry.text))
            answer = answer_of(session, prompt, options.n)
            groups[entry.category].append(drafted(session.draft, prompt, answer))
    note("")
    costs = call_costs(options.draft, options.rounds)
    everything = [answer for group in groups.values() for answer in group]
    n_vocab = max(costs)
    agreed = {n: np.mean([ok for answer in everything for ok in answer[n].right]) for n in costs}
    rows = []
    for n, cost in costs.items():
        speeds = [
            speed([answer[n] for answer in group], pair, costs)
            / speed([answer[n_vocab] for answer in group], pair, costs)
            for group in groups.values()
            for pair in PAIRS
            if pair.draft is not None
        ]
        computed = np.mean([row for answer in everything for row in answer[n].rows]) / n_vocab
        loss = 100 * (agreed[n_vocab] - agreed[n])
        rows.append([n, f"{cost:.2f}", f"{computed:.2f}", f"{loss:.1f}", f"{geometric_mean(speeds):.3f}"])
    table(["first tokens", "time of a call", "share of rows", "loss, in points", "speed"], rows)
    print(f"{sum(len(answer[n_vocab].right) for answer in everything)} tokens")


if __name__ == "__main__":
    main()
