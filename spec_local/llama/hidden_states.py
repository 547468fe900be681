"""Hidden states of a model's own calls, for drafters that read them.

There are two kinds. The outputs of given layers, for EAGLE-3, DFlash and DSpark, are copied by a callback
that llama.cpp calls for every tensor it computes. The state before the output matrix, for layers for
multi-token prediction (NextN) and for Gemma 4's assistant, is an output of llama.cpp. Neither changes the
logits.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spec_local import kernels
from spec_local.errors import BackendError, InvalidRequest
from spec_local.llama import graphs, runtime
from spec_local.llama.model import Model
from spec_local.llama.native_context import OutputView
from spec_local.llama.native_object import NativeObject


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The hidden states that a context keeps from each call.

    layers: a state consists of the outputs of these layers, in this order. Empty: the state before the output
        matrix, which layers for multi-token prediction read.
    """

    layers: tuple[int, ...] = ()

    def check(self, model: Model) -> None:
        """Check that they can be captured.

        Raises:
            InvalidRequest: there is no such layer.
        """
        # In the last layer, llama.cpp computes only the outputs of tokens whose logits are wanted.
        if any(not 0 <= layer < model.n_layers - 1 for layer in self.layers):
            raise InvalidRequest(
                f"layers {', '.join(map(str, self.layers))} were requested: "
                f"{model.path.name} has outputs of layers 0 to {model.n_layers - 2}"
            )

    def capture(self, model: Model, max_tokens: int) -> "Capture":
        """Create what captures them, for a context whose calls have up to `max_tokens` tokens.

        Raises:
            InvalidRequest: llama.cpp does not return them.
        """
        return _Layers(model, self.layers, max_tokens) if self.layers else _Nextn(model, max_tokens)


class Capture(Protocol):
    """Captures the hidden states of one context's calls."""

    def prepare(self, params: Any) -> None:
        """Set the parameters of the context before it is created."""

    def attach(self, context: NativeObject) -> None:
        """Set up the context after it has been created."""

    def begin(self) -> None:
        """Prepare for a call."""

    def finish(self, n_tokens: int, order: Sequence[int] | None) -> None:
        """Check that the states of a call of `n_tokens` tokens have been captured.

        Args:
            order: indices of the tokens in the order of their evaluation; None: that of the batch.

        Raises:
            BackendError: they have not.
            BaseException: what was raised during the call, such as KeyboardInterrupt from a signal handler.
        """

    def at(self, indices: Sequence[int]) -> NDArray[np.float32]:
        """A copy of the states of the last call's tokens at these indices, float32 (len(indices), width)."""


def _found(what: Any, name: str, model: Model) -> Any:
    """The same, unless llama.cpp does not have it."""
    if not what:
        raise InvalidRequest(f"llama.cpp returns no {name} of {model.path.name}: use another draft")
    return what


