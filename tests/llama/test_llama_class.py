"""specdec's `Llama`: what programs get that change one import."""

import base64
import inspect
import io
import json
import pickle
from dataclasses import replace
from itertools import islice

import llama_cpp
import numpy as np
import PIL.Image
import pytest
from llama_cpp import LlamaGrammar
from llama_cpp.llama_chat_format import Llava15ChatHandler

from spec_local.chat.request import ChatRequest
from spec_local.core.sampling import SamplingSettings
from spec_local.errors import ContextOverflow, InvalidRequest, ModelError, ModelFileError
from spec_local.images.audio import Audio
from spec_local.images.image import Image
from spec_local.llama.tiny import write_tiny_model
from spec_local.llama_cpp_python import Llama
from spec_local.llama_cpp_python.chat_images import MarkedMessages
from spec_local.session import Session
from spec_local.settings import GenerationSettings
from tests.sounds import clip
from tests.tiny_projectors import write_projector, write_sound_projector
from tests.tiny_vision import write_vision_model

pytestmark = pytest.mark.usefixtures("own_cache", "unchecked")

PROMPT = "the of and to in is you that "
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "how many people use water"},
]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2, 34]}, "b": {"type": "boolean"}}}
SCHEMA["required"] = ["n", "b"]
TOOL = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
OPTIONS = {"n_ctx": 256, "n_threads": 1, "verbose": False}
# Sessions use flash attention; without it, logits differ by rounding, which decides between near-ties.
THEIRS = OPTIONS | {"n_threads_batch": 1, "flash_attn": True}


@pytest.fixture(scope="module")
def files(folder):
    """F32, so that calls of different sizes give nearly the same logits; answers end by themselves."""
    made = {"main": {"end_scale": 1.2}, "draft": {"end_scale": 1.2, "noise": 0.05}}
    return [
        write_tiny_model(folder / f"llama-class-{name}.gguf", tensor_type="F32", **how)
        for name, how in made.items()
    ]


@pytest.fixture
def make(files):
    """A function that opens our `Llama` with a draft model, drafting in every step."""
    opened = []

    def make(path=files[0], **options):
        given = {"draft": files[1], "settings": GenerationSettings(policy="fixed"), **OPTIONS} | options
        opened.append(Llama(path, **given))
        return opened[-1]

    yield make
    for llama in opened:
        llama.close()


@pytest.fixture
def ours(make):
    return make(seed=1)  # without one, each process has other answers


@pytest.fixture(scope="module")
def theirs(files):
    llama = llama_cpp.Llama(str(files[0]), **THEIRS)
    yield llama
    llama.close()


def content(response):
    """A response, or all chunks of a stream, without what differs from call to call."""
    if not isinstance(response, dict):
        return [content(chunk) for chunk in response]
    kept = {k: v for k, v in response.items() if k not in ("id", "created", "model")}
    kept = json.loads(json.dumps(kept, default=float))  # a copy
    for choice in kept["choices"]:
        for part in (choice.get("message"), choice.get("delta")):
            for call in (part or {}).get("tool_calls") or []:
                call.pop("id", None)
    return kept


