"""Sound in prompts: the same texts as llama.cpp's own code, whatever drafts; caches; and damaged files."""

import functools
import re

import numpy as np
import pytest

from spec_local.chat_session import ChatSession
from spec_local.core.span import Cell
from spec_local.errors import InvalidRequest, ModelError
from spec_local.images.audio import Audio
from spec_local.images.image import Image
from spec_local.session import Session, Text
from tests.llama import mtmd_reference
from tests.llama.test_images import DRAFTS, PLAIN, answer, image, pixels
from tests.sounds import RATE, clip, flac, mp3, tones, wav
from tests.tiny_projectors import SOUND_CELLS, write_projector, write_sound_projector
from tests.tiny_vision import write_vision_model

pytestmark = pytest.mark.usefixtures("unchecked")

PROMPTS = {
    "before": (clip(1), "what is this"),
    "between": ("a sound: ", clip(1), " and what follows it"),
    "two": ("first ", clip(1), " second ", clip(2), " what differs"),
    "of two windows": ("a long one ", clip(3, 33), " the end"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Of two architectures, the files of main, projector and draft model."""
    folder, found = tmp_path_factory.mktemp("models"), {}
    projector = write_sound_projector(folder / "mmproj.gguf")
    for kind in ("llama", "qwen2vl"):
        main = write_vision_model(folder / f"{kind}.gguf", kind)
        found[kind] = main, projector, write_vision_model(folder / f"draft-{kind}.gguf", kind, noise=0.02)
    return found


@pytest.fixture(scope="module")
def expected(models):
    """A function that returns the tokens of llama.cpp's answer."""

    @functools.cache
    def greedy(kind, parts):
        return mtmd_reference.greedy(*models[kind][:2], parts, 16)

    return greedy


def opened(models, kind="llama", draft="none", **options):
    main, projector, draft_model = models[kind]
    usual = {"n_ctx": 1024, "threads": 1, "mmproj": projector}
    return Session.open(main, draft_model if draft == "model" else draft, **usual | options)


def prompt_of(session, *parts):
    """The tokens of texts and files of sound."""
    return session.main.model.tokenize([Audio(p, "a.wav") if isinstance(p, bytes) else p for p in parts])


@pytest.mark.parametrize("draft", ["none", "draft model", "tree"])
@pytest.mark.parametrize("parts", PROMPTS.values(), ids=PROMPTS.keys())
@pytest.mark.parametrize("kind", ["llama", "qwen2vl"])
def test_greedy_text_is_that_of_llama_cpp(models, expected, kind, parts, draft):
    with opened(models, kind, "none" if draft == "none" else "model", branches=16) as session:
        tokens, statistics = answer(session, prompt_of(session, *parts), **DRAFTS[draft])
    found = expected(kind, parts)
    assert tokens == found[: len(tokens)]
    assert len(tokens) == 16
    assert (statistics.draft_n > 0) == (draft != "none")


def test_answers_depend_on_the_sound(expected):
    answers = [expected("llama", ("a ", *parts)) for parts in ((clip(1), "b"), (clip(2), "b"), ("b",))]
    assert len({*map(tuple, answers)}) == 3


@pytest.mark.parametrize(
    "data",
    [
        flac(tones(1)),
        wav(np.repeat(tones(1), 2), channels=2),
        wav(tones(1).astype("f4") / 32768),
        mp3(100, xing=100, before=b"ID3\4\0\0\0\0\0\4text"),
        mp3(100),
    ],
    ids=["FLAC", "two channels", "floats", "MP3 with tags", "MP3"],
)
def test_formats_are_decoded_as_by_llama_cpp(models, data):
    main, projector, _ = models["llama"]
    wanted = mtmd_reference.vectors(main, projector, ["a ", data, " b"])
    with opened(models) as session:
        found = session.main.model.projector.encode(Audio(data))
    np.testing.assert_array_equal(found, wanted)


def test_a_second_question_reads_only_new_tokens(models, expected, own_cache):
    parts = PROMPTS["between"]
    with opened(models, prompt_cache=1 << 28) as session:
        first = prompt_of(session, *parts)
        assert sum(isinstance(token, Cell) for token in first) == SOUND_CELLS
        tokens, statistics = answer(session, first)
        assert statistics.prompt_n == len(first) - 1
        more = session.main.model.vocabulary.tokenize(" and what else")
        _, statistics = answer(session, [*session.main.cached, *more])
        assert statistics.prompt_n <= len(more)
        other = ("a sound: ", clip(2), " and what follows it")
        found, statistics = answer(session, prompt_of(session, *other))
        assert statistics.prompt_n > SOUND_CELLS
        assert found == expected("llama", other)
        assert answer(session, prompt_of(session, *parts))[0] == tokens


def test_images_and_sound_in_one_prompt(models, tmp_path):
    main, _, _ = models["qwen2vl"]
    projector = write_sound_projector(tmp_path / "both.gguf", vision="qwen2vl_merger")
    wanted = mtmd_reference.greedy(main, projector, ["a ", pixels(1), " b ", clip(1), " c"], 16)
    with opened(models, "qwen2vl", mmproj=projector) as session:
        assert session.main.model.projector.reads == (Image, Audio)
        prompt = session.main.model.tokenize(["a ", image(1), " b ", Audio(clip(1)), " c"])
        assert answer(session, prompt)[0] == wanted


def test_a_projector_that_does_not_hear_or_see(models, tmp_path):
    eye = write_projector(tmp_path / "mmproj-eye.gguf", "mlp")
    for projector, file, what in ((eye, Audio(clip(1)), "sound"), (models["llama"][1], image(1), "images")):
        with opened(models, mmproj=projector) as session:
            with pytest.raises(ModelError, match=f"has a projector that reads no {what}: give its mmproj"):
                session.main.model.tokenize(["a ", file, " b"])
            with pytest.raises(ModelError, match=f"reads no {what}"):
                next(session.chat([{"role": "user", "content": ["a", file]}], PLAIN))
    with (
        opened(models, mmproj="none") as session,
        pytest.raises(ModelError, match="no projector, and reads no s"),
    ):
        prompt_of(session, clip(1))


DAMAGED = {
    "not a number": wav(np.where(np.arange(9000) == 77, np.nan, 0).astype("f4")),
    "infinite": wav(np.full(9000, -np.inf, "f4")),
    "too loud": wav(np.full(9000, 1e30, "f4")),
    "noise in place of FLAC": flac(tones(1))[:42] + np.random.default_rng(1).bytes(9000),
    "a length without frames": flac(tones(1))[:42],
    "noise in MP3": mp3(1) + np.random.default_rng(1).bytes(104) + mp3(99),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_sound_is_refused_or_heard_in_part(models, data):
    with opened(models) as session:
        why = ""
        try:
            prompt = prompt_of(session, "a ", data, " b")
        except InvalidRequest as error:
            why = str(error)
        else:
            cells = [token for token in prompt if isinstance(token, Cell)]
            assert np.isfinite(cells[0].span.vectors()).all()
        assert re.fullmatch("(a.wav: the sound is damaged .*)?", why)
        assert answer(session, prompt_of(session, "a ", clip(1, 1), " b"))[0]


def test_the_last_samples_of_a_window(models):
    """Of less than 0.1 seconds after 30: some encoders would abort the process."""
    with opened(models) as session:
        encode = session.main.model.projector.encode
        longer = wav(np.append(tones(1, 30), tones(2, 1)[: RATE // 20]))
        np.testing.assert_array_equal(encode(Audio(longer)), encode(Audio(clip(1, 30))))


def test_chats_are_saved_with_sound(models, tmp_path):
    main = write_vision_model(tmp_path / "main.gguf", "llama", n_ctx=2048)
    with opened({"llama": (main, *models["llama"][1:])}) as session:
        chat = ChatSession(session, settings=PLAIN)
        first = [
            each.text
            for each in chat.send("what is ", images=[(8, Audio(clip(1), "a.wav"))])
            if isinstance(each, Text)
        ]
        chat.save(tmp_path / "chat.json")
        other = ChatSession(session, settings=PLAIN)
        other.load(tmp_path / "chat.json")
        assert other.conversation.messages == chat.conversation.messages
        assert other.conversation.prompt() == chat.conversation.prompt()
        content = ["what is ", {"type": "audio", "audio": Audio(clip(1))}]
        again = session.chat([{"role": "user", "content": content}], PLAIN)
        assert "".join(each.text for each in again if isinstance(each, Text)) == "".join(first)
