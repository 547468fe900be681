"""Options that several commands share, each declared once, alone or in a dataclass.

`specdec_cli.commands.add` turns the fields of dataclasses into the parameters that Typer reads, and
`specdec_cli.sessions` makes of their values what the library needs.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from typer import BadParameter

from spec_local import kernels
from spec_local.core.sampling_settings import SETTINGS, SamplingSettings, Setting
from spec_local.errors import InvalidRequest
from spec_local.models.names import FOUND_DRAFT, FOUND_PROJECTOR, NO_DRAFT, STARTER, resolve_pair
from spec_local.policies import POLICY_NAMES
from spec_local.proposers import PROPOSER_NAMES, SHAPE_NAMES
from spec_local.verifiers import VERIFIER_NAMES
from specdec_cli import commands, completion
from specdec_cli.parameters import argument, option

named_model = functools.partial(argument, autocompletion=completion.models)
model_argument = functools.partial(
    named_model,
    metavar="MODEL",
    help="Main model: a file, a name of a model or pair (see specdec models list), or user/repo:quant on "
    "the Hugging Face Hub.",
)
draft_argument = functools.partial(
    named_model, metavar="DRAFT", help="Draft model or head, instead of --draft."
)
model_option = functools.partial(option, metavar="FILE|NAME", autocompletion=completion.models)
main_option = functools.partial(
    model_option, "--main", "-m", help="Main model, instead of MODEL (default: starter-pair)."
)
needed_main_option = functools.partial(
    model_option, "--main", "-m", help="Main model, instead of MAIN; there is no default."
)
draft_option = functools.partial(
    model_option,
    "--draft",
    "-md",
    help="Draft model or head; auto (default) finds one, none turns it off.",
)


def named_pair(
    main: str | None, draft: str | None, main_option: str | None, draft_option: str | None
) -> tuple[str, str | None]:
    """Return the names of the models of a command, which may be arguments or options."""
    draft = draft or draft_option
    return main or main_option or STARTER, None if draft == FOUND_DRAFT else draft


def needed_main(main: str | None, main_option: str | None) -> str:
    """Return the name of the main model of a command that has no default for it.

    Raises:
        InvalidRequest: there is none.
    """
    if name := main or main_option:
        return name
    raise InvalidRequest("the main model is missing: give it as an argument, or with --main")


system_option = functools.partial(option, metavar="TEXT", help="System message.")
image_option = functools.partial(
    option, "--image", "--audio", metavar="FILE", help="Image or sound, repeatable; - is standard input."
)
show_drafts_option = functools.partial(
    option, default=False, help="Mark accepted draft tokens, and list rejected ones."
)
hide_thinking_option = functools.partial(
    option,
    default=False,
    help="Hide the reasoning of a model that thinks first; show only how long it takes.",
)
no_wrap_option = functools.partial(
    option,
    default=False,
    help="Do not break lines between words; leave line breaks to the terminal.",
)

CacheChoice = Literal["f16", "q8_0", "q4_0"]
KernelsChoice = kernels.Mode
if TYPE_CHECKING:  # type checkers accept no computed Literal
    PolicyChoice: TypeAlias = Any
    VerifierChoice: TypeAlias = Any
    ShapeChoice: TypeAlias = Any
else:
    PolicyChoice = Literal[POLICY_NAMES]
    VerifierChoice = Literal[VERIFIER_NAMES]
    ShapeChoice = Literal[SHAPE_NAMES]

_machine = functools.partial(option, rich_help_panel=commands.MACHINE)
_speculation = functools.partial(option, rich_help_panel=commands.SPECULATION)
_sampling = functools.partial(option, rich_help_panel=commands.SAMPLING)


def _vocabulary_size(value: str) -> str:
    """Accept a number of tokens, or ``all``.

    Raises:
        BadParameter: it is something else.
    """
    if value not in ("auto", "all") and not (value.isdecimal() and 1 <= int(value) < 2**31):
        raise BadParameter(f"{value!r} is invalid: give a number of tokens, or all")
    return value


def _device(value: str) -> str:
    """Accept what can be the name of a device: whether there is one shows when models are loaded.

    Raises:
        BadParameter: it is something else.
    """
    if not value.replace(":", "").isalnum():
        raise BadParameter(f"{value!r} is unknown: give auto, gpu, cpu, or a name that specdec doctor shows")
    return value


def _known_proposer(value: str) -> str:
    """Accept the proposers that are built in, and those of other packages.

    Raises:
        BadParameter: there is none of this name.
    """
    if value not in PROPOSER_NAMES and value not in (known := completion.proposers("")):
        raise BadParameter(f"{value!r} is not one of {', '.join(map(repr, known))}")
    return value


_UNITS = {"k": (10**3, 2**10), "m": (10**6, 2**20), "g": (10**9, 2**30), "t": (10**12, 2**40)}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+) *([kmgt]?)(i?)(b?)", re.ASCII | re.IGNORECASE)


def cache_limit(value: str) -> int | Literal["off"]:
    """Return the bytes that a value of --prompt-cache stands for; a number without a unit is in GiB.

    Raises:
        BadParameter: it is something else.
    """
    if value == "off":
        return "off"
    found = _SIZE.fullmatch(value.strip())
    if found and (found[2] or not (found[3] or found[4])):
        decimal, binary = _UNITS[found[2].lower() or "g"]
        size = float(found[1]) * (decimal if found[4] and not found[3] else binary)
        if size < 2**63:
            return round(size)
    raise BadParameter(
        f"{value!r} is not a size: give one such as 2GiB or 500MiB, 0 (in memory only), or off"
    )


def _checked_cache_limit(value: str | None) -> str | None:
    if value is not None:  # the default depends on the free space: which changes
        cache_limit(value)
    return value


prompt_cache_option = functools.partial(option, metavar="SIZE|off", callback=_checked_cache_limit)


def _unless_minus_one(value: int | None) -> int | None:
    """Accept llama.cpp's -1: a random seed, no maximum number of tokens."""
    return None if value == -1 else value


