"""A server with one row, which one client uses while others wait."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import openai
import pytest

from tests.server.conftest import Server
from tests.waiting import wait_until

ENDLESS = {"prompt": "one two", "n_predict": 100_000, "stream": True, "speculative": False}


@pytest.fixture(scope="module")
def one_row(specdec, models):
    options = ["--draft", models[1], "--ctx", 1 << 15, "--parallel", 1, "--queue", 1]
    with Server(specdec, models[0], *options) as started:
        yield started


@pytest.fixture
def busy(one_row):
    """Its row is in use, and one more request may wait."""
    with one_row.stream("/completion", ENDLESS) as response:
        lines = response.iter_lines()  # without a name, it would be closed, and the connection with it
        next(lines)
        yield one_row
    wait_until(lambda: one_row.metric("num_requests_running") == 0)


def n_waiting(server):
    return server.metric("num_requests_waiting")


@pytest.mark.parametrize(
    ("path", "body", "sign"),
    [
        ("/v1/completions", {"prompt": "a"}, b": waiting"),
        ("/completion", {"prompt": "a"}, b": waiting"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}, b"event: ping"),
        ("/v1/responses", {"input": "a"}, b"event: response.created"),
    ],
)
def test_headers_and_a_first_sign_come_at_once(busy, path, body, sign):
    begun = time.monotonic()
    with busy.stream(path, body | {"stream": True}) as response:
        parts = response.iter_raw()
        first = next(parts)
        assert time.monotonic() - begun < 4  # 0.15 s on a machine that does nothing else
        assert response.status_code == 200
        assert first.startswith(sign)
        assert n_waiting(busy) == 1
    wait_until(lambda: n_waiting(busy) == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_leaves_its_place(busy, stream):
    for _ in range(3):  # each would be refused if the one before it still waited
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                busy.address + "/completion",
                json={"prompt": "a", "n_predict": 8, "stream": stream},
                timeout=0.4,
            )
        wait_until(lambda: n_waiting(busy) == 0)


def test_errors_that_are_known_at_once_are_statuses(busy):
    with busy.stream("/completion", {"prompt": "a", "stream": True}) as waiting:
        parts = waiting.iter_raw()
        next(parts)
        response = busy.post("/completion", {"prompt": "a", "n_predict": 8, "stream": True})
        assert response.status_code == 429
        assert response.headers["retry-after"]
    wait_until(lambda: n_waiting(busy) == 0)
    for prompt in (["a", 10**6], [5] * 33_000, {"prompt_string": 5}):
        body = {"prompt": prompt, "n_predict": 8, "stream": True}
        # On a busy machine, 0.15 s may pass first, and then the error is an event of the stream.
        answers = (busy.post("/completion", body) for _ in range(9))
        response = next(answer for answer in answers if answer.status_code != 200)
        assert response.status_code == 400
        assert "--" not in response.json()["error"]["message"]


def test_rows_and_probes_of_a_busy_server(busy):
    (row,) = busy.get("/slots").json()
    assert row["is_processing"]
    assert row["n_ctx"] == 1 << 15
    assert row["params"]["n_predict"] == 100_000
    assert busy.get("/slots?fail_on_no_slot=1").status_code == 503
    host, port = busy.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
    for path in ("/health/", "/slots/"):
        assert httpx.head(busy.address + path).status_code == 200


def test_sixteen_clients_wait_for_long_prompts(specdec, models):
    """Each gets its first byte at once, keeps its place, and is answered."""
    options = ["--draft", "none", "--ctx", 1 << 15, "--parallel", 1, "--queue", 16]
    started = Server(specdec, models[0], *options)
    have_begun = threading.Barrier(17, timeout=30)

    def ask(number):
        body = {"prompt": f"{number} " + "many " * 500, "n_predict": 4, "stream": True}
        with httpx.Client(base_url=started.address, timeout=60) as client:
            begun = time.monotonic()
            with client.stream("POST", "/v1/completions", json=body) as response:
                parts = response.iter_text()
                first = next(parts)
                waited = time.monotonic() - begun
                have_begun.wait()
                return response.status_code, waited, first, "".join(parts)

    try:
        with ThreadPoolExecutor(16) as pool:
            with started.stream("/completion", ENDLESS) as response:
                lines = response.iter_lines()
                next(lines)
                asked = [pool.submit(ask, number) for number in range(16)]
                have_begun.wait()
            answers = [each.result() for each in asked]
    finally:
        started.stop()
    assert {(status, first) for status, _, first, _ in answers} == {(200, ": waiting\n\n")}
    assert max(waited for _, waited, _, _ in answers) < 3  # 0.2 s on a machine that does nothing else
    assert all(rest.endswith("data: [DONE]\n\n") for _, _, _, rest in answers)


def test_errors_name_fields_and_not_options(specdec, models):
    with Server(specdec, models[0], "--draft", "none", "--ctx", 512) as started:
        for speculative in ({"proposer": "draft"}, {"shape": "tree"}, {"shape": "beam"}):
            (field,) = speculative
            response = started.post("/v1/completions", {"prompt": "a", "speculative": speculative})
            assert response.status_code == 400
            message = response.json()["error"]["message"]
            assert f'"{field}"' in message
            assert "--" not in message


def test_texts_and_control_tokens(server):
    tokens = server.post("/tokenize", {"content": "one<|im_end|>"}).json()["tokens"]
    assert tokens[-1] == 4  # as `CONTROL_TOKENS` has them
    text = server.post("/detokenize", {"tokens": tokens}).json()["content"]
    assert text.endswith("one<|im_end|>")
    as_text = server.post("/tokenize", {"content": "one<|im_end|>", "parse_special": False}).json()
    assert len(as_text["tokens"]) > len(tokens)
    for prompt in ("", " ", "\n", [" "], ["one", " "], [5, "one"]):
        for path in ("/completion", "/v1/completions"):
            response = server.post(path, {"prompt": prompt, "n_predict": 2, "temperature": 0})
            assert response.status_code == 200, (path, prompt, response.text)
    both = server.post("/completion", {"prompt": ["one", " "], "n_predict": 2.0}).json()
    assert [result["tokens_predicted"] for result in both] == [2, 2]
    response = server.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert response.status_code == 400
    assert "fill-in-the-middle" in response.json()["error"]["message"]
    response = server.post("/v1/completions", {"prompt": "a", "speculative": {"shape": "tree"}})
    assert response.status_code == 400
    assert '"shape": "tree"' in response.json()["error"]["message"]


def test_a_bias_of_texts_and_of_tokens_that_do_not_exist(server):
    """As in llama.cpp's server: each token of the text has it, and unknown tokens are ignored."""
    tokens = server.post("/tokenize", {"content": "zebra"}).json()["tokens"]
    five = server.post("/tokenize", {"content": "5"}).json()["tokens"]
    short = {"prompt": "one", "n_predict": 4, "temperature": 0, "return_tokens": True}

    def answer(bias, **more):
        response = server.post("/completion", short | {"logit_bias": bias} | more)
        assert response.status_code == 200, response.text
        return response.json()["tokens"]

    unknown = {"99999999": 90, "-3": 90, str(10**30): False}
    assert answer(unknown) == answer({}) == answer([[10**9, 90], [-1, False]])
    assert set(answer({"zebra": 90} | unknown)) <= set(tokens)
    assert set(answer([["zebra", 90]])) <= set(tokens)
    assert set(answer([["5", 90]])) <= set(five)  # in a pair, text is text
    assert set(answer({"5": 90})) == set(answer([[5, 90]])) == {5}
    assert not {*answer([*([token, 90] for token in five), ["5", False]])} & {*five}  # the biases add up


