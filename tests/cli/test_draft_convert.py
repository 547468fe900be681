"""specdec draft convert and specdec models pull: heads in safetensors, in a folder and on the Hub."""

import io
import json

import pytest
import torch

from spec_local.llama import gguf_header
from spec_local.models.published_heads import find_main
from tests.checkpoints import write_checkpoint
from tests.hub_server import HubServer
from tests.stored_models import write_header
from tests.tiny_heads import write_tiny_eagle, write_tiny_main
from tests.torch_eagle import tiny_eagles

HEADS = tiny_eagles()
REPO = "someone/Toy-speculator.eagle3"
COMMAND = "specdec draft convert"
SMALL = ["--threads", 1, "--ctx", 256, "-n", 4, "--raw", "--temp", 0]


@pytest.fixture
def command(fresh_inside):
    """The command in a folder with a main model."""
    write_tiny_main(fresh_inside.folder / "Toy-F32.gguf", n_layers=8)
    return fresh_inside


@pytest.fixture
def head(tmp_path):
    (tmp_path / "heads").mkdir()
    return write_checkpoint(tmp_path / "heads/eagle", HEADS["SpecForge"].config, HEADS["SpecForge"].tensors)


@pytest.fixture
def hubbed(command, tmp_path):
    """The command with a hub, to whose `server` repositories can be added."""
    with HubServer() as server:
        command.environment |= server.environment(tmp_path)
        command.server = server
        yield command


def repository(tmp_path, main="org/Toy"):
    """The files of a head on the Hub whose config.json names its main model."""
    found = HEADS["speculators"]
    config = found.config | ({"speculators_config": {"verifier": {"name_or_path": main}}} if main else {})
    folder = write_checkpoint(tmp_path / "repository", config, found.tensors, "BF16")
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {"README.md": b"A head."}


def printed(done):
    assert done.returncode == 0, done
    return done.stdout.decode().strip()


def test_a_folder(command, head):
    """The file is written beside the main model."""
    done = command("draft", "convert", head, "--main", "Toy-F32.gguf")
    assert printed(done) == "eagle3-Toy-F32-eagle.gguf"
    assert done.stderr.decode() == "converting eagle (EAGLE-3) for Toy-F32.gguf to Q8_0\n"
    metadata = gguf_header.read_metadata(command.folder / printed(done))
    assert gguf_header.describe(metadata) == "eagle, Q8_0"
    again = command("draft", "convert", head, "--main", "Toy-F32.gguf")
    assert again.returncode == 2
    assert again.stderr.decode().splitlines()[-1] == (
        "specdec: eagle3-Toy-F32-eagle.gguf exists: give another --output, or --force to replace it"
    )
    more = ["--type", "f16", "--force", "-o", "eagle3-Toy-F32-eagle.gguf", "-m", "Toy-F32.gguf"]
    assert printed(command("draft", "convert", head, *more)) == "eagle3-Toy-F32-eagle.gguf"
    metadata = gguf_header.read_metadata(command.folder / "eagle3-Toy-F32-eagle.gguf")
    assert gguf_header.describe(metadata) == "eagle, F16"


def test_a_main_model_beside_the_head(command, head):
    main = head.parent / "Toy.gguf"
    missing = command.one_line(command("draft", "convert", head), 2).removeprefix("specdec: ")
    assert (
        missing == f"{head} does not name its main model: run {COMMAND} {head} --main MAIN with its GGUF file"
    )
    (command.folder / "Toy-F32.gguf").rename(main)
    write_tiny_eagle(head.parent / "another.gguf")  # is no main model
    assert printed(command("draft", "convert", head)) == str(head.parent / "eagle3-Toy-eagle.gguf")
    write_tiny_main(head.parent / "Other.gguf", n_layers=8)
    assert "does not name its main model" in command.one_line(command("draft", "convert", head), 2)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"base_model": "org/Toy.1"}))
    part = write_header(head.parent / "Toy.1-Q4_K_M-00001-of-00002.gguf")
    assert find_main(head, "a head") == part


