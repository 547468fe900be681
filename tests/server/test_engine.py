"""The process with the models, as the server sees it."""

import asyncio
import itertools
import multiprocessing
import queue
import re
import threading
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import pytest

from spec_local import GenerationSettings, SamplingSettings, Session, Text
from spec_local.errors import ContextOverflow, InternalError, ModelFileError
from spec_local.grammar.matcher import Grammar
from spec_local.llama.tiny import CHAT_TEMPLATE, write_tiny_model
from spec_local.server.supervision.engine_process import EngineProcess
from spec_local.server.supervision.events import (
    AnswerRequest,
    Delta,
    Ended,
    Infill,
    Reading,
    Refused,
    Started,
)
from spec_local.server.supervision.supervisor import Busy, NotReady, Supervisor
from spec_local.text import bytes_of
from tests import processes
from tests.chat_templates import TOOL_TEMPLATES
from tests.scripted_model import write_scripted_model

GREEDY = GenerationSettings(SamplingSettings(temperature=0), max_tokens=24)
LONG = GenerationSettings(SamplingSettings(temperature=0), max_tokens=4000)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    main, draft = (
        write_tiny_model(folder / name, tensor_type="F32", noise=noise, n_ctx=8192)
        for name, noise in (("main.gguf", 0.0), ("draft.gguf", 0.05))
    )
    return {"main": main, "draft": draft, "n_ctx": 4096, "parallel": 2, "threads": 1}


@asynccontextmanager
async def running(arguments, **options):
    engine = Supervisor(arguments, "tiny", **options)
    task = asyncio.create_task(engine.run())
    await engine.ready.wait()
    try:
        yield engine
    finally:
        engine.stop()
        await task
    assert not children()


def children():
    return processes.children("spec_local.server.supervision.engine_process")


async def collect(answers, progress=None):
    """The events of each answer; those of progress with the prompts go to a list of their own."""
    found = {}
    async for arrived in answers:
        for index, event in arrived:
            if not isinstance(event, Reading):
                found.setdefault(index, []).append(event)
            elif progress is not None:
                progress.append(event)
    return [found[index] for index in sorted(found)]


def text(events):
    deltas = [event if isinstance(event, Delta) else event.rest for event in events[1:]]
    return "".join(delta.content for delta in deltas)


def chat(*contents, settings=GREEDY):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return AnswerRequest(settings, messages)


def alone(arguments, prompt):
    with Session.open(**arguments) as session:
        return "".join(e.text for e in session.generate(prompt, GREEDY) if isinstance(e, Text))


async def test_answers_are_those_of_a_session(arguments):
    """And an impossible request disturbs no other."""
    prompts = ["one two three", "four five", "six", "many " * 5000, ""]
    async with running(arguments) as engine:
        assert engine.check_ready().n_parallel == 2
        found = await collect(engine.answer([AnswerRequest(GREEDY, prompt=p) for p in prompts]))
        tokens = await engine.ask("tokenize", ("one two", False, True))
        assert b"".join(await engine.ask("pieces", tokens)).decode().strip() == "one two"
        with pytest.raises(ValueError, match="token 1000000 is unknown"):
            await engine.ask("pieces", [1_000_000])
        assert (await engine.ask("costs"))["main"][0][0] == 1
    *found, long, empty = found
    assert empty[0].n_prompt == 1  # it begins a text
    assert [text(events) for events in found] == [alone(arguments, prompt) for prompt in prompts[:3]]
    for events in found:
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Ended)
        assert events[-1].reason == "length"
        assert events[-1].statistics.predicted_n == 24
        tokens = [token for delta in events[1:-1] for token in delta.tokens]
        assert b"".join(token.piece for token in tokens) == bytes_of(text(events))
        steps, statistics = events[1:-1], events[-1].statistics
        assert statistics.prompt_n + statistics.cached_n + bool(statistics.prompt_s) == events[0].n_prompt
        assert sum(delta.n_drafted for delta in steps) == statistics.draft_n
        assert sum(delta.draft_depth for delta in steps) == sum(statistics.tested_at)
    assert isinstance(long[-1], Refused)
    assert isinstance(long[-1].error, ContextOverflow)
    assert "--" not in str(long[-1].error)  # a client knows no options


