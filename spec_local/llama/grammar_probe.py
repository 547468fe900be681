"""Meeting a grammar that llama.cpp cannot cope with in a child process first.

Some grammars crash it, and some keep it busy or fill the memory without end. A grammar is tried once for a model and a
build, with limits: ``python -m spec_local.llama.grammar_probe``.
"""

import contextlib
import hashlib
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import psutil

from spec_local.child_process import child_main, run_child
from spec_local.errors import InvalidRequest
from spec_local.files import write_atomically
from spec_local.llama import runtime
from spec_local.llama.grammar import AMBIGUOUS, Grammar, encoded, refusal
from spec_local.llama.model import Model

_MOST_KEPT = 1000  # verdicts: a program may make a grammar for each question
_CHILD_SECONDS, _CHILD_BYTES, _CHILD_STACK, _CHILD_TOKENS = 10, 1 << 30, 1 << 20, 32


def check_grammar(model: Path, text: str, *, log: Callable[[str], None] = lambda line: None) -> None:
    """Make sure that a grammar can be built and used here.

    Args:
        model: the file of the model whose vocabulary it is for.
        log: told, in a line, what takes time.

    Raises:
        InvalidRequest: it is no grammar, or one that llama.cpp cannot cope with; the message says why.
    """
    raw = encoded(text)
    key = runtime.fingerprint(model, hashlib.sha256(raw).hexdigest())
    known = Path(platformdirs.user_cache_dir("specdec")) / "checked-grammars" / key
    if known.exists():
        return
    log("checking the grammar (first use with this model)")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "grammar.gbnf"
        file.write_bytes(raw)
        verdict = run_child("spec_local.llama.grammar_probe", str(model), str(file))
    if verdict.error:
        raise InvalidRequest(verdict.error)
    if verdict.crash in ("SIGXCPU", "SIGKILL"):
        raise InvalidRequest(AMBIGUOUS)
    if verdict.crash:
        raise InvalidRequest(
            f"the grammar takes llama.cpp down ({verdict.crash}): it is nested too deeply, or grows without end"
        )
    with contextlib.suppress(OSError):  # without a cache folder it is checked again next time
        write_atomically(known, b"")
        for old in sorted(known.parent.iterdir(), key=lambda file: file.stat().st_mtime)[:-_MOST_KEPT]:
            old.unlink()


def _limit_resources() -> None:
    """From here on; a GPU's driver may hold more address space than any grammar could need."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        seconds = int(time.process_time()) + _CHILD_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        size = psutil.Process().memory_info().vms + _CHILD_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _work(model: Path, file: Path) -> dict[str, Any]:
    """Build a grammar and say something in it; llama.cpp's parser tells its reasons to stderr only."""
    loaded = Model(model, weights=False)
    _limit_resources()
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            grammar = Grammar(loaded, file.read_text("utf-8"))
        except InvalidRequest as error:
            said.seek(0)
            found = re.search(rb"error parsing grammar: (.*)", said.read())
            return {"error": refusal(found[1].decode("utf-8", "replace")) if found else str(error)}
    state, chance, n = grammar.start(), np.random.default_rng(0), loaded.vocabulary.n_tokens
    state.allows(np.arange(n))
    for _ in range(_CHILD_TOKENS):
        some = chance.integers(0, n, 512)
        possible = some[state.allows(some)]
        if not len(possible):
            possible = np.flatnonzero(state.allowed())
        following = state.after(int(chance.choice(possible))) if len(possible) else None
        if following is None:
            break
        state = following
    return {}


def _main(model: str, file: str) -> None:
    # Where the grammar is used, the stack may be a small one, and llama.cpp is recursive.
    threading.stack_size(_CHILD_STACK)
    thread = threading.Thread(target=lambda: child_main(lambda: _work(Path(model), Path(file))))
    thread.start()
    thread.join()


if __name__ == "__main__":
    _main(*sys.argv[1:])
