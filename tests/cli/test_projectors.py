"""A main model's projector: found, given, listed, shown, checked, and pulled with the model."""

from types import SimpleNamespace

import pytest

from spec_local.llama.tiny import write_tiny_model
from spec_local.settings import GenerationSettings
from specdec_cli.chat_models import ChatModels
from specdec_cli.options import ModelOptions, SamplingOptions
from tests.hub_server import HubServer
from tests.stored_models import write_projector

ANSWER = ["--raw", "--ctx", 64, "-n", 2, "--threads", 1, "--temp", 0, "--draft", "none", "-v", "x"]
WIDTH = 64  # of the tiny model
SEES = "projector for images of 256 × 256 pixels (idefics3), 0.0 MB"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that does not see, and projectors elsewhere."""
    folder = tmp_path_factory.mktemp("blind")
    write_tiny_model(folder / "tiny.gguf", n_layers=1, tensor_type="F32")
    write_projector(folder / "elsewhere" / "eyes.gguf", WIDTH)
    write_projector(folder / "elsewhere" / "mmproj-other.gguf", 96)
    return folder


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A model with its projector beside it."""
    folder = tmp_path_factory.mktemp("seeing")
    write_projector(folder / "mmproj-F16.gguf", WIDTH)
    return write_tiny_model(folder / "tiny.gguf", n_layers=1, tensor_type="F32")


def about(done):
    assert done.returncode == 0, done
    return next(line for line in done.stderr.decode().splitlines() if line.startswith("main "))


def test_what_is_loaded(inside, folder, seeing):
    blind, eyes = folder / "tiny.gguf", folder / "elsewhere" / "eyes.gguf"
    found = inside("generate", "--main", seeing, *ANSWER)
    assert about(found).endswith("· projector mmproj-F16.gguf")
    assert "projector" not in about(inside("generate", "--main", seeing, "--mmproj", "none", *ANSWER))
    without = inside("generate", "--main", blind, *ANSWER)
    assert "projector" not in about(without)
    assert without.stdout == found.stdout
    assert about(inside("generate", "--main", blind, "-mm", eyes, *ANSWER)).endswith("· projector eyes.gguf")


@pytest.mark.parametrize("command", [["generate"], ["bench"], ["serve"]], ids=str)
def test_a_file_that_cannot_be_used(inside, folder, command):
    blind, elsewhere = folder / "tiny.gguf", folder / "elsewhere"
    last = ANSWER if command == ["generate"] else ["--port", 0] if command == ["serve"] else []
    for given, reason in (
        (elsewhere / "missing.gguf", "missing.gguf does not exist"),
        (blind, "tiny.gguf is not a projector (its architecture is llama): give"),
        (elsewhere / "mmproj-other.gguf", "(it gives vectors of 96 numbers, and the model reads 64)"),
    ):
        done = inside(*command, "--main", blind, "--mmproj", given, *last)
        line = inside.one_line(done, done.returncode)
        assert done.returncode in (1, 2)
        assert reason in line
        if given.exists():
            assert line.endswith("or --mmproj none")


def test_one_projector_is_for_one_model(inside, folder, seeing):
    done = inside("serve", folder / "tiny.gguf", seeing, "--mmproj", folder / "elsewhere" / "eyes.gguf")
    assert "--mmproj is for one model" in inside.one_line(done, 2)


def test_a_projector_is_no_main_model(inside, seeing):
    line = inside.one_line(inside("generate", "--main", seeing.with_name("mmproj-F16.gguf"), *ANSWER), 1)
    assert "give the model that it belongs to, and this file as --mmproj" in line


def test_check(inside, folder, seeing):
    projector, eyes = seeing.with_name("mmproj-F16.gguf"), folder / "elsewhere" / "eyes.gguf"

    def report(*files):
        done = inside("models", "check", *files)
        assert done.returncode == 0, done
        return dict(line.split(None, 1) for line in done.stdout.decode().splitlines())

    assert report(projector) == {"projector": f"mmproj-F16.gguf: {SEES}"}
    alone = report(seeing)
    assert alone == {"main": "tiny.gguf: tiny-llama-0; sees images", "projector": f"mmproj-F16.gguf: {SEES}"}
    mmproj = eyes.rename(eyes.with_name("mmproj-eyes.gguf"))
    assert report(folder / "tiny.gguf", mmproj)["projector"] == f"mmproj-eyes.gguf: {SEES}"
    mmproj.rename(eyes)
    pair = report(seeing, folder / "tiny.gguf", "--ctx", 64)
    assert pair["projector"] == alone["projector"]
    assert "projector" in pair["memory"]
    blind = report(folder / "tiny.gguf", seeing, "--ctx", 64)
    assert "projector" not in blind
    assert "projector" not in blind["memory"]
    assert "is not a pair" in inside.one_line(inside("models", "check", folder / "tiny.gguf"), 2)
    other = folder / "elsewhere" / "mmproj-other.gguf"
    assert "another model than tiny" in inside.one_line(inside("models", "check", seeing, other), 2)


def test_pull_list_and_show(fresh_inside, seeing, folder):
    projector = seeing.with_name("mmproj-F16.gguf")
    with HubServer() as server:
        fresh_inside.environment |= server.environment(fresh_inside.folder)
        tiny = seeing.read_bytes()
        server.put("u/seeing-GGUF", {"a-F32.gguf": tiny, "mmproj-a-f16.gguf": projector.read_bytes()})
        server.put("u/blind-GGUF", {"a-F32.gguf": tiny})
        done = fresh_inside("models", "pull", "u/seeing-GGUF:F32")
        assert done.returncode == 0, done
        assert "with 0.0 MB of the projector for images into" in done.stderr.decode()
        (path,) = done.stdout.decode().split()
        assert path.endswith("/a-F32.gguf")
        assert "projector" not in fresh_inside("models", "pull", "u/blind-GGUF:F32").stderr.decode()
    rows = [row.split("\t") for row in fresh_inside("models", "list", "--local").stdout.decode().splitlines()]
    sees = {row[0]: row[3].endswith("; sees images") for row in rows}
    assert sees == {"starter-draft": False, "u/seeing-GGUF:F32": True, "u/blind-GGUF:F32": False}
    shown = fresh_inside("models", "show", "u/seeing-GGUF:F32").stdout.decode()
    assert f"projector   {SEES}\n" in shown
    assert "projector" not in fresh_inside("models", "show", "u/blind-GGUF:F32").stdout.decode()
    answered = fresh_inside("generate", "--main", "u/seeing-GGUF:F32", *ANSWER)
    assert about(answered).endswith("· projector mmproj-a-f16.gguf")
    assert fresh_inside("models", "rm", "u/seeing-GGUF:F32", "--yes").returncode == 0
    assert not list(fresh_inside.folder.rglob("mmproj*"))


@pytest.mark.parametrize(("given", "later"), [("eyes.gguf", "auto"), ("auto", "auto"), ("none", "none")])
def test_another_main_model_of_a_chat_has_another_projector(given, later):
    changes = {}

    class Models(ChatModels):
        def reopen(self, chat, **given):
            changes.update(given)

    models = Models(ModelOptions(mmproj=given), SamplingOptions())
    models.use(SimpleNamespace(settings=GenerationSettings()), "other.gguf", None)
    assert changes["mmproj"] == later