async def test_the_next_turn_of_a_chat_is_in_the_cache(arguments):
    """Even where other chats come between, and although the client sends text and not tokens."""
    async with running(arguments) as engine:
        first = [text((await collect(engine.answer([chat(q)])))[0]) for q in ("one", "two")]
        second = [
            (await collect(engine.answer([chat(q, answer, "more")])))[0]
            for q, answer in zip(("one", "two"), first, strict=True)
        ]
    for started, *_ in second:
        assert started.n_cached > 24  # the answer, too
        assert started.n_prompt - started.n_cached < 20


async def test_too_many_wait(arguments):
    async with running(arguments, max_waiting=1) as engine:
        first = engine.answer([AnswerRequest(LONG, prompt="one")] * 3)
        with pytest.raises(Busy) as raised:
            engine.answer([AnswerRequest(LONG, prompt="one")])
        assert raised.value.retry_s >= 1
        engine.cancel(first)
        await collect(first)
        assert await collect(engine.answer([AnswerRequest(GREEDY, prompt="one")]))


async def test_progress_with_a_long_prompt(arguments):
    progress = []
    async with running(arguments) as engine:
        await collect(engine.answer([AnswerRequest(GREEDY, prompt="many " * 200)]), progress)
        await collect(engine.answer([AnswerRequest(GREEDY, prompt="many " * 400)]), progress)
    first = [each for each in progress if each.n_prompt == progress[0].n_prompt]
    second = progress[len(first) :]
    for each in (first, second):
        counts = [event.n_read for event in each]
        assert counts == sorted(counts)
        assert len(set(counts)) > 2
        assert counts[-1] == each[-1].n_prompt
        assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(each))
    assert {event.n_cached for event in first} == {0}
    assert all(event.n_cached >= first[0].n_prompt - 2 for event in second)


async def test_a_request_that_waits_loses_its_place_at_once(arguments):
    """It need not wait for its turn to be told that its client has gone."""
    async with running(arguments, max_waiting=1) as engine:
        first = engine.answer([AnswerRequest(LONG, prompt="one")] * 2)
        for _ in range(3):
            waiting = engine.answer([AnswerRequest(GREEDY, prompt="two")])
            await asyncio.sleep(0.05)
            engine.cancel(waiting)
            async with asyncio.timeout(20):
                ((ended,),) = await collect(waiting)
            assert ended.reason == "cancelled"
            assert engine.n_unfinished == 2
        engine.cancel(first)
        await collect(first)
        assert text((await collect(engine.answer([AnswerRequest(GREEDY, prompt="two")])))[0])


async def test_a_prompt_that_takes_long_delays_no_other_and_ends_with_its_client(tmp_path):
    """Nor does a question about one. Templates may take 5 s."""
    loop = "{% for i in range(99999) %}"
    slow = f"{{% if messages[0].content == 'slow' %}}{loop}{loop}{'{% endfor %}' * 2}{{% endif %}}"
    path = write_tiny_model(tmp_path / "slow.gguf", chat_template=slow + CHAT_TEMPLATE)

    def long(content):
        return replace(chat(content), variables={"padding": "x" * 40_000})

    async with running({"main": path, "n_ctx": 512, "threads": 1}) as engine:
        assert text((await collect(engine.answer([chat("hi")])))[0])
        asked = asyncio.create_task(engine.ask("prompt", long("slow")))
        answers = engine.answer([long("slow")])
        async with asyncio.timeout(4):
            for _ in range(3):
                assert text((await collect(engine.answer([chat("hi")])))[0])
        assert not asked.done()
        asked.cancel()
        engine.cancel(answers)
        async with asyncio.timeout(4):
            assert (await collect(answers))[0][0].reason == "cancelled"
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert text((await collect(engine.answer([long("quick")])))[0])  # its thread is free


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(arguments):
    """And more messages than tokens."""
    requests = [
        AnswerRequest(GREEDY, prompt=" " * 8_000_000),
        AnswerRequest(GREEDY, prompt="a" * 4_000_000, suffix="a" * 4_000_000),
        chat("a" * 8_000_000),
        chat(*["a"] * 4097),
    ]
    async with running(arguments) as engine:
        found = await collect(engine.answer(requests))
    for (refused,), what in zip(found, ["more than"] * 3 + ["4097 messages"], strict=True):
        assert isinstance(refused.error, ContextOverflow)
        assert what in str(refused.error)
        assert "but the context has 4096" in str(refused.error)


