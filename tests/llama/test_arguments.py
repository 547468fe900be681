"""Arguments of the wrong type or with strange values, for everything in `spec_local.__all__`."""

import contextlib
import inspect
import math
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

import spec_local
from spec_local import (
    ChatSession,
    ChatTemplate,
    Conversation,
    GenerationSettings,
    SamplingSettings,
    Session,
    SpecLocalError,
    Statistics,
)
from spec_local.chat.request import ChatRequest
from spec_local.chat.tool_use import ToolUse
from spec_local.errors import InvalidRequest
from tests.chat_templates import TOOL_TEMPLATES, StandIn

pytestmark = pytest.mark.usefixtures("own_cache")


class Odd:
    """Neither printable nor comparable."""

    def __repr__(self):
        raise RuntimeError("not printable")

    def __eq__(self, other):
        raise RuntimeError("not comparable")

    __hash__ = None


STRANGE = [
    *(None, True, 0, -1, 2**31, 2**63, 2**999, -(2**999), 10**5000, -(10**5000)),
    *(0.5, -0.5, 1e400, -1e400, math.nan, 1j, 5e-324),
    *("", "a", "a\0b", "\ud800", "\udc80", "x" * 5000, "\n\x1b[2J"),
    *(b"", b"a", bytearray(b"a"), range(3), object(), Odd(), print, str, lambda: None),
    *([], [None], ["a"], [1, "a"], [0.5], [[1]], [10**30], [-1], [2**999], [Odd()], (), ("a",)),
    *({}, {"a": 1}, {1: "a"}, {1: math.nan}, {-1: 1.0}, {5: -(2**999)}, {2**999: 1}, {10**400: 0.5}),
    *([{"role": "user"}], [{"role": "user", "content": 5}], [{"role": "user", "content": "\ud800"}]),
    *([{"content": "a"}], [{"role": "user", "content": "a", "reasoning_content": 5}]),
    *([{"function": {"name": "a", "parameters": each}}] for each in (5, [1], {1: {2}}, {"a": Odd()})),
    *([{"role": "assistant", "tool_calls": each}] for each in (5, [5], [{}], [{"function": {"name": 5}}])),
    *(Path("absent"), Path(), GenerationSettings(), SamplingSettings(), SimpleNamespace()),
]
OF_RECORDS = {
    *(
        "Done",
        "Failed",
        "MessagesDropped",
        "Prefilled",
        "NumberedEvent",
        "Statistics",
        "Text",
        "TokenLogprob",
    ),
    "ToolCall",
}
"""Events and their parts, which the library creates, and users only read."""


@pytest.fixture
def session(tiny_model, make_context, unchecked):
    return Session(make_context(tiny_model, n_ctx=64))


@pytest.fixture
def calls(session, tiny_model, tmp_path, monkeypatch):
    """Public functions and methods, by name, with arguments that are right."""
    monkeypatch.chdir(tmp_path)  # some strange values are names of files
    template, question = ChatTemplate(tiny_model), [{"role": "user", "content": "a"}]
    vocabulary = tiny_model.vocabulary
    tools = ChatTemplate(StandIn(path="x", vocabulary=vocabulary, chat_template=TOOL_TEMPLATES["Hermes"]))
    conversation = Conversation(tiny_model, template)
    settings = GenerationSettings(policy="off", max_tokens=1)
    chat = ChatSession(session, conversation, settings)
    list(session.generate("a", settings))
    chat.save("chat.json")
    opening = {"main": tiny_model.path, "n_ctx": 64, "threads": 1, "parallel": 2, "log": lambda line: None}
    many = {"prompts": ["a", [300]], "settings": settings, "n_parallel": 1, "totals": Statistics()}

    def ask(content):
        conversation.clear()
        conversation.ask(content)

    def answer(content, tokens, reasoning):
        conversation.ask("a")
        conversation.answer(content, tokens, reasoning)
        chat.save("chat.json")

    return {
        "SamplingSettings": (SamplingSettings, {}),
        "GenerationSettings": (GenerationSettings, {}),
        "Request": (ChatRequest, {"prompt": "a"}),
        "Session": (Session, {"main": session.main}),
        "Session.open": (Session.open, opening),
        "generate": (session.generate, {"prompt": "a", "settings": settings}),
        "chat": (session.chat, {"messages": question, "settings": settings}),
        "ToolUse": (ToolUse, {"template": tools, "tools": [{"function": {"name": "b"}}], "choice": "b"}),
        "generate_many": (session.generate_many, many),
        "proposers": (session.proposers, {"settings": settings}),
        "lookups": (session.lookups, {"settings": settings}),
        "ChatSession": (
            ChatSession,
            {"session": session, "conversation": conversation, "settings": settings},
        ),
        "send": (chat.send, {"message": "a"}),
        "chat.save": (chat.save, {"path": "chat.json"}),
        "chat.load": (chat.load, {"path": "chat.json"}),
        "ChatTemplate": (ChatTemplate, {"model": tiny_model}),
        "render": (template.render, {"messages": question}),
        "Conversation": (Conversation, {"model": tiny_model, "template": template}),
        "ask": (ask, {"content": "a"}),
        "answer": (answer, {"content": "a", "tokens": [300, 301], "reasoning": ""}),
        "restore": (conversation.restore, {"answers": {}}),
        "system": (lambda content: setattr(conversation, "system", content), {"content": "a"}),
        "datastore": (lambda datastore: setattr(session, "datastore", datastore), {"datastore": None}),
    }


