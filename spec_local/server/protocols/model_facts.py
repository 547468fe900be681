"""What the chat template and the vocabulary of a model can do, from its file without the weights.

It is read in a child process, since a damaged header can crash llama.cpp, and kept as long as the file is the
same.
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_local.errors import ModelFileError
from spec_local.system.child_process import child_main, run_child


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model.

    Attributes:
        parameters: their number, such as ``1.5B``.
        n_ctx: context length of an answer in tokens.
        template: the chat template; empty: it has none.
        has_tools: the template shows tools to the model. has_gaps: the model fills gaps in a text.
        thinks: the template knows reasoning.
    """

    parameters: str
    n_ctx: int
    template: str
    has_tools: bool
    has_gaps: bool
    thinks: bool


def facts_of(path: Path, n_ctx: int | None) -> ModelFacts:
    """Facts about the model in a file, which take a second to read, and next to nothing again.

    Args:
        n_ctx: the context length that is wanted; None: the default.

    Raises:
        ModelFileError: the file cannot be used.
        OSError: it is not there.
    """
    return _facts(path, n_ctx, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _facts(path: Path, n_ctx: int | None, modified: int) -> ModelFacts:
    result = run_child("spec_local.server.protocols.model_facts", str(path), str(n_ctx or 0))
    if not result.works:
        raise ModelFileError(f"{path} cannot be read ({result.crash or result.error}): download it again")
    return ModelFacts(**result.facts)


def _read(path: Path, n_ctx: int) -> dict[str, Any]:
    from spec_local.chat.template import ChatTemplate
    from spec_local.errors import ModelError
    from spec_local.llama.model import Model
    from spec_local.opening.loading import DEFAULT_CONTEXT
    from spec_local.reasoning.markers import markers_of

    model = Model(path, weights=False)
    template = model.chat_template or ""
    try:
        has_tools = bool(template) and ChatTemplate(model).has_tools
    except ModelError:  # the template is invalid
        has_tools = False
    return {
        "parameters": model.parameters,
        "n_ctx": model.n_ctx(n_ctx or DEFAULT_CONTEXT),
        "template": template,
        "has_tools": has_tools,
        "has_gaps": bool(model.vocabulary.fill_in),
        "thinks": bool(markers_of(template)),
    }


if __name__ == "__main__":
    child_main(lambda: _read(Path(sys.argv[1]), int(sys.argv[2])))
