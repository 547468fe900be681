"""A real server whose model has a projector: pictures in all protocols, and in the clients' own forms."""

import base64
import contextlib
import http.server
import io
import json
import shutil
import subprocess
import threading
from pathlib import Path

import anthropic
import numpy as np
import openai
import pytest
from PIL import Image as PillowImage

from spec_local import Session
from spec_local.images.image import Image
from spec_local.text import printable
from tests.chat_templates import TOOL_TEMPLATES
from tests.server.conftest import Server
from tests.tiny_projectors import write_projector
from tests.tiny_vision import write_vision_model
from tests.unit.test_server_images import wrong_images
from tests.waiting import wait_until

NPM = Path(__file__).parents[2] / ".venv/npm"
OPTIONS = {"temperature": 0, "max_tokens": 12}


def file_of(seed, size=(112, 84)):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
    file = io.BytesIO()
    PillowImage.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def b64(data):
    return base64.b64encode(data).decode()


A, B = file_of(0), file_of(1)
URI = f"data:image/png;base64,{b64(A)}"
PART = {"type": "image_url", "image_url": {"url": URI}}
QUESTION = [{"role": "user", "content": [{"type": "text", "text": "one two"}, PART]}]


@pytest.fixture(scope="module")
def files(specdec):
    model = write_vision_model(
        specdec.folder / "vision.gguf",
        "qwen2vl",
        n_ctx=8192,
        chat_template=TOOL_TEMPLATES["Hermes"],
    )
    return model, write_projector(specdec.folder / "eye.gguf", "qwen2vl_merger")


@pytest.fixture(scope="module")
def pictures():
    """A server of pictures, and what was fetched from it."""
    fetched, goes_on = [], threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            fetched.append(self.path)
            if self.path == "/slow.png":
                goes_on.wait(30)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(A)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as opened:
        threading.Thread(target=opened.serve_forever, args=[0.01], daemon=True).start()
        yield f"127.0.0.1:{opened.server_port}", fetched, goes_on
        opened.shutdown()


@pytest.fixture(scope="module")
def seeing(specdec, files, pictures):
    model, projector = files
    options = [
        "--draft",
        "none",
        "--ctx",
        4096,
        "--parallel",
        2,
        "--image-urls",
        f"example.org,{pictures[0]}",
    ]
    with Server(specdec, model, "--mmproj", projector, *options) as started:
        yield started


@pytest.fixture(scope="module")
def answers(files):
    """What the library answers to the question with each picture, and to that without one."""
    model, projector = files
    with Session.open(model, mmproj=projector, n_ctx=4096, threads=1, prompt_cache="off") as session:
        return [
            printable(session.complete([{"role": "user", "content": ["one two", *images]}], **OPTIONS))
            for images in ([Image(A)], [Image(B)], [])
        ]


def chat(server, messages=QUESTION, **more):
    response = server.post("/v1/chat/completions", {"messages": messages, **OPTIONS, **more})
    assert response.status_code == 200, response.text
    return response.json()


def test_answers_are_those_of_the_library(seeing, answers):
    assert len(set(answers)) == 3
    assert chat(seeing)["choices"][0]["message"]["content"] == answers[0]
    other = {"type": "image_url", "image_url": {"url": f"data:;base64,{b64(B)}"}}
    given = [{"role": "user", "content": [{"type": "text", "text": "one two"}, other]}]
    assert chat(seeing, given)["choices"][0]["message"]["content"] == answers[1]
    several = chat(seeing, n=2)
    assert [choice["message"]["content"] for choice in several["choices"]] == [answers[0]] * 2


def test_openais_client(seeing, answers):
    with openai.OpenAI(base_url=f"{seeing.address}/v1", api_key="none", max_retries=0) as client:
        found = client.chat.completions.create(model="vision", messages=QUESTION, **OPTIONS)
        assert found.choices[0].message.content == answers[0]
        parts = client.chat.completions.create(model="vision", messages=QUESTION, stream=True, **OPTIONS)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == answers[0]
        content = [
            {"type": "input_text", "text": "one two"},
            {"type": "input_image", "image_url": URI, "detail": "auto"},
        ]
        found = client.responses.create(
            model="vision",
            input=[{"role": "user", "content": content}],
            temperature=0,
            max_output_tokens=12,
        )
        assert found.output_text == answers[0]
        part = {"type": "image_url", "image_url": {"url": URI[:-300]}}
        cut = [{"role": "user", "content": [QUESTION[0]["content"][0], part]}]
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[1\]: the image is damaged"):
            client.chat.completions.create(model="vision", messages=cut)


