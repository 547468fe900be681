"""The forms in which models write tool calls, as their chat templates define them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from spec_local.chat.call_notations import (
    Notation,
    Tags,
    gemma_grammar,
    python_grammar,
    read_gemma,
    read_python,
)
from spec_local.chat.call_reading import (
    MALFORMED,
    MAX_HEADER,
    NAME,
    Begun,
    Read,
    Reader,
    read_arguments,
    read_json,
    read_whole_json,
    skip_space,
)
from spec_local.chat.messages import MessageToolCall, Tool, json_object

PARTS = re.compile("(NAME|ARGUMENTS|NUMBER)")
"""The parts of `CallFormat.written` that each call has its own values of."""
JSON_CALL = '{"name": "NAME", "arguments": ARGUMENTS}'


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A form in which models write calls.

    Attributes:
        signs: texts that the chat templates of these models contain, all of them.
        openings: texts with which a call begins.
        read: reads what follows an opening.
        written: a call, with ``NAME``, ``ARGUMENTS`` and ``NUMBER`` in place of its parts.
        before, between, after: texts around calls; between None: there is only one in an answer.
        closings: texts that may follow a call, in their order.
        bare: `BARE_OPENINGS` at the start of an answer, or after a call, begin a call, too, if it names one
            of the tools: small models often leave the openings out.
        control: control tokens in calls; in other answers, these have no text.
        answer: what precedes the text of an answer without calls.
        notation: the grammar of arguments that are not JSON.
    """

    signs: tuple[str, ...]
    openings: tuple[str, ...]
    read: Reader
    written: str
    before: str = ""
    between: str | None = ""
    after: str = ""
    closings: tuple[str, ...] = ()
    bare: bool = False
    control: tuple[str, ...] = ()
    answer: str = ""
    notation: Notation | None = None

    def write(self, calls: Sequence[MessageToolCall]) -> str:
        """The text of calls, for templates that do not write those of earlier answers."""
        written = []
        for i, call in enumerate(calls):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if self.notation is python_grammar and (given := json_object(arguments)) is not None:
                arguments = ", ".join(f"{key}={value!r}" for key, value in given.items())
            values = {"NAME": name, "NUMBER": str(i), "ARGUMENTS": arguments}
            written.append("".join(values.get(part, part) for part in PARTS.split(self.written)))
        return self.before + (self.between or "").join(written) + self.after

    @property
    def is_json(self) -> bool:
        """True if a call is nothing but JSON."""
        return self.written.startswith("{") and not self.before


def format_of(template: str) -> CallFormat | None:
    """The form of the models with this chat template; None: it is not known."""
    return next((known for known in _FORMATS if all(sign in template for sign in known.signs)), None)


