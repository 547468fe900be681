"""The keyword arguments with which `spec_local.session.Session.open` opens models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from spec_local.arguments import Default, Int32, Printable


class OpenArguments(TypedDict, total=False):
    """Of `Session.open`, whose documentation has these lines.

    n_ctx: context length in tokens, limited to the model's training context; None: the training context,
        up to 4096.
    threads: number of threads for each model; None: the number of physical cores.
    device: where the models run: ``cpu``, ``gpu`` (those that llama.cpp chooses), or a GPU by its name,
        such as ``metal`` or ``vulkan0``; ``auto``: each model where this pair was measured as fastest,
        which takes some seconds the first time. What does not fit into the memory of a GPU runs on the
        CPU, by layers.
    draft_device: where the draft model runs, unless it is a head; ``auto``: as `device` says.
    gpu_layers: number of layers on the GPU, also of a draft model without `draft_device`; −1: as many as
        fit; None: as `device` says.
    cache_type: element type of the KV caches.
    branches: maximum number of branches of a tree in the caches. The draft model evaluates more branches
        than it proposes, so use several times the number of a tree's nodes, such as 64. 1: chains only,
        which takes the least memory.
    learn: keep the tokens of whole prompts and answers on disk, too, to train a head on them; implies
        `datastore`. A head that has been trained from the draft is used in its place; without a draft,
        the head whose training began without one. See docs/learning.md.
    reproducible: make the same seed give the same text whatever is drafted, with any draft model,
        proposer, policy and shape, and with none; slower without specdec's CPU kernels. On the CPU only.
        See `spec_local.llama.reproducible`.
    parallel: maximum number of answers at the same time, each with a context of its own; None: up to 8,
        as many as fit into half of the free memory.
    draft_vocab: number of first tokens of the vocabulary that a draft model always drafts, beside those
        of the text; ``auto``: the usual number, if that is faster; ``all``: all of it. Only with
        specdec's CPU kernels. See `spec_local.llama.draft_vocabulary`.
    mtp: without a draft, use the layers for multi-token prediction in the main model's file, if it has
        any.
    workers: addresses, host:port, of ``specdec worker`` on other machines, which hold the layers of the
        main model in proportion to their memory; the draft model stays here. If one of them dies,
        llama.cpp ends this process. See docs/several-machines.md.
    mmproj: the main model's projector, for images or sound, as a GGUF file; ``auto``: the one that is
        found beside the main model, if there is one (`spec_local.models.projectors`); ``none``: do
        without.
    """

    n_ctx: Annotated[Printable | None, Default(None)]
    threads: Annotated[Int32 | None, Default(None)]
    device: Annotated[str, Default("auto")]
    draft_device: Annotated[str, Default("auto")]
    gpu_layers: Annotated[Printable | None, Default(None)]
    cache_type: Annotated[str, Default("f16")]
    branches: Annotated[Int32, Default(1)]
    learn: Annotated[bool, Default(False)]
    reproducible: Annotated[bool, Default(False)]
    parallel: Annotated[Int32 | None, Default(1)]
    draft_vocab: Annotated[Int32 | Literal["auto", "all"], Default("auto")]
    mtp: Annotated[bool, Default(True)]
    workers: Annotated[Sequence[str], Default(())]
    mmproj: Annotated[Path | str, Default("auto")]
