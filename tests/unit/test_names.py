"""Names of models: files, models, pairs and files of the Hub."""

import subprocess
import sys
from pathlib import Path

import pytest

from spec_local.errors import DownloadError, InvalidRequest
from spec_local.models import catalog
from spec_local.models.names import STARTER, paired, resolve, resolve_pair
from tests.named_models import write_catalog
from tests.stored_models import add_to_hub_cache

HUB = "user/repo:Q4_K_M"


@pytest.fixture(autouse=True)
def known(empty_home, monkeypatch):
    """Two models, a pair of them, and the files of those that have been downloaded."""
    models = {
        name: {"repo": f"user/{name}", "file": f"{name}.gguf", "rounded_size": 3_000_000}
        for name in ("big", "small")
    }
    write_catalog(empty_home / "config", models, {"duo": ("big", "small")})
    monkeypatch.chdir(empty_home)
    downloaded = {"small": ("user/small", "small.gguf"), HUB: ("user/repo", "repo-Q4_K_M.gguf")}
    return {name: add_to_hub_cache(empty_home / "hub", *each)[0] for name, each in downloaded.items()}


@pytest.fixture
def big(empty_home):
    return add_to_hub_cache(empty_home / "hub", "user/big", "big.gguf")[0]


def test_a_pair_names_both_models_unless_a_draft_is_given():
    assert paired("duo") == ("big", "small")
    assert paired("duo", "other") == ("big", "other")
    assert paired("big") == ("big", None)


def test_models_pairs_and_files_of_the_hub(known, big):
    assert resolve("small") == known["small"]
    assert resolve("duo") == big
    assert resolve(HUB) == known[HUB]
    assert resolve_pair("duo") == (big, known["small"])
    assert resolve_pair("duo", HUB) == (big, known[HUB])
    assert resolve_pair("small", Path("any")) == (known["small"], Path("any"))
    assert resolve_pair("duo", drafting=False) == (big, None)


@pytest.mark.parametrize("name", ["duo", "small", "nobody"])
def test_a_file_takes_precedence_over_a_name(name):
    Path(name).write_bytes(b"")
    assert resolve(name) == Path(name)
    assert resolve_pair(name) == (Path(name), None)


def test_a_path_is_a_file_even_if_it_is_missing():
    assert resolve(Path("duo")) == Path("duo")
    assert resolve_pair(Path("duo")) == (Path("duo"), None)
    assert resolve("missing.gguf") == Path("missing.gguf")
    assert resolve("~/missing.gguf") == Path.home() / "missing.gguf"


@pytest.mark.parametrize(
    ("main", "draft", "command"),
    [("duo", None, "duo"), ("duo", "small", "big"), ("big", None, "big"), ("small", "big", "big")],
)
def test_a_missing_download_names_the_command_for_it(main, draft, command):
    with pytest.raises(DownloadError, match=f"has not been downloaded: run specdec models pull {command}$"):
        resolve_pair(main, draft)
    with pytest.raises(DownloadError, match=r"the model big \(3.0 MB\) has not"):
        resolve("big")


def test_a_name_that_is_not_known():
    with pytest.raises(InvalidRequest, match="there is no model or file 'bigg': similar names are big"):
        resolve("bigg")
    with pytest.raises(InvalidRequest, match="as in user/repo:Q4_K_M; specdec draft convert makes"):
        resolve("user/repo")


def test_the_starter_pair_is_known(monkeypatch):
    monkeypatch.undo()
    assert STARTER in catalog.pairs()


def test_files_need_no_catalog(tmp_path):
    script = (
        "import sys\n"
        "from spec_local.models.names import resolve_pair\n"
        f"resolve_pair({str(tmp_path)!r}, {str(tmp_path)!r})\n"
        "assert 'spec_local.models.catalog' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
