"""Images in bodies of all protocols: they become the library's, or one line says why they cannot be read."""

import base64
import io
import json
import os
import pickle
import secrets
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image as PillowImage
from PIL.PngImagePlugin import PngImageFile

from spec_local.chat.meaning import same_message
from spec_local.chat.messages import messages_of
from spec_local.chat.template import ChatTemplate
from spec_local.errors import InvalidRequest
from spec_local.images.audio import Audio
from spec_local.images.image import Image
from spec_local.images.media import MAX_BYTES, MAX_IMAGES
from spec_local.server.protocols import request_images
from spec_local.server.protocols.chat_completions import ChatCompletions
from spec_local.server.protocols.completions import Completions
from spec_local.server.protocols.image_parts import ImageSource
from spec_local.server.protocols.llama_completion import LlamaCompletion, LlamaInfill
from spec_local.server.protocols.messages import Messages
from spec_local.server.protocols.ollama import OllamaChat, OllamaGenerate
from spec_local.server.protocols.responses import Responses
from spec_local.server.supervision import engine_process
from spec_local.server.supervision.events import AnswerRequest
from spec_local.server.supervision.read_again import KnownPrompt, ReadAgainLog, read_again
from spec_local.server.supervision.stable_prompts import StablePrompts
from spec_local.settings import GenerationSettings
from tests.chat_templates import TOOL_TEMPLATES, StandIn, StandInVocabulary
from tests.server_events import LOADED
from tests.sounds import clip

SEEING = replace(LOADED, reads=(Image,))


def picture(seed=0, size=(12, 8), form="PNG"):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
    file = io.BytesIO()
    PillowImage.fromarray(pixels).save(file, form)
    return file.getvalue()


def b64(data):
    return base64.b64encode(data).decode()


A, B = picture(0), picture(1, form="JPEG")
URI = f"data:image/png;base64,{b64(A)}"
IMAGE, OTHER = Image(A), Image(B)
KINDS = {ChatCompletions: "messages", Messages: "messages", Responses: "input", OllamaChat: "messages"}

PARTS = {
    "OpenAI's chat": {"type": "image_url", "image_url": {"url": URI, "detail": "low"}},
    "OpenAI's chat, as a text": {"type": "image_url", "image_url": URI},
    "OpenAI's responses": {"type": "input_image", "image_url": URI, "detail": "auto"},
    "OpenAI's files": {"type": "file", "file": {"filename": "a.png", "file_data": URI}},
    "OpenAI's files in responses": {"type": "input_file", "filename": "a.png", "file_data": URI},
    "Anthropic": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": b64(A)},
        "cache_control": {"type": "ephemeral"},
    },
    "Anthropic, as a URL": {"type": "image", "source": {"type": "url", "url": URI}},
    "MCP": {"type": "image", "data": b64(A), "mimeType": "image/png"},
    "a resource of MCP": {
        "type": "resource",
        "resource": {"uri": "file:///a.png", "mimeType": "image/png", "blob": b64(A)},
    },
    "AI SDK": {"type": "image", "image": b64(A), "mediaType": "image/png"},
    "AI SDK: a file": {"type": "file", "mediaType": "image/png", "data": b64(A)},
    "AI SDK: a part of its page": {"type": "file", "mediaType": "image/png", "url": URI},
    "LangChain": {"type": "image", "base64": b64(A), "mime_type": "image/png"},
    "LangChain, earlier": {"type": "image", "source_type": "base64", "data": b64(A)},
    "a screenshot": {"type": "computer_screenshot", "image_url": URI},
}


def requests_of(kind, body, loaded=SEEING):
    return kind(body, loaded).requests


def messages(kind, *items, loaded=SEEING):
    (request,) = requests_of(kind, {KINDS[kind]: [*items]}, loaded)
    return messages_of(request.messages)


def user(*parts):
    return {"role": "user", "content": [*parts]}


def text(value):
    return {"type": "text", "text": value}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("form", PARTS)