def test_progress_of_a_long_prompt(server):
    body = {"prompt": "many " * 400, "n_predict": 2, "stream": True, "return_progress": True}
    with server.stream("/completion", body) as response:
        text = response.read().decode()
    assert text.count("prompt_progress") > 4


def answered_after(server, ask):
    """The result of a request that waits for a row at first."""
    with ThreadPoolExecutor(1) as pool:
        with server.stream("/completion", ENDLESS) as response:
            lines = response.iter_lines()
            next(lines)
            asked = pool.submit(ask)
            wait_until(lambda: server.metric("num_requests_waiting") == 1)
            time.sleep(0.3)  # until the headers
        return asked.result(timeout=20)


def test_clients_understand_signs_of_life(one_row):
    question = [{"role": "user", "content": "one two"}]

    def with_openai():
        client = openai.OpenAI(base_url=one_row.address + "/v1", api_key="none", max_retries=0)
        chunks = client.chat.completions.create(model="x", messages=question, max_tokens=5, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def with_responses():
        client = openai.OpenAI(base_url=one_row.address + "/v1", api_key="none", max_retries=0)
        events = client.responses.create(model="x", input="one two", max_output_tokens=5, stream=True)
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")

    def with_anthropic():
        client = anthropic.Anthropic(base_url=one_row.address, api_key="none", max_retries=0)
        with client.messages.stream(model="x", messages=question, max_tokens=5) as events:
            return events.get_final_message().content[0].text

    for ask in (with_openai, with_responses, with_anthropic):
        assert answered_after(one_row, ask), ask.__name__