def test_what_cannot_be_converted(command, head):
    """Every error comes before anything is written, and in one line."""
    main = ["--main", "Toy-F32.gguf"]

    def refusal(folder, code=1):
        before = sorted(command.folder.iterdir())
        done = command("draft", "convert", folder, *main)
        assert sorted(command.folder.iterdir()) == before
        assert (done.returncode, done.stdout) == (code, b"")
        return done.stderr.decode().splitlines()[-1].removeprefix("specdec: ")

    assert (
        refusal("no-folder", 2)
        == "no-folder is neither a folder nor a repository (user/repo): check the name"
    )
    is_file = "is a file: give the folder that contains it; a head in GGUF needs no conversion"
    assert is_file in refusal("Toy-F32.gguf", 2)
    (empty := command.folder / "empty").mkdir()
    (empty / "config.json").write_text("{}")
    assert "empty contains no *.safetensors: give the folder of a head" in refusal(empty)
    given = json.loads((head / "config.json").read_text())
    for config, why in (
        (
            {"hidden_act": "gelu"},
            "`hidden_act` cannot be converted (input should be 'silu'): use another head",
        ),
        (
            {"vocab_size": 900},
            "is an EAGLE-3 head for another model (900 tokens against 823)",
        ),
    ):
        (head / "config.json").write_text(json.dumps(given | config))
        assert refusal(head).partition(why)[1]
    main[1] = str(write_tiny_eagle(command.folder / "other.gguf"))
    assert "other.gguf is an EAGLE-3 head: give it as the draft of the model it is for" in refusal(head)


def test_a_repository(hubbed, tmp_path):
    hubbed.server.put(REPO, repository(tmp_path, None) | {"mask_embedding.pt": b"of heads that draft blocks"})
    done = hubbed("draft", "convert", REPO, "--main", "Toy-F32.gguf")
    assert printed(done) == "eagle3-Toy-F32-Toy-speculator.eagle3.gguf"
    assert f"downloading {REPO}" in done.stderr.decode()
    assert hubbed.server.count("bytes") == 3  # without the README
    again = hubbed("draft", "convert", REPO, "--main", "Toy-F32.gguf", "--force", env={"HF_HUB_OFFLINE": "1"})
    assert printed(again) == printed(done)
    assert hubbed.server.count("bytes") == 3
    head, file = HEADS["speculators"], io.BytesIO()
    tensors = {name: torch.tensor(values) for name, values in head.tensors.items()}
    torch.save({k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}, file)
    files = {"config.json": json.dumps(head.config).encode(), "pytorch_model.bin": file.getvalue()}
    hubbed.server.put(REPO, files)
    pickled = hubbed("draft", "convert", REPO, "--main", "Toy-F32.gguf", "-o", "pickled.gguf")
    same = hubbed.folder / printed(again), hubbed.folder / printed(pickled)
    assert same[0].read_bytes() == same[1].read_bytes()
    refusals = {
        "someone/else": "the Hub has no model someone/else",
        "someone/text": "someone/text is no head in safetensors, as its config.json says: give that of a",
        "org/Toy": "org/Toy is no head",  # and is not downloaded
    }
    hubbed.server.put("org/Toy", {"config.json": b"{}", "model.safetensors": b"x" * 999})
    hubbed.server.put("someone/text", {"config.json": b"{}"})
    for repo, why in refusals.items():
        assert why in hubbed("draft", "convert", repo, "--main", "Toy-F32.gguf").stderr.decode()
    offline = hubbed("draft", "convert", "a/b", "--main", "Toy-F32.gguf", env={"HF_HUB_OFFLINE": "1"})
    assert "a/b has not been downloaded, and specdec is offline" in hubbed.one_line(offline, 1)


