"""What a trained draft gains from more of main's texts: one model, trained on parts of what main wrote, measured on what was held out.

    python benchmarks/draft_curve.py --main main.gguf --folder draft.gguf.training

The folder is one that `specdec draft train` has left. Every part is read as many times, so that it is the texts that make the
difference.
"""

import time
from pathlib import Path

from common import parser, table

from spec_local.machine import default_threads
from spec_local.training import distil
from spec_local.training.cutting import from_scratch
from spec_local.training.distil import Plan
from spec_local.training.material import Material
from spec_local.training.model_shape import ModelShape

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

    material = Material(options.main, options.folder / "data", options.tokens)
    shape = ModelShape(len(material.kept), WIDTH, LAYERS, HEADS, HEADS, WIDTH // HEADS, N_FF)
    rows = []
    for part in options.parts:
        corpus = material.learned.beginning(part)
        n_steps = round(options.rounds * len(corpus.ids) / N_TOKENS)
        plan = Plan(n_steps=n_steps, n_tokens=N_TOKENS, rate=3e-3, measure_every=n_steps)
        begun = time.monotonic()
        outcome = distil.train(
            from_scratch(shape), shape, corpus, material.held_out, plan, threads=default_threads()
        )
        minutes = (time.monotonic() - begun) / 60
        found = outcome.measured
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
