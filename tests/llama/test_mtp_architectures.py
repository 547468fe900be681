"""Layers for multi-token prediction of several architectures, with random weights, in F32."""

import random
import re
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest

from spec_local.core.calls import run
from spec_local.core.sampling import SamplingSettings
from spec_local.core.sequence import common_prefix
from spec_local.errors import InvalidRequest, ModelError
from spec_local.llama import tiny
from spec_local.llama.graphs import MtpLayers, layer_output, mtp_layers
from spec_local.llama.heads.choose import choose_head
from spec_local.llama.heads.mtp import open_mtp_sequences
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequences
from spec_local.models import pairs
from spec_local.session import Session
from spec_local.settings import GenerationSettings
from tests.llama.answers import drafts_of, text_of
from tests.llama.test_heads import NOISE, PROMPT, PROMPTS, Pair, answers, walk_together
from tests.tiny_architectures import write_tiny
from tests.tiny_mtp import MTP_ARCHITECTURES, write_tiny_mtp

pytestmark = pytest.mark.usefixtures("f32_caches")

ONE_LAYER = (
    *("glm4moe", "hy_v3", "deepseek2", "deepseek32", "glm-dsa", "deepseek4", "cohere2moe"),  # transformers
    *("qwen3next", "qwen35moe", "nemotron_h_moe", "bailingmoe3"),  # hybrids
)
LAYERS_AND_ROWS = [
    *((architecture, 1, 3) for architecture in ONE_LAYER),
    *((architecture, 1, 1) for architecture in ("glm4moe", "qwen3next", "nemotron_h_moe")),
    *(("step35", 1, 3), ("step35", 2, 1), ("step35", 3, 3)),
    *(("mimo2", 1, 1), ("mimo2", 2, 3), ("mimo2", 3, 1)),
    *(("hy_v3", 2, 1), ("hy_v3", 3, 3)),
]
"""Each architecture with layers, and numbers of layers and of rows. Several layers draft one token each."""


def open_pair(folder, architecture, n_mtp=1, **options):
    """A model with such layers; its file is written once."""
    path = folder / "-".join(["mtp", architecture, str(n_mtp), *options, ".gguf"])
    if not path.exists():
        write = write_tiny if architecture == "qwen3next" else write_tiny_mtp
        write(path, architecture, n_mtp=n_mtp, **options)
    return Pair("mtp", path, path)


@pytest.mark.parametrize(("architecture", "n_layers", "n_parallel"), LAYERS_AND_ROWS)
def test_logits_are_those_of_a_reference(folder, architecture, n_layers, n_parallel):
    pair = open_pair(folder, architecture, n_layers)
    n_drafts = range(n_layers + 1) if n_layers > 1 else (0, 1, 2, 5)
    walk_together(pair, n_parallel, random.Random(n_parallel), n_steps=15, n_drafts=n_drafts)
    pair.close()


@pytest.mark.parametrize("architecture", ONE_LAYER)
def test_the_text_is_that_of_plain_decoding(folder, architecture):
    pair = open_pair(folder, architecture)
    mains, heads = pair.open(3)
    plain, _ = answers(pair, mains, None, PROMPTS)
    text, statistics = answers(pair, mains, heads, PROMPTS)
    assert text == plain
    assert all(s.draft_n > 40 for s in statistics)
    pair.close()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_text_with_several_layers(folder, temperature):
    """No more tokens are drafted than there are layers, whatever is asked for."""
    pair = open_pair(folder, "step35", 3, predictable=True)
    mains, heads = pair.open(3)
    plain, _ = answers(pair, mains, None, PROMPTS, temperature=temperature, seed=3)
    text, statistics = answers(pair, mains, heads, PROMPTS, temperature=temperature, seed=3, draft_max=8)
    assert text == plain
    for s in statistics:
        assert 1 < s.draft_n / s.n_steps <= 3
        assert s.draft_n_accepted > 10
    pair.close()


