"""Measure how often a head's draft tokens are the main model's, at every position of its answers.

    python benchmarks/head_acceptance.py MAIN.gguf HEAD.gguf [--max-tokens N] [--per-category N]
    python benchmarks/head_acceptance.py MAIN.gguf HEAD.gguf --cache CACHE

The main model answers the prompts of `specdec bench` at temperature 0; with `--cache`, the answers that are
kept there are used instead (see `learning.py --keep`). At each position of an answer, the
head drafts three tokens; the k-th one is counted if those before it are the main model's. In decoding,
positions that follow a rejected draft token are drafted at more often, so acceptance rates there are lower.
"""

import argparse
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from common import parser, table

from spec_local import GenerationSettings, SamplingSettings, Session, Text
from spec_local.bench import prompts
from spec_local.bench.runner import tokenize
from spec_local.core.calls import run
from spec_local.datastore.answer_store import answer_store_of
from spec_local.llama.heads.base import HeadSequence
from spec_local.llama.heads.choose import choose_head
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence

DEPTH = 3
N_CTX = 4096
_Answer = tuple[str, list[int], list[int]]  # category, prompt, and answer


def outcomes(main: Path, head: Path, answers: Sequence[_Answer]) -> Iterator[tuple[str, int, bool]]:
    """Yield category, number (from 0), and whether it is the main model's token, of each draft token."""
    model, draft = Model(main), Model(head)
    chosen = choose_head(model, draft)
    assert chosen
    context = open_sequence(model, n_ctx=N_CTX, hidden=chosen.hidden)
    (row,) = chosen.open([context])
    for category, prompt, answer in answers:
        tokens = [*prompt, *answer]
        context.truncate(0)
        row.truncate(0)
        for start in range(0, len(tokens), context.limits.max_tokens):
            part = tokens[start : start + context.limits.max_tokens]
            run(context.call(part, n_logits=0))
            states = context.states(range(len(part)))
            for i, token in enumerate(part, start):
                first = i + 1 - len(prompt)  # in the answer, of the tokens that are drafted after this one
                if 0 <= first < len(answer):
                    for depth, is_right in enumerate(drafted(row, tokens[: i + 1], answer[first:])):
                        yield category, depth, is_right
                row.receive(i, [token], states[i - start : i - start + 1])


def drafted(row: HeadSequence, history: Sequence[int], wanted: Sequence[int]) -> Iterator[bool]:
    """Yield whether each of successive draft tokens is the main model's, up to the first that is not."""
    unread = history[len(row.cached) :]
    for start in range(0, len(unread), row.limits.max_tokens):
        logits = run(
            row.call(
                unread[start : start + row.limits.max_tokens],
                n_logits=int(start + row.limits.max_tokens >= len(unread)),
            )
        )
    for depth, token in enumerate(wanted[:DEPTH]):
        is_right = int(np.argmax(logits[-1])) == token
        yield is_right
        if not is_right:
            break
        logits = run(row.call([token], [depth - 1], 1))
    row.commit(())


def _to_built_in(given: argparse.Namespace) -> list[_Answer]:
    """The main model's answers to the built-in prompts."""
    texts = []
    with Session.open(given.main, "none", n_ctx=N_CTX, prompt_cache="off") as session:
        settings = GenerationSettings(
            SamplingSettings(temperature=0), max_tokens=given.max_tokens, proposer="none"
        )
        chosen = prompts.select(prompts.load(), per_category=given.per_category)
        for prompt in tokenize(session.main.model, chosen):
            events = session.generate(prompt.tokens, settings)
            answer = chain.from_iterable(event.tokens for event in events if isinstance(event, Text))
            texts.append((prompt.prompt.category, list(prompt.tokens), list(answer)))
    return texts


def _kept(main: Path, cache: Path) -> list[_Answer]:
    os.environ["XDG_CACHE_HOME"] = str(cache.absolute())
    return [
        ("kept", each.tokens[: each.n_prompt].tolist(), each.tokens[each.n_prompt :].tolist())
        for each in answer_store_of(main).answers()
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("main", type=Path)
    options.add_argument("head", type=Path)
    options.add_argument("--max-tokens", type=int, default=96)
    options.add_argument("--per-category", type=int, default=6)
    options.add_argument("--cache", type=Path, help="folder of kept answers, instead of built-in prompts")
    given = options.parse_args()
    texts = _kept(given.main, given.cache) if given.cache else _to_built_in(given)
    tested: Counter[tuple[str, int]] = Counter()
    accepted: Counter[tuple[str, int]] = Counter()
    for category, depth, is_right in outcomes(given.main, given.head, texts):
        for name in (category, "all"):
            tested[name, depth] += 1
            accepted[name, depth] += is_right
    names = [*dict.fromkeys(name for name, _ in tested if name != "all"), "all"]
    rows = [
        [name, *(f"{accepted[name, k] / max(1, tested[name, k]):.3f}" for k in range(DEPTH)), tested[name, 0]]
        for name in names
    ]
    table(["category", "first", "second", "third", "positions"], rows)


if __name__ == "__main__":
    main()
