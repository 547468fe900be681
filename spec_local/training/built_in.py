"""The main model's answers to the prompts of `specdec bench`: texts that no head was trained for."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from spec_local.bench import prompts
from spec_local.bench.prompts import Prompt as BenchPrompt
from spec_local.llama.model import Model
from spec_local.training import shards
from spec_local.training.generation import DataGenerator
from spec_local.training.prompts import TrainingPrompt
from spec_local.training.recipe import LIMITS
from spec_local.training.shards import Document

_N_CTX, _N_PARALLEL = 4096, 4  # the longest prompt has some thousand tokens; more rows take more memory
_DONE = "complete"  # file that exists once all prompts have been answered


def answers_to_built_in(
    model: Model,
    folder: Path,
    *,
    layers: tuple[int, ...],
    questions: Sequence[BenchPrompt] | None = None,
    max_tokens: int = LIMITS.built_in,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Document]:
    """Return the main model's answers at temperature 0, which an earlier run may have generated.

    Args:
        model: the main model.
        folder: of the shards; only for this main model.
        layers: the layers whose outputs are recorded.
        questions: by default, the prompts of `specdec bench`.
        max_tokens: of an answer.
        on_progress: called with the number of finished answers, and of all.

    Raises:
        SpecLocalError: the model cannot answer.
        OSError: a shard cannot be written.
    """
    all_questions = [TrainingPrompt(each.category, each.text, True) for each in questions or prompts.load()]
    if not (folder / _DONE).exists():
        shutil.rmtree(folder, ignore_errors=True)

        def prompt(i: int, answers: Sequence[str]) -> TrainingPrompt | None:
            return all_questions[i] if i < len(all_questions) else None

        generator = DataGenerator(
            model,
            folder,
            prompt,
            layers=layers,
            n_parallel=_N_PARALLEL,
            n_ctx=model.n_ctx(_N_CTX),
            max_tokens=max_tokens,
            temperatures=(0.0,),
            threads=threads,
        )
        for progress in generator.run():
            on_progress(progress.n_documents, len(all_questions))
        (folder / _DONE).touch()
    return shards.read_documents(folder)
