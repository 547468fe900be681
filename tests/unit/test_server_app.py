"""The HTTP side of the server, with scripted answers."""

import asyncio
import gzip
import json
import random
import sys
import threading
import time
import zlib

import httpx
import pytest

from spec_local.answers.gain import Gain
from spec_local.engine.events import Statistics
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.models.head_versions import HeadVersion
from spec_local.server import app, run
from spec_local.server.learning.idle_training import IdleTraining, Learner
from spec_local.server.metrics import Metrics
from spec_local.server.protocols import errors, request_body, responding
from spec_local.server.protocols.protocol import Exchange
from spec_local.server.supervision.events import AnswerRequest, Delta, Ended, Loaded, Refused, Started
from spec_local.server.supervision.served_models import ServedModel, ServedModels
from spec_local.server.supervision.supervisor import AnswerEvents, Busy, NotReady
from spec_local.settings import GenerationSettings
from spec_local.system.cancellation import Abandoned, check_wanted

LOADED = Loaded("tiny", "draft.gguf", 512, 2, "{{ messages }}", {"version": "1"})
DEFAULTS = {"top_k": 7, "speculative": {"policy": "fixed", "draft_max": 2}}
STARTED, ENDED = Started(3, 1), Ended(Delta("."), "stop", Statistics(predicted_n=2))


class Echo(Exchange):
    """A protocol: ``{"n": …, "stream": …}``, answered by the texts of the deltas."""

    def __init__(self, body, loaded):
        if "bad" in body:
            raise InvalidRequest("bad is not supported: remove it")
        self.body = body
        self.requests = [AnswerRequest(GenerationSettings())] * body.get("n", 1)
        self.streams = body.get("stream", False)

    def begin(self):
        yield "data: begin\n\n"

    def write(self, index, event):
        if isinstance(event, Delta):
            yield f"data: {index} {event.content}\n\n"

    def end(self):
        yield "data: end\n\n"

    @classmethod
    def refused(cls, error):
        return f"data: failed {error}\n\n"

    failed = refused

    def whole(self, answers):
        fields = {name: self.body.get(name) for name in ("top_k", "speculative") if name in self.body}
        return {
            "fields": fields,
            "texts": ["".join(e.content for e in events if isinstance(e, Delta)) for events in answers],
        }


class ScriptedEngine:
    """Answers with events of a script; "wait" waits until the answer is cancelled."""

    n_running, n_unfinished = 1, 1

    def __init__(self, *script):
        self.script, self.loaded, self.cancelled, self.tasks = script, LOADED, asyncio.Event(), []

    def check_ready(self):
        if not self.loaded:
            raise NotReady("the models are being loaded: try again soon")
        return self.loaded

    def answer(self, requests):
        if self.script == ("busy",):
            raise Busy("64 answers wait already: try again in 7 s", 7)
        answers = AnswerEvents(len(requests))

        async def play(index):
            for event in self.script:
                if event == "wait":
                    await self.cancelled.wait()
                    event = Ended(Delta(), "cancelled", Statistics())
                answers.put(index, event)
                await asyncio.sleep(0)

        self.tasks = [asyncio.create_task(play(index)) for index in range(len(requests))]
        return answers

    def cancel(self, answers):
        self.cancelled.set()

    async def ask(self, what, argument=None):
        replies = {
            "slots": getattr(self, "rows", None),
            "tokenize": [5, 6],
            "pieces": ["é".encode()[:1], "é".encode()[1:] + b"x"],
            "prompt": ("<s>é\udcff", 7),
            "costs": {"main": [[1, 0.1]], "draft": None},
        }
        return replies[what]


def alone(engine):
    """The only model of a server."""
    return ServedModels([ServedModel("tiny", {}, defaults=DEFAULTS, engine=engine)])


def client(served, kinds=None, *, learning=None, host="localhost", **access):
    created = app.create(served, app.Access(**access), kinds or {"/v1/echo": Echo}, learning)
    transport = httpx.ASGITransport(created, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}:8080")


def fetch(method, path, engine=None, access=None, kinds=None, **request):
    """The response of one request, and the engine."""

    async def main():
        used = engine() if engine else ScriptedEngine(STARTED, Delta("a"), ENDED)
        async with client(alone(used), kinds, **(access or {})) as opened:
            return await opened.request(method, path, **request)

    return asyncio.run(main())


