"""What llama.cpp's own code makes of texts and pictures: the reference for the library.

Only libmtmd and libllama are called, and nothing of the library: positions, the attention of pictures and the
division into calls are those of llama.cpp's helper.

Parts are texts, whose control tokens are recognized, and pictures: uint8 arrays of shape (height, width, 3),
or the bytes of a file, also of sound, which llama.cpp then decodes.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp
from numpy.typing import NDArray

Part = str | bytes | NDArray[np.uint8]


class Chunk(NamedTuple):
    """A piece of a prompt.

    kind: ``text``, ``image`` or ``audio``. tokens: of a text; others have none. n_tokens: of tokens or cells.
    n_pos: number of positions that it takes. shape: columns and rows of a picture's cells; else (0, 0).
    """

    kind: str
    tokens: tuple[int, ...]
    n_tokens: int
    n_pos: int
    shape: tuple[int, int]


_no_log = llama_cpp.llama_log_callback(lambda level, text, user_data: None)


def greedy(
    model: Path, projector: Path, parts: Sequence[Part], n: int, *, add_special: bool = True, **context: Any
) -> list[int]:
    """Return the n most probable tokens after a prompt, one after the other.

    A token that ends the answer is one of them like any other.

    Args:
        model: file of the language model.
        projector: file of the projector.
        parts: texts and pictures; the last one is a text, since llama.cpp's helper computes no logits after a
            picture (the tokens that some projectors put after it are a text, too).
        n: number of tokens.
        add_special: whether BOS is put before the prompt, if the vocabulary says so.
        context: settings of `llama_context_params` by their names. A picture of gemma3 must fit in a call:
            with fewer tokens in ``n_batch``, llama.cpp divides it, and its cells do not attend to all others.
    """
    return [int(row.argmax()) for row in _rows(model, projector, parts, n, add_special, context)]


def greedy_logits(
    model: Path, projector: Path, parts: Sequence[Part], n: int, *, add_special: bool = True, **context: Any
) -> NDArray[np.float32]:
    """Return the logits from which `greedy` has its tokens: of shape (n, size of the vocabulary)."""
    return np.stack(list(_rows(model, projector, parts, n, add_special, context)))


def chunks(model: Path, projector: Path, parts: Sequence[Part], *, add_special: bool = True) -> list[Chunk]:
    """Return the pieces of a prompt, in order."""
    with _opened(model, projector) as (_, mtmd), _tokenized(mtmd, parts, add_special) as found:
        return [_chunk(piece) for piece in _pieces(found)]


def vectors(model: Path, projector: Path, parts: Sequence[Part]) -> list[NDArray[np.float32]]:
    """Return the vectors of each piece that is an image: a row for each cell, as wide as the input."""
    encoded = []
    with _opened(model, projector) as (llama, mtmd), _tokenized(mtmd, parts, True) as found:
        width = llama_cpp.llama_model_n_embd_inp(llama)
        for piece in _pieces(found):
            if _chunk(piece).kind == "text":
                continue
            _check(mtmd_cpp.mtmd_encode_chunk(mtmd, piece), "mtmd_encode_chunk")
            values = np.ctypeslib.as_array(
                mtmd_cpp.mtmd_get_output_embd(mtmd), (_chunk(piece).n_tokens, width)
            )
            encoded.append(values.copy())
    return encoded


def _rows(
    model: Path,
    projector: Path,
    parts: Sequence[Part],
    n: int,
    add_special: bool,
    changes: dict[str, Any],
) -> Iterator[NDArray[np.float32]]:
    """Yield the logits after a prompt, and after each token that is then the most probable one."""
    with (
        _opened(model, projector) as (llama, mtmd),
        _tokenized(mtmd, parts, add_special) as found,
        _context(llama, changes) as context,
    ):
        assert _chunk(list(_pieces(found))[-1]).kind == "text", "no logits are computed after a picture"
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(llama))
        past = llama_cpp.llama_pos(0)
        n_batch = llama_cpp.llama_n_batch(context)
        code = mtmd_cpp.mtmd_helper_eval_chunks(mtmd, context, found, 0, 0, n_batch, True, ctypes.byref(past))
        _check(code, "mtmd_helper_eval_chunks")
        for i in range(n):
            row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (n_vocab,)).copy()
            yield row
            if i + 1 < n:
                _decode(context, int(row.argmax()), past.value + i)


def _decode(context: Any, token: int, position: int) -> None:
    batch = llama_cpp.llama_batch_init(1, 0, 1)
    try:
        batch.n_tokens = 1
        batch.token[0], batch.pos[0] = token, position
        batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 0, 1
        _check(llama_cpp.llama_decode(context, batch), "llama_decode")
    finally:
        llama_cpp.llama_batch_free(batch)


@contextmanager
def _opened(model: Path, projector: Path) -> Iterator[tuple[Any, Any]]:
    """Open a model and its projector; llama.cpp's messages are left out from then on."""
    llama_cpp.llama_log_set(_no_log, None)
    mtmd_cpp.mtmd_helper_log_set(_no_log, None)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    llama = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
    assert llama, f"llama.cpp does not load {model}"
    with ExitStack() as stack:
        stack.callback(llama_cpp.llama_model_free, llama)
        settings = mtmd_cpp.mtmd_context_params_default()
        settings.use_gpu = settings.warmup = settings.print_timings = False
        settings.n_threads = 1
        mtmd = mtmd_cpp.mtmd_init_from_file(str(projector).encode(), llama, settings)
        assert mtmd, f"libmtmd does not load {projector}"
        stack.callback(mtmd_cpp.mtmd_free, mtmd)
        yield llama, mtmd


