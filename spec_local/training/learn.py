"""One round of training on the user's answers, in a process of its own, for a server that is idle.

The process reads one line of JSON from its standard input: ``main``, ``draft`` (the head to continue, or
null), ``threads``, ``offload`` and ``minutes``. It writes its progress as lines of JSON to its standard
output, ends at the end of its standard input, and resumes where it was when it is started again.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spec_local.datastore.answer_store import answer_store_of
from spec_local.errors import SpecLocalError
from spec_local.llama.devices import Offload
from spec_local.models.head_versions import Data, HeadVersions
from spec_local.training import material, pipeline
from spec_local.training.dataset import OWN
from spec_local.training.distillation import TrainingProgress
from spec_local.training.events import Answering, Event, Generating, Stage
from spec_local.training.prompts import UserTexts
from spec_local.training.recipe import Recipe, general_data

LEAST_GAIN = 0.01
"""Rise of the acceptance rate on held-out answers from which on a new version is used."""
_NEW_HEAD = 6  # times the minutes of a round: the first head learns everything, not only the user's answers


def learn(options: Mapping[str, Any], send: "Sender") -> None:
    """Train a head on the answers that are kept, and add it to the versions if it is better.

    Raises:
        SpecLocalError: it cannot be trained; there are too few answers.
        OSError: the disk is full.
    """
    main, draft = Path(options["main"]), options["draft"] and Path(options["draft"])
    versions = HeadVersions(main)
    target = versions.folder / "training" / "head.gguf"
    earlier = [*_line(draft, versions), *([target] if versions.last_round else [])]
    recipe = Recipe(
        main=main,
        target=target,
        minutes=options["minutes"] * (1 if draft else _NEW_HEAD),
        continued=draft,
        learns=True,
        general=next(filter(None, map(general_data, earlier)), None),
        threads=options["threads"],
        offload=Offload.parse(options["offload"]),
    )
    material.check(recipe)
    head = pipeline.run(recipe, UserTexts(), send.progress, answer_store_of(main))
    learned = head.learned
    assert learned
    names: list[tuple[Data, str]] = [("user", OWN), ("built_in", material.BUILT_IN)]
    before, after = (
        {data: found[name].overall.agreement for data, name in names if name in found}
        for found in (learned.before, learned.after)
    )
    outcome: dict[str, Any] = {"before": before, "after": after, "last_answer": learned.last_answer}
    recipe.checkpoint.unlink(missing_ok=True)  # the next round starts from a version
    if before and after["user"] < before["user"] + LEAST_GAIN:
        versions.end_round(learned.last_answer)
        head.path.unlink()
        why = f"acceptance on your held-out answers rose by less than {LEAST_GAIN:.0%}"
        send(event="unchanged", why=why, **outcome)
        return
    added = versions.add(head.path, origin=draft, n_answers=learned.n_answers, **outcome)
    send(event="version", number=added.number, **outcome)


def _line(head: Path | None, versions: HeadVersions) -> Iterator[Path]:
    """Yield a head, and those that it continues, the latest first."""
    known = {versions.path(version): version for version in versions.all()}
    while head:
        yield head
        version = known.pop(head, None)
        head = Path(version.origin) if version and version.origin else None


class Sender:
    """Writes lines of JSON."""

    def __init__(self) -> None:
        self._stage, self._shown = "", ("", -1)
        self._longest = 1e-9  # seconds that generating took in all, as first estimated

    def __call__(self, **content: Any) -> None:
        try:
            print(json.dumps(content), flush=True)
        except OSError:  # the server has ended
            os._exit(1)

    def progress(self, event: Event) -> None:
        """Write an event; of those that only differ by their progress, one for each percent."""
        share = 0.0
        if isinstance(event, Stage):
            self._stage = event.name
        elif isinstance(event, Answering):
            self._stage, share = event.what, event.n_done / event.n
        elif isinstance(event, TrainingProgress):
            self._stage, share = "training", event.step / event.n_steps
            if event.evaluation and (own := event.evaluation.by_category.get(OWN)):
                self(event="evaluation", user=own.agreement)
        elif isinstance(event, Generating):
            self._longest = max(self._longest, event.seconds_left)
            share = 1 - event.seconds_left / self._longest
        if (shown := (self._stage, int(100 * share))) != self._shown:
            if self._shown[0] != self._stage:
                self(event="stage", name=self._stage)
            self(event="progress", share=round(share, 3))
            self._shown = shown


def _end_with_input() -> None:
    """End this process at the end of its standard input: the server has ended."""
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Run a round; the last line that is written says how it ended."""
    send = Sender()
    options = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        learn(options, send)
    except pipeline.AnswersDeleted:
        send(event="unchanged", why="the answers that it was learning from were deleted")
    except SpecLocalError as error:
        send(event="failed", message=str(error))
    except OSError as error:
        send(event="failed", message=f"{error.filename}: {error.strerror or error}")
    sys.stdout.flush()
    os._exit(0)  # the thread that reads holds a lock of the standard input


if __name__ == "__main__":
    main()