NAMES = [
    *("SamplingSettings", "GenerationSettings", "Request", "Session", "Session.open", "generate"),
    *("chat", "ToolUse", "generate_many"),
    *("proposers", "lookups", "ChatSession", "send", "chat.save", "chat.load"),
    *("ChatTemplate", "render", "Conversation", "ask", "answer", "restore", "system", "datastore"),
]


def use(result):
    """Use a result as a caller would, so that errors that come late are seen, too."""
    if isinstance(result, ChatTemplate):
        result.render([{"role": "user", "content": "a"}])
    elif isinstance(result, Conversation):
        result.ask("a")
    elif isinstance(result, ChatRequest):
        result.is_plain(SimpleNamespace(chat_template=None))
    elif isinstance(result, ToolUse):
        result.render([{"role": "user", "content": "a"}])
        result.settings(GenerationSettings())
    elif isinstance(result, ChatSession):
        list(result.send("a"))
    elif hasattr(result, "__next__"):
        list(result)
        result.close()


@pytest.mark.parametrize("name", NAMES)
def test_strange_arguments(calls, session, name):
    """A documented error of one line, or success."""
    function, right = calls[name]
    use(function(**right))
    errors = []
    parameters = inspect.signature(function).parameters
    for parameter in ("temperature" if each == "changes" else each for each in parameters):
        for value in STRANGE:
            try:
                result = function(**right | {parameter: value})
                if parameter not in (
                    "cancelled",
                    "on_read",
                    "clock",
                    "log",
                ):  # functions of the caller may fail
                    use(result)
            except SpecLocalError as error:
                errors.append(str(error).replace("\n\x1b[2J", ""))  # a path is quoted as it is
            else:
                if isinstance(result, Session):
                    result.close()
    assert len(errors) > 20
    assert all(error and "\n" not in error for error in errors)
    with contextlib.suppress(InvalidRequest):
        use(session.generate("a", GenerationSettings(policy="off", max_tokens=1)))


def test_every_public_name_is_tested(calls):
    assert set(NAMES) == set(calls)
    tested = {name for name in calls if name in spec_local.__all__}
    assert tested | OF_RECORDS | {"SpecLocalError", "__version__"} == set(spec_local.__all__)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda session: session.generate(), "Session.generate is missing a required argument: 'prompt'"),
        (lambda session: Session.open("a.gguf", wrong=1), "Session.open has no argument 'wrong'"),
        (lambda session: Session.open("a", ctx=1), "Session.open has no argument 'ctx': did you mean n_ctx?"),
        (
            lambda session: session.generate("a", temp=1),
            "there is no setting 'temp': did you mean temperature?",
        ),
        (
            pickle.dumps,
            "a Session cannot be copied or sent to another process: open one there",
        ),
    ],
)
def test_missing_and_unknown_arguments(session, call, message):
    with pytest.raises(TypeError) as caught:
        call(session)
    assert str(caught.value) == message


def test_what_an_interpreter_shows(session):
    path = session.main.model.path
    with pytest.raises(InvalidRequest, match=r"give it to Session\.open, which loads the model"):
        Session(str(path))
    assert repr(session) == f"<Session: {path.name}>"
    events = session.generate("a", max_tokens=3)
    assert repr(events) == "<Answer: iterate over it for its events>"
    assert all(len(repr(event)) < 400 for event in events)
    session.close()
    assert repr(session) == f"<Session: {path.name}, closed>"
    with pytest.raises(InvalidRequest, match="closed"), session:
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GenerationSettings(max_tokens="5"), "max_tokens is '5': give an integer"),
        (lambda: GenerationSettings(logprobs=True), "logprobs is True: give an integer"),
        (lambda: GenerationSettings(stops="end"), "stops is 'end': give a list"),
        (lambda: GenerationSettings(stops=["a", b"b"]), "stops[1] is bytes: give text"),
        (lambda: GenerationSettings(seed=-(2**2000)), "seed is int: give 0 or more"),
        (lambda: GenerationSettings(draft_max=100), "draft_max is 100: give at most 64"),
        (lambda: GenerationSettings(sampling={}), "sampling is dict: give a SamplingSettings"),
        (lambda: SamplingSettings(top_p=[0.5]), "top_p is list: give a number"),
        (lambda: SamplingSettings(top_p=math.nan), "top_p is nan: give at most 1"),
        (lambda: SamplingSettings(top_k=40.0), "top_k is 40.0: give an integer"),
        (lambda: SamplingSettings(logit_bias={"a": 1}), "a key of logit_bias is 'a': give an integer"),
    ],
)
def test_messages(make, message):
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("prompt", "message"),
    [(["a"], r"prompt\[0\] is 'a': give an integer"), (5, "prompt is 5: give text or a list")],
)
def test_messages_for_unions(session, prompt, message):
    with pytest.raises(InvalidRequest, match=message):
        session.generate(prompt)
    with pytest.raises(InvalidRequest, match=message):
        raise next(session.generate_many([prompt])).event.error


def test_floats_may_be_integers():
    assert SamplingSettings(temperature=1, logit_bias={5: 1}).temperature == 1