@contextmanager
def _context(llama: Any, changes: dict[str, Any]) -> Iterator[Any]:
    params = llama_cpp.llama_context_default_params()
    settings = {"n_ctx": 1024, "n_batch": 512, "n_ubatch": 512, "n_threads": 1, "n_threads_batch": 1}
    for name, value in (settings | changes).items():
        setattr(params, name, value)
    context = llama_cpp.llama_init_from_model(llama, params)
    assert context, "llama.cpp creates no context"
    try:
        yield context
    finally:
        llama_cpp.llama_free(context)


@contextmanager
def _tokenized(mtmd: Any, parts: Sequence[Part], add_special: bool) -> Iterator[Any]:
    marker = mtmd_cpp.mtmd_default_marker()
    text = b"".join(part.encode() if isinstance(part, str) else marker for part in parts)
    assert text.count(marker) == sum(not isinstance(part, str) for part in parts), "a text has the marker"
    with ExitStack() as stack:
        pictures = [_bitmap(mtmd, part) for part in parts if not isinstance(part, str)]
        for picture in pictures:
            stack.callback(mtmd_cpp.mtmd_bitmap_free, picture)
        found = mtmd_cpp.mtmd_input_chunks_init()
        stack.callback(mtmd_cpp.mtmd_input_chunks_free, found)
        given = mtmd_cpp.mtmd_input_text(text, len(text), add_special, True)
        array = (mtmd_cpp.mtmd_bitmap_p_ctypes * len(pictures))(*pictures)
        code = mtmd_cpp.mtmd_tokenize(mtmd, found, ctypes.byref(given), array, len(pictures))
        _check(code, "mtmd_tokenize")
        yield found


def _bitmap(mtmd: Any, part: bytes | NDArray[np.uint8]) -> Any:
    if isinstance(part, bytes):
        data = (ctypes.c_uint8 * len(part)).from_buffer_copy(part)
        picture = mtmd_cpp.mtmd_helper_bitmap_init_from_buf(mtmd, data, len(part), False)
        assert picture, "llama.cpp does not decode the picture"
        return picture
    height, width, channels = part.shape
    assert part.dtype == np.uint8
    assert channels == 3
    pixels = np.ascontiguousarray(part)
    return mtmd_cpp.mtmd_bitmap_init(width, height, pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))


def _pieces(found: Any) -> Iterator[Any]:
    for i in range(mtmd_cpp.mtmd_input_chunks_size(found)):
        yield mtmd_cpp.mtmd_input_chunks_get(found, i)


def _chunk(piece: Any) -> Chunk:
    n_tokens = mtmd_cpp.mtmd_input_chunk_get_n_tokens(piece)
    n_pos = mtmd_cpp.mtmd_input_chunk_get_n_pos(piece)
    if mtmd_cpp.mtmd_input_chunk_get_type(piece) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_TEXT:
        n = ctypes.c_size_t()
        tokens = mtmd_cpp.mtmd_input_chunk_get_tokens_text(piece, ctypes.byref(n))
        return Chunk("text", tuple(tokens[: n.value]), n_tokens, n_pos, (0, 0))
    if mtmd_cpp.mtmd_input_chunk_get_type(piece) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_AUDIO:
        return Chunk("audio", (), n_tokens, n_pos, (0, 0))
    image = mtmd_cpp.mtmd_input_chunk_get_tokens_image(piece)
    shape = mtmd_cpp.mtmd_image_tokens_get_nx(image), mtmd_cpp.mtmd_image_tokens_get_ny(image)
    return Chunk("image", (), n_tokens, n_pos, shape)


def _check(code: int, name: str) -> None:
    assert code == 0, f"{name} returned {code}"
