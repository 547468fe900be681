"""How far a token travels: files and Python calls of one step, and members of the seam.

These numbers may fall. If one has to rise, see first whether something only forwards.
"""

import re
import statistics
import sys
from pathlib import Path

import spec_local
from spec_local import GenerationSettings, SamplingSettings, Session
from spec_local.core.sequence import Context, Head, MainSequence, ModelSequence
from spec_local.llama.tiny import write_tiny_model

PACKAGE = str(Path(spec_local.__file__).parent)
N_FILES, N_CALLS = 17, 286
MEMBERS = {
    *("limits", "cached", "call", "commit", "truncate", "reuse", "checkpoint", "stops", "keep"),
    "context",  # of the main model's
    *("receive", "read"),  # of a head's
}


def calls_of(function, *args):
    """What a function returns, and the file and the name of each Python call of the package that it makes."""
    calls = []

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            calls.append((code.co_filename.removeprefix(PACKAGE + "/"), code.co_qualname))

    sys.setprofile(profile)
    try:
        return function(*args), calls
    finally:
        sys.setprofile(None)


def test_a_step_passes_few_files_and_calls(tmp_path):
    path = write_tiny_model(tmp_path / "tiny.gguf", tensor_type="F32", n_ctx=2048)
    settings = GenerationSettings(
        SamplingSettings(temperature=0.9),
        seed=3,
        max_tokens=200,
        policy="fixed",
        proposer="draft",
        draft_max=2,
    )
    with Session.open(path, path, n_ctx=1024, threads=1) as session:
        events, calls_before = calls_of(session.generate, "one two three four", settings)
        for _ in range(15):
            next(events)
        steps = [calls_of(next, events)[1] for _ in range(11)]
    assert len({file for calls in steps for file, _ in calls}) <= N_FILES
    assert statistics.median(map(len, steps)) <= N_CALLS
    _check_page([*calls_before, *steps[0]])


def _check_page(calls):
    """The page for contributors names functions in the order in which they are called, and their files."""
    page = (Path(__file__).parents[2] / "docs/architecture.md").read_text(encoding="utf-8")
    path = page.split("## The path of one token")[1].split("```")[1]
    named = re.findall(r"^ *(\w+\.\w+)(?: +(.*))?$", path, re.MULTILINE)
    assert len(named) > 20
    calls = iter(calls)
    for name, text in named:
        file = next((file for file, called in calls if called == name), None)
        assert file, f"{name} is not called there"
        given = re.match(r"[\w/]+\.py", text)
        assert not given or given[0] == file, name


def test_the_seam_has_twelve_members():
    members = {
        name
        for kind in (ModelSequence, MainSequence, Head)
        for name in vars(kind)
        if not name.startswith("_")
    }
    assert members == MEMBERS
    assert {name for name in vars(Context) if not name.startswith("_")} == {
        "max_tokens",
        "max_logits",
        "decode",
    }