def _read_tagged(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | Begun | None:
    """Read a call in tags: JSON, or a function in tags."""
    if text[start:end] == _FUNCTION:
        return _QWEN.read(text, start, tools)
    at = skip_space(text, end)
    if text.startswith(_FUNCTION, at):
        return _QWEN.read(text, at, tools)
    return None if _FUNCTION.startswith(text[at:]) else read_json(text, start, end, tools)


def _read_glm(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | None:
    return _GLM.read(text, end, tools)


def _read_dsml(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | None:
    return _DSML_TAGS.read(text, start if text.startswith(_INVOKE, start) else skip_space(text, end), tools)


def _read_mistral(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | Begun | None:
    """Read a list of calls, or the name of a tool and its arguments."""
    if text[skip_space(text, end) :][:1] in ("", "[", "{"):
        return read_whole_json(text, start, end, tools)  # its id comes last
    return _read_header(_MISTRAL, text, end)


def _read_gpt_oss(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | Begun | None:
    """Read a header with the name of a tool, and its arguments."""
    at = text.find(_MESSAGE, start, start + MAX_HEADER)
    if at < 0:
        return None if len(text) - start < MAX_HEADER else MALFORMED
    header = _GPT_OSS.fullmatch(text, start, at)
    name = header and (header["name"] or header["recipient"])
    return read_arguments(text, at + len(_MESSAGE), name) if name else MALFORMED


def _header_reader(header: re.Pattern[str]) -> Reader:
    """The reader of calls whose header begins with the opening."""
    return lambda text, start, end, tools: _read_header(header, text, start)


def _read_header(header: re.Pattern[str], text: str, at: int) -> Read | Begun | None:
    """Read what precedes the brace of the arguments: the name of a tool, and perhaps an id."""
    if found := header.match(text, at):
        groups = found.groupdict()
        return read_arguments(text, found.end(), groups["name"], groups.get("id"))
    return None if len(text) - at < MAX_HEADER and "{" not in text[at:] else MALFORMED


_FENCE = "```"
BARE_OPENINGS = ("{", f"{_FENCE}json\n{{", f"{_FENCE}\n{{")
"""The last character of each begins the JSON."""
_FUNCTION, _MESSAGE = "<function=", "<|message|>"
_CALLS, _CALL, _SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_CALL_END, _CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_DSML = "｜DSML｜"
_INVOKE, _INVOKE_END, _PARAMETER_END = f"<{_DSML}invoke", f"</{_DSML}invoke>", f"</{_DSML}parameter>"
_KIMI_CALLS, _KIMI_CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"
_KIMI_CALL_END, _KIMI_CALLS_END = "<|tool_call_end|>", "<|tool_calls_section_end|>"
_MISTRAL = re.compile(rf"\s*(?P<name>{NAME})\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{{)")
_GPT_OSS = re.compile(
    r"(?:<\|end\|>)?(?:<\|start\|>assistant)?\s*"
    rf"(?:to=functions\.(?P<recipient>{NAME})\s*)?"
    rf"(?:<\|channel\|>\w+\s*(?:to=functions\.(?P<name>{NAME})\s*)?)?"
    r"(?:<\|constrain\|>)?\w*\s*"
)
_DEEPSEEK = re.compile(  # R1 and V3 write the type of the tool first, V3.1 does not
    rf"(?:{_CALLS})?\s*{_CALL}(?:function{_SEP})?(?P<name>{NAME})(?:\s*{_FENCE}json|{_SEP})\s*(?=\{{)"
)
_KIMI = re.compile(
    rf"(?:{re.escape(_KIMI_CALLS)})?\s*{re.escape(_KIMI_CALL)}\s*"
    rf"(?P<id>(?:functions\.)?(?P<name>{NAME}?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*(?=\{{)"
)
_QWEN = Tags(
    head=re.compile(rf"<function=(?P<name>{NAME})>"),
    parameter=re.compile(r"<parameter=(?P<name>[^<>\n]+)>"),
    value_end=re.compile(r"</parameter>\s*(?=<parameter=|</function>)"),
    begin="<parameter=",
    end="</function>",
    written=("<parameter=", ">\n", "\n</parameter>\n"),
)
_GLM = Tags(
    head=re.compile(rf"\s*(?P<name>{NAME})\s*(?=<)"),
    parameter=re.compile(r"<arg_key>(?P<name>[^<>\n]+)</arg_key>\s*<arg_value>"),
    value_end=re.compile(r"</arg_value>\s*(?=<arg_key>|</tool_call>)"),
    begin="<arg_key>",
    end="</tool_call>",
    written=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
_DSML_TAGS = Tags(
    head=re.compile(rf'{_INVOKE} name="(?P<name>{NAME})">'),
    parameter=re.compile(rf'<{_DSML}parameter name="(?P<name>[^"\n]+)" string="(?P<is_text>true|false)">'),
    value_end=re.compile(rf"{_PARAMETER_END}\s*(?=<{_DSML}parameter|{_INVOKE_END})"),
    begin=f"<{_DSML}parameter",
    end=_INVOKE_END,
    written=(f'<{_DSML}parameter name="', '" string="IS_TEXT">', f"{_PARAMETER_END}\n"),
)
_FORMATS = (
    # gpt-oss. The token that ends a call, <|call|>, ends the answer, too.
    CallFormat(
        signs=("<|channel|>", "functions."),
        openings=("<|end|><|start|>assistant", "<|start|>assistant", "<|channel|>", "to=functions."),
        read=_read_gpt_oss,
        written="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
        between=None,
        closings=("<|call|>", "<|end|>"),
        control=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
        answer="<|channel|>final<|message|>",
    ),
    CallFormat(  # Mistral, since the templates have [ARGS]
        signs=("[TOOL_CALLS]", "[ARGS]"),
        openings=("[TOOL_CALLS]",),
        read=_read_mistral,
        written="[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
        control=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    CallFormat(
        signs=("[TOOL_CALLS]",),
        openings=("[TOOL_CALLS]",),
        read=_read_mistral,
        written=JSON_CALL,
        before="[TOOL_CALLS][",
        between=", ",
        after="]",
        control=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    CallFormat(  # Gemma 4
        signs=("<|tool_call>call:",),
        openings=("<|tool_call>call:",),
        read=read_gemma,
        written="<|tool_call>call:NAMEARGUMENTS<tool_call|>",
        closings=("<tool_call|>",),
        control=("<|tool_call>", "<tool_call|>", '<|"|>'),
        notation=gemma_grammar,
    ),
    *(
        CallFormat(
            signs=signs,
            openings=(_CALLS, _CALL),
            read=_header_reader(_DEEPSEEK),
            written=_CALL + written + _CALL_END,
            before=_CALLS,
            between=between,
            after=_CALLS_END,
            closings=(_FENCE, _CALL_END, _CALLS_END),
            control=(_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END),
        )
        for signs, written, between in (
            ((_CALLS, f"{_FENCE}json"), f"function{_SEP}NAME\n{_FENCE}json\nARGUMENTS\n{_FENCE}", "\n"),
            ((_CALLS,), f"NAME{_SEP}ARGUMENTS", ""),
        )
    ),
    *(
        CallFormat(
            signs=(_DSML, f"{block}>"),
            openings=(f"<{_DSML}{block}>", _INVOKE),
            read=_read_dsml,
            written=f'{_INVOKE} name="NAME">\nARGUMENTS{_INVOKE_END}\n',
            before=f"<{_DSML}{block}>\n",
            after=f"</{_DSML}{block}>",
            closings=(f"</{_DSML}{block}>",),
            control=(_DSML,),
            notation=_DSML_TAGS.grammar,
        )
        for block in ("function_calls", "tool_calls")  # DeepSeek V3.2 and V4
    ),
    CallFormat(  # Kimi K2
        signs=(_KIMI_CALLS,),
        openings=(_KIMI_CALLS, _KIMI_CALL),
        read=_header_reader(_KIMI),
        written=f"{_KIMI_CALL}functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS{_KIMI_CALL_END}",
        before=_KIMI_CALLS,
        after=_KIMI_CALLS_END,
        closings=(_KIMI_CALL_END, _KIMI_CALLS_END),
        control=(_KIMI_CALLS, _KIMI_CALL, "<|tool_call_argument_begin|>", _KIMI_CALL_END, _KIMI_CALLS_END),
    ),
    CallFormat(  # Command R7B and Command A
        signs=("<|START_ACTION|>",),
        openings=("<|START_ACTION|>",),
        read=read_json,
        written='{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ARGUMENTS}',
        before="<|START_ACTION|>[\n    ",
        between=",\n    ",
        after="\n]<|END_ACTION|>",
        closings=("<|END_ACTION|>",),
        control=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    CallFormat(  # Command R and R+
        signs=("Action:", '"tool_name"'),
        openings=tuple(f"Action:{space}{_FENCE}json" for space in ("\n", " ", "")),
        read=read_json,
        written='    {\n        "tool_name": "NAME",\n        "parameters": ARGUMENTS\n    }',
        before=f"Action:\n{_FENCE}json\n[\n",
        between=",\n",
        after=f"\n]{_FENCE}",
        closings=(_FENCE,),
    ),
    *(
        CallFormat(
            signs=(sign,),
            openings=("<|tool_call_start|>",),
            read=read_python,
            written="NAME(ARGUMENTS)",
            before="<|tool_call_start|>[",
            between=", ",
            after="]<|tool_call_end|>",
            closings=("<|tool_call_end|>",),
            control=("<|tool_call_start|>", "<|tool_call_end|>"),
            notation=python_grammar,
        )
        for sign in ("<|tool_call_start|>", "<|tool_list_start|>")  # LFM2
    ),
    CallFormat(  # GLM 4.5 and later
        signs=("<tool_call>", "<arg_key>"),
        openings=("<tool_call>",),
        read=_read_glm,
        written="<tool_call>NAME\nARGUMENTS</tool_call>",
        between="\n",
        control=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        notation=_GLM.grammar,
    ),
    CallFormat(  # Qwen3-Coder and Qwen3.5
        signs=("<tool_call>", _FUNCTION),
        openings=("<tool_call>", _FUNCTION),
        read=_read_tagged,
        written="<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
        between="\n",
        closings=("</tool_call>",),
        control=("<tool_call>", "</tool_call>"),
        notation=_QWEN.grammar,
    ),
    CallFormat(  # Hermes, Qwen2.5, Qwen3, Granite 4 and many others
        signs=("<tool_call>",),
        openings=("<tool_call>",),
        read=_read_tagged,
        written=f"<tool_call>\n{JSON_CALL}\n</tool_call>",
        between="\n",
        closings=(_FENCE, "</tool_call>"),
        bare=True,
        control=("<tool_call>", "</tool_call>"),
    ),
    CallFormat(  # Granite 3, Phi-4-mini
        signs=("<|tool_call|>",),
        openings=("<|tool_call|>",),
        read=read_json,
        written=JSON_CALL,
        before="<|tool_call|>[",
        between=", ",
        after="]",
        closings=(_FENCE, "<|/tool_call|>"),
        bare=True,
        control=("<|tool_call|>", "<|/tool_call|>"),
    ),
    CallFormat(  # Nemotron
        signs=("<TOOLCALL>",),
        openings=("<TOOLCALL>",),
        read=read_json,
        written=JSON_CALL,
        before="<TOOLCALL>[",
        between=", ",
        after="]</TOOLCALL>",
        closings=("</TOOLCALL>",),
        control=("<TOOLCALL>", "</TOOLCALL>"),
    ),
    CallFormat(  # Llama 3
        signs=('"parameters"', '"name"'),
        openings=("<|python_tag|>",),
        read=read_json,
        written='{"name": "NAME", "parameters": ARGUMENTS}',
        between=None,
        bare=True,
        closings=(_FENCE, ";"),
        control=("<|python_tag|>",),
    ),
)