COMPLETIONS = {
    "short": {},
    "until it ends": {"max_tokens": None, "logit_bias": {"2": 3.0, "4": 3.0}},  # which is soon
    "one token": {"max_tokens": 1},
    "stop": {"max_tokens": 60, "stop": ["e", " the"]},
    "echo": {"max_tokens": 20, "echo": True},
    "repeat penalty": {"max_tokens": 60, "repeat_penalty": 1.4},
    "other penalties": {"max_tokens": 60, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "logit bias": {"max_tokens": 60, "logit_bias": {"270": 3.0, 280: -100.0}},
    "grammar": {"max_tokens": 60, "grammar": LlamaGrammar.from_string('root ::= ("a" | "bc")+ "."')},
}


@pytest.mark.parametrize("name", COMPLETIONS)
@pytest.mark.parametrize(("prompt", "stream"), [(PROMPT, False), (PROMPT, True), ("", False)])
def test_greedy_completions_are_equal(ours, theirs, prompt, name, stream):
    call = {"prompt": prompt, "temperature": 0.0, "stream": stream, **COMPLETIONS[name]}
    expected = content(theirs.create_completion(**call))
    assert content(ours.create_completion(**call)) == expected
    n = theirs.n_tokens
    assert ours.n_tokens == n
    assert ours.input_ids[:n].tolist() == theirs.input_ids[:n].tolist()


CHATS = {
    "plain": {},
    "stop": {"stop": "e"},
    "json": {"response_format": {"type": "json_object"}, "max_tokens": 40},
    "schema": {"response_format": {"type": "json_object", "schema": SCHEMA}},
    "tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "count"}}},
    "function": {"functions": [TOOL["function"]], "function_call": {"name": "count"}},
}


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize(("chat_format", "stream"), [(None, False), (None, True), ("chatml", False)])
def test_greedy_chats_are_equal(make, theirs, name, stream, chat_format, monkeypatch):
    ours = make(chat_format=chat_format)
    monkeypatch.setattr(theirs, "chat_format", ours.chat_format)
    call = {"messages": MESSAGES, "temperature": 0.0, "stream": stream, **CHATS[name]}
    assert content(ours.create_chat_completion(**call)) == content(theirs.create_chat_completion(**call))


def test_it_drafts_and_keeps_the_beginning_of_a_chat(ours):
    first = ours.create_chat_completion(MESSAGES, temperature=0)
    assert ours.statistics.draft_n_accepted > 5
    messages = [*MESSAGES, first["choices"][0]["message"], {"role": "user", "content": "why"}]
    ours.create_chat_completion(messages, temperature=0)
    assert ours.statistics.cached_n >= first["usage"]["prompt_tokens"]


def test_the_weights_are_loaded_once(ours):
    assert ours.model_params.vocab_only


def test_log_probabilities(make, files):
    call = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 12, "logprobs": 5}
    theirs = llama_cpp.Llama(str(files[0]), logits_all=True, **THEIRS)
    ours = make(logits_all=True)
    for stream in (False, True):
        found, expected = (
            content(llama.create_completion(stream=stream, **call)) for llama in (ours, theirs)
        )
        pairs = list(zip(found, expected, strict=True)) if stream else [(found, expected)]
        n_tokens = 0
        for mine, other in pairs:
            if not other["choices"][0]["logprobs"]:
                assert mine == other
                continue
            mine, other = (each["choices"][0]["logprobs"] for each in (mine, other))
            n_tokens += len(other["tokens"])
            assert (mine["tokens"], mine["text_offset"]) == (other["tokens"], other["text_offset"])
            assert mine["token_logprobs"] == pytest.approx(other["token_logprobs"], abs=1e-2)
            for a, b in zip(mine["top_logprobs"], other["top_logprobs"], strict=True):
                assert a == pytest.approx(b, abs=1e-2)
        assert n_tokens == 12
    theirs.close()
    with pytest.raises(InvalidRequest, match="up to 20, without echo"):
        ours.create_completion("a", logprobs=21)
    with pytest.raises(InvalidRequest, match="up to 20, without echo"):
        ours.create_completion("a", logprobs=1, echo=True)
    with pytest.raises(ValueError, match="logits_all"):
        make().create_completion("a", logprobs=1)


@pytest.fixture
def settings_of(make, monkeypatch):
    """A function that returns the settings with which a call of `Llama` starts an answer."""
    given = []
    start = Session.generate

    def generate(session, prompt, settings):
        given.append(settings)
        return start(
            session, prompt, replace(settings, max_tokens=8)
        )  # without a seed, an answer may be long

    monkeypatch.setattr(Session, "generate", generate)

    def settings_of(call, **options):
        llama = make(**options)
        call(llama)
        llama.close()
        return given.pop()

    return settings_of


def test_defaults_are_those_of_llama_cpp(settings_of):
    usual = {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "penalty_window": 64, "penalize_prompt": False}
    found = settings_of(lambda llama: next(llama.generate([5])))
    assert found.sampling == SamplingSettings(temperature=0.8, **usual)
    assert (found.seed, found.max_tokens, found.policy) == (None, None, "fixed")
    assert settings_of(lambda llama: llama("a")).sampling == SamplingSettings(temperature=0.8, **usual)
    chat = settings_of(lambda llama: llama.create_chat_completion(MESSAGES))
    assert chat.sampling == SamplingSettings(temperature=0.2, **usual)
    ours, theirs = (inspect.signature(each.generate).parameters for each in (Llama, llama_cpp.Llama))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