def post(*script, body=None, **others):
    return fetch("POST", "/v1/echo", engine=lambda: ScriptedEngine(*script), json=body or {}, **others)


def test_whole_answers():
    response = post(STARTED, Delta("a"), Delta("b"), ENDED, body={"n": 2})
    assert response.status_code == 200
    assert response.json()["texts"] == ["ab", "ab"]


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({}, DEFAULTS),
        ({"top_k": None, "speculative": True}, DEFAULTS),
        ({"top_k": 3, "speculative": False}, {"top_k": 3, "speculative": False}),
        ({"speculative": {"draft_max": 5}}, {"top_k": 7, "speculative": {"policy": "fixed", "draft_max": 5}}),
    ],
)
def test_defaults_of_the_server(body, fields):
    assert post(STARTED, ENDED, body=body).json()["fields"] == fields


async def test_defaults_of_several_models():
    models = [
        ServedModel(name, {}, defaults={"top_k": top_k}, engine=ScriptedEngine(STARTED, ENDED))
        for name, top_k in (("a", 1), ("b", 2))
    ]
    served = ServedModels(models)
    served._is_started = True
    async with client(served) as opened:
        found = [(await opened.post("/v1/echo", json={"model": name})).json() for name in "ba"]
        params = (await opened.get("/props?model=b")).json()["default_generation_settings"]["params"]
    assert [each["fields"]["top_k"] for each in found] == [2, 1]
    assert (params["top_k"], params["min_p"]) == (2, 0.05)


def test_streams():
    response = post(STARTED, Delta("a"), ENDED, body={"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text == "data: begin\n\ndata: 0 a\n\ndata: end\n\n"
    assert post(STARTED, Delta("a"), ENDED, body={"stream": True, "n": 2}).text.count(" a\n") == 2


async def test_what_has_arrived_is_written_at_once():
    """A slow client finds many events waiting; each list of them is one write."""
    answers = AnswerEvents(1)
    for event in (STARTED, *[Delta("a")] * 30, Refused(BackendError("failed"))):
        answers.put(0, event)
    response = await responding.stream(Echo({"stream": True}, LOADED), answers, lambda: None)
    (part,) = [part async for part in response.body_iterator]
    assert part.count(" a\n") == 30
    assert part.endswith("failed\n\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequest("wrong: correct it"), 400, "invalid_request_error", None),
        (ContextOverflow("too long: shorten it"), 400, "invalid_request_error", "context_length_exceeded"),
        (BackendError("failed: try again"), 500, "server_error", None),
    ],
)
def test_an_error_before_the_first_token_is_a_response(stream, error, status, kind, code):
    response = post(Refused(error), body={"stream": stream})
    assert response.status_code == status
    expected = {"message": str(error), "type": kind, "param": None, "code": code}
    assert response.json() == {"error": expected}


def test_an_error_later_ends_the_stream():
    response = post(STARTED, Delta("a"), Refused(BackendError("failed: try again")), body={"stream": True})
    assert response.text == "data: begin\n\ndata: 0 a\n\ndata: failed failed: try again\n\n"


def test_too_many_requests():
    response = post("busy")
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    assert response.json()["error"]["type"] == "rate_limit_error"


def test_models_that_are_not_loaded():
    def engine():
        loading = ScriptedEngine()
        loading.loaded = None
        return loading

    for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/echo")):
        response = fetch(method, path, engine)
        assert response.status_code == 503, path
        assert response.headers["retry-after"] == "2"
    assert fetch("GET", "/health").json() == {"status": "ok"}


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"1", b'"x"', b"\xff", b"[" * 100_000, b"1" * 5000])
def test_bodies_that_are_no_objects(body):
    response = fetch("POST", "/v1/echo", content=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("the body is not")
    assert len(message) < 200


class Said(Echo):
    """Repeats a text of the body."""

    def whole(self, answers):
        return {"said": self.body["said"]}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (rb"cut \ud83d", "cut \ufffd"),
        (rb"\udc4d and \uD83D\uDE00 and \ud83d\ud83d\ude00", "\ufffd and 😀 and \ufffd😀"),
        (rb"\\ud83d \u00e9", r"\ud83d é"),
        (b"\xed\xa0\xbd bytes", "\ufffd bytes"),
        ("퟿ 한글 😀".encode(), "퟿ 한글 😀"),
    ],
)
def test_half_characters_are_replaced(said, expected):
    """Programs cut texts within an emoji: the whole conversation would be refused from then on."""
    response = fetch("POST", "/v1/echo", kinds={"/v1/echo": Said}, content=b'{"said": "' + said + b'"}')
    assert response.json()["said"] == expected


