"""Settings of a training run, and the journal from which it resumes."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ConfigDict, ValidationError

from spec_local.datastore import copies
from spec_local.errors import InvalidRequest
from spec_local.llama.devices import OFFLOADED, Offload
from spec_local.system.files import replacing, sha256
from spec_local.system.json_file import read_record
from spec_local.training.prompts import TrainingPrompt, UserTexts, synthetic_prompt
from spec_local.validation import describe

GENERATION_SHARE = 0.6
"""Share of the time for generating training data; training gets the rest."""
READING_SHARE = 0.2
"""Share of the time for reading the user's answers, in a run that learns from them."""
FURTHER_SHARE = 0.1
"""Share of the time for answering the user's prompts again, in such a run."""
SELF_GENERATED = "self-generated"
"""Category of the prompts that the main model generates."""
_JOURNAL = "journal.json"
_MAX_BYTES = 1 << 24  # of the journal; one of a day has 100 kB
_USER_ROUNDS = 4  # how often a user prompt is used; the answers differ in temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """What a run does at most; in tokens unless it says otherwise.

    n_parallel: texts that are generated at the same time; more are hardly faster. answer: of a generated
    answer. shard, own_shard: of general data and of the user's answers, after which a shard is written, so
    that a killed run does little again. own: of the user's latest answers and their prompts, ten minutes of
    reading on a laptop. own_prompt, own_answer: of one of them whose states are kept. built_in: of an answer
    to a built-in prompt. epochs: times that the training data is read; more has not helped. own_epochs: times
    that the user's answers are read, each time with others beside them. evaluations: during the training.
    unsaved: seconds of training between checkpoints.
    """

    n_parallel: int = 64
    answer: int = 320
    shard: int = 32_768
    own_shard: int = 16_384
    own: int = 200_000
    own_prompt: int = 512
    own_answer: int = 1024
    built_in: int = 64
    epochs: int = 8
    own_epochs: int = 24
    evaluations: int = 24
    unsaved: float = 60.0


LIMITS = RunLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of a training run.

    main, target: files. minutes: time for everything but the report, including the generation time of earlier
    runs; tokens: number of tokens to generate instead, after which training takes as long as it needs.
    continued: a head to train further, instead of a new one. learns: the run learns from the user's own
    answers. general: folder with training data that exists already, instead of generating it. n_drafted:
    number of tokens that the head can draft; None: as many as the main model's text needs.
    max_bytes: maximum size of the training data. seed: random seed for prompts, sampling and training.
    device: PyTorch device. threads: number of threads; None: one per physical core. offload: where the
    main model runs. limits: what is done at most.
    """

    main: Path
    target: Path
    minutes: float = 60.0
    tokens: int | None = None
    continued: Path | None = None
    learns: bool = False
    general: Path | None = None
    n_drafted: int | None = None
    max_bytes: int = 20 * 10**9
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    offload: Offload = OFFLOADED
    limits: RunLimits = LIMITS

    @property
    def folder(self) -> Path:
        """Folder of the training data and everything else from which a later run resumes."""
        return _folder(self.target)

    @property
    def checkpoint(self) -> Path:
        """File with the state of the training."""
        return self.folder / copies.CHECKPOINT

    @property
    def own(self) -> Path:
        """Folder of what is made from the user's own answers; once it is gone, they have been deleted."""
        return self.folder / copies.OWN

    @property
    def generation_seconds(self) -> float:
        """Time for generating training data; infinite if a number of tokens is given."""
        return float("inf") if self.tokens else GENERATION_SHARE * self._seconds

    @property
    def training_seconds(self) -> float:
        """Time for training; infinite if a number of tokens is given."""
        if self.tokens:
            return float("inf")
        return self._seconds if self.general else (1 - GENERATION_SHARE) * self._seconds

    @property
    def further_seconds(self) -> float:
        """Time for answering the user's prompts again; infinite if a number of tokens is given."""
        return float("inf") if self.tokens else FURTHER_SHARE * self.minutes * 60

    @property
    def _seconds(self) -> float:
        """Time for generating and training."""
        return self.minutes * 60 * (1 - READING_SHARE - FURTHER_SHARE if self.learns else 1)


