"""The memory of a session, estimated from headers."""

import pytest

from spec_local.errors import ModelFileError
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.models.pairs import OVERHEAD
from spec_local.models.projectors import describe
from spec_local.opening.memory_plan import plan_memory
from tests.stored_models import write_projector


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    return [write_tiny_model(folder / f"{n}.gguf", n_layers=n, n_ctx=512) for n in (2, 1)]


def session(main, draft="none", **options):
    return {
        "main": main, "draft": draft, "n_ctx": None, "threads": 1, "gpu_layers": 0, "cache_type": "f16",
        "parallel": None,
    } | options  # fmt: skip


def test_it_is_the_sum_of_weights_caches_and_overhead(paths):
    models = [Model(path, weights=False) for path in paths]
    weights, rows = ([model.size for model in models], [model.kv_bytes(512) for model in models])
    alone = plan_memory(session(paths[0], parallel=3), 0)
    assert (alone.n_parallel, alone.needed) == (3, weights[0] + 3 * rows[0] + OVERHEAD)
    pair = plan_memory(session(*paths, parallel=3), 0)
    assert pair.needed == sum(weights) + 3 * sum(rows) + OVERHEAD
    smaller = plan_memory(session(paths[0], parallel=1, n_ctx=256, cache_type="q8_0"), 0)
    assert smaller.needed < weights[0] + rows[0] / 2 + OVERHEAD
    fixed = sum(weights) + OVERHEAD
    for free, expected in ((0, 1), (2 * 5 * sum(rows), 5), (1 << 40, 8)):
        assert plan_memory(session(*paths), fixed + free).n_parallel == expected


def test_files_that_cannot_be_used(paths, tmp_path):
    for content in (b"", b"GGUF" + bytes(100), paths[0].read_bytes()[:-1000]):
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(content)
        for options in ((broken,), (broken, "auto"), (paths[0], broken)):
            with pytest.raises(ModelFileError, match=r"broken\.gguf"):
                plan_memory(session(*options), 0)
    with pytest.raises(ModelFileError, match=r"crashes llama\.cpp"):
        plan_memory(session(write_tiny_model(tmp_path / "crash.gguf", n_layers=0)), 0)


def test_a_draft_that_is_found(tmp_path, monkeypatch):
    """Without it if its header cannot be read: it will not be used."""
    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):  # of the child process
        monkeypatch.setenv(variable, str(tmp_path / "empty"))
    main = write_tiny_model(tmp_path / "main.gguf", n_layers=40, n_ctx=512)
    alone = plan_memory(session(main, "auto", parallel=1), 0).needed
    draft = write_tiny_model(tmp_path / "draft.gguf", n_layers=1, n_ctx=512)
    small = Model(draft, weights=False)
    with_draft = plan_memory(session(main, "auto", parallel=1), 0).needed
    assert with_draft == alone + small.size + small.kv_bytes(512)
    draft.write_bytes(draft.read_bytes()[:-1000])
    assert plan_memory(session(main, "auto", parallel=1), 0).needed == alone


def test_a_projector(paths, tmp_path):
    main = tmp_path / "main.gguf"
    main.write_bytes(paths[0].read_bytes())
    alone = plan_memory(session(main, parallel=1), 0).needed
    mmproj = write_projector(tmp_path / "mmproj-F16.gguf")
    with_projector = alone + describe(mmproj).memory
    assert plan_memory(session(main, parallel=1), 0).needed == with_projector
    assert plan_memory(session(main, parallel=1, mmproj=str(mmproj)), 0).needed == with_projector
    assert plan_memory(session(main, parallel=1, mmproj="none"), 0).needed == alone
    with pytest.raises(ModelFileError, match="does not exist"):
        plan_memory(session(main, mmproj=str(tmp_path / "missing.gguf")), 0)
