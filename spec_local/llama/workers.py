"""A main model whose layers are on other machines: workers, with llama.cpp's RPC backend.

The protocol has no password and no encryption: workers listen on loopback and private addresses only. When a
worker dies, llama.cpp aborts the process that uses it: let the session run in a child process.

llama.cpp waits for a worker without a limit of time, and a worker serves one connection at a time, so that a
second one cannot tell a worker that computes from one that is stopped. Therefore, workers reply to datagrams
(UDP) on the same port, in a thread of their own.
"""

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spec_local.errors import BackendError, InvalidRequest
from spec_local.llama import rpc as rpc_backend

PORT = 50052
"""The port of a worker, as that of llama.cpp's rpc-server."""
_CPU, _GPUS = 0, (1, 2)  # ggml_backend_dev_type
_CONNECT_S = 5.0
_START = "start specdec worker there, or correct `workers`"
# The first message of llama.cpp's RPC protocol: its command, the size of what follows, and what the client
# can do beyond TCP (nothing). The reply: its size and the protocol's version.
_VERSION = 7
_HELLO = struct.pack("<BQ24x", 14, 24)
_REPLY_HEAD = struct.Struct("<QB")
_ASK_S = 1.0  # between two datagrams to each worker
_QUIET, _SILENT = 5, 20
"""Datagrams without a reply, after which a worker counts as one that does not answer now, and as gone."""
_ASKED, _REPLIED = b"specdec worker?", b"specdec worker!"  # as long as each other: nothing is amplified
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
            f"cannot listen on {host} port {port} ({error.strerror or error}): give another `port` or `host`"
        ) from None


def silent(addresses: Sequence[str]) -> list[str]:
    """Return those workers that do not answer, or serve another client."""
    missing = []
    for address in addresses:
        try:
            check_ready(address)
        except BackendError:
            missing.append(address)
    return missing


def _abort(address: str) -> None:
    os.abort()  # as llama.cpp does


class _Watch:
    """Asks workers whether they are there, from their first reply on: not all networks let datagrams pass.

    Attributes:
        on_silence: called in another thread with the address of a worker that has not replied for `_SILENT`
            seconds. It ends the process, since nothing else ends the call that waits for the worker.
        is_idle: no call waits for a worker.
    """

    def __init__(self, ask_s: float = _ASK_S) -> None:
        self._ask_s = ask_s
        self.on_silence: Callable[[str], None] = _abort
        self.is_idle = False
        self._unanswered: dict[tuple[str, int], int] = {}  # datagrams since the last reply
        self._known: list[tuple[str, int]] = []
        self._asking: socket.socket | None = None
        self._lock = threading.Lock()

    def add(self, address: str) -> None:
        """Begin to ask a worker."""
        host, _, port = address.rpartition(":")
        with self._lock:
            if not self._asking:
                self._asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                threading.Thread(target=self._ask, args=[self._asking], name="workers", daemon=True).start()
            self._known.append((host, int(port)))
            self._send(self._asking, self._known[-1])

    def unanswered(self) -> list[str]:
        """Return those that have not replied for `_QUIET` seconds."""
        return [f"{host}:{port}" for (host, port), n in [*self._unanswered.items()] if n > _QUIET]

    def _ask(self, asking: socket.socket) -> None:
        while True:
            self._receive(asking, time.monotonic() + self._ask_s)
            for worker in list(self._known):
                self._send(asking, worker)
                if worker in self._unanswered:
                    # Counted, as time also passes while this process is stopped, or this machine sleeps.
                    self._unanswered[worker] += 1
                    if self._unanswered[worker] > _SILENT and not self.is_idle:
                        self.on_silence(f"{worker[0]}:{worker[1]}")

    @staticmethod
    def _send(asking: socket.socket, worker: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):  # the network is down, which counts as no reply
            asking.sendto(_ASKED, worker)

    def _receive(self, asking: socket.socket, until: float) -> None:
        """Note what arrives until a time."""
        while (left := until - time.monotonic()) > 0:
            asking.settimeout(left)
            try:
                received, worker = asking.recvfrom(len(_REPLIED) + 1)
            except TimeoutError:
                return
            except OSError:  # a worker has ended, which llama.cpp notices itself
                continue
            if received == _REPLIED and worker in self._known:
                self._unanswered[worker] = 0


watch = _Watch()


@contextlib.contextmanager
def idle() -> Iterator[None]:
    """Within the block, a worker may be silent, as its machine may sleep."""
    watch.is_idle = True
    try:
        yield
    finally:
        watch.is_idle = False


def unanswered() -> list[str]:
    """Return the workers of this process that do not answer now."""
    return watch.unanswered()


def no_answer(address: str) -> str:
    """What to say of a worker that `watch` calls silent."""
    return (
        f"the worker at {address} has not answered for {_SILENT * _ASK_S:.0f} s: check its machine and the "
        "network, and start it again"
    )


def _reply(opened: socket.socket) -> None:
    """Reply to the datagrams of clients."""
    while True:
        with contextlib.suppress(OSError):  # of one that has gone
            received, client = opened.recvfrom(len(_ASKED) + 1)
            if received == _ASKED:
                opened.sendto(_REPLIED, client)


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
                watch.add(address)
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


def devices(addresses: Sequence[str], gpus: Sequence[int] | None = None) -> Any:
    """The value of llama_model_params.devices for a model on these workers, or on this machine alone.

    A registered worker becomes a default device: from then on, models of this machine need a list, too.

    Args:
        gpus: pointers to those of this machine that a model without workers uses; None: llama.cpp's choice.

    Raises:
        BackendError: see `_Devices.of`.
    """
    found = gpus if gpus is not None else _devices.local()
    found = _devices.of(addresses) if addresses else found
    return None if found is None else (ctypes.c_void_p * (len(found) + 1))(*found, None)


def serve(host: str, port: int, threads: int) -> None:
    """Lend this machine's GPU, or else its CPU, to one client after another; returns only on a failure.

    Without a free port for datagrams, clients do not notice that this process is stopped.

    Raises:
        BackendError: there is no RPC backend, or the address is in use.
    """
    functions = rpc_backend.load()
    found = list(map(functions.ggml_backend_dev_get, range(functions.ggml_backend_dev_count())))
    used = [d for d in found if functions.ggml_backend_dev_type(d) in _GPUS]
    used = used or [functions.ggml_backend_dev_by_type(_CPU)]
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        opened = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        opened.bind((host, port))
        threading.Thread(target=_reply, args=[opened], name="replies", daemon=True).start()
        stack.pop_all()
    start = rpc_backend.backend().ggml_backend_rpc_start_server
    pointers = ctypes.POINTER(ctypes.c_void_p)
    start.restype = None
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, pointers]
    start(f"{host}:{port}".encode(), None, threads, len(used), (ctypes.c_void_p * len(used))(*used))
    raise BackendError(f"llama.cpp cannot serve on {host} port {port}: give another `port`")