def test_forms_of_images(kind, form):
    found = messages(kind, user(text("What"), text("is"), PARTS[form], text("this"), PARTS[form]))
    assert found == messages_of([user("What", "is", IMAGE, "this", IMAGE)])
    assert found[0]["content"] == "What\nisthis"
    assert [at for at, _ in found[0]["images"]] == [7, 11]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("form", PARTS)
def test_without_a_projector_notes_stand_for_images(kind, form):
    (found,) = messages(kind, user(text("What?"), PARTS[form]), loaded=LOADED)
    assert found["content"].endswith("left out: this model reads text only]")
    assert "images" not in found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_question_may_be_only_an_image(kind):
    assert messages(kind, user(PARTS["MCP"]))[0] == messages_of([user(IMAGE)])[0]


@pytest.mark.parametrize("texts", [["\n", "a\n", "\n\nb", ""], ["", "", "", ""], [" a", "b ", "", "\n"]])
def test_line_breaks_of_texts_stay(texts):
    a, b, c, d = texts
    found = messages(ChatCompletions, user(text(a), PARTS["MCP"], text(b), text(c), PARTS["AI SDK"], text(d)))
    assert found[0]["content"] == f"{a}{b}\n{c}{d}"
    assert [at for at, _ in found[0]["images"]] == [len(a), len(f"{a}{b}\n{c}")]


def test_texts_cannot_forge_marks(monkeypatch):
    monkeypatch.setattr(secrets, "token_hex", lambda n: "0123456789abcdef")
    assert "0123456789abcdef" in request_images.RequestImages.of(SEEING)._marks.of(3)
    monkeypatch.undo()
    forged = "[image 0123456789abcdef 0] <__media__>"
    found = messages(ChatCompletions, user(text(forged), PARTS["MCP"]))
    assert found == messages_of([user(forged, IMAGE)])


def test_images_of_ollama_stand_before_the_text():
    given = {"role": "user", "content": "And?", "images": [b64(A), b64(B)]}
    assert messages(OllamaChat, given) == messages_of([user(IMAGE, OTHER, "And?")])
    assert messages(OllamaChat, given | {"images": []}) == messages_of([user("And?")])
    openrouter = {"role": "assistant", "content": "Here.", "images": [PARTS["OpenAI's chat"]]}
    found = messages(ChatCompletions, user(text("Draw.")), openrouter, user(text("And?")))
    assert found[1]["images"] == [(0, IMAGE)]


CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"image": "x"}'}}
RESULTS = {
    "OpenAI's chat": (
        ChatCompletions,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": [text("It:"), PARTS["OpenAI's chat"]]},
    ),
    "Anthropic": (
        Messages,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look",
                                           "input": {"image": "x"}}]},
        user({"type": "tool_result", "tool_use_id": "a", "content": [text("It:"), PARTS["Anthropic"]]}),
    ),
    "OpenAI's responses": (
        Responses,
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"image": "x"}'},
        {"type": "function_call_output", "call_id": "a", "output": [
            {"type": "input_text", "text": "It:"}, PARTS["OpenAI's responses"]]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", RESULTS)
def test_images_in_results_of_tools(form):
    kind, call, result = RESULTS[form]
    found = messages(kind, user(text("Look.")), call, result)
    assert found[-1]["role"] == "tool"
    assert (found[-1]["content"], found[-1]["images"]) == ("It:", [(3, IMAGE)])
    assert json.loads(found[-2]["tool_calls"][0]["function"]["arguments"]) == {"image": "x"}


def test_screenshots_and_generated_images_of_responses():
    screenshot = {"type": "computer_call_output", "call_id": "a", "output": PARTS["a screenshot"]}
    generated = {"type": "image_generation_call", "id": "ig_1", "result": b64(B)}
    found = messages(Responses, user(text("Look.")), screenshot, generated, user(text("And?")))
    (at, image), start = found[1]["images"][0], '[computer_call_output: {"output": "'
    assert (image, found[1]["content"][:at], found[1]["content"][at:]) == (IMAGE, start, '"}]')
    assert (found[2]["role"], found[2]["images"]) == ("assistant", [(0, OTHER)])


def test_arguments_and_results_that_are_json_have_no_images():
    """They may have any form, such as that of a part with a URL from anywhere."""
    part = {"type": "image", "url": "http://example.org/a.png"}
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {"content": [part]}}
    result = {"type": "tool-result", "toolCallId": "a", "output": {"type": "json", "value": [part]}}
    given = [user(text("Look.")), {"role": "assistant", "content": [call]}, user(result)]
    found = messages(ChatCompletions, *given, user(text("And?")))
    assert not any("images" in message for message in found)
    assert json.loads(found[1]["tool_calls"][0]["function"]["arguments"]) == {"content": [part]}