def test_anthropics_client(seeing, answers):
    source = {"type": "base64", "media_type": "image/png", "data": b64(A)}
    content = [{"type": "text", "text": "one two"}, {"type": "image", "source": source}]
    with anthropic.Anthropic(base_url=seeing.address, api_key="none", max_retries=0) as client:
        options = {"model": "vision", "messages": [{"role": "user", "content": content}]}
        short = {"max_tokens": 12, "extra_body": {"temperature": 0}}
        found = client.messages.create(**options, **short)
        assert found.content[0].text == answers[0]
        with client.messages.stream(**options, **short) as stream:
            assert stream.get_final_text() == answers[0]
        n = client.messages.count_tokens(**options).input_tokens
        usage = found.usage
        assert n == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        tools = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
        history = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content}]},
        ]
        with_image = client.messages.count_tokens(model="vision", messages=history, tools=tools).input_tokens
        history[2]["content"][0]["content"] = content[:1]
        without = client.messages.count_tokens(model="vision", messages=history, tools=tools).input_tokens
        assert with_image > without + 8


@pytest.mark.skipif(not (NPM / "installed").exists(), reason="make .venv/npm/installed installs them")
def test_npm_packages(seeing, answers, tmp_path):
    script = shutil.copy(Path(__file__).with_name("client_images.mjs"), NPM)  # beside its packages
    picture = tmp_path / "a.png"
    picture.write_bytes(A)
    command = ["node", script, seeing.address, json.dumps(answers[0]), picture]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]


def test_ollamas_paths(seeing):
    """Pictures stand before the text."""
    before = [{"role": "user", "content": [PART, {"type": "text", "text": "one two"}]}]
    text = chat(seeing, before)["choices"][0]["message"]["content"]
    options = {"stream": False, "options": {"temperature": 0, "num_predict": 12}}
    body = {"messages": [{"role": "user", "content": "one two", "images": [b64(A)]}], **options}
    assert seeing.post("/api/chat", body).json()["message"]["content"] == text
    body = {"prompt": "one two", "images": [b64(A)], **options}
    assert seeing.post("/api/generate", body).json()["response"] == text


def test_prompts_without_a_template(seeing, files):
    model, projector = files
    with Session.open(model, mmproj=projector, n_ctx=4096, threads=1, prompt_cache="off") as session:
        tokens = session.main.model.tokenize(["one ", Image(A), " two"])
        text = printable(session.complete(tokens, **OPTIONS))
    one = {"prompt_string": "one <__media__> two", "multimodal_data": [b64(A)]}
    found = seeing.post("/completion", {"prompt": one, "temperature": 0, "n_predict": 12}).json()
    assert found["content"] == text
    assert found["tokens_evaluated"] == len(tokens)
    several = seeing.post("/completion", {"prompt": [one, "one"], "temperature": 0, "n_predict": 12}).json()
    assert several[0]["content"] == text
    body = {"prompt": [one], "temperature": 0, "max_tokens": 12}
    assert seeing.post("/v1/completions", body).json()["choices"][0]["text"] == text
    found = seeing.post("/tokenize", {"content": one, "add_special": True}).json()["tokens"]
    assert found == [max(token, -1) for token in tokens]
    assert found.count(-1) == 12
    pieces = seeing.post("/tokenize", {"content": one, "with_pieces": True}).json()["tokens"]
    assert {"id": -1, "piece": ""} in pieces


def test_prompts_are_shown_with_markers(seeing):
    shown = seeing.post("/apply-template", {"messages": QUESTION}).json()["prompt"]
    assert "one two<__media__><|im_end|>" in shown


def test_the_server_says_that_it_sees(seeing, server):
    for which, sees in ((seeing, True), (server, False)):
        expected = {"vision": sees, "audio": False}
        assert which.get("/props").json()["modalities"] == expected
        assert which.get("/v1/models").json()["data"][0]["modalities"] == expected
        (name,) = (model["name"] for model in which.get("/api/tags").json()["models"])
        shown = which.post("/api/show", {"model": name}).json()
        assert ("vision" in shown["capabilities"]) == sees


