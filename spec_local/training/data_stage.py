"""The first stage of a training: generate data until a limit of time, tokens or disk space is reached."""

import time
from collections.abc import Callable
from pathlib import Path

from spec_local.llama.fitting import load_fitting
from spec_local.llama.model import Model
from spec_local.training import precision
from spec_local.training.events import Event, Generating, GenerationRate, Stage
from spec_local.training.generation import LONGEST_CALL, DataGenerator, DataOptions, GenerationProgress
from spec_local.training.parallel_rows import texts_that_fit
from spec_local.training.prompts import UserTexts
from spec_local.training.recipe import Journal, Recipe, prompt_source

_N_CTX = 768  # maximum number of tokens in a prompt and its answer


class DataStage:
    """Generates the training data of a recipe, after what earlier runs generated.

    Args:
        layers: the layers whose outputs are recorded.
    """

    def __init__(
        self, recipe: Recipe, journal: Journal, layers: tuple[int, ...], on_progress: Callable[[Event], None]
    ) -> None:
        self._recipe, self._journal, self._layers = recipe, journal, layers
        self._on_progress = on_progress

    def run(self, user_texts: UserTexts) -> None:
        """Generate until there is enough data; nothing if there is."""
        recipe, journal = self._recipe, self._journal
        if self._has_enough():
            self._delete_copies()  # in case an earlier run was killed before this
            return
        started = time.monotonic()
        source = self._fastest_copy()
        self._on_progress(Stage("generating training data"))
        n_parallel = self._n_parallel(source)
        model = load_fitting(source, recipe.offload, n_parallel * _N_CTX)
        generator = DataGenerator(
            model,
            recipe.folder / "data",
            prompt_source(recipe.seed, user_texts),
            DataOptions(
                layers=self._layers,
                n_parallel=n_parallel,
                n_ctx=_N_CTX,
                max_tokens=recipe.limits.answer,
                shard_tokens=recipe.limits.shard,
                seed=recipe.seed,
                threads=recipe.threads,
            ),
        )
        running = generator.run()
        n_shards, last = -1, time.monotonic()
        journal.generation_seconds += last - started
        try:
            for progress in running:
                now = time.monotonic()
                journal.generation_seconds += min(now - last, LONGEST_CALL)
                last = now
                journal.n_tokens, journal.n_bytes = progress.n_tokens, progress.n_bytes
                if progress.n_shards != n_shards:  # time counts only once its data is on disk
                    journal.save(recipe)
                    n_shards = progress.n_shards
                if self._has_enough():
                    break
                self._on_progress(Generating(progress, self._seconds_left(progress)))
        finally:
            running.close()
            journal.save(recipe)
        model.close()
        self._delete_copies()

    def _has_enough(self) -> bool:
        """Return whether a limit of time, disk space or tokens has been reached, also in an earlier run."""
        recipe, journal = self._recipe, self._journal
        return (
            journal.generation_seconds >= recipe.generation_seconds
            or journal.n_bytes >= recipe.max_bytes
            or (recipe.tokens is not None and journal.n_tokens >= recipe.tokens)
        )

    def _seconds_left(self, progress: GenerationProgress) -> float:
        """Time until there is enough data."""
        recipe = self._recipe
        if recipe.tokens:
            return (recipe.tokens - progress.n_tokens) / max(progress.rate, 1e-9)
        return recipe.generation_seconds - self._journal.generation_seconds

    def _fastest_copy(self) -> Path:
        """Return the main model or its fastest copy, measured once."""
        recipe, journal = self._recipe, self._journal
        known = recipe.main if journal.generator == "main" else recipe.folder / journal.generator
        if journal.generator and known.exists():
            return known
        self._delete_copies()  # a killed run may have left a partial copy
        self._on_progress(Stage("measuring"))
        source = precision.fastest_copy(
            recipe.main,
            recipe.folder,
            n_parallel=self._n_parallel(recipe.main),
            threads=recipe.threads,
            offload=recipe.offload,
            on_progress=lambda kind, rate: self._on_progress(GenerationRate(kind, rate)),
        )
        journal.generator = "main" if source == recipe.main else source.name
        journal.save(recipe)
        return source

    def _delete_copies(self) -> None:
        for copy in self._recipe.folder.glob("main-*.gguf"):
            copy.unlink()

    def _n_parallel(self, path: Path) -> int:
        model = Model(path, weights=False)
        n = texts_that_fit(model, _N_CTX, self._recipe.limits.n_parallel, self._recipe.offload)
        model.close()
        return n