# Every template of tools, and one that shows no results.
NO_RESULTS = (
    "{% for message in messages %}{% if message.role != 'tool' %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
)


@pytest.mark.parametrize("name", [*TOOL_TEMPLATES, "no results"])
@pytest.mark.parametrize("is_last", [False, True])
def test_templates_show_images_of_results(name, is_last):
    source = TOOL_TEMPLATES.get(name, NO_RESULTS)
    template = ChatTemplate(StandIn(path="x.gguf", vocabulary=StandInVocabulary(), chat_template=source))
    rest = () if is_last else (user(text("And?"), PARTS["MCP"]),)
    _, call, result = RESULTS["OpenAI's chat"]
    given = messages(ChatCompletions, user(text("Look.")), call, result, *rest)
    rendered = template.prompt(given)
    assert rendered.images == (IMAGE,) * (1 + len(rest))
    assert str(rendered).count("<__media__>") == 1 + len(rest)
    if name in TOOL_TEMPLATES:
        assert "It:<__media__>" in str(rendered)
    else:
        assert str(rendered).endswith(
            "<|im_start|>user\n<__media__><|im_end|>\n"
            if is_last
            else "<|im_start|>user\n<__media__>And?<__media__><|im_end|>\n"
        )


def test_notes_tell_that_the_model_reads_images():
    document = {"type": "document", "title": "a.pdf", "source": {"type": "base64", "data": "AA"}}
    inner = {"type": "document", "source": {"type": "content", "content": [PARTS["MCP"]]}}
    found = messages(Messages, user(text("What?"), document, PARTS["MCP"], inner))
    note = "[document a.pdf left out: this model reads text and images only]"
    assert found[0]["content"] == f"What?\n{note}"
    assert [image for _, image in found[0]["images"]] == [IMAGE, IMAGE]
    with pytest.raises(InvalidRequest, match="the question is only"):
        messages(Messages, user(document))


def test_what_a_model_does_not_read_is_a_note():
    sound = Audio(clip(1, 1))
    part = {"type": "input_audio", "input_audio": {"data": b64(sound.data), "format": "wav"}}
    for reads, kept, notes in (
        ((Image,), [IMAGE], ["[audio left out: this model reads text and images only]"]),
        ((Audio,), [sound], ["[image left out: this model reads text and sound only]"]),
        ((Image, Audio), [IMAGE, sound], []),
        (
            (),
            [],
            ["[image left out: this model reads text only]", "[audio left out: this model reads text only]"],
        ),
    ):
        loaded = replace(LOADED, reads=reads)
        found = messages(ChatCompletions, user(text("What?"), PARTS["OpenAI's chat"], part), loaded=loaded)
        assert [file for _, file in found[0].get("images", ())] == kept
        assert found[0]["content"].replace("\n", "") == "".join(["What?", *notes])
        given = user(text("What?"), {"type": "input_audio", "input_audio": {}})
        if Audio in reads:
            with pytest.raises(
                InvalidRequest, match=r"content\[1\]: the sound has no data: give .*input_audio"
            ):
                messages(ChatCompletions, given, loaded=loaded)
        else:
            messages(ChatCompletions, given, loaded=loaded)


