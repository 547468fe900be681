"""How far a token travels: files and Python calls of one step, and members of the seam.

These numbers may fall. If one has to rise, see first whether something only forwards.
"""

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


def step_of(events):
    """The files with a Python call of the package until the next event, and the number of these calls."""
    calls = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        next(events)
    finally:
        sys.setprofile(None)
    return set(calls), len(calls)


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
        events = iter(session.generate("one two three four", settings))
        for _ in range(15):
            next(events)
        files, calls = zip(*(step_of(events) for _ in range(11)), strict=True)
    assert len(set.union(*files)) <= N_FILES
    assert statistics.median(calls) <= N_CALLS


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
