"""Experience on disk: what answers have taught about a pair of models, for later runs on this machine."""

import contextlib
import time
from pathlib import Path
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from spec_local.calibration import cost_store
from spec_local.llama.heads.base import HeadSequence
from spec_local.llama.sequence import LlamaSequence
from spec_local.policies.acceptance_model import AcceptanceModel, Calibration, Evidence, RecentRate
from spec_local.policies.base import WINDOWS
from spec_local.policies.experience import AnswerKind, PairExperience, PastAnswers
from spec_local.system.files import write_atomically
from spec_local.system.json_file import JsonRecord, read_record

_HALF_LIFE = 30 * 86_400.0  # seconds: after a month, other texts are as likely as those that were seen
_MAX_BYTES = 1 << 16  # of a file; one for all kinds of answers has 20 kB
_MAX_KINDS = 16  # two temperatures, four shapes, with and without a grammar
_Count = Annotated[float, Field(ge=0, le=1e4)]  # the longest memory is 1,000 tokens
_Ratio = Annotated[float, Field(ge=-1e3, le=1e3)]


class _Evidence(JsonRecord):
    model_config = ConfigDict(from_attributes=True)

    accepted: list[_Count]
    seen: list[_Count]
    shift: Annotated[float, Field(ge=-3, le=3)] = 0.0

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if any(accepted > seen for accepted, seen in zip(self.accepted, self.seen, strict=True)):
            raise ValueError("more tokens were accepted than seen")
        return self


class _Gain(JsonRecord):
    n_running: Annotated[int, Field(ge=1, le=256)]
    window: int
    gain: _Ratio


class _Known(JsonRecord):
    """The experience of answers of one kind."""

    kind: AnswerKind
    draft: _Evidence
    lookups: Annotated[dict[str, _Evidence], Field(max_length=16)]
    recent: _Evidence
    recycled: _Evidence
    length: Annotated[float, Field(gt=0, le=1e9)]
    gains: Annotated[list[_Gain], Field(max_length=1024)]


class _File(JsonRecord):
    """saved: seconds since 1970."""

    main: str
    draft: str | None
    saved: float
    known: Annotated[list[_Known], Field(max_length=_MAX_KINDS)]


def load(
    main: LlamaSequence, draft: LlamaSequence | HeadSequence | None, now: float | None = None
) -> PairExperience:
    """What earlier runs learned, the less certain the older it is; nothing if the file is damaged.

    now: seconds since 1970; None: the time.
    """
    learned = PairExperience()
    with contextlib.suppress(OSError, ValueError):
        found = read_record(_path(main, draft), _File, _MAX_BYTES)
        age = max(0.0, (time.time() if now is None else now) - found.saved)
        models = {known.kind: _acceptance(known, 0.5 ** (age / _HALF_LIFE)) for known in found.known}
        for known in found.known:
            gains = {(g.n_running, g.window): g.gain for g in known.gains if g.window in (0, *WINDOWS)}
            learned.acceptance[known.kind] = models[known.kind]
            learned.answers[known.kind] = PastAnswers(known.length, gains)
    return learned


def save(main: LlamaSequence, draft: LlamaSequence | HeadSequence | None, learned: PairExperience) -> None:
    """Write what was learned. Nothing happens if the cache folder is not writable, or nothing was learned."""
    if not learned.answers:
        return
    content = _File(
        main=main.model.name,
        draft=draft.model.name if draft else None,
        saved=time.time(),
        known=[
            _known(kind, model, learned.answers[kind])
            for kind, model in learned.acceptance.items()
            if kind in learned.answers
        ][:_MAX_KINDS],
    )
    with contextlib.suppress(OSError):
        write_atomically(_path(main, draft), content.model_dump_json().encode())


def _path(main: LlamaSequence, draft: LlamaSequence | HeadSequence | None) -> Path:
    """A file for each pair and each condition of its costs, which decide what is gained."""
    paths = [cost_store.path_of(sequence) for sequence in (main, draft) if sequence]
    return paths[0].parent.with_name("learned") / ("-".join(path.stem for path in paths) + ".json")


def _known(kind: AnswerKind, model: AcceptanceModel, answers: PastAnswers) -> _Known:
    def evidence(of: Calibration | RecentRate) -> _Evidence:
        return _Evidence.model_validate(of.evidence)

    return _Known(
        kind=kind,
        draft=evidence(model.draft),
        lookups={name: evidence(each) for name, each in model.lookups.items()},
        recent=evidence(model.recent),
        recycled=evidence(model.recycled),
        length=answers.length,
        gains=[_Gain(n_running=n, window=window, gain=gain) for (n, window), gain in answers.gains.items()],
    )


def _acceptance(known: _Known, share: float) -> AcceptanceModel:
    model = AcceptanceModel()

    def recall(of: Calibration | RecentRate, found: _Evidence) -> None:
        of.evidence = Evidence(found.accepted, found.seen, found.shift).faded(share)

    recall(model.draft, known.draft)
    for name, found in known.lookups.items():
        recall(model.lookups[name], found)
    recall(model.recent, known.recent)
    recall(model.recycled, known.recycled)
    return model