async def test_the_end_can_be_ignored(arguments, tmp_path):
    """A model that ends its answer at once goes on."""
    async with running(arguments) as engine:
        ends = await engine.ask("tokenize", ("</s>", False, True))
        bias = SamplingSettings(temperature=0, logit_bias=dict.fromkeys(ends, 100.0))
        settings = GenerationSettings(bias, max_tokens=8)
        requests = [AnswerRequest(settings, prompt="one", ignore_end=ignored) for ignored in (False, True)]
        ended, goes_on = await collect(engine.answer(requests))
    assert (ended[-1].reason, ended[-1].statistics.predicted_n) == ("stop", 1)
    assert (goes_on[-1].reason, goes_on[-1].statistics.predicted_n) == ("length", 8)


async def test_a_model_that_cannot_be_loaded(arguments, tmp_path):
    engine = Supervisor(arguments | {"main": tmp_path / "missing.gguf"}, "tiny")
    await engine.run()
    assert engine.ready.is_set()
    assert isinstance(engine.error, ModelFileError)
    with pytest.raises(NotReady, match=r"missing\.gguf"):
        engine.check_ready()


async def test_models_are_loaded_again_with_other_arguments(arguments):
    """And with those before, if they cannot be; requests are refused meanwhile."""
    lines = []
    async with running(arguments, log=lines.append) as engine:
        process = children()
        expected = await collect(engine.answer([AnswerRequest(GREEDY, prompt="one")]))
        reloading = asyncio.create_task(engine.reload(arguments | {"draft": None}))
        await asyncio.sleep(0)
        assert not engine.ready.is_set()
        with pytest.raises(NotReady, match="are being loaded"):
            engine.answer([AnswerRequest(GREEDY, prompt="one")])
        assert await reloading is None
        assert engine.loaded.draft is None
        assert children() != process
        missing = arguments | {"draft": arguments["main"].with_name("missing.gguf")}
        error = await engine.reload(missing)
        assert isinstance(error, ModelFileError)
        assert "missing.gguf" in str(error)
        assert engine.loaded.draft is None
        assert await engine.reload(arguments) is None
        assert engine.loaded.draft == "draft.gguf"
        found = await collect(engine.answer([AnswerRequest(GREEDY, prompt="one")]))
        assert text(found[0]) == text(expected[0])
        assert not any("ended" in line for line in lines)
        children()[0].kill()  # what follows a planned end is not taken for one
        while not any("ended (signal SIGKILL)" in line for line in lines):
            await asyncio.sleep(0.01)


async def test_the_end_of_the_server_while_models_are_loaded_again(arguments):
    async with running(arguments) as engine:
        reloading = asyncio.create_task(engine.reload(arguments))
        await asyncio.sleep(0.05)
    reloading.cancel()


CALLS = [
    '<tool_call>\n{"name": "weather", "arguments": ',
    '{"city": ',
    '"Paris"}}\n</tool_call>',
    '\n<tool_call>\n{"name": "now", ',
    '"arguments": {}}\n</tool_call>',
]


