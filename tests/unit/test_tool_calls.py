"""Tool calls and text, separated in answers that are split in every way."""

import itertools
import json
import re
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_local.chat.call_formats import BARE_OPENINGS, format_of
from spec_local.chat.messages import INVALID, json_value
from spec_local.chat.tool_calls import ToolCallParser
from spec_local.reasoning.markers import Splitter, markers_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "note": {"type": ["string", "null"]},
                    "unit": {"enum": ["C", "F"]},
                    "days": {"type": "integer"},
                    "places": {"type": "array"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "time.now"}},
]
FORMS = {  # what tells the template of the form
    "Hermes": "…<tool_call>\n{{ call | tojson }}\n</tool_call>…",
    "Llama 3": """…Respond in the format {"name": function name, "parameters": arguments}…""",
    "Mistral": "…[TOOL_CALLS]{{ call | tojson }}…",
    "Qwen3-Coder": "…<tool_call>\n<function={{ name }}>\n<parameter=…",
    "gpt-oss": "…<|channel|>…to={{ 'functions.' + name }}…",
    "Gemma 4": "…<|tool_call>call:{{ name }}…",
    "GLM": "…<tool_call>{{ name }}\n<arg_key>…",
    "Granite": "…<|tool_call|>{{ calls | tojson }}…",
    "Nemotron": "…<TOOLCALL>[{{ calls }}]</TOOLCALL>…",
    "Mistral with names": "…[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}…",
    "DeepSeek R1": "…<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>…\n```json\n…",
    "DeepSeek V3.1": "…<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>…",
    "Kimi K2": "…<|tool_calls_section_begin|>…",
    "Command R7B": "…<|START_ACTION|>[…",
    "LFM2": "…List of tools: <|tool_list_start|>[…",
    "DeepSeek V3.2": "{% set dsml_token = '｜DSML｜' %}…'<' + dsml_token + 'function_calls>'…",
    "DeepSeek V4": "{% set dsml_token = '｜DSML｜' %}…'<' + dsml_token + 'tool_calls>'…",
    "Command R": """…Action:\n```json\n[{'"tool_name": "' + name}…""",
}
PARIS = '{"city": "Paris"}'
WEATHER, NOW = ("weather", {"city": "Paris"}), ("time.now", {})
CALL = f'{{"name": "weather", "arguments": {PARIS}}}'
LLAMA_CALL = CALL.replace("arguments", "parameters")
MARKED = {  # a call of each form, as models write it
    "Hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "Llama 3": f"<|python_tag|>{LLAMA_CALL}",
    "Mistral": f"[TOOL_CALLS][{CALL}]",
    "Qwen3-Coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    ),
    "gpt-oss": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}",
    "Gemma 4": '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>',
    "GLM": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    "Granite": f"<|tool_call|>[{CALL}]<|/tool_call|>",
    "Nemotron": f"<TOOLCALL>[{CALL}]</TOOLCALL>",
    "Mistral with names": f"[TOOL_CALLS]weather[ARGS]{PARIS}",
    "DeepSeek R1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{PARIS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "DeepSeek V3.1": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "Kimi K2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{PARIS}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "Command R7B": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
        f"{PARIS}}}\n]<|END_ACTION|>"
    ),
    "LFM2": '<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>',
    **{
        f"DeepSeek {version}": (
            f'<｜DSML｜{block}>\n<｜DSML｜invoke name="weather">\n'
            '<｜DSML｜parameter name="city" string="true">Paris'
            f"</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜{block}>"
        )
        for version, block in (("V3.2", "function_calls"), ("V4", "tool_calls"))
    },
    "Command R": (
        'Action:\n```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": '
        f"{PARIS}\n    }}\n]```"
    ),
}
PIECES = [
    *'a \n;{}[]"\\<>|/`',
    *("```json\n", "```", '{"name": "weather", "arguments": ', '{"name": "time.now", "parameters": {}}'),
    *("weather", "<tool_call>", "</tool_call>", "<tool_", "call>", "<function=weather>", "</function>"),
    *("<function=", "<parameter=city>", "<parameter=days>", "</parameter>", "[TOOL_CALLS]", "[ARGS]"),
    *("[CALL_ID]", "[TOOL", "<|start|>assistant", "<|channel|>", "commentary", " to=functions.weather"),
    *("<|constrain|>json", "<|message|>", "<|call|>", "<|end|>", "<|tool_call>call:", "<tool_call|>"),
    *('<|"|>', "city:", "weather{", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *(
        "<|tool_call|>",
        "<|python_tag|>",
        "\udcff",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "weather(city=",
    ),
    *(
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<|tool_calls_section_begin|>",
        ", ",
        "')",
    ),
    *("<|tool_call_begin|>", "functions.weather:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|START_ACTION|>", "<|END_ACTION|>", "<|tool_call_start|>", "<|tool_call_end|>", '{"tool_name": "'),
    *(
        "<｜DSML｜invoke name=",
        '"city" string="true">',
        "</｜DSML｜invoke>",
        "｜DSML｜",
        "Action:",
        "\n```json",
    ),
    PARIS,
    *MARKED.values(),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
SPLITS = st.lists(st.integers(0, 400), max_size=60)
forms = pytest.mark.parametrize("form", FORMS)
MANY = settings(max_examples=12)  # for each form


def parser_of(form):
    return ToolCallParser(format_of(FORMS[form]), TOOLS)


def whole(form, text):
    """The text, and the names and arguments of the calls."""
    found = parser_of(form).finish(text)
    return found.text, [(call.name, value_of(call)) for call in found.calls]


def value_of(call):
    """The arguments; as text if the model wrote no JSON."""
    value = json_value(call.arguments)
    return call.arguments if value is INVALID else value


def borders(text, splits):
    return itertools.pairwise(sorted({0, len(text), *(at % (len(text) + 1) for at in splits)}))


@forms
@MANY
@given(text=TEXTS, splits=SPLITS)
@example(text="{}\n\n```", splits=[2, 3])
@example(text=f"```json\n{CALL}\n```\nb", splits=list(range(90)))
def test_any_split_gives_the_same_text_and_calls(form, text, splits):
    parser = parser_of(form)
    parts = [parser.feed(text[a:b]) for a, b in borders(text, splits)]
    parts.append(parser.finish())
    calls = [(call.name, value_of(call)) for part in parts for call in part.calls]
    assert ("".join(part.text for part in parts), calls) == whole(form, text)


@forms
@MANY
@given(text=TEXTS)
def test_nothing_but_calls_is_lost(form, text):
    shown, calls = whole(form, text)
    if not calls:
        assert shown == text
    rest = iter(text)
    assert all(character in rest for character in shown)  # in the same order


@forms
@MANY
@given(before=TEXTS.filter(lambda text: text.strip()), after=TEXTS)
def test_text_without_openings_is_unchanged(form, before, after):
    known = format_of(FORMS[form])
    text = f"It is {before}{after}"
    if not any(opening in text for opening in known.openings):
        assert whole(form, text) == (text, [])


@forms
@MANY
@given(text=TEXTS, splits=SPLITS)
def test_nothing_is_held_back_but_what_may_become_a_call(form, text, splits):
    """Text after other text waits for white space, and for the rest of an opening, but for nothing else."""
    known, text = format_of(FORMS[form]), f"It is {text}"
    parser, seen, shown = parser_of(form), "", ""
    for a, b in borders(text, splits):
        seen += text[a:b]
        shown += parser.feed(text[a:b]).text
        if any(opening in seen for opening in known.openings):
            return
        held = seen.removeprefix(shown).lstrip()
        assert any(opening.startswith(held) for opening in known.openings)


@forms
def test_a_call_between_texts(form):
    assert whole(form, f"One.\n\n{MARKED[form]}") == ("One.", [WEATHER])
    assert whole(form, f"{MARKED[form]}\n") == ("", [WEATHER])
    text, calls = whole(form, f"One.\n{MARKED[form]}\nTwo.")
    assert (text, calls) == ("One.\nTwo.", [WEATHER])
    assert whole(form, f"{MARKED[form]}\n{MARKED[form]}")[1] == [WEATHER, WEATHER]


@forms
def test_a_call_is_complete_as_soon_as_its_text_is(form):
    parser = parser_of(form)
    found = [parser.feed(character) for character in f"{MARKED[form]}"]
    assert [call.name for part in found for call in part.calls] == ["weather"]
    assert "".join(part.text for part in found) == ""
    assert parser.finish() == ("", [], "")


@forms
def test_a_call_that_is_cut_has_the_beginning_of_its_arguments(form):
    """If they are JSON. Before them, and in other notations, it is text; Mistral's id comes last."""
    call = MARKED[form]
    begins = call.find(PARIS) + 1 if PARIS in call and form != "Mistral" else len(call) + 1
    complete = next(n for n in range(len(call) + 1) if (found := parser_of(form).finish(call[:n])).calls
                    and json_value(found.calls[0].arguments) == WEATHER[1])  # fmt: skip
    for n in range(complete):
        found = parser_of(form).finish(f"a {call[:n]}")
        if n < begins:
            assert found == (f"a {call[:n]}", [], "")
        else:
            (cut,) = found.calls
            assert (found.text, cut.name, cut.arguments) == ("a", "weather", call[begins - 1 : n])
    for n in range(min(begins, complete)):  # the text before it, and a call after it, are found all the same
        if PARIS in call:  # otherwise a value may contain the next call
            text, calls = whole(form, f"{call[:n]} no\n{call}")
            assert (text, calls) in ((f"{call[:n]} no", [WEATHER]), (f"{call[:n]} no\n{call}", []))


@forms
@pytest.mark.parametrize("or_schema", [False, True], ids=["calls", "calls or a schema"])
def test_the_beginning_of_a_call_under_a_grammar_is_no_text(form, or_schema):
    call = MARKED[form]
    for n in range(len(call)):
        parser = ToolCallParser(format_of(FORMS[form]), TOOLS, constrained=True, or_schema=or_schema)
        found = parser.finish(call[:n])
        if not (or_schema and call.startswith(BARE_OPENINGS)):  # a schema's answer may begin like those
            assert found.text == ""
        assert all(each.name == "weather" for each in found.calls)


@forms
def test_an_answer_of_a_schema_keeps_the_marks_of_calls(form):
    known = format_of(FORMS[form])
    for opening in known.openings:
        answer = json.dumps({"text": f"{opening} begins a call"}, ensure_ascii=False)
        for n in range(len(answer) + 1):
            parser = ToolCallParser(known, TOOLS, constrained=True, or_schema=True)
            assert parser.finish(answer[:n]) == (answer[:n], [], "")


@forms
@MANY
@given(text=TEXTS, splits=SPLITS)
def test_the_parts_of_calls_make_the_calls(form, text, splits):
    parser, shown, calls = ToolCallParser(format_of(FORMS[form]), TOOLS, partial=True), "", []
    for part in [*(parser.feed(text[a:b]) for a, b in borders(text, splits)), parser.finish()]:
        if part.arguments:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + part.arguments)
        calls += part.calls
        shown += part.text
    found = parser_of(form).finish(text)
    assert shown == found.text
    assert [(each.name, each.arguments) for each in calls] == [
        (each.name, each.arguments) for each in found.calls
    ]


@pytest.mark.parametrize("form", [form for form in FORMS if PARIS in MARKED[form] and form != "Mistral"])
def test_arguments_come_while_they_are_generated(form):
    parser, call = ToolCallParser(format_of(FORMS[form]), TOOLS, partial=True), MARKED[form]
    parts = [parser.feed(character) for character in call]
    given = [part.arguments or "".join(each.arguments for each in part.calls) for part in parts]
    start = call.find(PARIS)
    assert given[start : start + len(PARIS)] == [*PARIS]
    assert parser.finish() == ("", [], "")


@forms
def test_at_most_one_call(form):
    parser = ToolCallParser(format_of(FORMS[form]), TOOLS, most=1)
    found = [parser.feed(character) for character in f"{MARKED[form]}\n{MARKED[form]} and more"]
    assert parser.is_full
    assert [call.name for part in [*found, parser.finish()] for call in part.calls] == ["weather"]
    assert "".join(part.text for part in found) == ""


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("Hermes", '<tool_call>{"name": "x", "arguments": {}}</tool_call>', [("x", {})]),
        ("Hermes", '<tool_call>\n{"name": "x"}', [("x", {})]),
        ("Hermes", '<tool_call>{"arguments": {"q": "</tool_call> }\\" <tool_call>"}, "name": "x"}',
         [("x", {"q": '</tool_call> }" <tool_call>'})]),
        ("Hermes", '<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>', [("x", '{"a": NaN}')]),
        ("Mistral", "[TOOL_CALLS]x[ARGS]{'city': 1}", [("x", "{'city': 1}")]),
        ("DeepSeek V3.1",
         "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time.now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
         f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
         [NOW, WEATHER]),
        ("LFM2", """<|tool_call_start|>[weather(city='it\\'s "x", y', note="\\\\")]<|tool_call_end|>""",
         [("weather", {"city": 'it\'s "x", y', "note": "\\"})]),
        ("Kimi K2", f"<|tool_call_begin|>weather:12<|tool_call_argument_begin|>{PARIS}<|tool_call_end|>\n",
         [WEATHER]),
        ("LFM2",
         """<|tool_call_start|>[weather(city='a\n"),(b', days = -3, places=["x", {'y': (True,)}], note=null),
         time.now()]<|tool_call_end|>""",
         [("weather", {"city": 'a\n"),(b', "days": -3, "places": ["x", {"y": [True]}], "note": None}), NOW]),
        ("Hermes", '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}', [("x", {"a": 1})]),
        ("Hermes", '<tool_call>{"name": "x", "arguments": {"a": "1\n2"}}', [("x", {"a": "1\n2"})]),
        ("Hermes", "<tool_call><function=weather>\n<parameter=city>Paris</parameter></function></tool_call>",
         [WEATHER]),
        ("Hermes", f'```json\n{CALL}\n```', [WEATHER]),
        ("Hermes", f'\n{CALL}', [WEATHER]),
        ("Llama 3", f'{LLAMA_CALL}', [WEATHER]),
        ("Llama 3", f'{{"type": "function", "name": "weather", "parameters": {PARIS}}}', [WEATHER]),
        ("Llama 3", f'{LLAMA_CALL}; {{"name": "time.now", "parameters": {{}}}}',
         [WEATHER, NOW]),
        ("Mistral", f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]time.now[ARGS]{{}}", [WEATHER, NOW]),
        ("Mistral", f"[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{PARIS}", [WEATHER]),
        ("Mistral", f"[TOOL_CALLS]weather{PARIS}", [WEATHER]),
        ("Mistral", f'[TOOL_CALLS] [{CALL}, {{"id": "abc", "name": "b"}}]',
         [WEATHER, ("b", {})]),
        ("gpt-oss", f"<|start|>assistant<|channel|>commentary to=functions.weather<|message|>{PARIS}<|call|>",
         [WEATHER]),
        ("gpt-oss", f" to=functions.weather<|channel|>commentary json<|message|>{PARIS}", [WEATHER]),
        ("gpt-oss", f"<|end|><|start|>assistant to=functions.weather<|channel|>analysis<|message|>{PARIS}",
         [WEATHER]),
        ("Gemma 4", '<|tool_call>call:x{a:1.5,b:true,c:[<|"|>{d:<|"|>,null],e:{f:<|"|><|"|>}}<tool_call|>',
         [("x", {"a": 1.5, "b": True, "c": ["{d:", None], "e": {"f": ""}})]),
        ("Gemma 4", "<|tool_call>call:time.now{}<tool_call|>", [NOW]),
        ("GLM", "<tool_call>time.now\n</tool_call>", [NOW]),
        ("GLM", "<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
         [("weather", {"days": 3})]),
    ],
)  # fmt: skip
def test_what_models_write(form, text, calls):
    assert whole(form, text) == ("", calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("Hermes", '<tool_call>{"name": weather}</tool_call>'),
        ("Hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
        ("Hermes", '<tool_call>{"name": "weather", "arguments": "Paris"}</tool_call>'),
        ("Hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("Hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("Hermes", "<tool_call>[]</tool_call>"),
        ("Hermes", "Write <tool_call> and </tool_call>."),
        ("Hermes", '<tool_call>{"a": ' + "[" * 100_000 + "]" * 100_000 + "}</tool_call>"),
        ("Hermes", '{"name": "unknown", "arguments": {}}'),  # without a mark, only the tools' names
        ("Hermes", '{"name": "weather"}'),
        ("Llama 3", 'It is {"name": "weather", "parameters": {}}'),
        ("Llama 3", '{"a": 1}'),
        ("Mistral", "[TOOL_CALLS] nothing to do, I think {}"),
        ("Mistral", f"[TOOL_CALLS][{CALL}, {{}}]"),
        ("Kimi K2", "<|tool_call_begin|>weather<|tool_call_argument_begin|>nothing"),
        ("DeepSeek R1", "<｜tool▁call▁begin｜>weather{}"),
        ("LFM2", "<|tool_call_start|>[weather('Paris')]<|tool_call_end|>"),
        ("LFM2", "<|tool_call_start|>[weather(city=Paris)]<|tool_call_end|>"),
        ("LFM2", "<|tool_call_start|>[weather(city=f())]<|tool_call_end|>"),
        ("gpt-oss", "<|channel|>commentary<|message|>{}"),
        ("gpt-oss", "<|channel|>commentary to=functions.x<|message|>no"),
        ("Gemma 4", "<|tool_call>call:weather(city)<tool_call|>"),
        ("Qwen3-Coder", "<function=weather> <b> </function>"),
        ("GLM", "<tool_call>two words</tool_call>"),
    ],
)
def test_what_is_no_call(form, text):
    assert whole(form, text) == (text, [])


def test_a_list_of_calls_ends_with_its_bracket():
    assert whole("Granite", f"<|tool_call|>[{CALL}, {CALL}]")[1] == [WEATHER, WEATHER]
    text = f", {CALL}"
    assert whole("Granite", f"<|tool_call|>[{CALL}]{text}") == (text, [WEATHER])


def test_values_in_tags_have_the_types_of_the_schema():
    def call(**values):
        parts = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
        ((_, arguments),) = whole("Qwen3-Coder", f"<tool_call>\n<function=weather>\n{parts}</function>")[1]
        return arguments

    assert call(city="5", note="null", unit="true") == {"city": "5", "note": "null", "unit": "true"}
    assert call(days="5", places='["a", 1]', other="True") == {"days": 5, "places": ["a", 1], "other": True}
    assert call(days="many", city=" a\n\nb ") == {"days": "many", "city": " a\n\nb "}
    code = "<parameter=x></parameter> and </function>"
    assert call(city=code) == {"city": code}


def test_ids():
    first, second = parser_of("Hermes").finish(MARKED["Hermes"] * 2).calls
    assert re.fullmatch("call_[0-9a-f]{24}", first.id)
    assert first.id != second.id
    text = '[TOOL_CALLS][{"name": "a", "arguments": {}, "id": "abcdefghi"}]'
    (call,) = parser_of("Mistral").finish(text).calls
    function = {"name": "a", "arguments": "{}"}
    assert call.message == {"id": "abcdefghi", "type": "function", "function": function}


def test_without_a_form_all_is_text():
    parser = ToolCallParser()
    assert parser.feed(MARKED["Hermes"]) == (MARKED["Hermes"], (), "")
    assert parser.finish(" ") == (" ", (), "")
    assert format_of("{{ messages }}") is None


def test_a_long_call_is_read_in_time():
    """50 KB of arguments in pieces of a few characters: well below a second."""
    code = "if (a) { b[0] = '\"'; }\n" * 2000
    text = f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': {'city': code}})}\n</tool_call>"
    parser = parser_of("Hermes")
    calls = [call for at in range(0, len(text), 50) for call in parser.feed(text[at : at + 50]).calls]
    assert [json.loads(call.arguments) for call in calls] == [{"city": code}]


CHANNELS = "{{ '<|start|>assistant<|channel|>final<|message|>' ~ ' to=functions.' }}"
HEADERS = (
    "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
    "<|start|>assistant<|channel|>analysis to=functions.weather code<|message|>",
    "<|end|><|start|>assistant to=functions.weather<|channel|>commentary json<|message|>",
)


@pytest.mark.parametrize("header", HEADERS)
@given(splits=SPLITS)
def test_a_call_ends_the_reasoning_of_gpt_oss(header, splits):
    splitter = Splitter(markers_of(CHANNELS), "<|start|>assistant")
    parser = ToolCallParser(format_of(CHANNELS), TOOLS)
    text = f"<|channel|>analysis<|message|>I call weather.{header}{PARIS}"
    parts = [splitter.feed(text[a:b]) for a, b in borders(text, splits)]
    parts.append(splitter.finish())
    assert "".join(part.reasoning for part in parts) == "I call weather."
    found = [parser.feed(part.answer) for part in parts]
    found.append(parser.finish())
    assert "".join(part.text for part in found) == ""
    assert [(call.name, call.arguments) for part in found for call in part.calls] == [("weather", PARIS)]