def test_a_large_body_is_refused():
    large = {"access": {"max_body": 1 << 20}}
    assert fetch("POST", "/v1/echo", content=b" " * (1 << 20) + b"{}", **large).status_code == 413

    async def endless():
        for _ in range(100):
            yield b" " * 65536

    assert fetch("POST", "/v1/echo", content=endless(), **large).status_code == 413
    assert fetch("POST", "/v1/echo", content=b" " * 1000 + b"{}", **large).status_code == 200


def test_a_key_is_needed():
    def status(headers=None, path="/v1/models"):
        return fetch("GET", path, access={"api_key": "sécret"}, headers=headers).status_code

    key = "sécret".encode()
    assert status() == 401
    assert status({b"Authorization": b"Bearer " + key}) == 200
    assert status({b"x-api-key": key}) == 200  # Anthropic's clients
    for wrong in (b"Bearer", b"Bearer ", b"Bearer wrong", b"Basic " + key, b"Bearer " + key + b"x"):
        assert status({b"Authorization": wrong}) == 401
    assert status(path="/health") == 200
    assert status(path="/metrics") == 401
    response = fetch("GET", "/v1/models", access={"api_key": "k"})
    assert response.json()["error"]["type"] == "authentication_error"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "localhost.evil.example", "10.0.0.1"])
def test_other_hosts_are_refused_on_loopback(host):
    """A page could reach the server under a name of its own that resolves to this machine."""
    assert fetch("GET", "/v1/models", headers={"host": host}).status_code == 403
    for path in ("/health", "/v1/health", "/metrics"):  # probes, to which counts are told
        assert fetch("GET", path, headers={"host": host}).status_code == 200
    assert fetch("OPTIONS", "/v1/echo", headers={"host": host}).status_code == 204


def test_a_client_without_a_host():
    """As HTTP/1.0 allows; a browser always sends one."""

    async def status(path):
        created = app.create(alone(ScriptedEngine()), app.Access(), {"/v1/echo": Echo})
        sent = []

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "http.request"}

        asked = scope(path) | {"method": "GET", "headers": [], "http_version": "1.0"}
        await created(asked, receive, send)
        return sent[0]["status"]

    assert asyncio.run(status("/health")) == 200
    assert asyncio.run(status("/v1/models")) == 200


def test_pages_elsewhere_are_refused_unless_they_are_named():
    there = {"origin": "https://chat.example"}
    assert fetch("POST", "/v1/echo", json={}, headers=there).status_code == 403
    assert fetch("POST", "/v1/echo", json={}, headers={"origin": "null"}).status_code == 403
    for ours in ("http://localhost:8080", "https://localhost:8080"):  # https: behind a proxy
        assert fetch("POST", "/v1/echo", json={}, headers={"origin": ours}).status_code == 200
    for other in ("chrome-extension://localhost:8080", "file://localhost:8080", "http://localhost:80800"):
        assert fetch("POST", "/v1/echo", json={}, headers={"origin": other}).status_code == 403
        named = {"origins": (other,)}
        assert fetch("POST", "/v1/echo", json={}, headers={"origin": other}, access=named).status_code == 200
    for origins in (("https://chat.example",), ("*",)):
        response = fetch("POST", "/v1/echo", json={}, headers=there, access={"origins": origins})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] in ("https://chat.example", "*")
        preflight = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        keyed = {"origins": origins, "api_key": "k"}
        assert fetch("OPTIONS", "/v1/echo", headers=there | preflight, access=keyed).status_code == 200
    other = {"origin": "https://other.example"}
    named = {"origins": ("https://chat.example",)}
    assert fetch("POST", "/v1/echo", json={}, headers=other, access=named).status_code == 403


