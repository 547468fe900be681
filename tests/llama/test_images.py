"""Images in prompts: the same texts as llama.cpp's own code, whatever drafts; caches; and several at once."""

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image as PillowImage

from spec_local.core.sampling import SamplingSettings
from spec_local.core.span import Cell
from spec_local.errors import ContextOverflow, InvalidRequest, ModelError
from spec_local.images.image import Image
from spec_local.llama.projector import Projector
from spec_local.session import Done, Session, Text
from spec_local.settings import GenerationSettings
from tests import tiny_heads
from tests.llama import mtmd_reference
from tests.tiny_block_heads import write_tiny_block_head
from tests.tiny_heads import write_tiny_eagle, write_tiny_main
from tests.tiny_projectors import KINDS, write_projector
from tests.tiny_vision import write_vision_model

pytestmark = pytest.mark.usefixtures("unchecked")

PLAIN = GenerationSettings(SamplingSettings(temperature=0), max_tokens=16, policy="off")
DRAFTS = {
    "none": {},
    "lookup": {"policy": "fixed", "proposer": "lookup"},
    "draft model": {"policy": "fixed", "proposer": "draft", "draft_max": 3},
    "tree": {"policy": "fixed", "proposer": "draft", "shape": "tree", "verifier": "spectr"},
    "adaptive": {"policy": "adaptive"},
}
MODELS = [*KINDS, "hybrid"]