@pytest.mark.parametrize("parallel", [True, False])
async def test_calls_come_in_parts_and_end_an_answer_that_may_have_one(tmp_path, parallel):
    path = write_scripted_model(tmp_path / "m.gguf", TOOL_TEMPLATES["Hermes"], "<0x0A>", CALLS)
    tools = [{"type": "function", "function": {"name": name}} for name in ("weather", "now")]
    messages = [{"role": "user", "content": "Rain?"}]
    settings = GenerationSettings(SamplingSettings(temperature=0), max_tokens=100, policy="off")
    request = AnswerRequest(settings, messages, tools, parallel_tool_calls=parallel)
    async with running({"main": path, "n_ctx": 512, "threads": 1}) as engine:
        (events,) = await collect(engine.answer([request]))
    deltas = [event if isinstance(event, Delta) else event.rest for event in events[1:]]
    calls = [(call.name, call.arguments) for delta in deltas for call in delta.tool_calls]
    arguments = [delta.arguments for delta in deltas if delta.arguments]
    assert events[-1].reason == "stop"
    if parallel:
        assert [name for name, _ in calls] == ["weather", "now"]
    else:
        assert [name for name, _ in calls] == ["weather"]
        assert events[-1].statistics.predicted_n <= 4
    assert calls[0][1] + "".join(arguments) == '{"city": "Paris"}' + "{}" * (calls[-1][1] == "" and parallel)
    assert text(events) == ""


async def test_calls_that_a_client_sends_back_are_in_the_cache(tmp_path):
    """Turn by turn, with other ids and another order of keys."""
    script = ["I look.", "<tool_call>", '{"name":"weather","arg', 'uments":{"days":3,', '"city":"Paris"}}']
    script += ["</tool_call>\n"]
    path = write_scripted_model(tmp_path / "m.gguf", TOOL_TEMPLATES["Hermes"], "<0x0A>", script)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    settings = GenerationSettings(SamplingSettings(temperature=0), max_tokens=100, policy="off")
    async with running({"main": path, "n_ctx": 2048, "threads": 1}) as engine:
        messages, known = [{"role": "user", "content": "Rain?"}], 0
        for turn in range(4):
            (events,) = await collect(engine.answer([AnswerRequest(settings, messages, tools)]))
            assert events[0].n_cached >= known
            known = events[0].n_prompt + len(script)
            call = {"name": "weather", "arguments": '{"city": "Paris", "days": 3}'}
            calls = [{"id": f"call-{turn}", "type": "function", "function": call}]
            messages += [
                {"role": "assistant", "content": "I look.", "tool_calls": calls},
                {"role": "tool", "content": f"{turn} mm", "tool_call_id": f"call-{turn}"},
            ]


@contextmanager
def process_here(arguments):
    """The other side of an engine in a thread of this process; yields its connection and what it sends."""
    ours, theirs = multiprocessing.Pipe()
    sent = queue.SimpleQueue()
    with Session.open(**arguments) as session:
        process = EngineProcess(theirs, lambda *message: sent.put(message), session, "tiny")
        thread = threading.Thread(target=process.run)
        thread.start()
        yield ours, sent
        ours.close()
        thread.join(60)
        assert not thread.is_alive()


def ends_of(sent, n):
    """The last events of n answers."""
    ends = {}
    while len(ends) < n:
        kind, *message = sent.get(timeout=60)
        if kind == "event" and isinstance(message[1], Ended | Refused):
            ends[message[0]] = message[1]
    return ends


@pytest.mark.parametrize("keep_headers", [False, True])
async def test_the_beginnings_of_system_messages_stay_the_same(tmp_path, keep_headers):
    path = write_tiny_model(tmp_path / "m.gguf", chat_template=CHAT_TEMPLATE)
    header, now = "x-anthropic-billing-header: cch={};", "It is 2026-11-28T13:39:{}Z. Help."
    async with running({"main": path, "n_ctx": 512, "threads": 1}, keep_headers=keep_headers) as engine:
        prompts = []
        for value in ("07", "28"):
            system = f"{header.format(value)}\n{now.format(value)}"
            messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello"}]
            prompts.append((await engine.ask("prompt", AnswerRequest(GREEDY, messages)))[0])
        first, second = prompts
    assert ("billing" in first) is keep_headers
    assert (first == second) is not keep_headers
    assert now.format("28" if keep_headers else "07") in second


