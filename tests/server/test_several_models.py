"""``specdec serve`` with several models, as its clients see it."""

import contextlib
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from spec_local.llama.tiny import write_tiny_model
from tests.chat_templates import TOOL_TEMPLATES
from tests.server.conftest import Server
from tests.server.test_serve import LONG
from tests.waiting import wait_until

ONE_MODEL = 0.2
"""GiB: a tiny model is expected to need 0.15."""


@pytest.fixture(scope="module")
def paths(specdec):
    return [
        write_tiny_model(
            specdec.folder / f"{name}.gguf",
            n_layers=1,
            tensor_type="F32",
            n_ctx=1 << 15,
            seed=seed,
            chat_template=TOOL_TEMPLATES["Hermes"],
        )
        for seed, name in enumerate(["first", "Second"])
    ]


def start(specdec, paths, *options, env=None):
    arguments = ["--draft", "none", "--ctx", 4096, "--parallel", 2]
    return Server(specdec, *paths, *arguments, *options, env=env)


@pytest.fixture
def served(specdec, paths):
    """A server with memory for one model, and one with memory for both."""
    started = []

    def begin(*options, **more):
        started.append(start(specdec, paths, *options, **more))
        return started[-1]

    yield begin
    for server in started:
        server.stop()


def status(server):
    return {model["id"]: model["meta"]["status"] for model in server.get("/v1/models").json()["data"]}


def answer(server, model, **options):
    reply = server.chat("one two three", model=model, **options)
    return reply["choices"][0]["message"]["content"]


def engines(server):
    return psutil.Process(server.process.pid).children()


@contextlib.contextmanager
def suspended(process):
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def test_each_model_answers_under_its_names(served, inside, paths):
    server = served()
    assert "serves first; 2 answers at a time; when asked for: Second; Ctrl-C" in server.line
    assert status(server) == {"first": "loaded", "Second": "not loaded"}
    found = {name: answer(server, name) for name in ("first", "second.gguf", "FIRST", "Second:latest")}
    assert found["first"] == found["FIRST"] != found["second.gguf"] == found["Second:latest"]
    for path in paths:
        done = inside(
            "generate", "one two three", "--main", path, "--temp", 0, "-n", 16, "--json", "--threads", 1
        )
        assert (
            json.loads(done.stdout)["content"]
            == found[path.name.lower() if path.stem == "Second" else "first"]
        )
    assert status(server) == {"first": "loaded", "Second": "loaded"}
    assert len(engines(server)) == 2
    assert server.get("/v1/models/SECOND").json()["meta"]["n_ctx"] == 4096
    assert server.get("/props?model=second").json()["model"] == "Second"
    assert server.get("/props").json()["model"] == "Second"  # the last one
    for path, body in (("/tokenize", {"content": "one"}), ("/detokenize", {"tokens": [300, 301]})):
        texts = [server.post(path, {**body, "model": name}).json() for name in ("first", "second")]
        assert texts[0] == texts[1], path
    assert server.metric("generation_tokens_total") == 4 * 16


@pytest.mark.parametrize("body", [{}, {"model": "third"}, {"model": 3}])
def test_a_name_that_nobody_has(served, body):
    server = served()
    for path, shape in (("/v1/chat/completions", "not_found_error"), ("/v1/messages", "not_found_error")):
        response = server.post(path, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4} | body)
        assert response.status_code == 404
        assert response.json()["error"]["type"] == shape
        assert "first, Second" in response.json()["error"]["message"]
    assert server.post("/v1/chat/completions", body).json()["error"]["code"] == "model_not_found"
    assert server.get("/v1/models/third").status_code == 404
    assert server.get("/props?model=third").status_code == 404


def test_memory_for_one(served):
    server = served("--memory", ONE_MODEL)
    first = answer(server, "first")
    second = answer(server, "Second")
    assert status(server) == {"first": "not loaded", "Second": "loaded"}
    assert len(engines(server)) == 1
    assert (answer(server, "first"), answer(server, "second")) == (first, second)
    with server.stream("/v1/chat/completions", LONG | {"model": "Second", "stream": True}) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(answer, server, "first")
            wait_until(lambda: server.metric("num_requests_waiting") == 1)
            assert server.get("/health").status_code == 200
            rest = list(lines)
            assert rest[-1] == "data: [DONE]"  # it was not cut
            assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            assert waiting.result(30) == first
    assert status(server) == {"first": "loaded", "Second": "not loaded"}


STREAMS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/completion": {"prompt": "x"},
}