def test_unknown_paths_and_methods():
    response = fetch("GET", "/v1/nothing")
    assert response.status_code == 404
    assert "/v1/chat/completions" in response.json()["error"]["message"]
    response = fetch("GET", "/v1/echo")
    assert response.status_code == 405
    assert "use POST" in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert fetch("POST", "/v1/embeddings", json={}).status_code == 501
    assert fetch("POST", "/rerank", json={}).status_code == 501
    assert fetch("GET", "/v1/models/other").status_code == 404
    assert fetch("GET", "/v1/models/tiny").json()["id"] == "tiny"
    for path in ("/v1/models/tiny/other", "/v1/models/%00", "/v1/models/%F0%9F%99%82"):
        response = fetch("GET", path)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert response.json()["error"]["message"].isprintable()
    for path in ("/../app.py", "/..%2fapp.py", "/page/../app.py", "//etc/passwd"):
        assert fetch("GET", path).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/health", 200),
        ("HEAD", "/v1/models", 200),
        ("HEAD", "/", 200),
        ("GET", "/health/", 200),
        ("GET", "/v1/models/", 200),
        ("POST", "/v1/echo/", 200),
        ("POST", "/v1/nothing/", 404),
    ],
)
def test_heads_and_slashes(method, path, status):
    response = fetch(method, path, **({"json": {}} if method == "POST" else {}))
    assert response.status_code == status


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("GET", "/v1/chat/completions/chatcmpl-1"),
    ],
)
def test_nothing_is_stored(method, path):
    response = fetch(method, path)
    assert response.status_code == 404
    assert "stores no answers" in response.json()["error"]["message"]


def test_an_anthropic_error():
    body = json.loads(errors.response_for("/v1/messages", Busy("full: wait", 1)).body)
    assert body == {"type": "error", "error": {"type": "rate_limit_error", "message": "full: wait"}}


def test_a_bug_shows_no_traceback():
    response = post(STARTED, ENDED, body={"n": "a bug of the protocol"})
    assert response.status_code == 500
    assert "report" in response.json()["error"]["message"]
    assert "Traceback" not in response.text


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/messages/count_tokens", {"input_tokens": 7}),
        ("/v1/responses/input_tokens", {"object": "response.input_tokens", "input_tokens": 7}),
        ("/apply-template", {"prompt": "<s>é\ufffd"}),
    ],
)
def test_prompts_without_an_answer(path, expected):
    kinds = app.PROTOCOLS
    body = {"messages": [{"role": "user", "content": "Why?"}], "input": "Why?"}
    assert fetch("POST", path, kinds=kinds, json=body).json() == expected
    response = fetch("POST", path, kinds=kinds, json={"messages": [], "input": []})
    assert response.status_code == 400
    assert ("type" in response.json()) == path.startswith("/v1/messages")


def test_tokens_and_facts():
    assert fetch("POST", "/tokenize", json={"content": "x"}).json() == {"tokens": [5, 6]}
    pieces = fetch("POST", "/tokenize", json={"content": "x", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 5, "piece": [0xC3]}, {"id": 6, "piece": [0xA9, ord("x")]}]
    assert fetch("POST", "/tokenize", json={"content": ["x", 5.0]}).json() == {"tokens": [5, 6]}
    assert fetch("POST", "/tokenize", json={}).json() == {"tokens": [5, 6]}  # of an empty text
    assert fetch("POST", "/detokenize", json={"tokens": [5.0, 6]}).json() == {"content": "éx"}
    for body in ({"content": True}, {"content": {}}, {"content": "x", "parse_special": 1}):
        assert fetch("POST", "/tokenize", json=body).status_code == 400
    for body in ({"tokens": "x"}, {"tokens": ["x"]}, {"tokens": [True]}, {"tokens": [1.5]}):
        assert fetch("POST", "/detokenize", json=body).status_code == 400
    assert fetch("GET", "/props").json()["n_ctx"] == 512
    assert fetch("GET", "/costs").json()["draft"] is None
    assert "specdec:num_requests_running 1.0" in fetch("GET", "/metrics").text