@dataclass(slots=True)
class Journal:
    """The progress of a run, from which it resumes.

    Attributes:
        settings: settings that must be the same in every run.
        generation_seconds: time spent on data generation so far.
        n_tokens, n_bytes: amount of data generated so far, including unfinished answers that were dropped.
        generator: name of the main model's copy that generates the data, "main" for its own file; empty: not
            measured yet.
        data: what the hyperparameters are for: size of the training data and of the vocabulary, the last of
            the user's answers, and the SHA-256 of the head that is continued.
        hyperparameters: hyperparameters of the training; empty: not set yet.
        curve: number of tokens read and `Evaluation`, for each evaluation during training.
        general: folder of training data that was used instead of generating it; empty: none was.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    settings: dict[str, Any]
    generation_seconds: float = 0.0
    n_tokens: int = 0
    n_bytes: int = 0
    generator: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)
    general: str = ""

    def save(self, recipe: Recipe) -> None:
        with replacing(recipe.folder / _JOURNAL) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


@contextlib.contextmanager
def open_journal(recipe: Recipe) -> Iterator[Journal]:
    """Load a recipe's journal, locked while the block runs.

    Raises:
        InvalidRequest: another run has locked it, or it belongs to another main model or other settings.
        OSError: the folder cannot be written, or the journal not be read.
    """
    recipe.folder.mkdir(parents=True, exist_ok=True)
    settings = {"main": sha256(recipe.main), "seed": recipe.seed}
    try:
        with FileLock(recipe.folder / "lock", timeout=0):
            journal = _load(recipe.folder / _JOURNAL, settings)
            changed = [name for name in settings if journal.settings.get(name) != settings[name]]
            if changed:
                raise InvalidRequest(
                    f"{recipe.folder} was started with another {', '.join(changed)}: "
                    "use the same, delete the folder, or give another `target`"
                )
            yield journal
    except Timeout:
        raise InvalidRequest(f"another run is using {recipe.folder}: wait for it, or stop it") from None


def _load(path: Path, settings: dict[str, Any]) -> Journal:
    try:
        return read_record(path, Journal, _MAX_BYTES)
    except FileNotFoundError:
        return Journal(settings)
    except ValidationError as error:
        raise InvalidRequest(
            f"{path} is damaged ({describe(error)}): delete it; the generated training data is kept"
        ) from None


def general_data(head: Path) -> Path | None:
    """Return the folder of the data that a head was trained on; None: it is not on this machine."""
    folder = _folder(head)
    found = [folder / "data"]
    with contextlib.suppress(OSError, InvalidRequest):
        if elsewhere := _load(folder / _JOURNAL, {}).general:
            found.append(Path(elsewhere))
    return next((each for each in found if any(each.glob("*.npz"))), None)


def _folder(head: Path) -> Path:
    return head.parent / f"{head.name}{copies.TRAINING}"


def prompt_source(seed: int, user_texts: UserTexts) -> Callable[[int, Sequence[str]], TrainingPrompt]:
    """Return the `next_prompt` function for `DataGenerator`: from a number and passages to a prompt.

    A quarter of the prompts are generated by the main model; the others are synthetic or, while there are
    some, the user's.
    """

    def prompt(i: int, answers: Sequence[str]) -> TrainingPrompt:
        block, kind = divmod(i, 4)
        if kind == 3:
            return TrainingPrompt(
                SELF_GENERATED, "", False
            )  # its text determines later whether it is held out
        if kind == 0 and block < _USER_ROUNDS * len(user_texts.prompts):
            return user_texts.prompts[block % len(user_texts.prompts)]
        passages = user_texts.passages if user_texts.passages and block % 2 else answers
        return synthetic_prompt(seed, 3 * block + kind, passages)

    return prompt