# Prompts without a chat template


@pytest.mark.parametrize("kind", [LlamaCompletion, Completions])
def test_prompts_with_images(kind):
    one = {"prompt_string": "<__media__>What<__media__> is it?", "multimodal_data": [b64(A), b64(B)]}
    (found,) = requests_of(kind, {"prompt": one})
    assert found.prompt == [IMAGE, "What", OTHER, " is it?"]
    both = requests_of(kind, {"prompt": [one, {"prompt_string": "Hi"}, "Hi"]})
    assert [each.prompt for each in both] == [found.prompt, "Hi", "Hi"]


@pytest.mark.parametrize("raw", [False, True])
def test_images_of_ollamas_prompts(raw):
    (found,) = requests_of(OllamaGenerate, {"prompt": "What?", "images": [b64(A), URI], "raw": raw})
    if raw:
        assert found.prompt == [IMAGE, IMAGE, "What?"]
    else:
        assert messages_of(found.messages) == messages_of([user(IMAGE, IMAGE, "What?")])


def test_the_context_of_ollama_tells_of_images():
    exchange = OllamaGenerate({"prompt": "What?", "images": [b64(A)]}, SEEING)
    again = {"prompt": "And?", "context": exchange.last()["context"]}
    assert requests_of(OllamaGenerate, again)[0].messages[0]["content"] == "[image]What?"


# Requests that are wrong


def wrong_images():
    """Content of a question, or a whole body, and a part of the one line that refuses it."""
    truncated, svg = b64(A)[:-24], b64(b"<svg xmlns='http://www.w3.org/2000/svg'/>")
    where = "messages[1].content[1]: "
    parts = {
        "truncated": ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{truncated}"}},
                      "image"),
        "no base64": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,a#"}}, "base64"),
        "SVG": ({"type": "image_url", "image_url": {"url": f"data:image/svg+xml;base64,{svg}"}}, "SVG"),
        "text": ({"type": "image", "data": b64(b"Hello"), "mimeType": "image/png"}, "image"),
        "empty": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "empty"),
        "large": ({"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (44 << 20)}},
                  "more than 32 MiB"),
        "http": ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}},
                 "fetches no images from 169.254.169.254:80"),
        "https": ({"type": "input_image", "image_url": "https://example.org/a.png"},
                  "--image-urls example.org"),
        "user": ({"type": "input_image", "image_url": "https://a@example.org/a.png"}, "no valid host"),
        "ftp": ({"type": "input_image", "image_url": "ftp://example.org/a.png"}, "'ftp'"),
        "file": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "'file'"),
        "path": ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "paths"),
        "no URL": ({"type": "image_url", "image_url": {}}, "no data"),
        "null": ({"type": "image_url", "image_url": None}, "no data"),
        "number": ({"type": "image_url", "image_url": 7}, "not text"),
        "list": ({"type": "image_url", "image_url": {"url": [URI]}}, "not text"),
        "file id": ({"type": "input_image", "file_id": "file-1"}, "no files are stored"),
        "Anthropic's file": ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "no files"),
        "Anthropic's source": ({"type": "image", "source": "x"}, "no data"),
        "no string": ({"type": "image", "source": {"type": "base64", "data": {"a": 1}}}, "no data"),
        "data URI without base64": ({"type": "image_url", "image_url": "data:image/png,abc"}, "base64"),
        "no image": ({"type": "image"}, "no data"),
        "a long text": ({"type": "image_url", "image_url": "data:" + "a" * 5000}, "base64"),
        "no base64 at its end": ({"type": "image_url", "image_url": URI + "#"}, "base64"),
        "control characters": ({"type": "image_url", "image_url": "https://a\n\0b/c"}, "no valid host"),
    }  # fmt: skip
    for name, (part, expected) in parts.items():
        yield name, {"messages": [user(text("Hi")), user(text("What?"), part)]}, where, expected
    many = [user(*[PARTS["MCP"]] * 25), user(text("And?"), *[PARTS["MCP"]] * 25)]
    yield "50 images", {"messages": many}, "messages[1].content[8]: ", f"more than {MAX_IMAGES} images"
    for name, images in {"number": [7], "object": [{}], "path": ["/a.png"], "null": [None]}.items():
        body = {"messages": [{"role": "user", "content": "What?", "images": images}]}
        yield f"Ollama: {name}", body, "messages[0].images[0]: ", "image"