class _Layers:
    """Outputs of layers, through llama.cpp's callback for tensors: that of the CPU kernels, or in Python."""

    def __init__(self, model: Model, layers: Sequence[int], max_tokens: int) -> None:
        self._layers, self._name = layers, model.path.name
        self._states = np.empty((len(layers), max_tokens, model.n_embd), np.float32)
        self._counts = np.zeros(len(layers), np.int64)
        self._order: Sequence[int] | None = None
        self._error: BaseException | None = None
        prefix = f"{_found(graphs.layer_output(model), 'outputs of layers', model)}-"
        self._native = _native_capture(prefix, layers, self._states, self._counts)
        self._ggml = runtime.ggml()
        self._numbers = {f"{prefix}{layer}".encode(): i for i, layer in enumerate(layers)}
        self._callback = runtime.library().ggml_backend_sched_eval_callback(self._on_tensor)

    def prepare(self, params: Any) -> None:
        if self._native:
            address, capture = self._native
            params.cb_eval = ctypes.cast(address, type(self._callback))
            params.cb_eval_user_data = ctypes.addressof(capture)
        else:
            params.cb_eval = self._callback

    def attach(self, context: NativeObject) -> None:
        pass

    def begin(self) -> None:
        self._counts[:] = 0
        self._error = None
        if self._native:
            self._native[1].unexpected = -1

    def _on_tensor(self, tensor: int, ask: bool, _: object) -> bool:
        """Return whether a tensor is wanted (ask), or copy it once it has been computed.

        No exception may escape: llama.cpp would continue with wrong logits. The call is stopped instead.
        """
        try:
            number = self._numbers.get(self._ggml.ggml_get_name(tensor))
            if number is None:
                return False
            if not ask:
                self._copy(number, tensor)
        except BaseException as error:
            self._error = self._error or error
            return ask  # stops the call once the tensor has been computed
        return True

    def _copy(self, number: int, tensor: int) -> None:
        # If llama.cpp splits a call, they arrive one part after another.
        states, start = self._states[number], int(self._counts[number])
        n_bytes = self._ggml.ggml_nbytes(tensor)
        n, rest = divmod(n_bytes, states[0].nbytes)
        if rest or start + n > len(states):
            raise self._unexpected(number)
        self._ggml.ggml_backend_tensor_get(tensor, states[start:].ctypes.data, 0, n_bytes)
        self._counts[number] = start + n

    def _unexpected(self, number: int) -> BackendError:
        return BackendError(
            f"the states of layer {self._layers[number]} of {self._name} have an unexpected size: "
            "use another draft"
        )

    def finish(self, n_tokens: int, order: Sequence[int] | None) -> None:
        self._order = order
        if self._error:
            raise self._error
        if self._native and self._native[1].unexpected >= 0:
            raise self._unexpected(self._native[1].unexpected)
        for layer, count in zip(self._layers, self._counts.tolist(), strict=True):
            if count != n_tokens:
                raise BackendError(
                    f"llama.cpp returned {count} of {n_tokens} states of layer {layer} of {self._name}: "
                    "use another draft, or `draft=none`"
                )

    def at(self, indices: Sequence[int]) -> NDArray[np.float32]:
        if self._order is not None:
            places = np.argsort(self._order)  # where the states of each token are
            indices = places[list(indices)].tolist()
        return np.concatenate([states[indices] for states in self._states], axis=1)


def _native_capture(
    prefix: str, layers: Sequence[int], states: NDArray[np.float32], counts: NDArray[np.int64]
) -> tuple[int, Any] | None:
    """The address of the callback in C++, and its argument, which refers to the arrays; None: not compiled.

    Args:
        prefix: prefix of the outputs' names, before the number of the layer.
        states: float32 (len(layers), n, width). counts: int64 (len(layers),).
    """
    if not (native := kernels.installed()):
        return None
    from spec_local.kernels.native import NativeCapture

    numbers = (ctypes.c_int32 * len(layers))(*layers)
    capture = NativeCapture(
        prefix=prefix.encode(),
        layers=numbers,
        states=states.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        counts=counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)),
        n_rows=states.shape[1],
        width=states.shape[2],
        n_layers=len(layers),
        unexpected=-1,
    )
    return native.capture, capture


class _Nextn:
    """The states before the output matrix, which llama.cpp returns for multi-token prediction."""

    def __init__(self, model: Model, max_tokens: int) -> None:
        self._extensions = runtime.extensions()
        self._name, self._shape = model.path.name, (max_tokens, model.n_state)
        _found(graphs.returns_states(model), "states for multi-token prediction", model)
        self._view: OutputView | None = None
        self._context: NativeObject | None = None

    def prepare(self, params: Any) -> None:
        pass

    def attach(self, context: NativeObject) -> None:
        self._context, self._view = context, OutputView(context, *self._shape)
        # Not masked: the states of all tokens, not only of those whose logits are wanted.
        self._extensions.llama_set_embeddings_nextn(context.pointer, True, False)

    def begin(self) -> None:
        pass

    def finish(self, n_tokens: int, order: Sequence[int] | None) -> None:
        pass

    def at(self, indices: Sequence[int]) -> NDArray[np.float32]:
        assert self._context is not None
        assert self._view is not None
        pointer = self._extensions.llama_get_embeddings_nextn(self._context.pointer)
        if not pointer:
            raise BackendError(f"llama.cpp returned no hidden states of {self._name}: add `draft=none`")
        found: NDArray[np.float32] = self._view.at(pointer)[list(indices)]
        return found