def test_pull_converts_a_head_for_its_main_model(hubbed, tmp_path):
    hubbed.server.put("org/Toy-GGUF", {"Toy-F32.gguf": (hubbed.folder / "Toy-F32.gguf").read_bytes()})
    hubbed.server.put(REPO, repository(tmp_path))
    unknown = hubbed.one_line(hubbed("models", "pull", REPO), 2)
    assert unknown == (
        f"specdec: {REPO} is for org/Toy, which is not on this machine: run {COMMAND} {REPO} --main MAIN "
        "with its GGUF file"
    )
    assert hubbed.server.count("bytes") == 1  # its config.json
    main = printed(hubbed("models", "pull", "org/Toy-GGUF:F32"))
    done = hubbed("models", "pull", REPO)
    assert printed(done) == main.replace("Toy-F32.gguf", "eagle3-Toy-F32-Toy-speculator.eagle3.gguf")
    assert done.stderr.decode().splitlines()[-1] == (
        "converting Toy-speculator.eagle3 (EAGLE-3) for Toy-F32.gguf to Q8_0"
    )
    again = hubbed("models", "pull", REPO)
    assert (printed(again), again.stderr) == (printed(done), b"")
    # The name of the main model still selects one file.
    assert printed(hubbed("models", "path", "org/Toy-GGUF:F32")) == main
    shown = hubbed("generate", "--main", "org/Toy-GGUF:F32", *SMALL, "the of").stderr.decode()
    assert "drafting with eagle3-Toy-F32-Toy-speculator.eagle3.gguf" in shown
    for offline in (["--offline"], []):
        environment = {} if offline else {"HF_HUB_OFFLINE": "1"}
        assert printed(hubbed("models", "pull", REPO, *offline, env=environment)) == printed(done)
        refused = hubbed.one_line(hubbed("models", "pull", "a/b", *offline, env=environment), 1)
        assert "a/b has not been downloaded, and specdec is offline" in refused


CATALOG = f"""\
[models.toy]
description = "tiny"
licence = "none"
repo = "org/Toy-GGUF"
file = "Toy-F32.gguf"

[models.toy-head]
description = "a head"
licence = "none"
checkpoint = "{REPO}"
file = "toy-head-Q8_0.gguf"
head = "eagle3"

[pairs.toy-pair]
main = "toy"
draft = "toy-head"
note = "tiny"
"""


def test_pull_converts_the_head_of_a_pair(hubbed, tmp_path):
    config = tmp_path / "config/specdec"
    config.mkdir(parents=True)
    (config / "models.toml").write_text(CATALOG)
    hubbed.environment["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    hubbed.server.put("org/Toy-GGUF", {"Toy-F32.gguf": (hubbed.folder / "Toy-F32.gguf").read_bytes()})
    hubbed.server.put(REPO, repository(tmp_path, None))
    alone = hubbed.one_line(hubbed("models", "pull", "toy-head"), 2)
    assert alone == (
        "specdec: toy-head is converted for its main model, which is not here: run specdec models pull toy "
        "first"
    )
    assert b"to convert" in hubbed("models", "list").stdout
    main, head = printed(hubbed("models", "pull", "toy-pair")).splitlines()
    assert head.endswith("toy-head-Q8_0.gguf")
    assert printed(hubbed("models", "pull", "toy-pair")).splitlines() == [main, head]


def test_pull_needs_the_quantization_of_what_is_no_head(hubbed):
    hubbed.server.put("org/Toy-GGUF", {"Toy-F32.gguf": b"GGUF"})
    hubbed.server.put("org/Toy", {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"x" * 999})
    for repo in ("org/Toy-GGUF", "org/Toy"):
        assert "add the quantization, as in" in hubbed.one_line(hubbed("models", "pull", repo), 2)
    assert "a head with specdec draft convert" in hubbed.one_line(hubbed("models", "pull", "org/Toy:Q8_0"), 2)
