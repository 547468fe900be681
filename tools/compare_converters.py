"""Compare the files of `specdec draft convert` with those of llama.cpp's script, for each layout.

Needs llama.cpp's sources, PyTorch and transformers. The heads are those of the tests. The script reads the
tokenizer of the main model's original folder, which tiny models have not: only the other fields are compared.

    python tools/compare_converters.py FOLDER_OF_LLAMA_CPP
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
LLAMA_CPP = Path(sys.argv[1])
sys.path.insert(0, str(ROOT))

from tests.checkpoints import write_checkpoint  # noqa: E402

sys.path[:0] = [str(LLAMA_CPP), str(LLAMA_CPP / "gguf-py")]  # which have a package `tests`, too

import gguf  # noqa: E402
from conversion.llama import LlamaModel  # noqa: E402
from conversion.qwen import DFlashModel, DSparkModel  # noqa: E402

from spec_local.conversion.convert import convert_head  # noqa: E402
from tests.block_checkpoints import HEADS, block_tensors  # noqa: E402
from tests.tiny_heads import N_EMBD, write_tiny_main  # noqa: E402
from tests.torch_eagle import N_VOCAB, tiny_eagles  # noqa: E402

N_LAYERS = 8
TARGET = {"vocab_size": N_VOCAB, "num_hidden_layers": N_LAYERS, "hidden_size": N_EMBD}
PREFIXES = ("eagle3.", "dflash.")
SAME = 1e-6  # of values that were computed in another order


def heads() -> Iterator[tuple[str, type, dict, dict[str, np.ndarray]]]:
    """The layout, the script's class, the configuration and the tensors of each head."""
    for layout, head in tiny_eagles().items():
        yield layout, LlamaModel, head.config, head.tensors
    for layout, (config, options) in HEADS.items():
        model = DSparkModel if "DSpark" in config["architectures"][0] else DFlashModel
        yield layout, model, config, block_tensors(config, **options)


def converted_by_script(model: type, folder: Path, target: Path, path: Path) -> Path:
    """Write the file of a head with a class of llama.cpp's script."""
    model.set_vocab = lambda self: None
    kind = gguf.LlamaFileType.ALL_F32
    model(dir_model=folder, ftype=kind, fname_out=path, target_model_dir=target).write()
    return path


def contents(path: Path) -> dict[str, object]:
    """The fields of the architecture and the tensors of a file, by name."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith(PREFIXES)}
    return fields | {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


def difference(ours: object, theirs: object) -> str:
    """What differs; empty: nothing."""
    if theirs is None:
        return "only ours" + ("" if isinstance(ours, np.ndarray) else f": {ours}")
    if ours is None:
        return "only theirs" + ("" if isinstance(theirs, np.ndarray) else f": {theirs}")
    if not isinstance(ours, np.ndarray):
        equal = np.allclose(ours, theirs, SAME) if not isinstance(ours, str) else ours == theirs
        return "" if equal else f"{ours} against {theirs}"
    if ours.shape != theirs.shape:
        return f"shape {ours.shape} against {theirs.shape}"
    return "" if np.allclose(ours, theirs, SAME) else f"by up to {np.abs(ours - theirs).max():.3g}"


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    main_path = write_tiny_main(folder / "main.gguf", n_layers=N_LAYERS)
    (folder / "target").mkdir()
    (folder / "target/config.json").write_text(json.dumps(TARGET))
    for layout, model, config, tensors in heads():
        given = write_checkpoint(folder / layout, config, tensors)
        ours = contents(convert_head(given, main_path, folder / "ours.gguf", "F32", force=True))
        try:
            theirs = contents(converted_by_script(model, given, folder / "target", folder / "theirs.gguf"))
        except Exception as error:
            print(f"{layout:40} the script fails: {type(error).__name__} {error}")
            continue
        found = {name: difference(ours.get(name), theirs.get(name)) for name in ours | theirs}
        n_tensors = sum(isinstance(each, np.ndarray) for each in ours.values())
        print(f"{layout:40} {n_tensors} tensors, {len(ours) - n_tensors} fields")
        for name, what in found.items():
            if what:
                print(f"    {name}: {what}")


if __name__ == "__main__":
    main()
