"""What llama.cpp computes for a model, read from its graphs: hidden states, and layers that draft tokens.

llama.cpp does not say for which architectures it returns or evaluates them, and no list would stay true. It
builds the graph of a call without weights, so that the file's header suffices.
"""

import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spec_local.llama import runtime
from spec_local.llama.devices import ON_CPU
from spec_local.llama.model import Model
from spec_local.system.child_process import child_main, run_child
from spec_local.system.files import write_atomically
from spec_local.system.folders import user_folder
from spec_local.system.json_file import JsonRecord, read_record

_N_TOKENS, _N_LOGITS = 4, 2  # of a call: not the same, so that states of all tokens can be told from fewer
_N_CTX = 32  # tokens in the context of a graph
_STATES = "h_nextn"  # llama.cpp's name of the states that layers for multi-token prediction read and return
_USUAL = "l_out"  # and of a layer's output, with few exceptions
_ASSERTION = "SIGABRT"  # how an assertion ends a process
_MAX_BYTES = 4096  # of a stored record


class _Graph:
    """The graph of a call of `_N_TOKENS` tokens; valid until the next one of its context is built."""

    def __init__(self, context: int, width: int) -> None:
        self._ggml, self._width = runtime.ggml(), width
        self._handle = runtime.graph_reserve()(context, _N_TOKENS, 1, _N_LOGITS)

    def has(self, name: str) -> bool:
        """Whether a tensor of this name is used, or computed."""
        return bool(self._tensor(name))

    @property
    def n_states(self) -> int:
        """Number of tokens whose states it returns."""
        tensor = self._tensor(_STATES)
        return self._ggml.ggml_nbytes(tensor) // (self._width * 4) if tensor else 0

    def _tensor(self, name: str) -> Any:
        return self._handle and self._ggml.ggml_graph_get_tensor(self._handle, name.encode())

    def computed(self) -> Iterator[tuple[str, int]]:
        """The names of all tensors that it computes, and their bytes, in the order of their evaluation."""
        for i in range(self._ggml.ggml_graph_n_nodes(self._handle) if self._handle else 0):
            tensor = self._ggml.ggml_graph_node(self._handle, i)
            name = self._ggml.ggml_get_name(tensor).decode("utf-8", "replace")
            yield name, self._ggml.ggml_nbytes(tensor)


@contextlib.contextmanager
def _context(model: Model, kind: int) -> Iterator[int]:
    """A small context that returns the states of all tokens; 0: llama.cpp cannot create it."""
    lib = runtime.library()
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = _N_CTX, _N_TOKENS, _N_TOKENS, 1
    params.n_outputs_max, params.ctx_type = _N_TOKENS, kind
    runtime.clear_log()
    context: int = lib.llama_init_from_model(model.handle, params) or 0
    try:
        if context:
            runtime.extensions().llama_set_embeddings_nextn(context, True, False)
        yield context
    finally:
        if context:
            lib.llama_free(context)


def returns_states(model: Model) -> bool:
    """Whether llama.cpp returns a model's states before its output matrix, of all tokens of a call."""
    with _context(model, runtime.library().LLAMA_CONTEXT_TYPE_DEFAULT) as context:
        return bool(context) and _Graph(context, model.n_state).n_states == _N_TOKENS


def layer_output(model: Model) -> str | None:
    """llama.cpp's name of the outputs of a model's layers, before ``-`` and the layer's number.

    None: the output has another width than the model, as that of several residual streams.
    """
    with _context(model, runtime.library().LLAMA_CONTEXT_TYPE_DEFAULT) as context:
        tensors = list(_Graph(context, model.n_state).computed()) if context else []
    if f"{_USUAL}-0" in dict(tensors):
        return _USUAL
    # Without that name, it is the last tensor that belongs to a layer.
    last = [(name[:-2], size) for name, size in tensors if re.search(r"\D-0$", name)][-1:]
    return next((name for name, size in last if size == 4 * _N_TOKENS * model.n_embd), None)


class MtpLayers(JsonRecord):
    """The layers for multi-token prediction in a file, as llama.cpp evaluates them.

    n_usable: their number; 0: there are none that it evaluates. has_all_outputs: whether it computes their
    outputs for all tokens, instead of for those whose logits are wanted. why: why there are none; or "".
    """

    n_usable: int = 0
    has_all_outputs: bool = False
    why: str = ""


def mtp_layers(path: Path) -> MtpLayers:
    """The usable layers for multi-token prediction in a file.

    llama.cpp aborts the process if it cannot evaluate some, so that this takes a child process of half a
    second. The result is kept in the user's cache folder, until the file or the build of llama.cpp changes.

    Raises:
        OSError: the file does not exist.
    """
    return _mtp_layers(path, runtime.fingerprint(path))


@functools.lru_cache(maxsize=64)
def _mtp_layers(path: Path, fingerprint: str) -> MtpLayers:
    stored = user_folder("cache") / "mtp-layers" / f"{fingerprint}.json"
    with contextlib.suppress(OSError, ValueError):
        return read_record(stored, MtpLayers, _MAX_BYTES)
    result = run_child("spec_local.llama.graphs", str(path))
    if result.error:
        return MtpLayers(why=result.error)
    found = MtpLayers(**result.facts) if result.works else MtpLayers(why=f"llama.cpp crashes: {result.crash}")
    if not result.works and result.crash != _ASSERTION:  # such as a lack of memory, which passes
        return found
    with contextlib.suppress(OSError):  # without a cache folder, it is found out again next time
        write_atomically(stored, found.model_dump_json().encode())
    return found


def _work(path: Path) -> dict[str, Any]:
    model = Model(path, offload=ON_CPU, weights=False, load_mtp=True)
    n, all_outputs = model.n_nextn, True
    if not n:
        return {"why": "the file has none"}
    with _context(model, runtime.library().LLAMA_CONTEXT_TYPE_MTP) as context:
        if not context:
            return {"why": runtime.failure_reason()}
        for i in range(n):
            runtime.extensions().llama_set_nextn_layer_offset(context, i)
            graph = _Graph(context, model.n_state)
            # If llama.cpp does not know the layers, it builds another graph.
            is_known = graph.has(f"blk.{model.n_layers + i}.nextn.eh_proj.weight")
            if not is_known or not graph.n_states:
                return {"why": "llama.cpp does not evaluate them"}
            all_outputs = all_outputs and graph.n_states == _N_TOKENS
    return {"n_usable": n, "has_all_outputs": all_outputs}


if __name__ == "__main__":
    child_main(lambda: _work(Path(sys.argv[1])))
