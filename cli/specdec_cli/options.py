"""The options that commands share, each declared once.

A command takes a dataclass (`ModelOptions`, `SamplingOptions`); `specdec_cli.commands.flattened` spreads its fields out
into the signature that Typer reads.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from typer import Argument, Option

from spec_local import kernels, registry
from spec_local.errors import DownloadError, InvalidRequest
from spec_local.files import format_size
from specdec_cli import completion

if TYPE_CHECKING:
    from spec_local.core.sampling import SamplingSettings
    from spec_local.session import Session
    from spec_local.settings import GenerationSettings

STARTER = "starter"
STANDARD = Path("-")
"""As a file: standard input, or output."""
MainArgument = Annotated[
    str,
    Argument(
        metavar="MAIN",
        help="The model that answers, or a pair: a file or a name.",
        autocompletion=completion.models,
    ),
]
_MAX_TEXT = 1 << 20


CacheChoice = Literal["f16", "q8_0", "q4_0"]
KernelsChoice = kernels.Mode
if TYPE_CHECKING:  # a type checker reads no computed Literal
    ProposerChoice: TypeAlias = Any
    PolicyChoice: TypeAlias = Any
    VerifierChoice: TypeAlias = Any
    ShapeChoice: TypeAlias = Any
    CrossVocabChoice: TypeAlias = Any
else:
    ProposerChoice = Literal[registry.PROPOSER_NAMES]
    PolicyChoice = Literal[registry.POLICY_NAMES]
    VerifierChoice = Literal[registry.VERIFIER_NAMES]
    ShapeChoice = Literal[registry.SHAPE_NAMES]
    CrossVocabChoice = Literal[registry.CROSS_VOCAB_NAMES]

_MODELS, _GUESSING, _SAMPLING = "Models", "Speculation", "Sampling"


def use_kernels(value: KernelsChoice) -> KernelsChoice:
    """What --kernels does, for the whole process: no command passes it on."""
    kernels.use(value)
    return value


_KERNELS_HELP = "auto: specdec's CPU kernels where they work; off: llama.cpp's own."
KernelsOption = Annotated[KernelsChoice, Option(callback=use_kernels, help=_KERNELS_HELP)]


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Which models, and how they run."""

    main: Annotated[
        str | None,
        Option(
            metavar="FILE|NAME",
            help="The model that answers: a file, a model's or a pair's name, or user/repo:quant "
            "(default: the starter model).",
            autocompletion=completion.models,
            rich_help_panel=_MODELS,
        ),
    ] = None
    draft: Annotated[
        str | None,
        Option(
            metavar="FILE|NAME",
            help="A small model of the same family that guesses.",
            autocompletion=completion.models,
            rich_help_panel=_MODELS,
        ),
    ] = None
    ctx: Annotated[
        int | None,
        Option(
            help="Tokens of context (default: 4096, or what main was trained for).", rich_help_panel=_MODELS
        ),
    ] = None
    threads: Annotated[
        int | None, Option(help="Threads (default: one per physical core).", rich_help_panel=_MODELS)
    ] = None
    gpu_layers: Annotated[int, Option(help="Layers on the GPU; negative: all.", rich_help_panel=_MODELS)] = -1
    cache_type: Annotated[
        CacheChoice, Option(help="Precision of the KV caches.", rich_help_panel=_MODELS)
    ] = "f16"
    kernels: Annotated[
        KernelsChoice, Option(callback=use_kernels, help=_KERNELS_HELP, rich_help_panel=_MODELS)
    ] = "auto"
    no_spec: Annotated[
        bool, Option("--no-spec", help="Plain decoding, without guesses.", rich_help_panel=_GUESSING)
    ] = False
    proposer: Annotated[
        ProposerChoice,
        Option(
            help="Who guesses; auto: the policy chooses among those that there are.",
            rich_help_panel=_GUESSING,
        ),
    ] = "auto"
    policy: Annotated[
        PolicyChoice,
        Option(
            help="How far to guess; adaptive: as far as measured costs say that it pays.",
            rich_help_panel=_GUESSING,
        ),
    ] = "adaptive"
    draft_max: Annotated[
        int | None,
        Option(
            help="Most tokens to guess a step, one after the other (default: the policy's).",
            rich_help_panel=_GUESSING,
        ),
    ] = None
    draft_p_min: Annotated[
        float, Option(help="Where policy confidence stops guessing.", rich_help_panel=_GUESSING)
    ] = 0.75
    staged: Annotated[
        int | None,
        Option(
            help="Most tokens that a look-up lets the draft read along (default: as many as pay).",
            rich_help_panel=_GUESSING,
        ),
    ] = None
    shape: Annotated[
        ShapeChoice,
        Option(
            help="What a draft model guesses; auto: the adaptive policy chooses chain or tree.",
            rich_help_panel=_GUESSING,
        ),
    ] = "chain"
    tree_nodes: Annotated[
        int, Option(help="Most guesses of a tree or of beams a step.", rich_help_panel=_GUESSING)
    ] = 16
    beam_width: Annotated[int, Option(help="How many beams.", rich_help_panel=_GUESSING)] = 4
    verifier: Annotated[
        VerifierChoice,
        Option(help="Acceptance rule; all are exact, auto takes the best.", rich_help_panel=_GUESSING),
    ] = "auto"
    greedy_draft: Annotated[
        bool,
        Option(
            "--greedy-draft",
            help="The draft guesses its favourite instead of drawing.",
            rich_help_panel=_GUESSING,
        ),
    ] = False
    datastore: Annotated[
        bool,
        Option(
            help="Keep answers, and the ends of their prompts, on this machine, and guess from those of earlier sessions.",
            rich_help_panel=_GUESSING,
        ),
    ] = False
    cross_vocab: Annotated[
        CrossVocabChoice,
        Option(
            help="How a draft of another vocabulary guesses: tokens that main has, too, or text.",
            rich_help_panel=_GUESSING,
        ),
    ] = "auto"

    def files(self) -> tuple[Path, Path | None]:
        """The files of the main model and of the draft model, if a step may use one; raises as `resolve` does."""
        drafting = self.proposer in ("auto", "draft") and not self.no_spec and self.policy != "off"
        return resolve_pair(self.main or STARTER, self.draft, drafting=drafting)

    def open(self, log: Callable[[str], None], files: tuple[Path, Path | None] | None = None) -> "Session":
        """Load the models. files: the result of `files`, if it is known."""
        from spec_local.session import Session
        from spec_local.settings import MAX_DRAFT

        main, draft = files or self.files()
        return Session.open(
            main,
            draft,
            n_ctx=self.ctx,
            threads=self.threads,
            gpu_layers=self.gpu_layers,
            cache_type=self.cache_type,
            branches=1 if self.shape == "chain" else MAX_DRAFT,
            datastore=self.datastore,
            log=log,
        )


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How the answer is drawn. Names, meaning and defaults are llama.cpp's."""

    temp: Annotated[
        float, Option(help="Temperature; 0: always the most probable token.", rich_help_panel=_SAMPLING)
    ] = 0.8
    top_k: Annotated[
        int, Option(help="Keep the k most probable tokens; 0: all.", rich_help_panel=_SAMPLING)
    ] = 40
    top_p: Annotated[float, Option(help="Keep tokens up to this sum; 1: all.", rich_help_panel=_SAMPLING)] = (
        0.95
    )
    min_p: Annotated[
        float, Option(help="Keep tokens this probable next to the best; 0: all.", rich_help_panel=_SAMPLING)
    ] = 0.05
    repeat_penalty: Annotated[
        float, Option(help="Divide recent tokens' logits; 1: off.", rich_help_panel=_SAMPLING)
    ] = 1.0
    frequency_penalty: Annotated[
        float, Option(help="Per recent occurrence; 0: off.", rich_help_panel=_SAMPLING)
    ] = 0.0
    presence_penalty: Annotated[
        float, Option(help="For any recent occurrence; 0: off.", rich_help_panel=_SAMPLING)
    ] = 0.0
    repeat_last_n: Annotated[int, Option(help="Tokens that count as recent.", rich_help_panel=_SAMPLING)] = 64
    logit_bias: Annotated[
        list[str] | None,
        Option(
            metavar="ID=BIAS",
            help="Add to a token's logit; -inf forbids it. Repeatable.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    seed: Annotated[
        int | None,
        Option(help="Repeat an answer (with the default shape and verifier).", rich_help_panel=_SAMPLING),
    ] = None
    stop: Annotated[
        list[str] | None,
        Option(
            metavar="TEXT", help="End the answer before this text. Repeatable.", rich_help_panel=_SAMPLING
        ),
    ] = None
    max_tokens: Annotated[
        int | None, Option("--max-tokens", "-n", help="Most tokens to say.", rich_help_panel=_SAMPLING)
    ] = None
    grammar_file: Annotated[
        Path | None,
        Option(metavar="FILE", help="A GBNF grammar that the answer follows.", rich_help_panel=_SAMPLING),
    ] = None
    json_schema: Annotated[
        str | None,
        Option(
            metavar="FILE|JSON",
            help="A JSON schema under which the answer is valid: a file, or the schema itself.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None

    def shape(self) -> "SamplingSettings":
        from spec_local.core.sampling import SamplingSettings

        return SamplingSettings(
            temperature=self.temp,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            penalty_window=self.repeat_last_n,
            logit_bias=dict(map(_bias, self.logit_bias or [])),
        )


def generation_settings(models: ModelOptions, sampling: SamplingOptions) -> "GenerationSettings":
    """What both groups say about one answer; checks every value.

    Raises:
        InvalidRequest: an impossible value.
    """
    from spec_local.settings import GenerationSettings

    return GenerationSettings(
        sampling=sampling.shape(),
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stops=sampling.stop or [],
        proposer="none" if models.no_spec else models.proposer,
        policy=models.policy,
        draft_max=models.draft_max,
        draft_p_min=models.draft_p_min,
        staged=models.staged,
        shape=models.shape,
        tree_nodes=models.tree_nodes,
        beam_width=models.beam_width,
        verifier=models.verifier,
        greedy_draft=models.greedy_draft,
        cross_vocab=models.cross_vocab,
        grammar=_text_of(sampling.grammar_file) if sampling.grammar_file else None,
        json_schema=_schema(sampling.json_schema) if sampling.json_schema is not None else None,
    )


def _schema(given: str) -> str:
    return given if given.lstrip().startswith("{") else _text_of(Path(given))


def _text_of(path: Path) -> str:
    from spec_local.files import read_text

    return read_text(path, _MAX_TEXT)


def paired(main: str, draft: str | None = None) -> tuple[str, str | None]:
    """The names of main and draft: a pair's name as main gives both, but for a draft that was given."""
    from spec_local.files import expanded
    from spec_local.models import catalog

    if expanded(main).exists() or main not in catalog.pairs():
        return main, draft
    pair = catalog.pairs()[main]
    return pair.main, draft or pair.draft


def resolve(name: str, fetch: str | None = None) -> Path:
    """The file that a path or a name means: a model's, user/repo:quant, or a pair's, which gives its main.

    fetch: what to pull if it is not here; if not given, the model itself.

    Raises:
        DownloadError: a named model is not here; nothing is fetched without being asked for.
    """
    from spec_local.files import expanded
    from spec_local.models import catalog

    path = expanded(name)
    if path.exists():
        return path
    name, _ = paired(name)
    if not catalog.is_hub_name(name) and name not in catalog.models():
        return path
    found = catalog.find(name)
    if not found:
        size = None if catalog.is_hub_name(name) else catalog.entry(name).size
        told = f" ({format_size(size)})" if size else ""
        raise DownloadError(f"the model {name}{told} is not here: run specdec models pull {fetch or name}")
    return found


def resolve_pair(main: str, draft: str | None = None, *, drafting: bool = True) -> tuple[Path, Path | None]:
    """The files of main and draft, which a pair's name gives both; raises as `resolve` does.

    drafting: False leaves the draft out, and does not ask for its file.
    """
    fetch = None if draft else main  # what is missing of a pair is fetched by the pair's name
    main, draft = paired(main, draft)
    return resolve(main, fetch), resolve(draft, fetch) if draft and drafting else None


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        value = float(bias)
        if math.isnan(value):
            raise ValueError
        return int(token), value
    except ValueError:
        raise InvalidRequest(
            f"logit bias {text!r} is not understood: give a token id and a number, as 42=-1.5"
        ) from None