def pixels(seed, width=84, height=112):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def image(seed, **size):
    file = io.BytesIO()
    PillowImage.fromarray(pixels(seed, **size)).save(file, "PNG")
    return Image(file.getvalue(), f"{seed}.png")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Of each kind, the files of main, projector and draft model."""
    folder, found = tmp_path_factory.mktemp("models"), {}
    for kind, architecture in KINDS.items():
        main = write_vision_model(folder / f"{kind}.gguf", architecture)
        draft = write_vision_model(folder / f"draft-{kind}.gguf", architecture, noise=0.02)
        found[kind] = main, write_projector(folder / f"mmproj-{kind}.gguf", kind), draft
    main = write_vision_model(folder / "hybrid.gguf", "qwen35", n_mtp=1)
    projector = write_projector(folder / "mmproj-hybrid.gguf", "qwen3vl_merger", n_deepstack=0)
    found["hybrid"] = main, projector, write_vision_model(folder / "small.gguf", "qwen35", noise=0.02)
    return found


@pytest.fixture
def opened(models):
    """A function that opens a session with models of a kind; by default, without a draft."""

    def open_session(kind, draft="none", **options):
        main, projector, draft_model = models[kind]
        usual = {"n_ctx": 1024, "threads": 1, "mmproj": projector}
        return Session.open(main, draft_model if draft == "model" else draft, **usual | options)

    return open_session


class RecordingProjector(Projector):
    """Notes the images that it encodes; `failing` are the names of some that it cannot."""

    failing = ()

    def __init__(self, session, mmproj):
        super().__init__(mmproj, session.main.model, "gemma3", 1)
        self.encoded = []

    def encode(self, image):
        self.encoded.append(image.name)
        if image.name in self.failing:
            raise ModelError("damaged")
        return super().encode(image)


def recording(session, models, kind):
    """The projector of a session, which now notes what it encodes."""
    session.main.model.projector = found = RecordingProjector(session, models[kind][1])
    return found


def prompt_of(session, *parts):
    """The tokens of texts and images; a number is the seed of an image."""
    return session.main.model.tokenize([image(part) if isinstance(part, int) else part for part in parts])


def answer(session, prompt, settings=PLAIN, **changes):
    """The tokens of an answer, and its statistics."""
    tokens, statistics = [], None
    for event in session.generate(prompt, replace(settings, **changes)):
        if isinstance(event, Text):
            tokens += event.tokens
        elif isinstance(event, Done):
            statistics = event.statistics
    return tokens, statistics


def expected(models, kind, *parts, n=16):
    main, projector, _ = models[kind]
    pictures = [pixels(part) if isinstance(part, int) else part for part in parts]
    return mtmd_reference.greedy(main, projector, pictures, n)


PROMPTS = {
    "before": (1, "what is this"),
    "between": ("a picture: ", 1, " and what follows it"),
    "two": ("first ", 1, " second ", 2, " what differs"),
    "three": (3, 1, " in between ", 2, " the end"),
    "twice": ("the same ", 2, " again ", 2, " the same "),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("parts", PROMPTS.values(), ids=PROMPTS.keys())
@pytest.mark.parametrize("kind", MODELS)
def test_greedy_text_is_that_of_llama_cpp(models, opened, kind, parts, draft):
    settings = DRAFTS[draft]
    if kind == "hybrid" and draft == "tree":
        pytest.skip("a hybrid model evaluates chains only")
    with opened(kind, "model" if draft not in ("none", "lookup") else "none", branches=16) as session:
        tokens, statistics = answer(session, prompt_of(session, *parts), **settings)
    found = expected(models, kind, *parts)
    assert tokens == found[: len(tokens)]
    assert len(tokens) == 16 or statistics
    if draft in ("draft model", "tree"):
        assert statistics.draft_n > 0


@pytest.mark.parametrize("write_head", [write_tiny_eagle, write_tiny_block_head])
def test_a_head_reads_the_states_of_images(tmp_path, write_head):
    main, head = write_tiny_main(tmp_path / "main.gguf"), write_head(tmp_path / "head.gguf")
    projector = write_projector(tmp_path / "mmproj.gguf", "mlp", tiny_heads.N_EMBD)
    parts = PROMPTS["two"]
    given = [pixels(part) if isinstance(part, int) else part for part in parts]
    wanted = mtmd_reference.greedy(main, projector, given, 16)
    with Session.open(main, head, n_ctx=1024, threads=1, mmproj=projector) as session:
        prompt = prompt_of(session, *parts)
        for _ in range(2):
            tokens, statistics = answer(session, prompt, policy="fixed", proposer="draft", draft_max=3)
            assert tokens == wanted[: len(tokens)]
            assert statistics.draft_n > 0
        assert session.draft.received.tokens[: len(prompt)] == prompt


def test_layers_for_multi_token_prediction(models, opened):
    parts = PROMPTS["two"]
    with opened("hybrid", None) as session:
        assert session.draft
        tokens, statistics = answer(session, prompt_of(session, *parts), policy="fixed", proposer="draft")
    assert tokens == expected(models, "hybrid", *parts)[: len(tokens)]
    assert statistics.draft_n > 0


@pytest.mark.parametrize("draft", ["none", "model"])
@pytest.mark.parametrize("kind", ["gemma3", "qwen2vl_merger"])
def test_drawn_tokens_have_the_distribution_of_the_main_model(models, opened, kind, draft):
    main, projector, _ = models[kind]
    parts, n = ("a picture: ", 1, " and what follows it"), 600
    given = [pixels(part) if isinstance(part, int) else part for part in parts]
    logits = mtmd_reference.greedy_logits(main, projector, given, 1)[0].astype(np.float64)
    wanted = np.exp(logits - logits.max())
    wanted /= wanted.sum()
    settings = GenerationSettings(
        SamplingSettings(temperature=1, top_k=0, top_p=1, min_p=0),
        **{"max_tokens": 3, "policy": "fixed", "proposer": "draft", "draft_max": 2}
        if draft == "model"
        else {"max_tokens": 1, "policy": "off"},
    )
    with opened(kind, draft) as session:
        prompt = prompt_of(session, *parts)
        counts = np.zeros(len(wanted))
        for seed in range(n):
            tokens, _ = answer(session, prompt, settings, seed=seed)
            counts[tokens[0] if tokens else session.main.model.vocabulary.eos] += 1
    common = wanted > 5 / n
    observed = np.append(counts[common], counts[~common].sum())
    chances = np.append(wanted[common], wanted[~common].sum()) * n
    chi_square = ((observed - chances) ** 2 / np.maximum(chances, 1e-9)).sum()
    degrees = len(chances) - 1
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees) + 5


@pytest.mark.parametrize("kind", MODELS)
def test_a_second_question_reads_only_new_tokens(models, opened, kind, own_cache):
    with opened(kind, prompt_cache=1 << 28) as session:
        first = prompt_of(session, "look: ", 1, " what is it")
        tokens, statistics = answer(session, first)
        assert statistics.prompt_n == len(first) - 1 or kind == "hybrid"
        history = list(session.main.cached)
        assert any(isinstance(token, Cell) for token in history)
        parts = ("look: ", 1, " what is it")
        more = session.main.model.vocabulary.tokenize(" and what else")
        _, statistics = answer(session, [*history, *more])
        assert statistics.prompt_n <= len(more)
        # Another image of the same size is another text from its first cell on.
        other = prompt_of(session, "look: ", 2, " what is it")
        found, statistics = answer(session, other)
        assert len(other) == len(first)
        n_cells = sum(isinstance(token, Cell) for token in other)
        assert statistics.prompt_n > n_cells
        assert found == expected(models, kind, "look: ", 2, " what is it")[: len(found)]
        again, statistics = answer(session, prompt_of(session, *parts))
        assert again == tokens


@pytest.mark.parametrize("kind", MODELS)
def test_the_prompt_cache_keeps_images(models, opened, kind, own_cache):
    """Blocks of 256 tokens end in a text and within images."""
    text = " ".join(f"word {i}" for i in range(110))
    parts = (text, 1, " and ", 2, text, 3, " the end")
    with opened(kind, prompt_cache=1 << 28) as session:
        prompt = prompt_of(session, *parts)
        wanted, _ = answer(session, prompt)
    assert wanted == expected(models, kind, *parts)[: len(wanted)]
    with opened(kind, prompt_cache=1 << 28) as session:
        projector = recording(session, models, kind)
        found, statistics = answer(session, prompt_of(session, *parts))
        assert found == wanted
        assert statistics.prompt_n <= 16
        assert not projector.encoded


def test_cells_of_a_block_are_restored_wherever_it_ends(models, opened, own_cache):
    for shift in range(0, 24, 5):
        text = "x " * (250 - 12 + shift)
        for kind in ("qwen2vl_merger", "gemma3"):
            with opened(kind, prompt_cache=1 << 28) as session:
                prompt = prompt_of(session, text, 1, " the end of it")
                wanted, _ = answer(session, prompt)
            with opened(kind, prompt_cache=1 << 28) as session:
                found, statistics = answer(session, prompt_of(session, text, 1, " the end of it"))
                assert statistics.prompt_n <= 16
            assert found == wanted == expected(models, kind, text, 1, " the end of it")[: len(wanted)]


@pytest.mark.parametrize("draft", ["none", "model"])
@pytest.mark.parametrize("kind", MODELS)
def test_several_answers_at_once(models, opened, kind, draft):
    prompts = [PROMPTS["two"], ("only text",), PROMPTS["before"], PROMPTS["three"], PROMPTS["two"]]
    changes = DRAFTS["draft model"] if draft == "model" else {}
    with opened(kind, draft, parallel=3) as session:
        given = [prompt_of(session, *parts) for parts in prompts]
        found = {i: [] for i in range(len(prompts))}
        for each in session.generate_many(given, replace(PLAIN, **changes)):
            if isinstance(each.event, Text):
                found[each.number] += each.event.tokens
            else:
                assert not hasattr(each.event, "exception"), each.event
    for i, parts in enumerate(prompts):
        assert found[i] == expected(models, kind, *parts)[: len(found[i])]


def test_reproducible_output(models, opened):
    parts = PROMPTS["two"]
    with opened("qwen2vl_merger", "model", reproducible=True) as session:
        prompt = prompt_of(session, *parts)
        settings = GenerationSettings(
            SamplingSettings(temperature=1), max_tokens=16, seed=5, verifier="exact-match", policy="off"
        )
        plain, _ = answer(session, prompt, settings)
        assert plain == answer(session, prompt, settings, policy="fixed", proposer="draft", draft_max=3)[0]


def test_chat(models, opened):
    with opened("mlp") as session:
        question = {"role": "user", "content": [image(1), "what is it"]}
        found = [event.text for event in session.chat([question], PLAIN) if isinstance(event, Text)]
        first = session.answer
        parts = ["<|im_start|>user\n", 1, "what is it<|im_end|>\n<|im_start|>assistant\n"]
        tokens = expected(models, "mlp", *parts)
        assert "".join(found) == session.main.model.vocabulary.detokenize(tokens)[: len("".join(found))]
        events = [*session.chat([question, first, {"role": "user", "content": "and now"}], PLAIN)]
        assert events[-1].statistics.cached_n > events[-1].statistics.prompt_n


def test_an_image_is_encoded_once(opened, models):
    with opened("qwen2vl_merger") as session:
        projector = recording(session, models, "qwen2vl_merger")
        for text in ("one ", "two ", "three "):
            answer(session, prompt_of(session, text, 1, " end", 2, " end"))
    assert projector.encoded == ["1.png", "2.png"]


def test_vectors_are_forgotten_but_encoded_again(opened, models):
    with opened("qwen2vl_merger") as session:
        projector = recording(session, models, "qwen2vl_merger")
        projector.kept_bytes = 1
        wanted = [answer(session, prompt_of(session, text, 1, 2, " end"))[0] for text in ("one ", "two ")]
        session.main.truncate(0)
        found = [answer(session, prompt_of(session, text, 1, 2, " end"))[0] for text in ("one ", "two ")]
        assert found == wanted
        assert len(projector.encoded) == 4


def test_wrong_uses(models, opened):
    with opened("gemma3", n_ctx=64) as session:
        cells = [token for token in prompt_of(session, 1, "a") if isinstance(token, Cell)]
        with pytest.raises(InvalidRequest, match="ends with an image"):
            answer(session, [*prompt_of(session, "a "), *cells])
        with pytest.raises(ContextOverflow):
            answer(session, prompt_of(session, 1, 2, 3, 4, " a"))
        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            answer(session, [5, -7, 5])
        with pytest.raises(InvalidRequest, match="a part of an image"):
            answer(session, [5, *cells[1:], 5])
        assert answer(session, prompt_of(session, "still ", 1, " works"))[0]
    with opened("gemma3", mmproj="none") as session, pytest.raises(ModelError, match="has no projector"):
        prompt_of(session, 1, "a")
    with opened("gemma3", mmproj=models["qwen2vl_merger"][1]) as session:
        assert session.main.model.projector  # it has the same width: libmtmd sees no difference


def test_a_failed_image_ends_one_answer(models, opened):
    prompts = [("a ", 1, " b"), ("a ", 2, " b"), ("only text",)]
    with opened("gemma3", parallel=3) as session:
        recording(session, models, "gemma3").failing = ("2.png",)
        found, failed = {0: [], 1: [], 2: []}, []
        for each in session.generate_many([prompt_of(session, *parts) for parts in prompts], PLAIN):
            if isinstance(each.event, Text):
                found[each.number] += each.event.tokens
            elif hasattr(each.event, "exception"):
                failed.append(each.number)
    assert failed == [1]
    assert not found[1]
    for i in (0, 2):
        assert found[i] == expected(models, "gemma3", *prompts[i])[: len(found[i])]
