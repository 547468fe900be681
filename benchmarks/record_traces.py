r"""Record what a draft model would have drafted along answers of the main model, for `simulate.py`.

    python benchmarks/record_traces.py --main main.gguf --draft draft.gguf
    python benchmarks/record_traces.py --main main.gguf --draft draft.gguf \
        --prompts benchmarks/held_out_prompts.toml --output benchmarks/held_out_traces.json

The main model answers prompts by plain decoding at temperature 0. Then the draft model
evaluates each prompt and answer once, and again with only the last tokens of the prompt (`WINDOWS`). For
every token of the answer, a trace records whether it was the draft model's most probable token, and the
probability of the latter. Tokens are numbered in the order in which they first occur in a trace: a replay
depends only on which tokens are equal.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from common import chat_text, note, parser, tokens_of
from numpy.typing import NDArray

from spec_local import GenerationSettings, SamplingSettings, Session, Text
from spec_local.bench.prompts import load, select
from spec_local.core.calls import run
from spec_local.llama.draft_vocabulary import DraftVocabulary, usual_first
from spec_local.llama.sequence import LlamaSequence
from spec_local.policies.base import WINDOWS

TRACES = Path(__file__).with_name("traces.json")


def answer_of(session: Session, prompt: Sequence[int], n: int, policy: str = "off") -> list[int]:
    """The main model's answer, up to n tokens, without the end token."""
    settings = GenerationSettings(sampling=SamplingSettings(temperature=0), max_tokens=n, policy=policy)
    answer: list[int] = []
    for event in session.generate(prompt, settings):
        if isinstance(event, Text):
            answer += event.tokens
    return answer


def outputs_along(
    draft: LlamaSequence, prompt: Sequence[int], answer: Sequence[int]
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield, for each token of the answer, the token before it and the draft model's logits after that.

    The logits, (n_vocab,), are valid until the next ones.
    """
    draft.truncate(0)
    text = [*prompt, *answer]
    start = len(prompt) - 1
    for first in range(0, start, draft.limits.max_tokens):
        run(draft.call(text[first : min(first + draft.limits.max_tokens, start)], n_logits=0))
    for first in range(start, len(text) - 1, draft.limits.max_logits):
        chunk = text[first : min(first + draft.limits.max_logits, len(text) - 1)]
        yield from zip(chunk, run(draft.call(chunk)), strict=True)


def predict(
    draft: LlamaSequence, prompt: Sequence[int], answer: Sequence[int], known: Sequence[int]
) -> tuple[list[int], list[float]]:
    """The draft model's most probable token at each position of the answer, and its probability.

    known: tokens that it may draft although they are not among the first of its vocabulary.
    """
    vocabulary = draft.model.vocabulary
    n_vocab = draft.limits.n_vocab
    drafted = DraftVocabulary(n_vocab, usual_first(n_vocab) or n_vocab, [vocabulary.eos, vocabulary.eot])
    drafted.read(known)
    best: list[int] = []
    confidences: list[float] = []
    for token, logits in outputs_along(draft, prompt, answer):
        drafted.read([token])
        ids = np.arange(draft.limits.n_vocab) if drafted.tokens is None else drafted.tokens
        row = logits[ids]
        best.append(int(ids[row.argmax()]))
        confidences.append(float(1.0 / np.exp(row - row.max(), dtype=np.float64).sum()))
    return best, confidences


def predictions(
    draft: LlamaSequence, prompt: Sequence[int], answer: Sequence[int], known: Sequence[int]
) -> dict[str, list[int]]:
    """What a trace records of the draft model; see `predict`."""
    best, confidences = predict(draft, prompt, answer, known)
    return {
        "right": [int(drafted == token) for drafted, token in zip(best, answer, strict=True)],
        "per_mille": [round(1000 * c) for c in confidences],
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--main", required=True, help="GGUF file of the main model")
    arguments.add_argument("--draft", required=True, help="GGUF file of the draft model")
    arguments.add_argument("--prompts", type=Path, help="TOML file; default: the built-in prompts")
    arguments.add_argument("--per-category", type=int, default=6, help="prompts of each category")
    arguments.add_argument("--tokens", type=int, default=128, help="maximum number of tokens in an answer")
    arguments.add_argument("--output", type=Path, default=TRACES)
    options = arguments.parse_args()

    traces = []
    # All logits of the draft model are computed, and those that it would not compute are left out.
    with Session.open(
        options.main, options.draft, n_ctx=2048, branches=64, draft_vocab="all", prompt_cache="off"
    ) as session:
        assert session.draft
        model = session.main.model
        for entry in select(load(options.prompts), per_category=options.per_category):
            note(str(entry))
            prompt = tokens_of(model, chat_text(model, entry.text))
            answer = answer_of(session, prompt, options.tokens)
            number = {token: i for i, token in enumerate(dict.fromkeys([*prompt, *answer]))}
            parts = {window: [prompt[0], *prompt[-window:]] for window in WINDOWS if window < len(prompt) - 1}
            traces.append(
                {
                    "category": entry.category,
                    "name": entry.name,
                    "prompt": [number[token] for token in prompt],
                    "answer": [number[token] for token in answer],
                    **predictions(session.draft, prompt, answer, prompt),
                    "windows": {
                        window: predictions(session.draft, part, answer, prompt)
                        for window, part in parts.items()
                    },
                }
            )
    note("")
    lines = ",\n".join(json.dumps(trace, separators=(",", ":")) for trace in traces)
    options.output.write_text(f"[\n{lines}\n]\n")
    print(f"{len(traces)} traces, {sum(len(t['answer']) for t in traces)} tokens: {options.output}")


if __name__ == "__main__":
    main()
