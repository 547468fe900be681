"""Programs that speak ollama's protocol, in the shapes that they send, against a real server."""

import json
import re
from datetime import UTC, datetime

import pytest

from spec_local.server.protocols import ollama_paths
from tests.chat_templates import TOOL_TEMPLATES
from tests.scripted_model import THOUGHT, write_calling_model
from tests.server.conftest import Server
from tests.server.test_agents import PNG, READ
from tests.waiting import wait_until

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": ["string", "null"], "description": "Where."}},
            "required": ["city"],
        },
    },
}
ASKED = [{"role": "user", "content": "one two three"}]
FORMAT = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
SHORT = {"temperature": 0, "num_predict": 16}


@pytest.fixture(scope="module")
def caller(specdec):
    return write_calling_model(specdec.folder / "caller.gguf", TOOL_TEMPLATES["Hermes"])


@pytest.fixture(scope="module")
def server(specdec, models, caller):
    """A model that writes anything, and one that calls a tool."""
    started = Server(specdec, models[0], caller, "--ctx", 4096, "--parallel", 2, "--keep-alive", "30m")
    yield started
    code, errors = started.stop()
    assert code == 0
    assert "Traceback" not in errors


@pytest.fixture
def ask(server):
    """Send a body; return the objects of the response."""

    def send(path, status=200, **body):
        response = server.post(path, body)
        assert response.status_code == status, response.text
        objects = [json.loads(line) for line in response.text.splitlines()]
        is_stream = body.get("stream") is not False and "eval_count" in objects[-1]  # an answer, and no load
        kind = "application/x-ndjson" if is_stream else "application/json"
        assert response.headers["content-type"] == kind
        return objects

    return send


def text_of(objects):
    return "".join(each["message"]["content"] if "message" in each else each["response"] for each in objects)


def running(server):
    return [model["name"] for model in server.get("/api/ps").json()["models"]]


# The paths


def test_the_address_says_what_it_is(server):
    for method, accepted in (("HEAD", "*/*"), ("GET", "*/*"), ("GET", "application/json")):
        response = server.request(method, "/", headers={"accept": accepted})
        assert response.status_code == 200
        assert response.text == "Ollama is running" * (method == "GET")
    browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    assert server.get("/", headers=browser).text.startswith("<!doctype html>")


def test_the_version_is_new_enough(server):
    version = server.get("/api/version").json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]  # VS Code's least


def test_the_models(server, models):
    listed = server.get("/api/tags").json()["models"]
    assert [model["name"] for model in listed] == ["main:latest", "caller:latest"]
    for model in listed:
        assert model["model"] == model["name"]
        assert re.fullmatch("[0-9a-f]{64}", model["digest"])
        assert datetime.fromisoformat(model["modified_at"]) < datetime.now(UTC)
        details = model["details"]
        assert (details["format"], details["family"], details["families"]) == ("gguf", "llama", ["llama"])
        assert re.fullmatch(r"[\d.]+[MB]", details["parameter_size"])
        assert details["quantization_level"]
    assert listed[0]["size"] == models[0].stat().st_size
    assert listed == server.get("/api/tags").json()["models"]
    assert server.request("HEAD", "/api/tags").status_code == 200


@pytest.mark.parametrize(
    ("model", "can"),
    [("main", ["completion", "tools"]), ("caller", ["completion", "tools", "insert", "thinking"])],
)
@pytest.mark.parametrize("field", ["model", "name"])
def test_the_details_of_a_model(server, model, can, field):
    shown = server.post("/api/show", {field: f"{model}:latest", "verbose": False}).json()
    assert shown["capabilities"] == can
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"] == 4096  # what an answer has here
    assert shown["model_info"]["llama.block_count"] == 1
    assert re.search(r"^num_ctx +4096$", shown["parameters"], re.M)
    assert shown["template"].startswith(TOOL_TEMPLATES["Hermes"][:40])
    assert (".Suffix" in shown["template"]) == ("insert" in can)
    assert shown["details"]["format"] == "gguf"
    assert f"FROM {model}\n" in shown["modelfile"]


def test_copilot_shows_the_name(server):
    shown = server.post(
        "/api/show", {"model": "main:latest"}, headers={"user-agent": "GitHubCopilotChat/0.40"}
    )
    assert shown.json()["model_info"]["general.basename"] == "main:latest"