def test_the_state_of_the_rows():
    def rows(*given):
        def engine():
            scripted = ScriptedEngine()
            scripted.rows = given
            return scripted

        return lambda path: fetch("GET", path, engine)

    in_use = (7, 12, 3, GenerationSettings(max_tokens=10, seed=5))
    idle, busy = rows(in_use, None), rows(in_use, in_use)
    first, second = idle("/slots?fail_on_no_slot=1").json()
    assert (first["id"], first["id_task"], first["is_processing"], first["n_ctx"]) == (0, 7, True, 512)
    assert first["next_token"] == [{"has_next_token": True, "n_decoded": 3, "n_remain": 7}]
    assert second == {"id": 1, "id_task": -1, "n_ctx": 512, "speculative": True, "is_processing": False}
    assert busy("/slots").status_code == 200
    assert busy("/slots?fail_on_no_slot=1").status_code == 503


BODY = json.dumps({"n": 2, "text": "x" * 1000}).encode()


def packed(encoding, body=BODY):
    if encoding == "gzip":
        return gzip.compress(body, mtime=0)
    if encoding == "two members":
        return gzip.compress(body[:10], mtime=0) + gzip.compress(body[10:], mtime=0)
    if encoding == "raw":
        return zlib.compress(body)[2:-4]
    return zlib.compress(body)


def send(body, encoding, **access):
    headers = {"content-encoding": encoding}
    return fetch("POST", "/v1/echo", content=body, headers=headers, access=access)


@pytest.mark.parametrize(
    ("encoding", "header"),
    [
        ("gzip", "gzip"),
        ("gzip", "X-GZIP"),
        ("two members", "gzip"),
        ("zlib", "deflate"),
        ("raw", "deflate"),
        ("gzip", "identity, gzip"),
    ],
)
def test_compressed_bodies(encoding, header):
    assert len(send(packed(encoding), header).json()["texts"]) == 2


def test_a_body_compressed_twice():
    assert len(send(gzip.compress(zlib.compress(BODY), mtime=0), "deflate, gzip").json()["texts"]) == 2


class Inflater:
    """zlib's, which counts the bytes that it is given, and those that are taken from it."""

    given, taken, real = 0, 0, staticmethod(zlib.decompressobj)

    def __init__(self, *arguments):
        self._inflater = self.real(*arguments)

    def __getattr__(self, name):
        return getattr(self._inflater, name)

    def decompress(self, data, limit):
        found = self._inflater.decompress(data, limit)
        Inflater.given += len(data)
        Inflater.taken += len(found)
        return found


@pytest.fixture
def counting_zlib(monkeypatch):
    monkeypatch.setattr(zlib, "decompressobj", Inflater)
    Inflater.given = Inflater.taken = 0
    return Inflater


def test_a_small_body_that_becomes_large_is_cut(counting_zlib):
    bomb = gzip.compress(b" " * (64 << 20))
    assert len(bomb) < 1 << 20
    assert send(bomb, "gzip", max_body=1 << 20).status_code == 413
    assert counting_zlib.taken == (1 << 20) + 1


@pytest.mark.parametrize("body", [BODY, packed("gzip")[:-9], b"", packed("zlib")])
def test_bodies_that_are_not_what_the_header_names(body):
    response = send(body, "gzip")
    assert response.status_code == 400
    assert "\n" not in response.json()["error"]["message"]


def test_encodings_that_are_not_supported(monkeypatch):
    for module in ("brotli", "compression.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, module, None)
    for encoding in ("br", "zstd", "compress", "gzip, br"):
        response = send(b"x", encoding)
        assert response.status_code == 415
        assert response.headers["accept-encoding"] == "gzip, deflate"
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("encoding", "module"), [("br", "brotli"), ("zstd", "zstandard")])
def test_encodings_of_other_packages(encoding, module):
    library = pytest.importorskip(module)
    assert len(send(library.compress(BODY), encoding).json()["texts"]) == 2
    assert send(library.compress(b" " * (8 << 20)), encoding, max_body=1 << 20).status_code == 413
    assert send(library.compress(BODY)[:-3], encoding).status_code == 400


@pytest.mark.parametrize("member", [b"", b"x" * 3000])
def test_a_member_takes_as_long_as_its_own_bytes(counting_zlib, member):
    read = {}
    for n in (1000, 4000):
        counting_zlib.given = 0
        assert request_body.decoded(gzip.compress(member) * n, "gzip", 1 << 30) == member * n
        read[n] = counting_zlib.given
    assert read[4000] < 5 * read[1000]