def test_layers_draft_again_after_any_change(folder):
    """Another draft for the same history, one for a part of it, and one that is longer than a call."""
    pair = open_pair(folder, "step35", 3)
    (main,), (head,) = pair.open(max_tokens=16)
    reference = pair.reference(main)
    tokens = random.Random(0).choices(range(5, 800), k=40)
    states = []
    for start in range(0, 40, 10):
        run(main.call(tokens[start : start + 10], n_logits=0))
        states += list(main.states(range(10)))
        head.receive(start, tokens[start : start + 10], np.array(states[start:]))

    def check(history, drafted):
        head.truncate(common_prefix(head.cached, history[:-1]))
        n = head.n_received
        head.receive(n, history[n:-1], np.array(states[n : len(history) - 1]).reshape(-1, 64))
        found = [run(head.call(history[len(head.cached) :], n_logits=1))[0].copy()]
        found += [run(head.call([token], n_logits=1))[0].copy() for token in drafted]
        assert head.cached == [*history, *drafted]
        expected = reference.logits(history, states[: len(history) - 1], drafted)
        assert np.allclose(found, expected, atol=NOISE)
        head.truncate(len(history))
        drafted = [token + 1 for token in drafted]
        found[1:] = [run(head.call([token], n_logits=1))[0].copy() for token in drafted]
        expected = reference.logits(history, states[: len(history) - 1], drafted)
        assert np.allclose(found, expected, atol=NOISE)

    for drafted in ([8, 9], [18, 9], [28], [8, 39]):
        check([*tokens, 7], drafted)
    check([*tokens[:30], 7], [8, 9])
    check(tokens[:20], [8, 9])
    check([*tokens[:30], 11], [8, 9])
    with pytest.raises(InvalidRequest, match="3 layers for multi-token prediction, which draft one"):
        run(head.call([10], n_logits=1))
    assert head.cached == [*tokens[:30], 11, 9, 10]
    pair.close()


@pytest.mark.parametrize(
    ("write", "n_mtp", "load"),
    [
        (partial(write_tiny_mtp, architecture="step35"), 3, False),  # loaded without its layers
        (partial(write_tiny_mtp, architecture="step35"), 0, True),
        (partial(write_tiny, architecture="qwen35"), 2, True),  # llama.cpp evaluates one, and would abort
    ],
    ids=["not loaded", "none", "too many"],
)
def test_a_model_without_layers_that_can_be_used(folder, write, n_mtp, load):
    model = Model(write(folder / "without.gguf", n_mtp=n_mtp), load_mtp=load)
    mains = open_sequences(model, 1, n_ctx=64, threads=1)
    with pytest.raises(ModelError, match="has no layer for multi-token prediction: draft without it"):
        open_mtp_sequences(mains)
    mains[0].close()
    model.close()


@pytest.mark.parametrize("architecture", ["glm4moe", "step35"])
def test_a_header_that_lists_layers_of_another_file(folder, architecture):
    """The model is used without them, instead of ending the process."""
    with_layer = write_tiny_mtp(folder / f"{architecture}-1.gguf", architecture)
    without = write_without_layers(with_layer, folder / f"{architecture}-without.gguf")
    models = Model(with_layer, load_mtp=True), Model(without, load_mtp=True)
    assert [model.n_nextn for model in models] == [1, 0]
    assert choose_head(models[1]) is None
    found = []
    for model in models:
        row = open_sequences(model, 1, n_ctx=64, threads=1)[0]
        found.append(run(row.call(PROMPT[:20], n_logits=1)).copy())
        row.close()
        model.close()
    assert np.array_equal(*found)


@pytest.mark.parametrize(
    ("architecture", "n_mtp", "why"),
    [
        ("glm5-next", 1, "GLM5-Next NextN graph not implemented yet"),
        ("exaone4", 1, "failed to initialize the context"),  # of layers that it does not know
        ("qwen35", 2, "llama.cpp crashes: SIGABRT"),  # of an assertion: it evaluates one
    ],
)
def test_layers_that_llama_cpp_cannot_evaluate(folder, architecture, n_mtp, why):
    model = Model(
        write_tiny_mtp(folder / f"cannot-{architecture}.gguf", architecture, n_mtp=n_mtp), load_mtp=True
    )
    notes = []
    assert not model.is_head
    assert choose_head(model, log=notes.append) is None
    assert "cannot evaluate its layers for multi-token prediction (" in notes[0]
    assert why in notes[0]
    run(open_sequences(model, 1, n_ctx=64, threads=1)[0].call(PROMPT[:20], n_logits=1))


def test_what_llama_cpp_evaluates_is_found_once(folder, own_cache):
    path = write_tiny_mtp(folder / "once.gguf", "glm4moe")
    found = mtp_layers(path)
    (record,) = own_cache.rglob("mtp-layers/*.json")
    assert (found.n_usable, found.has_all_outputs, found.why) == (1, True, "")
    assert MtpLayers.model_validate_json(record.read_text()) == found
    write_tiny_mtp(path, "glm4moe", n_mtp=0)
    assert mtp_layers(path).why == "the file has none"


LISTED = [
    [cell.strip() for cell in line.split("|")[1:4]]
    for line in (Path(__file__).parents[2] / "docs" / "heads.md").read_text().splitlines()
    if " MTP layer" in line and line.startswith("| ")
]
"""Rows of the table in the documentation: how many layers, of which architectures, and the shapes."""


@pytest.mark.parametrize("architecture", MTP_ARCHITECTURES)
def test_the_documentation_says_what_llama_cpp_evaluates(folder, architecture):
    found = {}
    for n_layers, kind in ((1, "one MTP layer"), (2, "several MTP layers")):
        path = write_tiny_mtp(folder / f"listed-{architecture}-{n_layers}.gguf", architecture, n_mtp=n_layers)
        if (layers := mtp_layers(path)).n_usable:
            model = Model(path, weights=False)
            is_tree = n_layers == 1 and layers.has_all_outputs and not model.is_recurrent
            found[kind] = "chain, tree, beam" if is_tree else "chain"
    assert found == {kind: shapes for kind, names, shapes in LISTED if f"`{architecture}`" in names}


