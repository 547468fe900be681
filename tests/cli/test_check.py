"""specdec models check: its report, and the pairs it rejects."""

import json
import re

import psutil
import pytest

from spec_local.llama.tiny import write_tiny_model
from specdec_cli.check import _percent

TINY = ["--threads", 1, "--ctx", 256]


@pytest.fixture(scope="module")
def model(home):
    def write(name, **kwargs):
        return write_tiny_model(home / f"{name}.gguf", n_layers=1, **kwargs)

    return write


def rows(done):
    assert done.returncode == 0, done
    return dict(line.split(None, 1) for line in done.stdout.decode().splitlines())


def test_a_pair(fresh_inside, model):
    main, draft = model("one"), model("two", noise=0.1, tensor_type="Q8_0")
    done = fresh_inside("models", "check", main, draft, *TINY)
    report = rows(done)
    assert list(report)[:7] == ["vocabulary", "main", "draft", "memory", "acceptance", "length", "speed-up"]
    assert report["vocabulary"] == "the same"
    assert report["main"].startswith("one.gguf: llama ")
    assert re.search(r"two\.gguf: llama .*\(0\.[56]\d times the main model's\)$", report["draft"])
    assert re.match(
        r"[\d.]+ [GM]B needed \(weights .*, KV caches of 256 tokens .*\); [\d.]+ [GM]B free$",
        report["memory"],
    )
    how = f"run specdec tune {main} {draft} --ctx 256 --threads 1"
    assert done.stdout.decode().endswith(f" estimated from the sizes; to measure it: {how}\n")
    assert done.stderr == b""
    assert "\x1b" not in done.stdout.decode()


@pytest.mark.usefixtures("unchecked_headers")
def test_the_costs_of_tune_are_used(fresh_inside, model):
    main, draft = model("one"), model("two", noise=0.1)
    assert fresh_inside("tune", main, draft, *TINY, "--rounds", 1).returncode == 0
    # The costs of tiny models are arbitrary: use those of a pair that pays off, then of one that does not.
    for seconds, pays in (({"1": 0.1, "64": 0.1}, True), ({"1": 2.0}, False)):
        for path in fresh_inside.folder.rglob("costs/*.json"):
            known = json.loads(path.read_text())
            known["others"] = 0.0
            known["seconds"] = {"1": 1.0, "64": 1.5} if known["model"] == "one.gguf" else seconds
            path.write_text(json.dumps(known))
        done = fresh_inside("models", "check", main, draft, *TINY)
        report = rows(done)
        assert list(report)[-3:] == ["acceptance", "length", "speed-up"]
        times = [float(x) for x in report["speed-up"].split()[:6]]
        assert times == sorted(times)
        assert (times[-1] > 2) is pays
        assert ("none" in report["length"].split()[5]) is not pays
        assert (b"too slow" in done.stderr) is not pays
    for path in fresh_inside.folder.rglob("costs/*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"others": 64.0}))
    done = fresh_inside("models", "check", main, draft, *TINY)
    assert b"estimated from the sizes" in done.stdout
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("warning: the measured costs are not used, as other programs used 64.0 of ")


def coverage(share):
    return f"the draft model can propose {share:.1%} of the main model's tokens"


@pytest.mark.usefixtures("unchecked_headers")
def test_the_costs_of_a_device(fresh_inside, model):
    """Those of the CPU are of sessions without layers on a GPU."""
    pair = model("one"), model("two", noise=0.1)

    def check(*device):
        done = fresh_inside("models", "check", *pair, *TINY, *device)
        return rows(done).get("estimated", "measured")

    command = ["tune", *map(str, pair), "--ctx", "256", "--threads", "1", "--device", "cpu"]
    assert check("--device", "cpu") == f"from the sizes; to measure it: run specdec {' '.join(command)}"
    assert fresh_inside(*command, "--rounds", 1).returncode == 0
    for path in fresh_inside.folder.rglob("costs/*.json"):  # whatever else runs here
        path.write_text(json.dumps(json.loads(path.read_text()) | {"others": 0.0}))
    for device in (["--device", "cpu"], ["--gpu-layers", 0]):
        assert check(*device) == "measured"
    assert "run specdec tune" in check()


@pytest.mark.usefixtures("unchecked_headers")
def test_vocabularies(inside, model):
    plain = model("plain")
    wine, beer = (model(name, extra_tokens=[name]) for name in ("wine", "beer"))
    many = model("many", extra_tokens=[f"<{i}>" for i in range(300)])
    shifted = model("shifted", extra_tokens=[f"<{i}>" for i in range(1, 9)])
    other = model("other", extra_tokens=[f"<{i}>" for i in range(8)])
    # 95 characters have two tokens each, of which the draft model proposes one.
    for main, draft, what in [
        (wine, plain, "the same, except ids 823"),
        (plain, wine, "the same, except ids 823"),
        (wine, beer, f"nearly the same, except ids 823; {coverage(728 / 824)}"),
        (
            shifted,
            other,
            f"nearly the same, except ids 823, 824, 825, 826, 827 and 3 more; {coverage(735 / 831)}",
        ),
        (many, plain, f"different (1123 tokens against 823); {coverage(728 / 1123)}"),
        (plain, many, f"different (823 tokens against 1123); {coverage(728 / 823)}"),
    ]:
        assert rows(inside("models", "check", main, draft))["vocabulary"] == what


def test_less_than_all_is_never_100_percent():
    assert [_percent(share) for share in (1.0, 0.99999, 0.5)] == ["all", "99.9%", "50.0%"]


@pytest.mark.usefixtures("unchecked_headers")
def test_a_sliding_window(inside, model):
    report = rows(inside("models", "check", model("plain"), model("gemma", architecture="gemma3")))
    assert "sliding window" in report["draft"]
    assert "sliding window" not in report["main"]


@pytest.mark.usefixtures("unchecked_headers")
def test_too_little_memory_is_a_warning(inside, model, monkeypatch):
    path, memory = model("plain"), psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=1000))
    done = inside("models", "check", path, path)
    assert rows(done)["memory"].endswith("0.0 MB free")
    same, memory = done.stderr.splitlines()
    assert same.startswith(b"warning: main and draft are the same file")
    assert memory.startswith(b"warning: there is not enough free memory")


def test_models_that_form_no_pair(inside, model, tmp_path):
    path = model("plain")
    deadly = write_tiny_model(tmp_path / "deadly.gguf", n_layers=0)
    for pair, what in [
        ((path, tmp_path / "absent.gguf"), "absent.gguf does not exist"),
        ((path, deadly), "crashes llama.cpp"),
    ]:
        assert what in inside.one_line(inside("models", "check", *pair), 1)


def test_a_pair_before_its_download(inside):
    """An error, which names the command that shows its size, its memory and its speed-up."""
    line = inside.one_line(inside("models", "check", "coder-7b"), 1)
    assert "(4.7 GB) has not been downloaded: run specdec models pull coder-7b" in line
    assert line.endswith("before the download, specdec models show coder-7b shows what is known")
    shown = inside("models", "show", "coder-7b").stdout.decode()
    assert "GB for both models" in shown
    assert "4.7 GB to download" in shown
