"""A real server whose model has a projector for sound."""

import base64

import numpy as np
import openai
import pytest

from spec_local import Session
from spec_local.images.audio import Audio
from spec_local.text import printable
from tests.chat_templates import TOOL_TEMPLATES
from tests.server.conftest import Server
from tests.server.test_images import PART as IMAGE_PART
from tests.sounds import clip, flac, tones, wav
from tests.tiny_projectors import write_sound_projector
from tests.tiny_vision import write_vision_model


def b64(data):
    return base64.b64encode(data).decode()


CLIP = clip(1, 2)
TEXT = {"type": "text", "text": "one two"}


def part(data):
    return {"type": "input_audio", "input_audio": {"data": b64(data), "format": "wav"}}


QUESTION = [{"role": "user", "content": [TEXT, part(CLIP)]}]


@pytest.fixture(scope="module")
def files(specdec):
    path, template = specdec.folder / "hearing.gguf", TOOL_TEMPLATES["Hermes"]
    model = write_vision_model(path, "llama", n_ctx=4096, chat_template=template)
    return model, write_sound_projector(specdec.folder / "ear.gguf")


@pytest.fixture(scope="module")
def hearing(specdec, files):
    model, projector = files
    with Server(specdec, model, "--mmproj", projector, "--draft", "none", "--ctx", 4096) as started:
        yield started


def chat(server, messages):
    body = {"messages": messages, "temperature": 0, "max_tokens": 12}
    return server.post("/v1/chat/completions", body)


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_answers_are_those_of_the_library(hearing, files):
    model, projector = files
    with Session.open(model, mmproj=projector, n_ctx=4096, threads=1, prompt_cache="off") as session:
        messages = [{"role": "user", "content": ["one two", Audio(CLIP)]}]
        wanted = printable(session.complete(messages, temperature=0, max_tokens=12))
        prompt = session.main.model.tokenize(["one ", Audio(CLIP), " two"])
        continued = printable(session.complete(prompt, temperature=0, max_tokens=12))
    assert text_of(chat(hearing, QUESTION)) == wanted
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{b64(CLIP)}"}}
    file = {"type": "file", "file": {"file_data": f"data:audio/wav;base64,{b64(CLIP)}", "filename": "a.wav"}}
    of_mcp = {"type": "audio", "data": b64(CLIP), "mimeType": "audio/wav"}
    for form in (url, file, of_mcp):
        assert text_of(chat(hearing, [{"role": "user", "content": [TEXT, form]}])) == wanted
    one = {"prompt_string": "one <__media__> two", "multimodal_data": [b64(CLIP)]}
    found = hearing.post("/completion", {"prompt": one, "temperature": 0, "n_predict": 12}).json()
    assert found["content"] == continued
    with openai.OpenAI(base_url=f"{hearing.address}/v1", api_key="-", max_retries=0) as client:
        answer = client.chat.completions.create(model="any", messages=QUESTION, temperature=0, max_tokens=12)
        assert answer.choices[0].message.content == wanted
        more = [*QUESTION, {"role": "assistant", "content": wanted}, {"role": "user", "content": "and"}]
        usage = client.chat.completions.create(model="any", messages=more, max_tokens=2).usage
    assert usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens


def test_the_server_says_that_it_hears(hearing):
    assert hearing.get("/props").json()["modalities"] == {"vision": False, "audio": True}
    shown = hearing.post(
        "/apply-template", {"messages": [{"role": "user", "content": [TEXT, IMAGE_PART]}]}
    ).json()
    assert "one two\n[image left out: this model reads text and sound only]" in shown["prompt"]


def test_wrong_sounds_are_refused_in_one_line(hearing):
    wrong = [CLIP[:30], clip(1, 0.05), b"", b"text", wav(tones(1), tag=17), flac(tones(1), n_samples=1 << 35)]
    wrong += [wav(np.full(9000, np.nan, "f4")), flac(tones(1))[:42]]
    parts = [part(data) for data in wrong]
    parts += [
        {"type": "input_audio", "input_audio": value} for value in ({}, None, 5, {"data": 5}, {"data": "#"})
    ]
    parts.append({"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:1/a.wav"}})
    for each in parts:
        response = chat(hearing, [{"role": "user", "content": [TEXT, each]}])
        assert response.status_code == 400, (str(each)[:200], response.text)
        line = response.json()["error"]["message"]
        assert line.isprintable()
        assert line.startswith("messages[0].content[1]: ")
    one = {"prompt_string": "<__media__>", "multimodal_data": [IMAGE_PART["image_url"]["url"]]}
    response = hearing.post("/completion", {"prompt": one})
    assert response.status_code == 400
    assert "reads no images" in response.json()["error"]["message"]
    assert text_of(chat(hearing, QUESTION))
