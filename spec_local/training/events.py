"""The events of a training run, for the display of its progress."""

from dataclasses import dataclass

from spec_local.training.distillation import TrainingProgress
from spec_local.training.generation import GenerationProgress


@dataclass(frozen=True, slots=True)
class Stage:
    """The start of a stage."""

    name: str


@dataclass(frozen=True, slots=True)
class GenerationRate:
    """Tokens per second of a copy of the main model; kind: its precision, or "main" for its own file."""

    kind: str
    rate: float


@dataclass(frozen=True, slots=True)
class Generating:
    """Progress of the data generation."""

    progress: GenerationProgress
    seconds_left: float


@dataclass(frozen=True, slots=True)
class Answering:
    """Progress of the main model with answers; what: what it does with which ones."""

    what: str
    n_done: int
    n: int


Event = Stage | GenerationRate | Generating | Answering | TrainingProgress
