"""Answers that a client sends back: the model reads what it wrote, wherever the message means the same."""

import json

import pytest

from spec_local.chat.conversation import Conversation
from spec_local.chat.meaning import meaning_of
from spec_local.chat.template import ChatTemplate
from spec_local.chat.tool_use import ToolUse
from spec_local.core.sequence import common_prefix
from spec_local.llama.model import Model
from spec_local.llama.tiny import FIRST_BYTE, write_tiny_model
from tests.chat_templates import STRICT_TEMPLATES, TEMPLATES, THINKING_TEMPLATES, TOOL_TEMPLATES, StandIn
from tests.scripted_model import CHANNELS

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", *CHANNELS]
NUMBERS = {"type": "object", "properties": {"days": {"type": "integer"}, "city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": NUMBERS}},
    {"type": "function", "function": {"name": "now"}},
]
ASKED, RESULT = {"role": "user", "content": "Rain?"}, "18 °C"
QWEN_CALL = "<tool_call>\n<function=weather>\n<parameter=days>\n{}\n</parameter>\n<parameter=city>\nParis\n"
QWEN_CALL += "</parameter>\n</function>\n</tool_call>"
CALLS = {  # by kind of template: what the model writes, with a place for the number of days
    "Hermes": [
        '<tool_call>\n{{"name": "weather", "arguments": {{"days": {}, "city": "Paris"}}}}\n</tool_call>',
        'I look.\n<tool_call>{{"arguments":{{"days":{},"city":"Par\\u0069s"}},"name":"weather"}}</tool_call>',
        '<tool_call>{{"name": "weather", "arguments": {{"days": {}}}}}</tool_call>\n'
        '<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>\n',
    ],
    "Llama 3": [
        '{{"name": "weather", "parameters": {{"days": {}, "city": "Paris"}}}}',
        '{{"name":"weather","parameters":{{"days":{},"city":"Paris"}}}}',
    ],
    "Mistral": [
        '[TOOL_CALLS][{{"name": "weather", "arguments":{{"days": {}, "city": "Paris"}}, "id": "abcdefgh9"}}]',
        '[TOOL_CALLS] [{{"name":"weather","arguments":{{"days":{},"city":"Paris"}}}}]',
    ],
    "Qwen3-Coder": ["I look.\n" + QWEN_CALL, "\n\n" + QWEN_CALL.replace("=days>\n", "=days>")],
    "gpt-oss": [
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{{"days": {}, "city": "Paris"}}',
    ],
    "LFM2": ['<|tool_call_start|>[weather(days={}, city="Paris")]<|tool_call_end|>'],
}
WRITTEN = [(kind, text.format(3)) for kind, texts in CALLS.items() for text in texts]
SPELLINGS = {
    "as given": str,
    "sorted": lambda text: json.dumps(json.loads(text), sort_keys=True),
    "without spaces": lambda text: json.dumps(json.loads(text), separators=(",", ":")),
    "in lines": lambda text: json.dumps(json.loads(text), indent=2),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory, unchecked):
    path = tmp_path_factory.mktemp("sent") / "m.gguf"
    opened = Model(write_tiny_model(path, n_ctx=4096, extra_tokens=MARKS))
    yield opened
    opened.close()


class Chat:
    """A first question, what the model generates, and the tokens of the next prompt."""

    def __init__(self, model, template, tools=()):
        facts = {"path": model.path, "vocabulary": model.vocabulary, "chat_template": template}
        self.template = ChatTemplate(StandIn(**facts))
        self.tools = ToolUse(self.template, tools)
        self.model = model
        start = Conversation(model, self.template)
        self.first = start.following([ASKED], self.tools, as_generated=True)
        self.before = self.first.prompt()

    def generate(self, text):
        """Return the message that the server returns, whose tokens are the bytes of the text."""
        self.generated = [FIRST_BYTE + byte for byte in text.encode()]
        parts = self.first.splitter().finish(text)
        self.first.answer(parts.answer, self.generated, parts.reasoning)
        return self.first.last_answer

    def next(self, answer, *more, **options):
        """The conversation after an answer as the client sends it, and what follows."""
        given = [ASKED, answer, *more]
        self.second = self.first.following(given, self.tools, **({"as_generated": True} | options))
        self.tokens = self.second.prompt()
        return self.second

    @property
    def n_again(self):
        """Tokens of the first prompt and the generated ones that the second prompt does not begin with."""
        known = [*self.before, *self.generated]
        return len(known) - common_prefix(known, self.tokens)

    @property
    def is_rendered(self):
        """True if the tokens of the prompt spell what the template renders."""
        vocabulary = self.model.vocabulary
        text = b"".join(vocabulary.piece(token, special=True) for token in self.tokens[1:])
        return text.decode().removeprefix(" ") == str(self.second.rendered)


