"""What a trained draft gains from more of main's texts: one model, trained on parts of what main wrote, measured on what was held out.

    python benchmarks/draft_curve.py --main main.gguf --folder draft.gguf.training

The folder is one that `specdec draft train` has left. Every part is read as many times, so that it is the texts that make the
difference; the whole is read for longer, too, to see what reading alone brings.
"""

import time
from pathlib import Path

import numpy as np
from common import parser, table

from spec_local.llama.context import default_threads
from spec_local.llama.model import Model
from spec_local.training import distil, scoring, shards
from spec_local.training.corpus import Reader, build
from spec_local.training.cutting import from_scratch
from spec_local.training.distil import Plan
from spec_local.training.export import spellings
from spec_local.training.model_shape import ModelShape
from spec_local.training.trimming import choose

WIDTH, LAYERS, HEADS, N_FF = 256, 2, 4, 704
N_TOKENS = 4096  # of a step


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--main", type=Path, required=True)
    arguments.add_argument("--folder", type=Path, required=True)
    arguments.add_argument("--parts", type=float, nargs="+", default=[0.125, 0.25, 0.5, 1.0])
    arguments.add_argument("--rounds", type=float, default=3.0, help="times that every text is read")
    arguments.add_argument("--tokens", type=int, default=8192, help="that the draft knows")
    options = arguments.parse_args()

    documents = [d for shard in shards.read(options.folder / "data") for d in shard.documents]
    learned = [d for d in documents if not d.held_out]
    model = Model(options.main, weights=False)
    counts = sum(np.bincount(d.tokens, minlength=model.vocabulary.n_tokens) for d in learned)
    model.close()
    kept = choose(options.main, np.asarray(counts), options.tokens)
    reader = Reader(spellings(options.main, kept), kept, len(kept))
    held_out = build([d for d in documents if d.held_out], reader)
    shape = ModelShape(len(kept), WIDTH, LAYERS, HEADS, HEADS, WIDTH // HEADS, N_FF)
    rows = []
    for part in options.parts:
        corpus = build(learned[: round(part * len(learned))], reader)
        n_steps = round(options.rounds * len(corpus.ids) / N_TOKENS)
        plan = Plan(n_steps=n_steps, n_tokens=N_TOKENS, rate=3e-3, measure_every=n_steps)
        begun = time.monotonic()
        outcome = distil.train(from_scratch(shape), shape, corpus, held_out, plan, threads=default_threads())
        minutes = (time.monotonic() - begun) / 60
        found = scoring.measure(outcome.weights, shape, held_out)
        n_sure, right = found.sure[0.7]
        rows.append(
            [
                f"{len(corpus.places):,}",
                f"{outcome.n_tokens:,}",
                f"{minutes:.1f}",
                f"{found.all.agreement:.3f}",
                f"{found.all.acceptance:.3f}",
                f"{n_sure / found.all.n:.3f}",
                f"{right:.3f}",
            ]
        )
        print(rows[-1], flush=True)
    head = [
        "main's tokens",
        "read in all",
        "minutes",
        "foretold",
        "accepted at T=1",
        "sure (> 0.7)",
        "right, if sure",
    ]
    table(head, rows)


if __name__ == "__main__":
    main()
