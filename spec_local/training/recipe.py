"""Settings of a training run, and the journal from which it resumes."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from spec_local.errors import InvalidRequest
from spec_local.files import replacing, sha256
from spec_local.training.prompts import Prompt, UserTexts, synthetic_prompt

Size = Literal["tiny", "small"]

N_VOCAB: Mapping[Size, int] = {"tiny": 8192, "small": 12288}
"""Tokens of a draft model."""
WIDTHS: Mapping[Size, tuple[int, int]] = {"tiny": (256, 4), "small": (384, 6)}
"""Width and attention heads of a new draft model."""
GENERATION_SHARE = 0.6
"""Of the time, for generating training data."""
SELECTION_SHARE = 0.08
"""Of the time, for the short runs that select the model; training gets the rest."""
SELF_GENERATED = "self-generated"
"""Category of the prompts that the main model generates."""
_JOURNAL = "journal.json"
_USER_ROUNDS = 4  # times that a user prompt is asked; at other temperatures it gets other answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to train, and how.

    main, target: files. minutes: for everything but the report, including the generation time of earlier
    runs. seed: of prompts, sampling and training. device: PyTorch's. threads: None: one per physical core.
    gpu_layers: of the main model.
    """

    main: Path
    target: Path
    minutes: float = 60.0
    size: Size = "small"
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    gpu_layers: int = -1

    @property
    def folder(self) -> Path:
        """Folder of the training data and everything else that a later run resumes from."""
        return self.target.parent / f"{self.target.name}.training"


@dataclass(slots=True)
class Journal:
    """How far a run has come.

    Attributes:
        settings: what must be the same in every run.
        generation_seconds: spent so far.
        generator: name of the main model's copy that generates, "main" for its own file; empty: not measured
            yet.
        speedups: expected of each candidate model that was tried.
        selected: name of the best candidate; empty: not selected yet.
        hyperparameters: of the training; empty: not set yet.
        curve: tokens read and `Evaluation` of each evaluation during training.
    """

    settings: dict[str, Any]
    generation_seconds: float = 0.0
    generator: str = ""
    speedups: dict[str, float] = field(default_factory=dict)
    selected: str = ""
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)

    def save(self, recipe: Recipe) -> None:
        with replacing(recipe.folder / _JOURNAL) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


@contextlib.contextmanager
def open_journal(recipe: Recipe) -> Iterator[Journal]:
    """Load a recipe's journal, locked while the block runs.

    Raises:
        InvalidRequest: another run holds it, or it belongs to another main model or other settings.
        OSError: the folder cannot be written.
    """
    recipe.folder.mkdir(parents=True, exist_ok=True)
    settings = {"main": sha256(recipe.main), "size": recipe.size, "seed": recipe.seed}
    try:
        with FileLock(recipe.folder / "lock", timeout=0):
            journal = _load(recipe.folder / _JOURNAL, settings)
            changed = [name for name in settings if journal.settings.get(name) != settings[name]]
            if changed:
                raise InvalidRequest(
                    f"{recipe.folder} was started with another {', '.join(changed)}: "
                    "use the same, delete the folder, or give another --output"
                )
            yield journal
    except Timeout:
        raise InvalidRequest(f"another run is using {recipe.folder}: wait for it, or stop it") from None


def _load(path: Path, settings: dict[str, Any]) -> Journal:
    if not path.exists():
        return Journal(settings)
    try:
        return Journal(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InvalidRequest(
            f"{path} is damaged ({error}): delete it; the generated training data is kept"
        ) from None


def prompt_source(seed: int, user_texts: UserTexts) -> Callable[[int, Sequence[str]], Prompt]:
    """Return the stream of prompts: by number, given passages to ask about, for `DataGenerator`.

    Half of them are left to the main model; the other half are synthetic and, while there are some, the
    user's.
    """

    def prompt(i: int, answers: Sequence[str]) -> Prompt:
        block, kind = divmod(i, 4)
        if kind >= 2:
            return Prompt(SELF_GENERATED, "", False)  # its text will decide whether it is held out
        if kind == 0 and block < _USER_ROUNDS * len(user_texts.prompts):
            return user_texts.prompts[block % len(user_texts.prompts)]
        passages = user_texts.passages if user_texts.passages and block % 2 else answers
        return synthetic_prompt(seed, 2 * block + kind, passages)

    return prompt