def sent_back(answer, spell=str, new_id=None, **changes):
    """An answer with calls as a client sends it, and the results."""
    calls = [
        call | {"id": new_id or call["id"], "function": call["function"] | {"arguments": spell(arguments)}}
        for call in answer["tool_calls"]
        for arguments in [call["function"]["arguments"]]
    ]
    results = [{"role": "tool", "content": RESULT, "tool_call_id": call["id"]} for call in calls]
    return [answer | {"tool_calls": calls} | changes, *results]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("kind", "text"), WRITTEN)
def test_a_call_is_read_as_it_was_written(model, kind, text, spelling):
    chat = Chat(model, TOOL_TEMPLATES[kind], TOOLS)
    answer = chat.generate(text)
    assert answer["tool_calls"]
    chat.next(*sent_back(answer, SPELLINGS[spelling]))
    assert chat.n_again == 0
    # A third prompt begins with all of the second one.
    more = [*chat.second.messages, {"role": "assistant", "content": "Yes."}, ASKED]
    third = chat.second.following(more, chat.tools, as_generated=True).prompt()
    n_closing = 12  # the template may end differently after another message
    assert common_prefix(third, chat.tokens) >= len(chat.tokens) - n_closing


@pytest.mark.parametrize(("kind", "text"), WRITTEN)
def test_the_template_writes_what_means_something_else(model, kind, text):
    for changed in (text.replace("3", "4", 1), text.replace("Paris", "Rome").replace("now", "weather")):
        if changed != text:
            chat = Chat(model, TOOL_TEMPLATES[kind], TOOLS)
            answer, other = chat.generate(text), Chat(model, TOOL_TEMPLATES[kind], TOOLS).generate(changed)
            if answer["tool_calls"][0]["function"] == other["tool_calls"][0]["function"]:
                continue
            chat.next(*sent_back(other))
            assert chat.n_again > 0
            assert chat.is_rendered


@pytest.mark.parametrize(
    "changes",
    [
        lambda answer: sent_back(answer, content="I look up."),
        lambda answer: sent_back(answer, spell=lambda text: text.replace("3", "true")),
        lambda answer: sent_back(answer, spell=lambda text: text.replace("3", '"3"')),
        lambda answer: sent_back(answer | {"tool_calls": [*answer["tool_calls"]] * 2}),
        lambda answer: [{"role": "assistant", "content": answer["content"]}, ASKED],
    ],
)
def test_other_values_texts_or_calls(model, changes):
    chat = Chat(model, TOOL_TEMPLATES["Hermes"], TOOLS)
    chat.next(*changes(chat.generate(CALLS["Hermes"][1].format(3))))
    assert chat.n_again > 0
    assert chat.is_rendered


def test_answers_are_compared_once(model, monkeypatch):
    compared = []

    def meaning(text, *arguments):
        compared.append(text)
        return meaning_of(text, *arguments)

    monkeypatch.setattr("spec_local.chat.conversation.meaning_of", meaning)
    chat = Chat(model, TOOL_TEMPLATES["Hermes"], TOOLS)
    sent = sent_back(chat.generate(CALLS["Hermes"][1].format(3)), SPELLINGS["sorted"])
    chat.next(*sent)
    assert chat.n_again == 0
    assert len(compared) == 2
    second = chat.second
    chat.first = second
    chat.next(*sent, ASKED)
    assert chat.n_again == 0
    assert len(compared) == 2
    twice = [sent[0] | {"tool_calls": [*sent[0]["tool_calls"]] * 2}, *sent[1:]]
    chat.next(*twice)  # it begins with the known call
    assert len(compared) == 4
    assert chat.is_rendered


def test_numbers_and_ids_in_another_form(model):
    chat = Chat(model, TOOL_TEMPLATES["Hermes"], TOOLS)
    answer = chat.generate(CALLS["Hermes"][0].format("3.0"))
    chat.next(*sent_back(answer, lambda text: text.replace("3.0", "3"), new_id="call_1"))
    assert chat.n_again == 0


def test_a_call_whose_end_was_cut_is_closed(model):
    """An answer that may have one call ends with its arguments."""
    text = CALLS["Hermes"][1].format(3).removesuffix("</tool_call>")
    chat = Chat(model, TOOL_TEMPLATES["Hermes"], TOOLS)
    chat.next(*sent_back(chat.generate(text)))
    assert chat.is_rendered