@pytest.mark.parametrize("how", ["create_completion", "create_chat_completion"])
def test_each_sampling_parameter(settings_of, how):
    given = {"temperature": 0.3, "top_k": 7, "top_p": 0.4, "min_p": 0.2, "repeat_penalty": 1.2}
    given |= {"frequency_penalty": 0.3, "presence_penalty": 0.1, "logit_bias": {"7": "2.5", 8: -1}}
    prompt = "a" if how == "create_completion" else MESSAGES
    found = settings_of(lambda llama: getattr(llama, how)(prompt, **given)).sampling
    expected = given | {"logit_bias": {7: 2.5, 8: -1.0}}
    assert {name: getattr(found, name) for name in expected} == expected


def test_special_values_of_parameters(settings_of):
    def settings(options=None, **given):
        return settings_of(lambda llama: llama("a", **given), **options or {})

    assert settings(temperature=0.0).sampling.temperature == 0
    assert settings(top_k=-1).sampling.top_k == 0
    whole = settings(temperature=-1, top_k=3).sampling  # the whole distribution
    assert (whole.temperature, whole.top_k) == (1, 0)
    assert settings({"last_n_tokens_size": 9}).sampling.penalty_window == 9
    others = GenerationSettings(SamplingSettings(dry_multiplier=0.5, top_k=3))
    assert (
        settings({"settings": others}).sampling.dry_multiplier == 0.5
    )  # which llama-cpp-python does not have
    assert settings({"settings": others}).sampling.top_k == 40
    assert settings({"last_n_tokens_size": -1}).sampling.penalty_window == 0
    assert (settings(seed=5).seed, settings(seed=-1).seed) == (5, None)
    assert settings_of(lambda llama: next(llama.generate([5])), seed=6).seed == 6


def test_seeds(ours):
    def answer(seed):
        return ours(PROMPT, max_tokens=30, temperature=1.5, seed=seed)["choices"][0]["text"]

    assert answer(1) == answer(1)
    assert len({answer(seed) for seed in range(5)}) == 5


def test_without_a_seed_each_answer_is_another_one(make):
    """Also the first one of each new instance, as in each new process."""

    def answer(llama, **seed):
        return llama(PROMPT, max_tokens=30, temperature=1.5, **seed)["choices"][0]["text"]

    assert len({answer(make()) for _ in range(3)}) == 3
    llama = make()
    assert len({answer(llama) for _ in range(3)}) == 3
    assert answer(make(seed=3)) == answer(make(seed=3))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 2000},
        {"type": "string", "minLength": 5, "maxLength": 20000},
        {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3000},
        {"type": "array", "items": {"type": "object", "properties": {"a": {"enum": ["b"]}}}, "maxItems": 500},
    ],
)
def test_large_counts_in_a_schema(ours, schema):
    form = {"type": "json_object", "schema": {"type": "object", "properties": {"x": schema}}}
    form["schema"]["required"] = ["x"]
    answer = ours.create_chat_completion(MESSAGES, response_format=form, max_tokens=60, seed=1)
    assert answer["choices"][0]["message"]["content"].startswith("{")


def test_no_end_token_behind_the_prompt(make, files, closing_path):
    prompt = []
    llama = make(closing_path, draft=None)
    started = llama.session.generate
    llama.session.generate = lambda tokens, settings: prompt.extend(tokens) or started(tokens, settings)
    llama(PROMPT, max_tokens=1)
    assert prompt[0] == llama.token_bos()
    assert llama.token_eos() not in prompt


def test_generate_continues_without_reset(ours):
    tokens = ours.tokenize(PROMPT.encode())
    whole = list(islice(ours.generate(tokens, temp=0), 6))
    ours.reset()
    first = list(islice(ours.generate(tokens, temp=0), 3))
    rest = list(islice(ours.generate(first[2:], temp=0, reset=False), 3))
    assert first + rest == whole


def test_stopping_criteria(ours, theirs):
    criteria = llama_cpp.StoppingCriteriaList([lambda tokens, logits: len(tokens) > 20])
    call = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 90, "stopping_criteria": criteria}
    found = ours.create_completion(**call)
    assert content(found) == content(theirs.create_completion(**call))
    assert found["usage"]["completion_tokens"] < 20
    seen = []
    ours(PROMPT, stopping_criteria=[lambda tokens, logits: seen.append(logits)][0], max_tokens=2)
    assert np.isnan(seen).all()


