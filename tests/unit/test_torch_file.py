"""Files of torch.save, read without PyTorch: whole, damaged and hostile ones."""

import io
import os
import pickle
import re
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch

from spec_local.conversion.checkpoint import Checkpoint
from spec_local.errors import ModelFileError

VALUES = torch.arange(12).reshape(3, 4) / 7


@pytest.fixture
def saved(tmp_path):
    """A function that saves what it is given, and returns the checkpoint of it."""

    def save(content, **options):
        (tmp_path / "config.json").write_text("{}")
        torch.save(content, tmp_path / "pytorch_model.bin", **options)
        return Checkpoint(tmp_path)

    return save


def test_values_of_each_type(saved):
    kinds = (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.bool,
    )
    tensors = {str(kind): (100 * VALUES).to(kind) for kind in kinds}
    whole = torch.arange(20.0)
    tensors |= {"a part": whole[4:10].reshape(2, 3), "another": whole[:4], "one": torch.tensor(3.0)}
    tensors |= {"empty": torch.empty(0, 3), "a parameter": torch.nn.Parameter(VALUES)}
    for content in (tensors, OrderedDict(tensors), torch.nn.Linear(2, 3).state_dict()):
        found = saved(content)
        assert sorted(found.names) == sorted(content)
        for name, values in content.items():
            assert found.shape(name) == tuple(values.shape)
            expected = (
                values.detach().to(torch.float32 if values.is_floating_point() else torch.int64).numpy()
            )
            assert np.array_equal(found.tensor(name), expected), name
            assert found.tensor(name).dtype == expected.dtype


def test_what_is_not_read(saved):
    def refusal(why, content, **options):
        with pytest.raises(ModelFileError, match=why) as caught:
            saved(content, **options)
        assert "\n" not in str(caught.value)

    refusal(r"pytorch_model\.bin is damaged: download it again", {"a": VALUES.T})
    refusal("is damaged", {"a": VALUES}, _use_new_zipfile_serialization=False)
    refusal("is damaged", [VALUES])
    refusal("is damaged", {"a": 3})
    refusal("is damaged", {3: VALUES})
    refusal(
        "contains torch.nn.modules.linear.Linear, which is no tensor: give a head in safetensors",
        torch.nn.Linear(2, 2),
    )


class Runs:
    """A pickle that runs a function when it is loaded."""

    def __init__(self, function, *arguments):
        self._what = function, arguments

    def __reduce__(self):
        return self._what


class Pickler(pickle.Pickler):
    def persistent_id(self, thing):
        return thing.pid if isinstance(thing, Stored) else None


class Stored:
    """A storage."""

    def __init__(self, *pid):
        self.pid = pid


def rebuilt(storage, *rest):
    return Runs(torch._utils._rebuild_tensor_v2, storage, *rest)


def archive(path, content, data=b"\0" * 48, compression=zipfile.ZIP_STORED):
    pickled = io.BytesIO()
    Pickler(pickled, 2).dump(content)
    (path / "config.json").write_text("{}")
    with zipfile.ZipFile(path / "pytorch_model.bin", "w") as file:
        file.writestr("archive/data.pkl", pickled.getvalue())
        file.writestr("archive/data/0", data, compression)
    return path


STORAGE = Stored("storage", torch.FloatStorage, "0", "cpu", 12)
TENSOR = rebuilt(STORAGE, 0, (3, 4), (4, 1), False, OrderedDict())
HOSTILE = {
    "another size": rebuilt(STORAGE, 0, (4, 4), (4, 1)),
    "an offset": rebuilt(STORAGE, 1, (3, 4), (4, 1)),
    "before the start": rebuilt(STORAGE, -4, (3, 4), (4, 1)),
    "negative": rebuilt(STORAGE, 0, (-3, -4), (4, 1)),
    "huge": rebuilt(STORAGE, 0, (1 << 62, 1 << 62), (1 << 62, 1)),
    "fractions": rebuilt(STORAGE, 0, (3.0, 4.0), (4, 1)),
    "fewer strides": rebuilt(STORAGE, 0, (3, 4), (1,)),
    "no storage": rebuilt(None, 0, (3, 4), (4, 1)),
    "too few arguments": rebuilt(STORAGE),
    "a larger storage": rebuilt(Stored("storage", torch.FloatStorage, "0", "cpu", 99), 0, (3, 4), (4, 1)),
    "another member": rebuilt(Stored("storage", torch.FloatStorage, "../0", "cpu", 12), 0, (3, 4), (4, 1)),
    "no name": rebuilt(Stored("storage", torch.FloatStorage, 0, "cpu", 12), 0, (3, 4), (4, 1)),
    "another kind": rebuilt(Stored("module", torch.FloatStorage, "0", "cpu", 12), 0, (3, 4), (4, 1)),
    "a short storage": rebuilt(Stored("storage"), 0, (3, 4), (4, 1)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_tensors_that_are_not_in_the_file(tmp_path, case):
    with pytest.raises(ModelFileError, match="is damaged: download it again"):
        Checkpoint(archive(tmp_path, {"a": HOSTILE[case]}))


def test_damaged_archives(tmp_path):
    assert Checkpoint(archive(tmp_path, {"a": TENSOR})).tensor("a").shape == (3, 4)
    whole = (tmp_path / "pytorch_model.bin").read_bytes()
    archive(tmp_path, {"a": TENSOR}, compression=zipfile.ZIP_DEFLATED)
    compressed = (tmp_path / "pytorch_model.bin").read_bytes()
    pickled = re.search(rb"archive/data\.pkl\x80", whole).end()
    cut = whole[:pickled] + whole[pickled : pickled + 9] + b"." * 4 + whole[pickled + 13 :]
    for content in (
        b"",
        b"PK",
        whole[:-30],
        whole[:40],
        compressed,
        cut,
        whole.replace(b"data/0", b"data/1"),
    ):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(ModelFileError, match="is damaged: download it again"):
            Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        Runs(os.system, "touch made"),
        {"a": Runs(eval, "1")},
        {"a": Runs(getattr, "x", "y")},
        Runs(torch.load, "x"),
    ],
)
def test_no_program_is_run(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match=r"contains \S+, which is no tensor: give a head in safetensors"):
        Checkpoint(archive(tmp_path, content))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "pytorch_model.bin"]