def test_without_tools_a_call_is_text(model):
    chat = Chat(model, TOOL_TEMPLATES["Hermes"], TOOLS)
    answer = chat.generate(CALLS["Hermes"][1].format(3))
    chat.tools = ToolUse(chat.template)
    chat.next(*sent_back(answer))
    assert chat.is_rendered


@pytest.mark.parametrize(
    "template",
    [TEMPLATES["chatml"], TEMPLATES["gemma"], STRICT_TEMPLATES["Qwen3.5"].replace("<think>\n", "")],
)
def test_white_space_around_a_text(model, template):
    chat = Chat(model, template)
    answer = chat.generate("\nThe time is long. \n")
    for sent in (answer, answer | {"content": answer["content"].strip()}):
        chat.next(sent, ASKED)
        assert chat.n_again == 0
    chat.next(answer | {"content": "The time  is long."}, ASKED)
    assert chat.is_rendered
    if template != TEMPLATES["chatml"]:
        chat.next(answer, ASKED, as_generated=False)  # a chat of this library shows what the template writes
        assert chat.is_rendered


def test_the_beginning_of_an_answer_is_not_a_whole_one(model):
    """White space between what a client has begun and what the model has added belongs to the text."""
    chat = Chat(model, TEMPLATES["chatml"])
    chat.first = chat.first.following([ASKED, {"role": "assistant", "content": "It is"}], as_generated=True)
    chat.before = chat.first.prompt()
    answer = chat.generate(" long.")
    chat.next(answer, ASKED)
    assert chat.n_again == 0
    chat.next(answer | {"content": "It islong."}, ASKED)
    assert chat.is_rendered


THOUGHT, ANSWER = "Hm, what?\n\nThe sky", "It is\n\nblue."


@pytest.mark.parametrize("content", [ANSWER, f" {ANSWER}\n"])
@pytest.mark.parametrize("thought", [THOUGHT, f" {THOUGHT} "])
def test_reasoning_that_the_template_shows(model, thought, content):
    chat = Chat(model, THINKING_TEMPLATES["kept"])
    answer = chat.generate(f"<think>{thought}\n</think>\n\n{content}")
    assert answer["reasoning_content"]
    for sent in (answer, {key: value.strip() for key, value in answer.items()}):
        chat.next(sent, ASKED)
        assert chat.n_again == 0
    for changes in ({"reasoning_content": "No."}, {"content": "No."}):
        chat.next(answer | changes, ASKED)
        assert chat.n_again > 0
        assert chat.is_rendered
    chat.next({"role": "assistant", "content": answer["content"]}, ASKED)  # it is not sent back
    assert "<think>" not in str(chat.second.rendered)
    assert chat.is_rendered


def test_reasoning_before_a_call_and_its_result(model):
    thought = "{{ '\n<think>\n' + m.reasoning_content + '\n</think>\n' if m.reasoning_content }}"
    template = TOOL_TEMPLATES["Hermes"].replace("{% if m.content %}", thought + "{% if m.content %}")
    chat = Chat(model, template, TOOLS)
    answer = chat.generate(f"<think>\n{THOUGHT}\n</think>\n\n" + CALLS["Hermes"][1].format(3))
    for spell in SPELLINGS.values():
        chat.next(*sent_back(answer, spell))
        assert chat.n_again == 0
    chat.next(*sent_back(answer, reasoning_content="No."))
    assert chat.is_rendered


def test_reasoning_of_a_template_that_opens_it(model):
    """Qwen3.5: reasoning is shown until the next question."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content "
        "and messages[-1].role != 'user' %}{{ '<think>\n' + m.reasoning_content | trim + '\n</think>\n\n' }}"
        "{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n<think>\n' }}"
        "{{ tools or '' }}{{ '<tool_call>' if false }}"
    )
    chat = Chat(model, template)
    answer = chat.generate(f"{THOUGHT}  \n</think>\n\n\n{ANSWER} ")
    assert answer["reasoning_content"]
    chat.next(answer, {"role": "system", "content": "More."})
    assert chat.n_again == 0
    chat.next(answer, ASKED)
    assert chat.is_rendered


@pytest.mark.parametrize("kind", ["both markers", "opened"])
@pytest.mark.parametrize("thought", [THOUGHT, " ", ""])
def test_reasoning_that_the_template_drops(model, kind, thought):
    chat = Chat(model, THINKING_TEMPLATES[kind])
    opened = "<think>\n" if kind == "both markers" else ""
    answer = chat.generate(f"{opened}{thought}\n</think>\n\n{ANSWER}")
    chat.next(answer, ASKED)
    assert chat.n_again > 0
    assert chat.is_rendered