@pytest.mark.parametrize("is_gap", [False, True])
def test_prompts_that_are_read_again_are_logged(arguments, monkeypatch, is_gap):
    """But for those of gaps, which change wherever the cursor is."""

    def tokens(vocabulary, infill, n_ctx, max_tokens):
        return vocabulary.tokenize(infill.prefix)

    monkeypatch.setattr("spec_local.server.supervision.engine_process.infill_tokens", tokens)
    words, counted = " ".join(f"{n} one" for n in range(300)), []
    with process_here(arguments | {"parallel": 1}) as (ours, sent):
        for id, prompt in enumerate([f"a {words}", f"a {words} two", f"b {words}", f"b {words}"]):
            given = {"infill": Infill(prompt, "")} if is_gap else {"prompt": prompt}
            ours.send(("answers", [(id, AnswerRequest(GREEDY, **given))]))
            lines = []
            while len(counted) == id:
                kind, *message = sent.get(timeout=60)
                lines += message if kind == "log" else []
                if kind == "event" and isinstance(message[1], Ended):
                    counted.append(message[1].n_reread)
            lines = [line for line in lines if "again" in line]
            assert len(lines) == (id == 2 and not is_gap)
            for line in lines:
                assert re.match(
                    r"reads [\d,]+ tokens again: parts from an earlier prompt at token \d: ", line
                )
                assert "b 0 one 1 one" in line
    assert [n > 500 for n in counted] == [False, False, not is_gap, False]


def test_a_defect_ends_one_answer_and_not_the_process(arguments, monkeypatch):
    """A part of the process that fails unexpectedly for one request; the others are answered."""
    parts = EngineProcess._parts

    def broken(self, running, text, **options):
        if running.settings.logprobs == 7:
            raise ZeroDivisionError("a defect")
        return parts(self, running, text, **options)

    monkeypatch.setattr(EngineProcess, "_parts", broken)
    with process_here(arguments) as (ours, sent):
        for id, prompt in enumerate(["one two three", "six", "four five"]):
            settings = replace(GREEDY, logprobs=7) if prompt == "six" else GREEDY
            ours.send(("answers", [(id, AnswerRequest(settings, prompt=prompt))]))
        ends = ends_of(sent, 3)
    assert isinstance(ends[0], Ended)
    assert isinstance(ends[2], Ended)
    assert isinstance(ends[1], Refused)
    assert isinstance(ends[1].error, InternalError)
    assert "ZeroDivisionError" in str(ends[1].error)


def test_grammars_are_compiled_beside_running_answers(arguments, monkeypatch):
    """It can take a second, in which no answer would go on. One that cannot be used is refused at once."""
    threads = []
    compiled = Grammar.from_gbnf

    def record(vocabulary, text):
        threads.append(threading.current_thread().name)
        return compiled(vocabulary, text)

    monkeypatch.setattr(Grammar, "from_gbnf", record)
    with process_here(arguments) as (ours, sent):
        grammars = [f'root ::= "{word}"' for word in ("one", "two", "three", "four", "five", "six")]
        for id, grammar in enumerate([*grammars, "root ::= oops"]):
            ours.send(("answers", [(id, AnswerRequest(replace(GREEDY, grammar=grammar), prompt="one"))]))
        ends = ends_of(sent, 7)
    assert [type(ends[id]) for id in range(7)] == [Ended] * 6 + [Refused]
    assert len(threads) == 7
    assert all(name.startswith("prepare") for name in threads)


async def test_what_may_be_refused_is_known_until_it_is_checked(arguments):
    """The headers of a stream wait for that: see `responding`."""
    grammar = replace(GREEDY, grammar='root ::= "a"')
    asked = ((GREEDY, "one"), (GREEDY, "many " * 3000), (grammar, "one"))
    async with running(arguments) as engine:
        several = [engine.answer([AnswerRequest(settings, prompt=prompt)]) for settings, prompt in asked]
        assert [answers.unchecked == {*answers.ids} for answers in several] == [False, True, True]
        ends = [(await collect(answers))[0][-1] for answers in several]
        assert all(isinstance(event, Ended) for event in ends)
        assert [answers.unchecked for answers in several] == [set()] * 3
