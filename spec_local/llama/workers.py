"""A main model whose layers are on other machines: workers, with llama.cpp's RPC backend.

The protocol has no password and no encryption: workers listen on loopback and private addresses only. When a
worker dies, llama.cpp aborts the process that uses it: let the session run in a child process.
"""

import ctypes
import ipaddress
import socket
import struct
from collections.abc import Sequence
from typing import Any

from spec_local.errors import BackendError, InvalidRequest
from spec_local.llama import rpc as rpc_backend

PORT = 50052
"""The port of a worker, as that of llama.cpp's rpc-server."""
_CPU, _GPUS = 0, (1, 2)  # ggml_backend_dev_type
_CONNECT_S = 5.0
_START = "start specdec worker there, or correct --workers"
# The first message of llama.cpp's RPC protocol: its command, the size of what follows, and what the client
# can do beyond TCP (nothing). The reply: its size and the protocol's version.
_VERSION = 7
_HELLO = struct.pack("<BQ24x", 14, 24)
_REPLY_HEAD = struct.Struct("<QB")
# Keeps ggml from writing where in its code it aborts: the parent process reports that a worker died.
_SAY_NOTHING = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda message: None)


def parse(addresses: Sequence[str]) -> list[str]:
    """Check the addresses of workers, host:port or host, and return each as address:port.

    Raises:
        InvalidRequest: one is no address, or neither a loopback nor a private one, or is given twice.
    """
    found = [_parsed(address) for address in addresses]
    if twice := {address for address in found if found.count(address) > 1}:
        raise InvalidRequest(f"the worker at {', '.join(twice)} is given twice: give it once")
    return found


def _parsed(text: str) -> str:
    host, colon, port = text.strip().rpartition(":")
    host, port = (host, port) if colon else (port, str(PORT))
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"{text[:60]!a} is not the address of a worker: give HOST:PORT")
    return f"{private(host)}:{int(port)}"


def private(host: str) -> str:
    """Return the IPv4 address of a host, which must be a loopback or private one.

    Raises:
        InvalidRequest: it is another one, or unknown.
    """
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None, socket.AF_INET)}
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"{host[:60]!a} is unknown ({reason}): give an IPv4 address") from None
    for address in map(ipaddress.ip_address, found):
        if not (address.is_loopback or address.is_private) or address.is_unspecified:
            raise InvalidRequest(
                f"{host} is not a loopback or private address: workers have no password and no encryption; "
                "use an ssh tunnel"
            )
    return str(min(found))


def check_free(host: str, port: int) -> None:
    """Raise InvalidRequest unless a worker can listen there."""
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise InvalidRequest(
            f"cannot listen on {host} port {port} ({error.strerror or error}): give another --port or --host"
        ) from None


def silent(addresses: Sequence[str]) -> list[str]:
    """Return those workers that do not answer. llama.cpp aborts the process if it connects to one of them."""
    missing = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        except OSError:
            missing.append(address)
    return missing


def check_ready(address: str) -> None:
    """Begin the protocol with a worker, as llama.cpp will do without a limit of time or a way to fail.

    Raises:
        BackendError: the worker cannot be used.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _CONNECT_S) as connection:
            connection.sendall(_HELLO)
            reply = connection.makefile("rb").read(_REPLY_HEAD.size)
    except ConnectionRefusedError:
        raise BackendError(f"no worker answers at {address}: {_START}") from None
    except TimeoutError:
        raise BackendError(
            f"the worker at {address} serves another client, or does not answer: end that client, or start "
            "another worker"
        ) from None
    except OSError as error:
        raise BackendError(f"no worker answers at {address} ({error.strerror}): {_START}") from None
    if len(reply) < _REPLY_HEAD.size or _REPLY_HEAD.unpack(reply)[1] != _VERSION:
        raise BackendError(f"what answers at {address} is no worker of this version of specdec: {_START}")


class _Devices:
    """The devices of this process."""

    def __init__(self) -> None:
        self._local: list[int] | None = None  # as they were before the first worker
        self._remote: dict[str, list[int]] = {}

    def local(self) -> list[int] | None:
        """Pointers to this machine's GPUs; None: no worker was added, and llama.cpp's default is the same."""
        return self._local

    def of(self, addresses: Sequence[str]) -> list[int]:
        """Pointers to the devices of workers, and to this machine's GPUs after them.

        Raises:
            BackendError: there is no RPC backend, or a worker does not answer.
        """
        functions = rpc_backend.load()
        for address in addresses:
            if address not in self._remote:
                check_ready(address)
        if self._local is None:
            functions.ggml_set_abort_callback(_SAY_NOTHING)
            found = map(functions.ggml_backend_dev_get, range(functions.ggml_backend_dev_count()))
            self._local = [d for d in found if functions.ggml_backend_dev_type(d) in _GPUS]
        for address in addresses:
            if address not in self._remote:
                self._remote[address] = self._add(functions, address)
        return [*(device for address in addresses for device in self._remote[address]), *self._local]

    @staticmethod
    def _add(functions: Any, address: str) -> list[int]:
        add = rpc_backend.backend().ggml_backend_rpc_add_server
        add.restype, add.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        backend = add(address.encode())
        functions.ggml_backend_register(backend)
        n = functions.ggml_backend_reg_dev_count(backend)
        return [functions.ggml_backend_reg_dev_get(backend, i) for i in range(n)]


_devices = _Devices()


def devices(addresses: Sequence[str]) -> Any:
    """The value of llama_model_params.devices for a model on these workers, or on this machine alone.

    A registered worker becomes a default device: from then on, models of this machine need a list, too.

    Raises:
        BackendError: see `_Devices.of`.
    """
    found = _devices.of(addresses) if addresses else _devices.local()
    return None if found is None else (ctypes.c_void_p * (len(found) + 1))(*found, None)


def serve(host: str, port: int, threads: int) -> None:
    """Lend this machine's GPU, or else its CPU, to one client after another; returns only on a failure.

    Raises:
        BackendError: there is no RPC backend, or the address is in use.
    """
    functions = rpc_backend.load()
    found = list(map(functions.ggml_backend_dev_get, range(functions.ggml_backend_dev_count())))
    used = [d for d in found if functions.ggml_backend_dev_type(d) in _GPUS]
    used = used or [functions.ggml_backend_dev_by_type(_CPU)]
    start = rpc_backend.backend().ggml_backend_rpc_start_server
    pointers = ctypes.POINTER(ctypes.c_void_p)
    start.restype = None
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, pointers]
    start(f"{host}:{port}".encode(), None, threads, len(used), (ctypes.c_void_p * len(used))(*used))
    raise BackendError(f"llama.cpp cannot serve on {host} port {port}: give another --port")
