"""Options that would have no effect beside others: errors, if they are given on the command line.

In the environment and the config file they are defaults, which need not apply to every command. With
--no-spec, which people add to a command line to compare, all of them may remain.
"""

from collections.abc import Callable, Mapping
from typing import Any

from spec_local.errors import InvalidRequest
from specdec_cli.settings import kind_of_source

_Values = Mapping[str, Any]


def _drafts(values: _Values) -> bool:
    return bool(values["proposer"] != "none" and values["policy"] != "off")


def _uses_draft_model(values: _Values) -> bool:
    return _drafts(values) and values["proposer"] in ("auto", "draft")


_NEEDED: dict[str, tuple[Callable[[_Values], bool], str]] = {
    "tree_nodes": (lambda values: values["shape"] != "chain", "--shape tree, beam or auto"),
    "beam_width": (lambda values: values["shape"] == "beam", "--shape beam"),
    "draft_p_min": (lambda values: values["policy"] == "confidence", "--policy confidence"),
    "draft_max": (_drafts, "a --proposer and a --policy that draft"),
    "verifier": (_drafts, "a --proposer and a --policy that draft"),
    "staged": (_uses_draft_model, "--proposer auto or draft"),
    "draft_vocab": (_uses_draft_model, "--proposer auto or draft"),
    "shape": (
        lambda values: values["shape"] == "auto" or _uses_draft_model(values),
        "--proposer auto or draft",
    ),
    "no_newline": (
        lambda values: not any(map(values.get, ("as_json", "as_jsonl", "answers", "input_file"))),
        "text output of one answer",
    ),
    "memory": (lambda values: len(values["model"] or ()) > 1, "several models"),
}
"""For each option, whether it has an effect among the values of all options, and what it needs for one."""
_SOURCES = "DEFAULT", "DEFAULT_MAP", "ENVIRONMENT", "COMMANDLINE"  # a later one takes precedence
_VARIED = ("sweep", "proposers", "policies")  # by these, a benchmark gives options several values


def switch_learning_off(ctx: Any) -> None:
    """Unset learning where --no-datastore, which says to keep nothing, takes precedence over it.

    Raises:
        InvalidRequest: both are on the command line.
    """
    if not ctx.params.get("learn") or ctx.params.get("datastore", True):
        return
    learn, datastore = (_SOURCES.index(kind_of_source(ctx, name)) for name in ("learn", "datastore"))
    if learn == datastore == _SOURCES.index("COMMANDLINE"):
        raise InvalidRequest("--learn needs the datastore: remove --no-datastore, or --learn")
    if datastore and datastore >= learn:
        ctx.params["learn"] = False


def check(ctx: Any) -> None:
    """Check the options of a command, in its click context.

    Raises:
        InvalidRequest: one of those on the command line has no effect.
    """
    values = ctx.params
    if values.get("no_spec") or any(values.get(name) for name in _VARIED):
        return
    for name, (has_effect, needed) in _NEEDED.items():
        if name in values and kind_of_source(ctx, name) == "COMMANDLINE" and not has_effect(values):
            option = f"--{name.replace('_', '-')}"
            raise InvalidRequest(f"{option} has no effect here: use {needed}, or remove {option}")
