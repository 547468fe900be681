"""A process that was forked after llama.cpp was loaded gets a clear error, and never hangs."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

DEADLINE = 60  # seconds; what takes longer hangs
SCRIPT = """
import contextlib, gc, os, sys, threading
from spec_local.core.calls import run
from spec_local.errors import InvalidRequest
from spec_local.llama.open import open_sequence
from spec_local.llama.model import Model
from spec_local.session import Session
from spec_local.settings import GenerationSettings

path = sys.argv[1]
settings = GenerationSettings(max_tokens=8, seed=1, policy="off")
main, draft = (Model(path) for _ in range(2))
session = Session(*(open_sequence(model, n_ctx=128, threads=2) for model in (main, draft)))
vocabulary = main.vocabulary
list(session.generate("one two", settings))  # starts llama.cpp's threads
events = session.generate("one two", settings)
next(events)
uses = {
    "generate": lambda: session.generate("one two", settings),
    "next": lambda: next(events),
    "costs": session.costs,
    "tokenize": lambda: vocabulary.tokenize("one two"),
    "tokenize on another stack": lambda: vocabulary.tokenize("one two " * 900),
    "piece": lambda: vocabulary.piece(70),
    "is_end": lambda: vocabulary.is_end(70),
    "evaluate": lambda: run(session.main.call([1])),
    "open": lambda: Model(path),
    "context": lambda: open_sequence(main, n_ctx=64, threads=1),
    "check_open": session.check_open,
}

def in_child():
    for name, use in uses.items():
        try:
            use()
        except InvalidRequest as error:
            assert "\\n" not in str(error) and "forked" in str(error) and "spawn" in str(error), error
        else:
            raise AssertionError(name)
    events.close()
    with contextlib.suppress(InvalidRequest), session:
        pass
    session.main.close()
    main.close()
    globals().pop("events"), globals().pop("session")
    gc.collect()

held = sys.argv[2]
if held == "the state":
    session._lock._state.acquire()
    threading.Thread(target=lambda: None).start()
child = os.fork()
if not child:
    code = 1
    try:
        in_child()
        code = 0
    finally:
        if held == "at exit":
            sys.exit(code)
        sys.stderr.flush()
        os._exit(code)
if held == "the state":
    session._lock._state.release()
code = os.waitpid(child, 0)[1]
assert len(list(events)) == 9  # the parent goes on
sys.exit(bool(code))
"""


def run_script(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    # In a session of its own, so that a child that hangs is killed, too.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},  # waiting threads would slow down other tests
    )
    try:
        out, err = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize("held", ["nothing", "the state", "at exit"])
def test_a_forked_process(tiny_path, held):
    """`held`: what another thread of the parent held during the fork, or that the child exits as usual."""
    run_script(SCRIPT, tiny_path, held)


def test_a_fork_before_llama_cpp_is_loaded(tiny_path):
    """Both processes load it themselves."""
    run_script(
        """
import os, sys
from spec_local.llama.model import Model

child = os.fork()
model = Model(sys.argv[1])
assert model.vocabulary.tokenize("a")
if child:
    sys.exit(bool(os.waitpid(child, 0)[1]))
os._exit(0)
""",
        tiny_path,
    )