@pytest.mark.parametrize(
    ("body", "where", "expected"), [pytest.param(*rest, id=name) for name, *rest in wrong_images()]
)
def test_wrong_images_are_refused(body, where, expected):
    with pytest.raises(InvalidRequest) as error:
        ChatCompletions(body, SEEING)
    line = str(error.value)
    assert line.startswith(where)
    assert expected in line
    assert line.isprintable()
    assert len(line) < 300
    ChatCompletions({"messages": [user(text("What?"), PARTS["MCP"])]}, SEEING)


MARKER = "<__media__>"


@pytest.mark.parametrize(
    ("prompt", "where", "expected"),
    [
        ({"prompt_string": "Hi", "multimodal_data": [b64(A)]}, "prompt: ", "has 0 of <__media__>"),
        ({"prompt_string": MARKER * 2, "multimodal_data": [b64(A)]}, "prompt: ", "has 2 of <__media__>"),
        ({"prompt_string": MARKER, "multimodal_data": b64(A)}, "prompt.multimodal_data", "list"),
        ({"prompt_string": MARKER, "multimodal_data": [1]}, "prompt.multimodal_data", "list"),
        ({"prompt_string": MARKER, "multimodal_data": ["a#"]}, "prompt.multimodal_data[0]: ", "base64"),
        ({"prompt_string": MARKER * 33, "multimodal_data": [b64(A)] * 33},
         "prompt.multimodal_data[32]: ", "more than 32"),
        (["a", {"prompt_string": "Hi", "multimodal_data": [b64(A)]}], "prompt[1]: ", "has 0"),
        ({"multimodal_data": [b64(A)]}, "prompt ", "not supported"),
        ([1, {"prompt_string": MARKER, "multimodal_data": [b64(A)]}], "prompt ", "not supported"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [LlamaCompletion, Completions])
def test_wrong_prompts_with_images_are_refused(kind, prompt, where, expected):
    with pytest.raises(InvalidRequest) as error:
        kind({"prompt": prompt}, SEEING)
    assert str(error.value).startswith(where)
    assert expected in str(error.value)


@pytest.mark.parametrize("kind", [LlamaCompletion, Completions])
def test_without_a_projector_prompts_have_no_images(kind):
    with pytest.raises(InvalidRequest, match="prompt is not supported"):
        kind({"prompt": {"prompt_string": MARKER, "multimodal_data": [b64(A)]}}, LOADED)


def test_gaps_have_no_images():
    one = {"prompt_string": MARKER, "multimodal_data": [b64(A)]}
    with pytest.raises(InvalidRequest):
        LlamaInfill({"input_prefix": one, "input_suffix": ""}, SEEING)
    with pytest.raises(InvalidRequest, match="suffix needs a prompt of text"):
        Completions({"prompt": one, "suffix": "a"}, SEEING)
    with pytest.raises(InvalidRequest, match="suffix needs a prompt of text"):
        OllamaGenerate({"prompt": "a", "suffix": "b", "images": [b64(A)]}, SEEING)


def test_too_many_images_are_refused_before_one_is_decoded():
    """Otherwise, the first one would be refused as damaged."""
    damaged = PARTS["MCP"] | {"data": b64(A[:-20])}
    with pytest.raises(InvalidRequest, match=f"more than {MAX_IMAGES} images"):
        messages(ChatCompletions, user(*[damaged] * (MAX_IMAGES + 1)))
    with pytest.raises(InvalidRequest, match=r"content\[0\]: the image"):
        messages(ChatCompletions, user(*[damaged] * MAX_IMAGES))


def test_an_image_is_decoded_once(monkeypatch):
    part = PARTS["MCP"] | {"data": b64(picture(3))}  # which no other test sends
    decoded, original = [], PngImageFile.load
    monkeypatch.setattr(PngImageFile, "load", lambda file: decoded.append(1) or original(file))
    for _ in range(3):
        messages(ChatCompletions, user(text("What?"), part, part))
    assert len(decoded) == 1


def test_known_images_have_a_limit():
    known = request_images._KnownImages(len(A) + len(B))
    files = [A, B, picture(2)]
    for data in files:
        assert known.image(ImageSource("base64", b64(data)), "a") == Image(data)
    assert known._n_bytes == sum(len(image.data) for image in known._images.values()) <= len(A) + len(B)


def test_the_limit_of_a_body_allows_the_largest_image():
    from specdec_cli.serve import _MAX_BODY_WITH_IMAGES

    assert MAX_BYTES * 4 / 3 + 65536 < _MAX_BODY_WITH_IMAGES << 20


# In the process with the models


def test_answers_that_share_images_send_them_once():
    data = os.urandom(100_000)
    image = Image(A)
    object.__setattr__(image, "data", data)
    body = {"messages": [user(text("What?"), PARTS["MCP"])], "n": 8}
    requests = requests_of(ChatCompletions, body)
    requests[0].messages[0]["images"][0] = (5, image)
    assert len(pickle.dumps([*enumerate(requests)])) < 150_000
    (again,) = pickle.loads(pickle.dumps([requests[3]]))
    assert again.messages[0]["images"][0][1].data == data


def test_conversations_with_large_images_are_forgotten_earlier():
    """But never the last one. Of the images of three, the limit is hardly more."""
    image = Image(A.ljust(28 << 20, b"\0"))
    assert engine_process._KEPT_IMAGE_BYTES // len(image.data) == 3 * 3
    process = engine_process.EngineProcess.__new__(engine_process.EngineProcess)
    process._chats = deque(maxlen=5)
    plain = [SimpleNamespace(messages=messages_of([user("Hi")])) for _ in range(4)]
    for chat in plain:
        process._keep(chat)
    chats = [SimpleNamespace(messages=messages_of([user(*[image] * 3)])) for _ in range(6)]
    for i, chat in enumerate(chats):
        process._keep(chat)
        kept = [*plain, *chats[: i + 1]][-5:] if i < 3 else chats[i - 2 : i + 1]
        assert list(process._chats) == kept
    large = SimpleNamespace(messages=messages_of([user(*[image] * 10)]))
    process._keep(large)
    assert list(process._chats) == [large]


def test_messages_with_other_images_differ():
    a, b = messages_of([user("What?", IMAGE), user("What?", OTHER)])
    assert same_message(a, dict(a))
    assert not same_message(a, b)


def test_prompts_that_begin_with_images_are_told():
    cells = [-5 - i for i in range(400)]
    words = list(range(1000, 1400))
    lines = []
    log = ReadAgainLog(lambda tokens: " ".join(map(str, tokens)), lines.append)
    log.add([*cells, *words])
    assert log.check([1, *cells, *words], 0) == 792  # in blocks of eight
    assert "parts from an earlier prompt at token 0" in lines[0]
    prompt = np.asarray([*cells, 1, 2], np.int32)
    assert read_again(prompt, 0, [KnownPrompt.of([*cells, 3])]) == (400, None)


def test_system_messages_with_images_stay_as_they_are():
    header = "x-anthropic-billing-header: a\n"
    system = {"role": "system", "content": f"{header}It is 10:05.", "images": [(len(header), IMAGE)]}
    assert StablePrompts().stable([system]) == [system]


def test_requests_know_their_length_with_images():
    AnswerRequest(GenerationSettings(), prompt=[IMAGE, "a"]).check_length(4)