def test_a_second_question_about_a_picture_reads_only_what_is_new(seeing):
    messages = [{"role": "user", "content": [PART, {"type": "text", "text": "seven eight nine"}]}]
    first = chat(seeing, messages, seed=1)
    answer = first["choices"][0]["message"]
    messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "and ten?"}]
    second = chat(seeing, messages, seed=1)["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    part = {"type": "image_url", "image_url": {"url": f"data:;base64,{b64(B)}"}}
    other = [{"role": "user", "content": [part, {"type": "text", "text": "seven eight nine"}]}]
    assert chat(seeing, other)["usage"]["prompt_tokens_details"]["cached_tokens"] < 20


def test_images_from_urls(seeing, pictures, answers):
    host, fetched, _ = pictures
    del fetched[:]
    part = {"type": "image_url", "image_url": {"url": f"http://{host}/a.png"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "one two"}, part]}]
    assert chat(seeing, messages)["choices"][0]["message"]["content"] == answers[0]
    assert fetched == ["/a.png"]
    for url in (f"http://localhost:{host.partition(':')[2]}/a.png", "https://example.com/a.png"):
        part["image_url"]["url"] = url
        response = seeing.post("/v1/chat/completions", {"messages": messages})
        assert response.status_code == 400
        assert "messages[0].content[1]: this server fetches no images" in response.json()["error"]["message"]
    assert fetched == ["/a.png"]


def test_slow_hosts_delay_nobody_else(seeing, pictures):
    host, fetched, goes_on = pictures
    part = {"type": "image_url", "image_url": {"url": f"http://{host}/slow.png"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "one two"}, part]}]
    waiting = [threading.Thread(target=chat, args=(seeing, messages)) for _ in range(3)]
    for each in waiting:
        each.start()
    wait_until(lambda: fetched.count("/slow.png") == 3)
    assert seeing.get("/health").status_code == 200
    chat(seeing, [{"role": "user", "content": "one"}], max_tokens=1)
    assert all(each.is_alive() for each in waiting)
    goes_on.set()
    for each in waiting:
        each.join()


def hostile():
    """Paths and bodies."""
    for _, body, *_ in wrong_images():
        yield "/v1/chat/completions", body
    part = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, part]}]
    for path in ("/v1/messages", "/api/chat"):
        yield path, {"messages": messages, "max_tokens": 5}
    yield "/v1/responses", {"input": messages}
    yield "/api/generate", {"prompt": "Hi", "images": ["#"]}
    for prompt in (
        {"prompt_string": "Hi", "multimodal_data": [b64(A)]},
        {"prompt_string": "<__media__>", "multimodal_data": [b64(A)] * 2},
        {"prompt_string": "<__media__>", "multimodal_data": "x"},
    ):
        yield "/completion", {"prompt": prompt}
        yield "/v1/completions", {"prompt": prompt}
        yield "/tokenize", {"content": prompt}


def test_wrong_images_are_refused_in_one_line(seeing, answers):
    n = 0
    for path, body in hostile():
        response = seeing.post(path, body)
        assert response.status_code == 400, (path, str(body)[:200], response.text)
        error = response.json()["error"]
        line = error if isinstance(error, str) else error["message"]
        assert line.isprintable()
        assert len(line) < 400
        assert any(field in line for field in ("messages[", "input[", "images[", "prompt", "content"))
        n += 1
    assert n > 30
    assert chat(seeing)["choices"][0]["message"]["content"] == answers[0]


def test_the_size_of_a_request(seeing, server):
    """A model that sees takes 64 MiB, and others 16."""
    large = {"messages": [{"role": "user", "content": "Hi"}], "user": "a" * (17 << 20), "max_tokens": 1}
    assert seeing.post("/v1/chat/completions", large).status_code == 200
    assert server.post("/v1/chat/completions", large).status_code == 413
    with contextlib.suppress(Exception):  # the connection may be cut
        response = seeing.post("/v1/chat/completions", large | {"user": "a" * (65 << 20)})
        assert response.status_code == 413


def test_without_a_projector_notes_stand_for_images(server):
    shown = server.post("/apply-template", {"messages": QUESTION}).json()["prompt"]
    assert "one two\n[image left out: this model reads text only]" in shown
    one = {"prompt_string": "<__media__>", "multimodal_data": [b64(A)]}
    assert server.post("/completion", {"prompt": one}).status_code == 400


def test_a_conversation_of_tools_goes_on_after_a_crash(seeing, answers):
    """The process that is started again reads images, too."""
    seeing.engine.kill()
    wait_until(lambda: seeing.get("/health").status_code == 200)
    assert chat(seeing)["choices"][0]["message"]["content"] == answers[0]