prompt_option = functools.partial(
    option, "--prompt", "-p", metavar="TEXT", help="The prompt, instead of the argument."
)
verbose_option = functools.partial(
    option,
    "--verbose",
    "-v",
    default=0,
    count=True,
    show_default=False,
    help="Show statistics, device and threads; -vv: llama.cpp's log.",
)


def _choice(text: str, names: tuple[str, ...], note: str, default: str) -> Any:
    """Return an option with its values in the help text: Typer's column for them would be too wide."""
    return _speculation(default=default, metavar="NAME", help=f"{text}: {', '.join(names)}; {note}.")


def use_kernels(value: KernelsChoice) -> KernelsChoice:
    """Apply --kernels to the whole process, so that commands need not pass it on."""
    kernels.use(value)
    return value


kernels_option = functools.partial(
    option,
    default="auto",
    callback=use_kernels,
    help="CPU kernels: auto uses specdec's own where they work, off uses llama.cpp's.",
)
device_option = functools.partial(
    option,
    default="auto",
    metavar="auto|gpu|cpu|NAME",
    help="Where the models run: on the CPU, on a GPU, or each where it is faster (auto); specdec doctor "
    "shows the names of GPUs.",
    autocompletion=completion.devices,
    callback=_device,
)
cache_type_option = functools.partial(option, default="f16", help="Precision of the KV caches.")
later_context_option = functools.partial(
    option, default=4096, min=1, max=1 << 24, help="Context size of later sessions, in tokens."
)
yes_option = functools.partial(option, "--yes", "-y", default=False, help="Delete without asking.")
gpu_layers_option = functools.partial(
    option, help="Number of layers on the GPU; −1: as many as fit (default: depends on --device)."
)


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Models, the resources they use, and speculation."""

    main: str | None = main_option()
    draft: str | None = draft_option()
    ctx: int | None = option(
        "--ctx", "-c", help="Context size in tokens (default: 4096, or less if the model has less)."
    )
    no_spec: bool = option(default=False, help="Decode without speculation.")
    threads: int | None = _machine(
        "--threads", "-t", help="Number of threads (default: one per usable core)."
    )
    device: str = device_option(rich_help_panel=commands.MACHINE)
    draft_device: str = device_option(
        help="Where the draft model runs (default: as --device).", rich_help_panel=commands.MACHINE
    )
    gpu_layers: int | None = gpu_layers_option("--gpu-layers", "-ngl", rich_help_panel=commands.MACHINE)
    cache_type: CacheChoice = cache_type_option(rich_help_panel=commands.MACHINE)
    kernels: KernelsChoice = kernels_option(rich_help_panel=commands.MACHINE)
    mmproj: str = _machine(
        "--mmproj",
        "-mm",
        default=FOUND_PROJECTOR,
        metavar="FILE|auto|none",
        help="Projector of the main model, for images and sound; auto finds it beside it.",
    )
    prompt_cache: str | None = prompt_cache_option(
        rich_help_panel=commands.MACHINE,
        help="Disk space that saves later sessions from reading the same prompts and answers again; 0 "
        "keeps them in memory only, off not at all (default: 2GiB, or 5 % of the free space).",
    )
    workers: str | None = _machine(
        metavar="HOST:PORT,…", help="Other machines that run layers of the main model; see specdec worker."
    )
    proposer: str = _speculation(
        default="auto",
        metavar="NAME",
        help=f"Source of draft tokens: {', '.join(PROPOSER_NAMES)}, or a lookup of another package; auto "
        "lets the policy choose.",
        callback=_known_proposer,
        autocompletion=completion.proposers,
    )
    policy: PolicyChoice = _choice(
        "Draft-length policy",
        POLICY_NAMES,
        "adaptive drafts as much as measured costs justify",
        default="adaptive",
    )
    draft_max: int | None = _speculation(
        help="Maximum draft length in tokens (default: depends on the policy)."
    )
    draft_p_min: float = _speculation(
        default=0.75, help="Confidence below which the confidence policy stops drafting."
    )
    staged: int = _speculation(
        default=0, help="Maximum number of lookup tokens staged in a call of the draft model."
    )
    draft_vocab: str = _speculation(
        default="auto",
        metavar="N|all",
        help="To draft faster, use only the first N tokens of the vocabulary and those in the context "
        "(default: 49152 of a large vocabulary, 16384 of a medium one).",
        callback=_vocabulary_size,
    )
    shape: ShapeChoice = _choice(
        "Draft shape", SHAPE_NAMES, "auto lets the adaptive policy choose chain or tree", default="chain"
    )
    tree_nodes: int = _speculation(
        default=16, help="Maximum number of draft tokens per step in a tree or beams."
    )
    beam_width: int = _speculation(default=4, help="Number of beams.")
    verifier: VerifierChoice = _choice(
        "Acceptance rule", VERIFIER_NAMES, "all are exact; auto selects the best", default="auto"
    )
    datastore: bool = _speculation(
        "--datastore/--no-datastore",
        default=False,
        help="Keep answers and the ends of their prompts on disk for lookups in later sessions.",
    )
    learn: bool = _speculation(
        "--learn/--no-learn",
        default=False,
        help="Keep whole prompts and answers on disk to train a head on them; implies --datastore.",
    )
    reproducible: bool = _speculation(
        default=False,
        help="Give the same output for a seed with any draft or none (CPU only; may be slower).",
    )

    def with_models(self, main: str | None, draft: str | None = None) -> Self:
        """Return the options with other models; None: with the same."""
        return dataclasses.replace(self, main=main or self.main, draft=draft or self.draft)

    def files(self) -> tuple[Path, Path | None]:
        """Return the files of the main model, and of the draft model if one is named and may be used."""
        draft = None if self.draft == FOUND_DRAFT else self.draft
        return resolve_pair(self.main or STARTER, draft, drafting=self.drafting)

    @property
    def drafting(self) -> bool:
        """True if a draft model may be used."""
        is_asked = self.proposer in ("auto", "draft") and self.draft != NO_DRAFT
        return is_asked and not self.no_spec and self.policy != "off"


def _sampler_field(setting: Setting) -> tuple[str, Any, Any]:
    """Return name, type and field of an option. Its default is None if a model may recommend another one."""
    help, default, kind = setting.help, getattr(SamplingSettings(), setting.field), setting.kind
    metavar = None
    if kind == list[str]:
        texts = ", ".join(default).replace("\n", "\\n")
        help, default, metavar = f"{help}; repeatable, none: no text (default: {texts})", None, "TEXT"
    elif setting.gguf:
        help, default, kind = f"{help} (default: the model's, or {default:g})", None, kind | None
    declare = option if setting.field == "temperature" else _sampling
    field = declare(default=default, metavar=metavar, help=f"{help}.")
    return setting.option.replace("-", "_"), kind, field


if TYPE_CHECKING:
    _SamplerFields = object
else:
    _SamplerFields = dataclasses.make_dataclass(
        "_SamplerFields", [_sampler_field(setting) for setting in SETTINGS if setting.kind], frozen=True
    )


@dataclasses.dataclass(frozen=True)
class SamplerOptions(_SamplerFields):
    """The sampler; names, meaning and defaults are those of llama.cpp."""

    logit_bias: list[str] | None = _sampling(
        metavar="ID=BIAS", help="Add a bias to a token's logit; -inf forbids the token; repeatable."
    )

    def settings(self, recommended: Mapping[str, Any] | None = None) -> SamplingSettings:
        """Return the settings of the sampler.

        Args:
            recommended: defaults of `SamplingSettings` in place of its own.

        Raises:
            InvalidRequest: an invalid value.
        """
        given = {**(recommended or {}), "logit_bias": dict(map(_bias, self.logit_bias or []))}
        for setting in SETTINGS:
            value = getattr(self, setting.option.replace("-", "_"), None) if setting.kind else None
            if isinstance(value, list):
                value = [text.replace("\\n", "\n") for text in value if text != "none"]
            if value is not None:
                given[setting.field] = value
        return SamplingSettings(**given)


@dataclasses.dataclass(frozen=True)
class SamplingOptions(SamplerOptions):
    """The sampler, and the limits and form of the answer."""

    max_tokens: int | None = option(
        "--max-tokens",
        "-n",
        callback=_unless_minus_one,
        help="Maximum number of tokens (default: until the answer ends).",
    )
    seed: int | None = option(
        callback=_unless_minus_one, help="Random seed, to repeat an output (see --reproducible)."
    )
    json_schema: str | None = option(
        metavar="FILE|JSON", help="JSON schema for the answer: a file, or the schema itself."
    )
    stop: list[str] | None = _sampling(metavar="TEXT", help="End the answer before this text; repeatable.")
    grammar_file: Path | None = _sampling(metavar="FILE", help="GBNF grammar that the answer must follow.")
    thinking_budget: int | None = _sampling(
        min=0,
        max=1 << 31,
        metavar="<int>",
        help="Maximum number of reasoning tokens before the answer (default: no limit; under a grammar "
        "or schema, half of the tokens that the answer may have).",
    )


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        value = float(bias)
        if math.isnan(value):
            raise ValueError
        return int(token), value
    except ValueError:
        raise InvalidRequest(
            f"logit bias {text!r} is invalid: give a token id and a number, as in 42=-1.5"
        ) from None
