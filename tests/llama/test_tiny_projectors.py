"""Tiny projectors and their models, in llama.cpp's own code."""

import numpy as np
import pytest

from tests.llama import mtmd_reference
from tests.tiny_projectors import KINDS, write_projector
from tests.tiny_vision import N_DEEPSTACK, N_EMBD, write_vision_model

BEFORE, AFTER = "<|im_start|>user\nwhat is this: ", " the<|im_end|>\n<|im_start|>assistant\n"
CELLS = {"gemma3": 16, "qwen2vl_merger": 12, "qwen3vl_merger": 12, "idefics3": 20, "mlp": 16}
PAIRS = [(kind, name, N_DEEPSTACK if name == "qwen3vl" else 0) for kind, name in KINDS.items()]
PAIRS.append(("qwen3vl_merger", "qwen35", 0))


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def pair(request, tmp_path_factory):
    """The kind of a projector, its number of deepstack layers, and the files of a model and of it."""
    kind, architecture, n_deepstack = request.param
    folder = tmp_path_factory.mktemp("vision")
    model = write_vision_model(folder / "model.gguf", architecture)
    projector = write_projector(folder / "mmproj.gguf", kind, n_deepstack=n_deepstack)
    return kind, n_deepstack, model, projector


def noise(seed, height=84, width=112):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def plain(value, height=84, width=112):
    return np.full((height, width, 3), value, np.uint8)


def answer(pair, *parts, **options):
    _, _, model, projector = pair
    return mtmd_reference.greedy(model, projector, [BEFORE, *parts, AFTER], 12, **options)


def test_answers_depend_on_the_picture(pair):
    pictures = [noise(0), noise(1), plain(0), plain(255)]
    answers = [answer(pair, picture) for picture in pictures]
    assert answers == [answer(pair, picture) for picture in pictures]
    assert len({tuple(tokens) for tokens in answers}) == len(pictures)


def test_answers_depend_on_all_pictures_and_their_order(pair):
    answers = [answer(pair, noise(a), " and ", noise(b)) for a, b in [(0, 1), (1, 0), (0, 0), (2, 1)]]
    assert len({tuple(tokens) for tokens in answers}) == len(answers)


def test_answers_depend_on_the_text_before_and_after(pair):
    picture = noise(0)
    answers = [answer(pair, picture), answer(pair, " me", picture), answer(pair, picture, " me")]
    assert len({tuple(tokens) for tokens in answers}) == len(answers)


def test_number_of_cells_and_their_vectors(pair):
    kind, n_deepstack, model, projector = pair
    parts = [BEFORE, noise(0), AFTER]
    chunks = mtmd_reference.chunks(model, projector, parts)
    images = [chunk for chunk in chunks if chunk.kind == "image"]
    assert sum(chunk.n_tokens for chunk in images) == CELLS[kind]
    vectors = mtmd_reference.vectors(model, projector, parts)
    assert [len(rows) for rows in vectors] == [chunk.n_tokens for chunk in images]
    for rows in vectors:
        assert rows.shape[1] == N_EMBD * (1 + n_deepstack)
        assert 0.5 < rows.std() < 2  # as embeddings of tokens
        assert rows.std(axis=0).mean() > 0.4  # each cell differs


def test_vectors_are_those_of_the_pictures_in_order(pair):
    _, _, model, projector = pair

    def vectors(*pictures):
        parts = [part for picture in pictures for part in (BEFORE, picture)]
        return mtmd_reference.vectors(model, projector, parts)

    one, other = vectors(noise(0)), vectors(noise(1))
    for found, expected in zip(vectors(noise(0), noise(1)), one + other, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_shape_of_a_picture_decides_its_pieces(tmp_path):
    """qwen has a cell for each square of pixels, idefics3 a tile for each larger square."""
    shapes = {}
    for kind in ("qwen2vl_merger", "idefics3", "gemma3"):
        model = write_vision_model(tmp_path / f"{kind}.gguf", KINDS[kind])
        projector = write_projector(tmp_path / f"mmproj-{kind}.gguf", kind)
        found = mtmd_reference.chunks(model, projector, [noise(0, 168, 56)])
        shapes[kind] = [(*c.shape, c.n_tokens, c.n_pos) for c in found if c.kind == "image"]
    assert shapes["qwen2vl_merger"] == [(2, 6, 12, 6)]
    assert shapes["idefics3"] == [(4, 1, 4, 4)] * 3  # two rows of one tile, and the whole picture
    assert shapes["gemma3"] == [(16, 1, 16, 16)]


def test_pictures_have_tokens_around_them(pair):
    """All that libmtmd asks for by their texts: in place of a missing one it puts -1."""
    kind, _, model, projector = pair
    chunks = mtmd_reference.chunks(model, projector, [noise(0)])
    tokens = [token for chunk in chunks for token in chunk.tokens]
    expected = {"gemma3": 3, "qwen2vl_merger": 3, "qwen3vl_merger": 3, "idefics3": 14, "mlp": 1}
    assert len(tokens) == expected[kind]  # with <s>
    assert min(tokens) > 0