def test_pieces_of_any_size_are_decompressed():
    """Bodies that end at, before and after the ends of the first pieces that are read."""
    noise = random.Random(0).randbytes(1 << 18)
    for size in (0, 1, *range(480, 520), *range(1500, 1540), 25_344, 1 << 16, len(noise)):
        whole = noise[:size]
        packs = [
            gzip.compress(whole) + gzip.compress(b"") * 3 + gzip.compress(whole, 0),
            zlib.compress(whole),
        ]
        assert request_body.decoded(packs[0], "gzip", 1 << 20) == whole * 2
        assert request_body.decoded(packs[1], "deflate", 1 << 20) == whole
        for pack, name in zip(packs, ("gzip", "deflate"), strict=True):
            with pytest.raises(InvalidRequest, match="cut short"):
                request_body.decoded(pack[:-1], name, 1 << 20)


@pytest.mark.parametrize("n", [0, 1, *range(470, 520), *range(1500, 1530), 100_000])
def test_pieces_without_text_are_read_on(n):
    """A file name in the header may be longer than the first pieces, and few bytes may be much text."""
    whole = b"abc" * 50_000
    plain = gzip.compress(whole)
    named = plain[:3] + b"\x08" + plain[4:10] + b"n" * n + b"\0" + plain[10:]
    assert request_body.decoded(named * 2, "gzip", 1 << 20) == whole * 2
    for cut in (1, 8, 9, len(plain) - 10):  # the last one: in the header
        with pytest.raises(InvalidRequest, match="cut short"):
            request_body.decoded(named[:-cut], "gzip", 1 << 20)


@pytest.mark.parametrize(
    ("body", "encoding", "message"),
    [
        (gzip.compress(b"") * 20_000, "gzip", "more than 16384 members"),
        (b"", ", ".join(["gzip"] * 3), "3 encodings"),
        (b'{"n": [' + b"[]," * 1_100_000 + b"1]}", "", "more than 1048576 values"),
        (b'{"n": [' + b'"a",' * 1_100_000 + b"1]}", "", "more than 1048576 values"),
        (b'{"n": ' + b"9" * 5000 + b"}", "", "not JSON"),
        (b'{"n": ' + b"[" * 99_999, "", "nested too deeply"),
    ],
)
def test_small_bodies_that_would_take_long_or_much_memory(body, encoding, message):
    response = send(body, encoding)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_what_is_in_strings_does_not_count_as_values():
    body = {"text": '[{,",\\' * 400_000, "n": 2}
    assert len(send(json.dumps(body).encode(), "").json()["texts"]) == 2


def in_turn(monkeypatch):
    """Let bodies take long, until nobody waits; returns the threads that read them, and the ended ones."""
    reading, ended = [], []

    def slow(body, max_size):
        reading.append(threading.current_thread().name)
        try:
            while True:
                check_wanted()
                time.sleep(0.001)
        except Abandoned:
            ended.append(body)
            raise

    monkeypatch.setitem(request_body._DECODERS, "gzip", slow)
    return reading, ended


def test_work_on_a_body_ends_when_its_client_has_gone(monkeypatch):
    """One after another, and other requests do not wait for them."""
    reading, ended = in_turn(monkeypatch)

    async def main():
        created = app.create(alone(ScriptedEngine(STARTED, ENDED)), app.Access(), {"/v1/echo": Echo})
        headers = [(b"host", b"localhost"), (b"content-encoding", b"gzip")]
        clients = [asyncio.Queue() for _ in range(8)]
        for number, messages in enumerate(clients):
            messages.put_nowait({"type": "http.request", "body": b"%d" % number})

        async def send(message):
            pass

        serving = [
            asyncio.create_task(created(scope() | {"headers": headers}, messages.get, send))
            for messages in clients
        ]
        async with asyncio.timeout(20), client(alone(ScriptedEngine(STARTED, ENDED))) as opened:
            while not reading:
                await asyncio.sleep(0.01)
            assert (await opened.post("/v1/echo", json={})).status_code == 200
            assert len(reading) == 1
            for messages in clients:
                messages.put_nowait({"type": "http.disconnect"})
            await asyncio.gather(*serving)
            while len(ended) < len(reading):
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert len(set(reading)) == 1


