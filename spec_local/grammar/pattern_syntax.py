"""Whether a pattern of a JSON schema is a regular expression (of ECMA-262), supported or not."""

import re

from spec_local.grammar.matcher import is_pattern

_PARTS = re.compile(
    r"""
    \\(?P<escape> [pP]\{[^{}]*\} | k<[^<>]*> | u\{[0-9a-fA-F]+\} | c[a-zA-Z] | [0-9]+ | . )
    | \[\^?(?P<set> (?: \\. | [^\]\\] )* )\]
    | (?P<open> \[ )
    | \(\?<(?P<behind> [=!] )
    | \(\?<(?P<name> [^<>]+ )>
    """,
    re.VERBOSE | re.DOTALL,
)
_MEMBER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[pPu]\{[^{}]*\}|c[a-zA-Z]|.)|.", re.DOTALL)


def why_invalid(pattern: str) -> str | None:
    """Why a pattern is no regular expression; None: it is one.

    What Python writes in another way is replaced first; Python then checks the rest, without matching.
    """
    if is_pattern(pattern):
        return None
    names = {match["name"] for match in _PARTS.finditer(pattern)}
    try:
        re.compile(_PARTS.sub(lambda part: _in_python(part, names), pattern))
    except re.error as error:
        return error.msg
    except OverflowError:  # a number of repetitions, which JavaScript does not limit
        return None
    except RecursionError:
        return "it is nested too deeply"
    return None


def _in_python(part: re.Match[str], names: set[str | None]) -> str:
    if part["behind"]:
        return f"(?{part['behind']}"  # Python has only those of one length
    if part["name"]:
        return "("
    if part["open"]:
        raise re.error("unterminated character set")
    if (members := part["set"]) is not None:
        _check_ranges(members)
        return "x"
    escape = part["escape"]
    if escape[0] == "k" and escape[2:-1] not in names:
        raise re.error(f"there is no group {escape[2:-1][:20]!a}")
    if escape[0] in "pP" and not is_pattern(part[0]):
        raise re.error(f"there is no property {part[0][:20]}")
    return "x" if len(escape) > 1 or escape.isdigit() else part[0]


def _check_ranges(members: str) -> None:
    found = _MEMBER.findall(members)
    for first, dash, last in zip(found, found[1:], found[2:], strict=False):
        if dash == "-" and len(first) == len(last) == 1 and first > last:
            raise re.error(f"bad character range {first}-{last}")