UNSUPPORTED = {
    "mirostat_mode": lambda llama: llama("a", mirostat_mode=1),
    "typical_p": lambda llama: llama("a", typical_p=0.9),
    "tfs_z": lambda llama: llama("a", tfs_z=0.9),
    "logits_processor": lambda llama: llama("a", logits_processor=[lambda tokens, logits: logits]),
    "penalize_nl": lambda llama: next(llama.generate([5], penalize_nl=False)),
    "eval": lambda llama: llama.eval([5]),
    "sample": lambda llama: llama.sample(),
    "embed": lambda llama: llama.create_embedding("a"),
    "set_cache": lambda llama: llama.set_cache(llama_cpp.LlamaRAMCache()),
    "save_state": lambda llama: llama.save_state(),
    "load_state": lambda llama: llama.load_state(None),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_is_not_supported_is_an_error(ours, what):
    with pytest.raises(InvalidRequest, match=f"^{what} is not supported"):
        UNSUPPORTED[what](ours)
    ours("a", max_tokens=2)


@pytest.mark.parametrize(
    "options",
    [
        *({"lora_path": "x.gguf"}, {"embedding": True}, {"draft_model": object()}, {"vocab_only": True}),
        *({"rope_freq_base": 1e6}, {"tensor_split": [1.0]}, {"kv_overrides": {"a": 1}}),
        {"chat_handler": object.__new__(Llava15ChatHandler)},
        {"type_k": llama_cpp.GGML_TYPE_Q8_0},
        {"type_k": llama_cpp.GGML_TYPE_Q5_0, "type_v": llama_cpp.GGML_TYPE_Q5_0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_that_is_not_supported_is_an_error(make, options):
    with pytest.raises(InvalidRequest, match="not supported"):
        make(**options)


def test_options(make):
    with pytest.warns(UserWarning, match="^n_batch, use_mlock: no effect on specdec's Llama$"):
        make(n_batch=64, use_mlock=True, use_mmap=True)
    quantized = make(type_k=llama_cpp.GGML_TYPE_Q8_0, type_v=llama_cpp.GGML_TYPE_Q8_0)
    assert quantized.session.main.cache_type == "q8_0"
    assert make(n_ctx=0).n_ctx() == 2048
    assert make(n_ctx=9000).n_ctx() == 2048
    with pytest.raises(TypeError, match="n_contexts"):
        make(n_contexts=1)
    with pytest.raises(ModelFileError, match="absent"):
        make("absent.gguf")


def test_a_full_context(make, theirs):
    ours = make(n_ctx=40)
    answer = ours(PROMPT, max_tokens=500, temperature=0, logit_bias={2: -100, 4: -100})
    assert answer["usage"]["total_tokens"] == 40
    assert answer["choices"][0]["finish_reason"] == "length"
    with pytest.raises(ContextOverflow, match="the context of 40 tokens is full"):
        list(ours.generate(ours.tokenize(PROMPT.encode()), temp=0, logits_processor=None, grammar=ENDLESS))
    with pytest.raises(ValueError, match="exceed context window"):
        ours(PROMPT * 10)


ENDLESS = LlamaGrammar.from_string('root ::= "a" root')


def test_a_second_stream_ends_the_first_with_an_error(ours):
    first = ours(PROMPT, stream=True, max_tokens=90, logit_bias={2: -100, 4: -100})
    next(first)
    assert ours(PROMPT, max_tokens=3)["choices"][0]["text"]
    with pytest.raises(InvalidRequest, match="another completion was started"):
        list(first)


def test_it_is_pickled_by_its_arguments(make):
    ours = make(seed=4)
    copy = pickle.loads(pickle.dumps(ours))
    call = {"prompt": PROMPT, "temperature": 1.0, "max_tokens": 20}
    assert content(copy(**call)) == content(ours(**call))
    copy.close()


def test_closing(ours):
    ours.close()
    ours.close()
    with pytest.raises(InvalidRequest, match="the session is closed"):
        next(ours.generate([5]))


def test_a_recurrent_model(make, recurrent_path):
    ours = make(recurrent_path, draft=None)
    theirs = llama_cpp.Llama(str(recurrent_path), **THEIRS)
    for _ in range(2):
        call = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 20}
        assert content(ours(**call)) == content(theirs(**call))
        ours.reset()
    theirs.close()


def test_images_in_messages(make, folder):
    """Their cells are those of the library's own prompt, and stand where the parts do."""
    seeing = write_vision_model(folder / "seeing.gguf", "gemma3")
    projector = write_projector(folder / "for-images.gguf", "gemma3")
    made = io.BytesIO()
    PIL.Image.effect_noise((40, 30), 90).save(made, "PNG")
    image = Image(made.getvalue())
    url = f"data:image/png;base64,{base64.b64encode(image.data).decode()}"
    llama = make(seeing, draft="none", mmproj=projector)
    content = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        *({"type": "text", "text": text} for text in ("here", "there")),
    ]

    def ask(content, **more):
        messages = [{"role": "user", "content": content}]
        return llama.create_chat_completion(messages, temperature=0.0, max_tokens=12, **more)

    prompts, generate = [], llama.session.generate
    llama.session.generate = lambda tokens, settings: (prompts.append(tokens), generate(tokens, settings))[1]
    answer = ask(content)["choices"][0]["message"]["content"]
    parts = ["look", image, image, "here\nthere"]
    model = llama.session.main.model
    expected = ChatRequest(messages=[{"role": "user", "content": parts}]).tokens(model)
    (of_llama, of_library) = ([token for token in prompt if token < 0] for prompt in (prompts[0], expected))
    assert of_llama == of_library
    assert len(of_llama) == 2 * sum(token < 0 for token in model.image_tokens(image)) > 0
    first, last = prompts[0].index(of_llama[0]), len(prompts[0]) - prompts[0][::-1].index(of_llama[-1])
    assert llama.detokenize(prompts[0][:first]).strip().endswith(b"look")
    assert llama.detokenize(prompts[0][last:]).strip().startswith(b"here\nthere")
    streamed = [part["choices"][0]["delta"].get("content", "") for part in ask(content, stream=True)]
    assert "".join(streamed) == answer != ask("look here")["choices"][0]["message"]["content"]
    with pytest.raises(InvalidRequest, match="no data URI"):
        ask([{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}])
    blind = make(seeing, draft="none", mmproj="none")
    with pytest.raises(ModelError, match="no projector"):
        blind.create_chat_completion([{"role": "user", "content": content}])


def test_sounds_in_messages(make, folder):
    hearing = write_vision_model(folder / "hearing.gguf", "llama")
    llama = make(hearing, draft="none", mmproj=write_sound_projector(folder / "for-sounds.gguf"))
    sound, prompts, generate = Audio(clip(1)), [], llama.session.generate
    part = {"data": base64.b64encode(sound.data).decode(), "format": "wav"}
    llama.session.generate = lambda tokens, settings: (prompts.append(tokens), generate(tokens, settings))[1]

    def ask(part):
        content = [{"type": "text", "text": "listen"}, {"type": "input_audio", "input_audio": part}]
        llama.create_chat_completion([{"role": "user", "content": content}], max_tokens=1)

    ask(part)
    cells = [token for token in llama.session.main.model.image_tokens(sound) if token < 0]
    assert [token for token in prompts[0] if token < 0] == cells != []
    with pytest.raises(InvalidRequest, match="the file is not a WAV, MP3 or FLAC sound"):
        ask({"data": base64.b64encode(b"no sound").decode()})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"type": "image_url"}], "'image_url' has no data: give"),
        ([{"type": "image_url", "image_url": {}}], "'image_url' has no data: give"),
        ([{"type": "image_url", "image_url": {"url": None}}], "'image_url' has no data: give"),
        ([{"type": "input_audio", "input_audio": {"format": "wav"}}], "'input_audio' has no data: give"),
        ([{"type": "text"}, {"type": "image_url", "image_url": "x"}], "'text' has no text: give a text"),
    ],
)
def test_a_part_without_content_is_an_error(parts, message):
    with pytest.raises(InvalidRequest, match=message) as error:
        MarkedMessages([{"role": "user", "content": parts}])
    assert "\n" not in str(error.value)