def test_loaded_models(server, ask):
    for model in ("main", "caller"):
        (loaded,) = ask("/api/generate", model=model)
        assert (loaded["model"], loaded["done_reason"]) == (model, "load")
    found = {model["name"]: model for model in server.get("/api/ps").json()["models"]}
    assert set(found) == {"main:latest", "caller:latest"}
    for model in found.values():
        assert model["context_length"] == 4096
        assert model["size"] > 0 <= model["size_vram"]
        left = datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)
        assert 1700 < left.total_seconds() <= 1800
    ask("/api/chat", model="caller", messages=[], keep_alive=-1)
    (forever,) = (m for m in server.get("/api/ps").json()["models"] if m["name"] == "caller:latest")
    assert datetime.fromisoformat(forever["expires_at"]).year > 2200
    (unloaded,) = ask("/api/chat", model="caller", messages=[], keep_alive=0)
    assert unloaded["done_reason"] == "unload"
    wait_until(lambda: running(server) == ["main:latest"])
    (unloaded,) = ask("/api/generate", model="caller", keep_alive="0s")  # without loading it
    assert (unloaded["done_reason"], running(server)) == ("unload", ["main:latest"])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/embed"),
        ("POST", "/api/embeddings"),
        ("POST", "/api/pull"),
        ("POST", "/api/push"),
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/blobs/sha256:00"),
    ],
)
def test_what_is_not_here(server, method, path):
    response = server.request(method, path, json={"model": "main", "input": "x"})
    assert response.status_code == 501
    (message,) = response.json().values()
    assert message.startswith("this server ")
    assert len(message.splitlines()) == 1


def test_errors(server, ask):
    for path, more in (("/api/chat", {"messages": ASKED}), ("/api/generate", {}), ("/api/show", {})):
        (found,) = ask(path, status=404, model="absent", **more)
        assert found == {"error": "model 'absent' not found: this server has main, caller"}
    for body in ({"messages": 7}, {"messages": ASKED, "options": {"mirostat": 2}}):
        (found,) = ask("/api/chat", status=400, model="main", **body)
        assert isinstance(found["error"], str)
    (found,) = ask("/api/chat", status=400, model="main", messages=[{"role": "user", "content": "x " * 9999}])
    assert "context" in found["error"]
    assert server.get("/api/nothing").json()["error"].startswith("there is nothing at /api/nothing")
    assert "use POST" in server.get("/api/chat").json()["error"]
    (found,) = ask("/api/generate", status=400, model="main", prompt="def f(", suffix="return")
    assert "fill-in-the-middle" in found["error"]


# The answers


def test_streams_and_objects_are_the_same(ask):
    for path, question in (
        ("/api/chat", {"messages": ASKED}),
        ("/api/generate", {"prompt": "one two three"}),
    ):
        *parts, last = ask(path, model="main", options=SHORT, **question)
        assert len(parts) > 1
        (whole,) = ask(path, model="main", options=SHORT, stream=False, **question)
        assert text_of(parts) == text_of([whole])
        for each in (last, whole):
            assert (each["done"], each["done_reason"], each["eval_count"]) == (True, "length", 16)
            assert each["total_duration"] >= each["eval_duration"] > 0
            assert each["prompt_eval_count"] > 3


def test_each_object_is_a_chunk(server):
    """Raycast, and others, read what arrives at a time as one object."""
    body = {"model": "caller", "messages": ASKED, "tools": [WEATHER], "options": {"temperature": 0}}
    with server.stream("/api/chat", body) as response:
        objects = [json.loads(chunk) for chunk in response.iter_raw() if chunk]
    assert objects[-1]["done"]
    assert not objects[-1]["message"]["content"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_after_thinking(ask, stream):
    found = ask(
        "/api/chat",
        model="caller",
        messages=ASKED,
        tools=[WEATHER],
        options={"temperature": 0},
        stream=stream,
    )
    assert "".join(each["message"].get("thinking", "") for each in found) == THOUGHT
    (call,) = (call for each in found for call in each["message"].get("tool_calls", ()))
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}
    assert call["id"]
    assert (text_of(found), found[-1]["done_reason"]) == ("", "stop")


def test_thinking_can_be_turned_off(ask):
    for path, question in (("/api/chat", {"messages": ASKED}), ("/api/generate", {"prompt": "Rain?"})):
        for think, thinks in ((None, True), (True, True), ("low", True), (False, False)):
            (found,) = ask(path, model="caller", think=think, options=SHORT, stream=False, **question)
            assert ("thinking" in found.get("message", found)) == thinks