def test_the_documentation_lists_only_what_is_tested():
    listed = {name for _, names, _ in LISTED for name in re.findall(r"`([\w-]+)`", names)}
    assert len(listed) > 10
    assert listed <= set(MTP_ARCHITECTURES)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("glm4moe", "l_out"), ("nemotron_h", "nemotron_h_block_out"), ("deepseek4", None)],
)
def test_outputs_of_layers_are_found(folder, architecture, name):
    """Those of DeepSeek-V4 are several residual streams, which no head reads."""
    write = write_tiny if architecture == "nemotron_h" else write_tiny_mtp
    model = Model(write(folder / f"outputs-{architecture}.gguf", architecture))
    assert layer_output(model) == name
    options = {"n_ctx": 64, "threads": 1, "hidden": HiddenStates((0, 1))}
    if name:
        (row,) = open_sequences(model, 1, **options)
        run(row.call(PROMPT[:9], n_logits=1))
        states = row.states(range(9))
        assert states.shape == (9, 128)
        assert np.isfinite(states).all()
        assert states.any(axis=0).all()
        row.close()
    else:
        with pytest.raises(InvalidRequest, match="returns no outputs of layers of outputs-deepseek4"):
            open_sequences(model, 1, **options)


def write_without_layers(source, path):
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.3."):
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    return tiny.finish(writer, path)


# Layers in a file of their own


@pytest.fixture
def two_files(folder):
    """A function that writes the main model, its layers in a file of their own, and a file with both."""

    def write(architecture, n_mtp=1):
        name, options = f"{architecture}-{n_mtp}", {"predictable": True}
        return (
            write_tiny_mtp(folder / f"{name}-main.gguf", architecture, n_mtp=0, **options),
            write_tiny_mtp(folder / f"mtp-{name}.gguf", architecture, n_mtp=n_mtp, alone=True, **options),
            write_tiny_mtp(folder / f"{name}-both.gguf", architecture, n_mtp=n_mtp, **options),
        )

    return write


@pytest.mark.parametrize(
    ("architecture", "n_mtp"),
    [
        *((name, 1) for name in ("qwen35", "qwen3next", "qwen35moe", "glm4moe", "deepseek2")),
        *(("deepseek32", 1), ("deepseek4", 1), ("glm-dsa", 1), ("step35", 2)),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_layers_in_a_file_of_their_own_draft_the_same(two_files, architecture, n_mtp):
    main, layers, both = two_files(architecture, n_mtp)
    found = []
    for paths in ((main, layers), (both, None)):
        with Session.open(*paths, n_ctx=256, threads=1, parallel=1) as session:
            found.append(drafts_of(session))
    assert found[0] == found[1]
    assert found[0][2] > 0


@pytest.mark.usefixtures("unchecked")
def test_trees_for_a_model_with_an_indexer(two_files):
    """An indexer selects the tokens that are attended to, in a tree as in a chain."""
    path, found = two_files("deepseek32")[2], []
    for shape, mtp in (("chain", False), ("tree", True)):
        with Session.open(path, n_ctx=256, threads=1, parallel=1, branches=4, mtp=mtp) as session:
            how = GenerationSettings(
                SamplingSettings(temperature=0),
                max_tokens=60,
                policy="fixed" if mtp else "off",
                shape=shape,
                draft_max=2,
            )
            events = list(session.generate("the of and to in is you", how))
            found.append((text_of(events), events[-1].statistics))
    assert found[0][0] == found[1][0]
    assert found[1][1].draft_n_accepted > 10
    assert found[1][1].draft_n / found[1][1].n_steps > 2  # more than in a chain


@pytest.mark.usefixtures("unchecked", "unchecked_headers")
def test_layers_of_another_model_are_refused(two_files, folder):
    main, layers, _ = two_files("glm4moe")
    other = write_tiny_mtp(folder / "wide.gguf", "glm4moe", n_mtp=0, n_embd=128)
    for wrong, why in ((other, "width 64 against 128"), (two_files("hy_v3")[0], "architecture glm4moe")):
        with pytest.raises(ModelError, match=rf"mtp-glm4moe-1.gguf has layers .* of another model .*{why}"):
            Session.open(wrong, layers, n_ctx=64, threads=1)
    with pytest.raises(ModelError, match="give it as the draft of the model it is for"):
        Session.open(layers, n_ctx=64, threads=1)
    with pytest.raises(ModelError, match="of another model"):
        pairs.check(other, layers)
    assert pairs.check(main, layers).vocabulary_match.verdict == "same"