def test_two_lengths_of_a_body_are_refused():
    """Programs before the server may believe the one that it does not."""
    headers = {"content-length": "2", "transfer-encoding": "chunked"}
    response = fetch("POST", "/v1/echo", content=b"{}", headers=headers)
    assert response.status_code == 400
    assert response.headers["connection"] == "close"
    assert "Transfer-Encoding" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "request_",
    [
        AnswerRequest(GenerationSettings(), [{"role": "user", "content": ""}] * 513),
        AnswerRequest(GenerationSettings(), prompt=[1] * 513),
    ],
)
def test_prompts_that_cannot_fit_are_refused_before_they_are_sent_to_the_models(request_):
    class Long(Echo):
        def __init__(self, body, loaded):
            super().__init__(body, loaded)
            self.requests = [request_]

    engine = ScriptedEngine()
    response = fetch("POST", "/v1/echo", engine=lambda: engine, kinds={"/v1/echo": Long}, json={})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "513" in response.json()["error"]["message"]
    assert not engine.tasks


def test_all_tokens_of_prompts_are_counted():
    """The last one, too, which the first step reads: as in the usage of an answer."""
    metrics = Metrics(lambda: 0, lambda: 0)
    metrics.observe(Ended(Delta(), "stop", Statistics(prompt_n=3, cached_n=2, prompt_s=0.1)), 1.0)
    metrics.observe(Ended(Delta(), "cancelled", Statistics(prompt_n=1)), 1.0)  # before all were read
    assert b"specdec:prompt_tokens_total 7.0" in metrics.text()


def test_savings_and_losses_of_drafting_are_counters():
    """A sum of both would fall, which a counter must not."""
    metrics = Metrics(lambda: 0, lambda: 0)
    for saved in ({"draft": 1.5, "reading": -0.5}, {"draft": -0.25}):
        metrics.observe(Ended(Delta(), "stop", Statistics(saved_s=saved)), 1.0)
    for line in ('saved_seconds_total{cause="draft"} 1.5', 'lost_seconds_total{cause="draft"} 0.25',
                 'lost_seconds_total{cause="reading"} 0.5'):  # fmt: skip
        assert f"specdec:drafting_{line}\n".encode() in metrics.text()


def test_gains_are_counted_as_they_are_stated():
    metrics = Metrics(lambda: 0, lambda: 0)
    for gain in (Gain("faster", "", 1.5), Gain("none", ""), Gain("faster", "", 2.0), None):
        metrics.observe(Ended(Delta(), "stop", Statistics(predicted_n=20), gain=gain), 1.0)
    lines = metrics.text().decode().splitlines()
    found = [line for line in lines if line.startswith("specdec:drafting_gain")]
    assert sorted(found) == [
        'specdec:drafting_gain_total{gain="faster"} 2.0',
        'specdec:drafting_gain_total{gain="none"} 1.0',
    ]