@pytest.mark.parametrize("form", ["json", FORMAT])
def test_structured_answers(ask, form):
    for path, question in (("/api/chat", {"messages": ASKED}), ("/api/generate", {"prompt": "Which?"})):
        *_, last = found = ask(path, model="main", format=form, options={"num_predict": 200}, **question)
        if last["done_reason"] == "stop" or form == FORMAT:
            assert form == "json" or json.loads(text_of(found)) == {"n": 7}
            assert isinstance(json.loads(text_of(found)), dict)


def test_a_gap_and_a_raw_prompt(ask):
    found = ask(
        "/api/generate", model="caller", prompt="def f(", suffix="return a", options={"num_predict": 4}
    )
    assert found[-1]["prompt_eval_count"] > 6
    assert "context" not in found[-1]
    marks = "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    (raw,) = ask(
        "/api/generate", model="caller", prompt=marks, raw=True, stream=False, options={"num_predict": 1}
    )
    assert raw["prompt_eval_count"] == 6  # these are tokens, and one that begins the text


def test_log_probabilities(ask):
    (found,) = ask(
        "/api/chat", model="main", messages=ASKED, options=SHORT, stream=False, logprobs=True, top_logprobs=2
    )
    assert len(found["logprobs"]) == 16
    assert all(len(each["top_logprobs"]) == 2 for each in found["logprobs"])


