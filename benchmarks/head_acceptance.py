"""Compare heads by the share of positions where their first draft token is accepted at temperature 0.

    python benchmarks/head_acceptance.py --main MAIN.gguf --cache CACHE HEAD.gguf HEAD-learned.gguf

The texts are the answers that are kept in a cache (see `learning.py --keep`), none of which a head may have
been trained on, and the main model's answers to the built-in prompts. Every position of an answer counts,
also those that no step of decoding begins with. The second figure is the number of tokens that a step with
three draft tokens gives, if it may begin anywhere.
"""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import note, parser, table

from spec_local.datastore.answer_store import answer_store_of
from spec_local.llama.model import Model
from spec_local.system.machine import default_threads
from spec_local.training import shards
from spec_local.training.built_in import answers_to_built_in
from spec_local.training.dataset import OWN, Dataset
from spec_local.training.distillation import Hyperparameters, Run
from spec_local.training.evaluation import Evaluation
from spec_local.training.head_file import read_head
from spec_local.training.head_shape import head_shape, layers_read
from spec_local.training.main_weights import read_main_weights
from spec_local.training.material import BUILT_IN
from spec_local.training.own_answers import read_again
from spec_local.training.shards import Document, Shard


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--main", type=Path, required=True, help="GGUF file of the main model")
    arguments.add_argument("--cache", type=Path, required=True, help="folder of the kept answers")
    arguments.add_argument("--threads", type=int, default=default_threads())
    arguments.add_argument("heads", type=Path, nargs="+", help="GGUF files of heads")
    options = arguments.parse_args()
    os.environ["XDG_CACHE_HOME"] = str(options.cache.absolute())
    answers = answer_store_of(options.main).answers()
    header = Model(options.main, weights=False)
    layers = layers_read(header.n_layers)
    folder = options.cache / "states"
    model = Model(options.main)
    threads = options.threads
    texts = {
        OWN: read_again(answers, model, folder / "own", layers=layers, threads=threads, on_progress=_shown),
        BUILT_IN: answers_to_built_in(
            model, folder / "built-in", layers=layers, threads=threads, on_progress=_shown
        ),
    }
    model.close()
    rows = []
    for path in options.heads:
        note(path.name)
        found = _evaluations(header, path, texts, options.threads)
        rows.append([path.name, *(part for each in found for part in _figures(each))])
    note("")
    columns = [f"{name}: {figure}" for name in texts for figure in ("first", "tokens a step")]
    table(["head", *columns], rows)


def _evaluations(main: Model, head: Path, texts: dict[str, list[Document]], threads: int) -> list[Evaluation]:
    trained, n_vocab = read_head(head, main), main.vocabulary.n_tokens
    documents = [document for each in texts.values() for document in each]
    with tempfile.TemporaryDirectory() as folder:
        # A data set needs documents of both kinds; all are evaluated here.
        shards.write(Path(folder), 0, Shard([_kept(documents[0], False), _kept(documents[0], True)], 0))
        dataset = Dataset(Path(folder), n_vocab, (len(trained.drafted),))
        dataset.draft(trained.drafted, n_vocab)
        weights = read_main_weights(main, trained.drafted)
        shape = head_shape(main.n_embd)
        run = Run(trained.weights, shape, weights, dataset, Hyperparameters(n_steps=1), threads=threads)
        return [run.evaluate_weights(run.best, each) for each in texts.values()]


def _kept(document: Document, held_out: bool) -> Document:
    return replace(document, held_out=held_out)


def _figures(evaluation: Evaluation) -> list[str]:
    return [f"{evaluation.overall.agreement:.3f}", f"{1 + np.cumprod(evaluation.chain).sum():.2f}"]


def _shown(n_done: int, n: int) -> None:
    note(f"{n_done} of {n}")


if __name__ == "__main__":
    main()
