"""Calls as each form writes them are read back, whatever is in their arguments, and in parts of any size."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.chat.call_formats import format_of
from spec_local.chat.tool_calls import ToolCallParser
from tests.unit.test_tool_calls import FORMS, MARKED, SPLITS, borders, value_of

NAMES = st.from_regex(r"\A[a-z][\w.-]{0,20}\Z")
MARKS = [
    *MARKED.values(),
    *(
        mark
        for form in FORMS
        for known in [format_of(FORMS[form])]
        for mark in known.openings + known.closings
    ),
    *('"', "\\", "\n", "é🙂", "'", "}", "]", ",", ")", "\u2028", "\x00", "</arg_value>", "</parameter>\n"),
]
TEXTS = st.lists(st.sampled_from(MARKS) | st.text(st.characters(codec="utf-8"), max_size=4), max_size=4).map(
    "".join
)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
GEMMA = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS.filter(lambda text: '<|"|>' not in text),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
IDENTIFIERS = st.from_regex(r"\A[a-z][a-z0-9_]{0,9}\Z").filter(lambda name: name not in ("in", "is"))


def in_gemma(value):
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(in_gemma, value))}]"
        case dict():
            return "{" + ",".join(f"{name}:{in_gemma(one)}" for name, one in value.items()) + "}"
    return json.dumps(value)


def tagged(before, between, after):
    def write(arguments):
        values = (v if isinstance(v, str) else json.dumps(v) for v in arguments.values())
        return "".join(before + n + between + v + after for n, v in zip(arguments, values, strict=True))

    return write


def is_plain(value):
    """Return whether a value in tags can be told from the tags, and a text from other JSON."""
    if "</" in json.dumps(value):
        return False
    return not isinstance(value, str) or (value.strip() == value and value[:1].isalpha())


def in_dsml(arguments):
    return "".join(
        f'<｜DSML｜parameter name="{name}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n"
        for name, value in arguments.items()
    )


DSML = (st.dictionaries(IDENTIFIERS, VALUES.filter(lambda v: "</" not in json.dumps(v)), max_size=3), in_dsml)
WRITE = {  # what no JSON is: the arguments that there may be, and how they are written
    "Gemma 4": (st.dictionaries(NAMES, GEMMA, max_size=3), in_gemma),
    "LFM2": (
        st.dictionaries(IDENTIFIERS, VALUES, max_size=3),
        lambda arguments: ", ".join(f"{name}={value!r}" for name, value in arguments.items()),
    ),
    "Qwen3-Coder": (
        st.dictionaries(IDENTIFIERS, VALUES.filter(is_plain), max_size=3),
        tagged("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "GLM": (
        st.dictionaries(IDENTIFIERS, VALUES.filter(is_plain), max_size=3),
        tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
}
WRITE |= dict.fromkeys(["DeepSeek V3.2", "DeepSeek V4"], DSML)
JSON = (st.dictionaries(TEXTS, VALUES, max_size=3), None)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25)
@given(data=st.data(), text=st.sampled_from(["", "I look.\n"]), splits=SPLITS)
def test_calls_are_read_back(form, data, text, splits):
    known = format_of(FORMS[form])
    arguments, write = WRITE.get(form, JSON)
    most = 3 if known.between is not None else 1
    calls = data.draw(st.lists(st.tuples(NAMES, arguments), min_size=1, max_size=most))
    if write is None:
        is_ascii = data.draw(st.booleans())
        write = lambda value: json.dumps(value, ensure_ascii=is_ascii)  # noqa: E731
    if known.is_json:
        text = ""  # without a mark, only the beginning of an answer is a call
    written = [
        known.written.replace("NAME", name).replace("NUMBER", str(i)).replace("ARGUMENTS", write(values))
        for i, (name, values) in enumerate(calls)
    ]
    answer = text + known.before + (known.between or "").join(written) + known.after
    tools = [{"function": {"name": name}} for name, _ in calls]
    for partial in (False, True):
        parser, shown, found = ToolCallParser(known, tools, partial=partial), "", []
        for part in [*(parser.feed(answer[a:b]) for a, b in borders(answer, splits)), parser.finish()]:
            if part.arguments:
                found[-1][1] += part.arguments
            found += [[call, call.arguments] for call in part.calls]
            shown += part.text
        assert shown == text.strip()
        read = [(call.name, value_of(type(call)(call.id, call.name, given))) for call, given in found]
        assert json.dumps(read) == json.dumps(calls)


@pytest.mark.parametrize("form", FORMS)
def test_names_that_look_like_parts_of_a_call(form):
    function = {"name": "a_NUMBER_NAME_ARGUMENTS", "arguments": "{}"}
    written = format_of(FORMS[form]).write([{"id": "a", "type": "function", "function": function}])
    assert "a_NUMBER_NAME_ARGUMENTS" in written


@pytest.mark.parametrize("form", ["DeepSeek V3.2", "DeepSeek V4"])
def test_a_parameter_says_whether_it_is_text(form):
    known = format_of(FORMS[form])
    given = {"a": "1", "b": 1, "c": " null\n", "d": None, "e": "", "f": {"g": ["1"]}}
    arguments = known.written.replace("NAME", "weather").replace("ARGUMENTS", in_dsml(given))
    (call,) = (
        ToolCallParser(known, [{"function": {"name": "weather"}}]).finish(known.before + arguments).calls
    )
    assert value_of(call) == given