def test_a_context_continues_a_conversation(ask, server):
    first = ask("/api/generate", model="main", prompt="one two three", options=SHORT)
    second = ask("/api/generate", model="main", prompt="And?", options=SHORT, context=first[-1]["context"])
    history = [*ASKED, {"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "And?"}]
    assert text_of(second) == text_of(ask("/api/chat", model="main", messages=history, options=SHORT))


# What programs send


def program(name, path, **body):
    return pytest.param(path, body, id=name)


CALL = {"function": {"name": "Read", "arguments": {"file_path": "/main.py"}}}
TOOLS = [
    WEATHER,
    {"type": "function", "function": {"name": "Read", "parameters": READ["schema"], "description": "Reads."}},
]
UNSET = dict.fromkeys(
    [
        *("embedding_only", "f16_kv", "low_vram", "main_gpu", "mirostat", "mirostat_eta", "num_gqa", "seed"),
        *("penalize_newline", "rope_frequency_base", "tfs_z", "typical_p", "use_mlock", "vocab_only"),
    ]
)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        program(
            "open-webui",
            "/api/chat",
            model="main:latest",
            messages=[
                {"role": "system", "content": "Today is Monday."},
                {"role": "user", "content": "What is this?", "images": [PNG]},
            ],
            stream=True,
            keep_alive="5m",
            format="",
            options={"num_predict": 16, "num_ctx": 8192, "num_batch": 512, "num_keep": 24, "use_mmap": True}
            | {
                "mirostat_eta": 0.1,
                "tfs_z": 1,
                "new_topic_penalty": 0.5,
                "repeat_last_n": 64,
                "stop": ["###"],
            },
        ),
        program(
            "Home Assistant",
            "/api/chat",
            model="main",
            messages=[
                {"role": "system", "content": "You control a home."},
                {"role": "user", "content": "Is it warm?"},
                {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [CALL, CALL]},
                {"role": "tool", "content": '{"data": 20, "error": null}'},
                {"role": "tool", "content": '{"data": null, "error": "x"}'},
            ],
            tools=TOOLS,
            stream=True,
            think=False,
            keep_alive=-1,
            options={"num_ctx": 8192, "num_predict": 16},
        ),
        program(
            "Obsidian Copilot, n8n",  # LangChain's JavaScript
            "/api/chat",
            model="main",
            messages=[{"role": "user", "content": "Hi", "images": []}],
            stream=True,
            keep_alive="5m",
            options={"num_ctx": 8192, "num_predict": 16, "temperature": 0.1, "top_p": 0.9, "num_thread": 4},
        ),
        program(
            "Smart Connections",
            "/api/chat",
            model="main:latest",
            messages=[{"role": "user", "content": "Look it up.", "images": [f"data:image/png;base64,{PNG}"]}],
            options={"num_predict": 64, "temperature": 0.7},  # a call is shown with its first argument
            tools=TOOLS,
            format="json",
            stream=True,
        ),
        program(
            "Raycast",
            "/api/generate",
            model="main",
            prompt="Improve this.",
            system="You edit texts.",
            images=[],
            options={"temperature": 0.8, "num_ctx": 2048, "num_predict": 16, "mirostat": 0, "tfs_z": 1},
            keep_alive="5m",
        ),
        program(
            "Enchanted",
            "/api/chat",
            model="main:latest",
            messages=[
                {"role": "user", "content": "Hi", "images": [PNG]},
                {"role": "assistant", "content": ""},
            ],
            stream=True,
            options={"temperature": 0, "stop": "END", "repeat_penalty": 1, "num_predict": 16},
        ),
        program(
            "Page Assist",
            "/api/chat",
            model="main:latest",
            keep_alive="5m",
            format=None,
            think=None,
            options=UNSET
            | {"num_ctx": 8192, "num_predict": 16, "temperature": 0.7, "frequency_penalty": 0.1},
            messages=[{"role": "user", "content": "\nHi", "images": []}],
        ),
        program(
            "Continue: a chat",
            "/api/chat",
            model="main",
            messages=[{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It is"}],
            options={"num_predict": 16, "num_ctx": 4096, "temperature": 0, "top_p": None, "stop": []},
            keep_alive=1800,
            stream=True,
        ),
        program(
            "Continue: a completion",
            "/api/generate",
            model="caller",
            prompt="def f(",
            suffix="\n    return a",
            raw=None,
            options={"num_predict": 16, "temperature": 0.01, "stop": ["\n\n", "<|fim_prefix|>"]},
            keep_alive=1800,
            stream=True,
        ),
        program(
            "Zed",
            "/api/chat",
            model="main:latest",
            messages=[
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "", "tool_calls": [CALL], "thinking": None},
                {"role": "tool", "tool_name": "Read", "content": "print()"},
            ],
            stream=True,
            keep_alive=-1,
            options={"num_ctx": 4096, "num_predict": 16, "stop": [], "temperature": 1.0, "top_p": None},
            tools=[],
            think=None,
        ),
        program(
            "LibreChat",
            "/api/chat",
            messages=ASKED,
            model="main",
            num_predict=16,
            temperature=0.5,
            seed=None,
            stop=["END"],
            stream=True,
        ),
        program(
            "the ollama command",
            "/api/chat",
            model="main",
            messages=[QUESTION := {"role": "user", "content": "Hi"}],
            format="",
            options={"num_predict": 16},
            think=True,
            keep_alive="5m0s",
        ),
        program(
            "LlamaIndex",
            "/api/chat",
            model="main",
            messages=[QUESTION | {"tool_calls": []}],
            stream=True,
            tools=None,
            options={"temperature": 0.75, "num_ctx": -1, "num_predict": 16},
        ),
    ],
)
def test_programs(ask, path, body):
    *parts, last = ask(path, **body)
    assert parts
    for part in (*parts, last):
        assert part["model"] == body["model"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z", part["created_at"])  # Enchanted's
        assert part["done"] is (part is last)
    assert last["done_reason"] in ("stop", "length")
    assert 0 < last["eval_count"] <= body.get("options", body)["num_predict"]


def test_vs_code(server):
    """It reads what models can do, and then speaks OpenAI's protocol."""
    for model in server.get("/api/tags").json()["models"]:
        shown = server.post("/api/show", {"model": model["model"]}).json()
        info = shown["model_info"]
        assert info[f"{info['general.architecture']}.context_length"] == 4096
        assert "tools" in shown["capabilities"]
        body = {"model": model["model"], "messages": ASKED, "max_tokens": 4}
        assert server.post("/v1/chat/completions", body).json()["choices"]


def one_model(specdec, models, *options):
    return Server(specdec, models[0], "--draft", "none", "--ctx", 512, "--parallel", 1, *options)


def test_a_model_alone_with_an_alias_and_a_key(specdec, models):
    with one_model(specdec, models, "--alias", "coder:7b", "--api-key", "k") as server:
        key = {"headers": {"authorization": "Bearer k"}}
        assert server.get("/api/tags").status_code == 401
        assert set(server.get("/api/tags").json()) == {"error"}
        (model,) = server.get("/api/tags", **key).json()["models"]
        assert model["name"] == "coder:7b"
        for name in ("coder:7b", "llama3.2", "x:latest"):  # a model alone answers to any name
            body = {"model": name, "messages": ASKED, "options": SHORT, "stream": False, "keep_alive": 0}
            answer = server.post("/api/chat", body, **key).json()
            assert (answer["model"], answer["done_reason"]) == (name, "length")
            assert server.post("/api/show", {"model": name}, **key).status_code == 200
        assert server.post("/api/generate", {"model": "coder:7b", "keep_alive": 0}, **key).json()["done"]
        (model,) = server.get("/api/ps", **key).json()["models"]  # it stays
        assert datetime.fromisoformat(model["expires_at"]).year > 2200
        assert server.get("/").text == ollama_paths.IS_RUNNING