def test_a_stream_that_waits_for_its_model(served):
    """Its headers and a sign of life come at once, and then its answer; one whose client goes ends."""
    server = served("--memory", ONE_MODEL)
    with (
        server.stream("/v1/chat/completions", LONG | {"model": "first", "stream": True}) as busy,
        contextlib.ExitStack() as stack,
    ):
        generated = busy.iter_lines()  # kept: the end of an iterator closes its response
        next(generated)
        (engine,) = engines(server)
        stack.enter_context(suspended(engine))  # its answer does not end on a fast machine, either
        waiting = {}
        for path, body in STREAMS.items():
            short = {"model": "Second", "stream": True, "max_tokens": 4, "max_output_tokens": 4}
            response = stack.enter_context(server.stream(path, body | short))
            assert response.headers["content-type"].startswith("text/event-stream")
            waiting[path] = response.iter_lines()
            assert next(waiting[path]) == ("event: ping" if "messages" in path else ": loading Second")
        body = STREAMS["/v1/chat/completions"] | {"model": "Second", "stream": True}
        with server.stream("/v1/chat/completions", body) as leaving:
            signs = leaving.iter_lines()
            next(signs)
            wait_until(lambda: server.metric("num_requests_waiting") == 5)
        wait_until(lambda: server.metric("num_requests_waiting") == 4)
        wrong = body | {"temperature": -1}
        refused = stack.enter_context(server.stream("/v1/chat/completions", wrong)).iter_lines()
        assert next(refused) == ": loading Second"
        busy.close()
        engine.resume()
        for lines in waiting.values():
            *_, last = (json.loads(line[6:]) for line in lines if line.startswith("data: {"))
            assert not last.get("error")
            assert last.get("type") in (None, "message_stop", "response.incomplete")
        (error,) = (json.loads(line[6:]) for line in refused if line.startswith("data: {"))
        assert error["error"]["type"] == "invalid_request_error"


def test_a_client_that_goes_loses_its_place(served):
    server = served("--memory", ONE_MODEL, "--queue", 1)
    with server.stream("/v1/chat/completions", LONG | {"model": "first", "stream": True}) as response:
        next(response.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.address + "/v1/chat/completions", json=LONG | {"model": "Second"}, timeout=0.3)
        wait_until(lambda: server.metric("num_requests_waiting") == 0)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(answer, server, "second")
            wait_until(lambda: server.metric("num_requests_waiting") == 1)
            refused = server.post("/v1/chat/completions", LONG | {"model": "second"})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            response.close()
            assert waiting.result(30)


def test_keep_alive(served):
    server = served("--keep-alive", "10m")
    answer(server, "Second", keep_alive=0)
    wait_until(lambda: status(server) == {"first": "loaded", "Second": "not loaded"})
    answer(server, "first", keep_alive="100ms")
    wait_until(lambda: not engines(server))
    assert server.get("/health").status_code == 200
    assert answer(server, "first")
    response = server.post("/v1/chat/completions", LONG | {"model": "first", "keep_alive": "soon"})
    assert response.status_code == 400
    assert "keep_alive 'soon' is not a time" in response.json()["error"]["message"]


def test_one_model_may_be_unloaded(specdec, paths):
    with start(specdec, paths[:1], "--keep-alive", "300ms") as server:
        wait_until(lambda: not engines(server))
        assert answer(server, "any name")


def test_a_model_that_cannot_be_loaded(specdec, paths, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(paths[0].read_bytes()[:-1000])
    with start(specdec, [*paths[:1], broken]) as server:
        for _ in range(2):
            response = server.post("/v1/chat/completions", LONG | {"model": "broken"})
            assert response.status_code == 500
            assert "broken cannot be loaded: " in response.json()["error"]["message"]
            assert answer(server, "first")
        assert status(server) == {"first": "loaded", "broken": "not loaded"}


def test_a_crash_of_one(served):
    server = served()
    answer(server, "Second")
    (second,) = [
        e for e in engines(server) if e.create_time() == max(e.create_time() for e in engines(server))
    ]
    second.send_signal(signal.SIGABRT)
    wait_until(lambda: status(server)["Second"] == "not loaded")
    assert answer(server, "first")
    assert server.post("/v1/chat/completions", LONG | {"model": "Second"}).status_code == 503
    wait_until(lambda: status(server)["Second"] == "loaded")
    assert answer(server, "Second")


@pytest.mark.parametrize("n_signals", [1, 2])
def test_a_signal(served, n_signals):
    """Answers of all models finish, or are cut by a second signal."""
    server = served()
    answer(server, "Second")
    body = LONG | {"stream": True, "max_tokens": 400 if n_signals == 1 else 100_000}
    with (
        server.stream("/v1/chat/completions", body | {"model": "first"}) as first,
        server.stream("/v1/chat/completions", body | {"model": "Second"}) as second,
        contextlib.suppress(httpx.HTTPError),
    ):
        iterators = [(line for line in response.iter_lines() if line) for response in (first, second)]
        for lines in iterators:
            next(lines)
        for _ in range(n_signals):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        ends = [list(lines)[-1] for lines in iterators]
        assert n_signals == 2 or ends == ["data: [DONE]"] * 2
    code, errors = server.wait(10)
    assert code == 0
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft", "first.gguf"], "--draft works with one model only"),
        (["--alias", "x"], "--alias is for one model"),
        (["--workers", "127.0.0.1:1"], "--workers is for one model"),
        (["--memory", "0"], "0.0 is not a size in GiB"),
        (["--memory", "nan"], "nan is not a size in GiB"),
        (["--keep-alive", "soon"], "keep_alive 'soon' is not a time"),
        (["first.gguf"], "two models are named first"),
        (["missing.gguf"], "missing.gguf does not exist"),
        (["nothing-7b"], "nothing-7b"),
    ],
)
def test_options_that_do_not_fit(inside, paths, options, message):
    assert message in inside.one_line(
        inside("serve", *paths, "--port", 0, *options), 2 if "missing" not in message else 1
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", 1], "--memory has no effect here: use several models"),
        (["--keep-alive", "1m", "--workers", "127.0.0.1:1"], "--keep-alive does not work with --workers"),
    ],
)
def test_options_that_do_not_fit_one(inside, paths, options, message):
    assert message in inside.one_line(inside("serve", paths[0], *options), 2)
