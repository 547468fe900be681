"""libmtmd aborts the process with some files: they are tried in a child process first."""

import pytest

from spec_local.errors import ModelFileError
from spec_local.session import Session
from tests.llama.test_images import answer, prompt_of
from tests.tiny_projectors import write_projector
from tests.tiny_vision import write_vision_model


def test_a_damaged_projector_does_not_crash(tmp_path, own_cache):
    main = write_vision_model(tmp_path / "main.gguf", "qwen3vl")
    projector = write_projector(tmp_path / "mmproj.gguf", "qwen3vl_merger")
    whole = projector.read_bytes()
    for name, data in {
        "cut": whole[:-5000],
        "no-size": whole.replace(b"vision.image_size", b"vision.image_sizf"),
    }.items():
        damaged = tmp_path / f"mmproj-{name}.gguf"
        damaged.write_bytes(data)
        with Session.open(main, "none", n_ctx=512, threads=1, mmproj=damaged) as session:
            with pytest.raises(ModelFileError) as caught:
                prompt_of(session, 1, "a")
            assert "\n" not in str(caught.value)
            assert answer(session, prompt_of(session, "text"))[0]
    with Session.open(main, "none", n_ctx=512, threads=1, mmproj=projector) as session:
        assert answer(session, prompt_of(session, 1, "a"))[0]
    assert len([*(own_cache / "checked-models").iterdir()]) == 2  # of the main model, and the projector