def scope(path="/v1/echo"):
    headers = [(b"host", b"localhost")]
    return {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers,
        "query_string": b"", "server": ("localhost", 8080), "scheme": "http", "http_version": "1.1",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip


@pytest.mark.parametrize("script", [("wait",), (STARTED, Delta("a"), "wait")])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_cancels_its_answers(script, stream):
    """Before the first token as well, when nothing can be written to it."""
    engine = ScriptedEngine(*script)
    created = app.create(alone(engine), app.Access(), {"/v1/echo": Echo})
    messages: asyncio.Queue = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": json.dumps({"stream": stream}).encode()})

    async def send(message):
        pass

    serving = asyncio.create_task(created(scope(), messages.get, send))
    await asyncio.sleep(0.02)
    assert not engine.cancelled.is_set()
    for _ in range(3):  # each reader of a connection is told
        messages.put_nowait({"type": "http.disconnect"})
    async with asyncio.timeout(5):
        await engine.cancelled.wait()
        await serving


async def test_a_client_that_does_not_read_is_cut():
    engine = ScriptedEngine(STARTED, Delta("a"), Delta("b"), "wait")
    created = app.create(alone(engine), app.Access(stall_s=0.05), {"/v1/echo": Echo})
    messages: asyncio.Queue = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": b'{"stream": true}'})

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async with asyncio.timeout(5):
        await created(scope(), messages.get, send)
        await engine.cancelled.wait()


def test_a_body_that_does_not_arrive():

    async def body():
        yield b"{"
        await asyncio.sleep(1)

    assert fetch("POST", "/v1/echo", content=body(), access={"body_s": 0.05}).status_code == 408


def test_addresses_that_others_reach_need_a_key():
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        run.check_access(host, None)
    for host in ("0.0.0.0", "::", "192.168.0.2", "example.org"):
        with pytest.raises(InvalidRequest, match="--api-key"):
            run.check_access(host, None)
        run.check_access(host, "secret")


class Learning:
    """A model that has learned. n: its versions."""

    def __init__(self, n, is_training=False):
        version = HeadVersion(
            number=n or 1, file="head-1.gguf", size=1, sha256="", trained=0, n_answers=60,
            after={"user": 0.58, "built_in": 0.43},
        )  # fmt: skip
        self.found, self.is_training = Learner(None, None, None, {}), is_training
        self.found.current = version if n else None

    def learner(self, model):
        assert model.name == "tiny"
        return self.found

    def described(self, model):
        return {"enabled": True, "model": model.name}


def learned(path, learning=None, **access):
    async def main():
        async with client(alone(ScriptedEngine()), learning=learning, host="my-name", **access) as opened:
            return await opened.get(path)

    return asyncio.run(main())


def test_what_a_head_has_learned():
    assert learned("/learning").json() == {"enabled": False}
    assert learned("/learning", Learning(1)).json() == {"enabled": True}
    assert learned("/learning", Learning(1), api_key="secret").status_code == 401
    assert learned("/props", Learning(1)).status_code == 403  # as of any name but this machine's


class Broken(ScriptedEngine):
    """An engine whose model cannot be loaded."""

    def check_ready(self):
        raise NotReady("the models are not loaded (/home/me/secret.gguf is damaged): try again soon")


@pytest.mark.parametrize("n", [1, 2], ids=["one model", "several models"])
@pytest.mark.parametrize(
    ("access", "headers"),
    [
        ({}, {"host": "rebound.example:8080"}),
        ({"api_key": "key"}, {}),
        ({"api_key": "key"}, {"x-api-key": "k"}),
    ],
    ids=["foreign host", "no key", "wrong key"],
)
async def test_strangers_learn_no_names_of_models_and_files(n, access, headers):
    class Learning(IdleTraining):
        def described(self, model):
            return super().described(model) | {"state": "secret-draft drafts", "kept_answers": 5}

    models = [ServedModel(f"secret-{i}", {"learn": True}, engine=Broken()) for i in range(n)]
    served = ServedModels(models)
    async with client(served, learning=Learning(served, print), **access) as opened:
        found = {}
        for path in (*PATHS, "/learning?model=x", "/learning?model=secret-1", "/health?model=x"):
            for method in ("GET", "POST", "HEAD", "OPTIONS"):
                response = await opened.request(method, path, headers=headers)
                assert "secret" not in response.text + str(response.headers), (method, path)
                found[method, path] = response
    assert found["GET", "/health"].status_code == 503
    assert "not loaded" in found["GET", "/health"].json()["error"]["message"]
    if "api_key" not in access:
        for path in ("/learning", "/learning?model=x", "/learning?model=secret-1"):
            assert found["GET", path].json()["kept_answers"] == 5
            assert found["GET", path].json() == found["GET", "/learning"].json()


PATHS = (
    *("/", "/health", "/v1/health", "/metrics", "/learning", "/v1/models", "/v1/models/secret-0", "/props"),
    *("/costs", "/slots", "/openapi.json", "/v1/echo", "/tokenize", "/none"),
)


@pytest.mark.parametrize(
    ("learning", "expected"), [(Learning(2, True), (2, 60, 0.58, 0.43, 1)), (Learning(0), (0, 0, 0, 0, 0))]
)
def test_metrics_of_learning(learning, expected):
    text = learned("/metrics", learning).text
    names = (
        *("draft_head_version", "learned_answers", 'draft_head_acceptance{data="user"}'),
        *('draft_head_acceptance{data="built_in"}', "training_running"),
    )
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert tuple(float(values[f"specdec:{name}"]) for name in names) == expected
    assert "draft_head" not in learned("/metrics").text
