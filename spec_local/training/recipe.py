"""What a draft is made from and how, and how far that has come: enough to go on after a kill."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from spec_local.errors import InvalidRequest
from spec_local.files import replacing, sha256
from spec_local.training.questions import FromFiles, Question, question

Size = Literal["tiny", "small"]

TOKENS: Mapping[Size, int] = {"tiny": 8192, "small": 12288}
"""How many of main's tokens a draft knows."""
WRITING = 0.6
"""Of the time, what main gets to write; most of what is left goes into learning."""
RACE = 0.08
"""Of the time, what the short runs get that decide which model is trained."""
WIDTHS: Mapping[Size, tuple[int, int]] = {"tiny": (256, 4), "small": (384, 6)}
"""Width and heads of a model that is made anew."""
MAINS = "asked by main"
"""The category of questions that main asks itself."""
_JOURNAL = "journal.json"
_OWN_ROUNDS = (
    4  # times that a question of the user's own is asked: at other temperatures it has other answers
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a person asks for.

    main, target: files. texts: prompts and documents of the user's own. minutes: for all but the report; what main wrote in
    runs that it goes on from counts. seed: of questions, sampling and learning. device: of the learning. threads: None: one
    per physical core.
    gpu_layers: of main, while it writes.
    """

    main: Path
    target: Path
    texts: Sequence[Path] = ()
    minutes: float = 60.0
    size: Size = "small"
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    gpu_layers: int = -1

    @property
    def folder(self) -> Path:
        """Where the shards and all else are that a later run goes on from."""
        return self.target.parent / f"{self.target.name}.training"


@dataclass(slots=True)
class Journal:
    """How far a run has come.

    Attributes:
        order: what must stay the same from run to run.
        spent: seconds by what they went into.
        rates: tokens a second that each copy of main would write.
        writer: name of the copy of main that writes, "main" where main itself does; empty before that is known.
        gains: what each model that was tried would gain.
        chosen: name of the model that won; empty before.
        plan: of the learning, as `distil.Plan` has it; empty before.
        curve: what was measured while learning: `scoring.Figures`, and the tokens read until then.
    """

    order: dict[str, Any]
    spent: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    writer: str = ""
    gains: dict[str, float] = field(default_factory=dict)
    chosen: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)

    def save(self, recipe: Recipe) -> None:
        with replacing(recipe.folder / _JOURNAL) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


@contextlib.contextmanager
def journal(recipe: Recipe) -> Iterator[Journal]:
    """The journal of a recipe, its own while the block runs.

    Raises:
        InvalidRequest: another run is at work there, or an earlier one was of another main or settings.
        OSError: the folder cannot be written.
    """
    recipe.folder.mkdir(parents=True, exist_ok=True)
    path = recipe.folder / _JOURNAL
    order = {"main": sha256(recipe.main), "size": recipe.size, "seed": recipe.seed}
    try:
        with FileLock(recipe.folder / "lock", timeout=0):
            found = _found(path, order)
            if found.order != order:
                changed = ", ".join(name for name in order if found.order.get(name) != order[name])
                raise InvalidRequest(
                    f"{recipe.folder} was begun with another {changed}: give the same, delete the folder, or give another --output"
                )
            yield found
    except Timeout:
        raise InvalidRequest(f"another run is at work in {recipe.folder}: wait for it, or stop it") from None


def _found(path: Path, order: dict[str, Any]) -> Journal:
    if not path.exists():
        return Journal(order)
    try:
        return Journal(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"{path} is damaged ({error}): delete it; what main has written stays") from None


def asking(seed: int, own: FromFiles) -> Callable[[int, Sequence[str]], Question]:
    """The stream of questions: half of them main's own, half built-in ones and, as long as there are some, the user's.

    Returns:
        the question of a number, for `production.Production`.
    """

    def ask(i: int, written: Sequence[str]) -> Question:
        turn, kind = divmod(i, 4)
        if kind >= 2:
            return Question(MAINS, "", False)  # what is asked decides whether it is held out
        if kind == 0 and turn < _OWN_ROUNDS * len(own.questions):
            return own.questions[turn % len(own.questions)]
        return question(seed, 2 * turn + kind, own.passages if own.passages and turn % 2 else written)

    return ask
