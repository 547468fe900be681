"""The settings of one answer."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from spec_local.arguments import checked_fields, similar
from spec_local.core.proposal import MAX_DRAFT, MAX_STAGED
from spec_local.core.sampling_settings import SamplingSettings
from spec_local.errors import InvalidRequest
from spec_local.grammar.lark import RuleSet
from spec_local.policies import POLICIES, POLICY_NAMES
from spec_local.proposers import PROPOSER_NAMES, SHAPE_NAMES
from spec_local.verifiers import VERIFIERS

MAX_LOGPROBS = 20
CHAIN_VERIFIERS = [name for name, verifier in VERIFIERS.items() if verifier.drawing == "one"]
_TREE_DEPTH = 8  # default maximum depth of trees and beams: deeper nodes are rarely accepted
_SPEED = {"affects": "speed"}
"""Metadata of settings that affect the speed of an answer but not its distribution."""
_Natural = Annotated[int, Field(ge=0)]
_Nodes = Annotated[int, Field(ge=1, le=MAX_DRAFT)]


def _text_of(schema: object) -> object:
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping):
        raise PydanticCustomError("schema", "a dict or text")
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise PydanticCustomError("schema", "what JSON can hold ({why})", {"why": str(error)}) from None


_Schema = Annotated[str, BeforeValidator(_text_of)]


@checked_fields
@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """The settings of one answer; every value is validated.

    Args:
        sampling: sampling settings for both the main and the draft model.
        seed: random seed; the same seed gives the same output for the same drafts. With verifier
            ``exact-match``, the drafts may differ if logits do not depend on the size of a call (see
            `reproducible` of `Session.open`). None: a new seed for each answer.
        max_tokens: maximum number of tokens to generate; None: until the model ends its answer or the context
            is full.
        stops: strings that end the answer; they are not part of it.
        min_indent: number of spaces and tabs with which each line but the first must begin; the answer ends
            before a line with fewer, such as an empty one.
        max_seconds: time from the first token, in seconds, after which the answer ends at the next line
            break; None: no limit.
        proposer: ``draft`` (the draft model), ``suffix`` (a suffix automaton over the whole context),
            ``lookup`` (prompt lookup: the last occurrence), ``recycling`` (tokens that the main model
            predicted after the same token before), ``none``; ``auto``: in each step, the policy chooses among
            those that may pay. Also the name of a lookup of another package: see docs/architecture.md.
        policy: how many tokens to draft. ``adaptive``: as many as measured costs and learned acceptance rates
            justify; ``fixed``: always `draft_max`; ``confidence``: until the draft model's confidence falls
            below `draft_p_min`; ``off``: none.
        draft_max: maximum number of draft tokens on a path; None: the policy's default.
        draft_p_min: minimum confidence for policy ``confidence``, 0 to 1.
        staged: maximum number of lookup tokens that the draft model reads ahead in one call (see
            `spec_local.proposers.draft_model`), 0 to 8.
        shape: shape of the draft model's proposals: ``chain``, ``tree`` or ``beam``; ``auto``: the adaptive
            policy chooses between chains and trees.
        tree_nodes: maximum number of nodes in a tree or in all beams together.
        beam_width: number of beams.
        verifier: a name in `spec_local.verifiers.VERIFIERS`; all of them are lossless. ``auto`` is
            ``exact-match``, with which drafts change the output of a seed only through the logits.
        grammar: GBNF that the whole answer must match (see `spec_local.grammar.gbnf`); in a chat, without the
            reasoning before it. An answer that is cut short by `max_tokens`, a stop string or a full context
            is the beginning of a matching one.
        json_schema: a JSON schema instead of a grammar (see `spec_local.grammar.json_schema`), as a dict or
            as its text.
        reasoning_budget: maximum number of tokens of the reasoning before the answer; up to three more
            complete a character that the limit would split. None: under a grammar, half of the tokens that
            the answer may have; otherwise no limit. It has no effect for models that do not reason, and under
            a grammar for prompts that are not chats.
        call_grammar: a grammar of tool calls, which `spec_local.chat.tool_use` writes.
        control_text: control tokens whose names are part of the answer's text, such as ``[TOOL_CALLS]``;
            others have no text.
        logprobs: number of alternatives whose log probabilities to report for each token, 0 to 20, before
            sampling settings and grammar; None: report no log probabilities.
        sampled_logprobs: report the log probabilities after sampling settings and grammar instead.

    Raises:
        InvalidRequest: a value is out of range or has the wrong type, or two settings exclude each other.
    """

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    seed: _Natural | None = None
    max_tokens: _Natural | None = None
    stops: Sequence[str] = ()
    min_indent: _Natural = 0
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    proposer: str = field(default="auto", metadata=_SPEED)
    policy: str = field(default="adaptive", metadata=_SPEED)
    draft_max: Annotated[int, Field(ge=0, le=MAX_DRAFT)] | None = field(default=None, metadata=_SPEED)
    draft_p_min: Annotated[float, Field(ge=0, le=1)] = field(default=0.75, metadata=_SPEED)
    staged: Annotated[int, Field(ge=0, le=MAX_STAGED)] = field(default=0, metadata=_SPEED)
    shape: str = field(default="chain", metadata=_SPEED)
    tree_nodes: _Nodes = field(default=16, metadata=_SPEED)
    beam_width: _Nodes = field(default=4, metadata=_SPEED)
    verifier: str = field(default="auto", metadata=_SPEED)
    grammar: str | None = None
    json_schema: _Schema | None = None
    reasoning_budget: _Natural | None = None
    call_grammar: RuleSet | None = None
    control_text: Sequence[str] = ()
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    sampled_logprobs: bool = False

    def __post_init__(self) -> None:
        proposers: Sequence[str] = PROPOSER_NAMES
        if self.proposer not in proposers:
            from spec_local import installed

            proposers = installed.known_names()
            if self.proposer in proposers:
                installed.load(self.proposer)  # fail before any model is loaded
        for name, value, known in (
            ("proposer", self.proposer, proposers),
            ("policy", self.policy, POLICY_NAMES),
            ("shape", self.shape, SHAPE_NAMES),
            ("verifier", self.verifier, ("auto", *VERIFIERS)),
        ):
            if value not in known:
                raise InvalidRequest(f"{name} {value!r} is unknown: give {', '.join(known)}")
        if self.shape == "auto" and self.policy not in ("adaptive", "off"):
            raise InvalidRequest(f"shape auto needs policy adaptive: with {self.policy} give chain or tree")
        if self.shape == "tree" and self.verifier in CHAIN_VERIFIERS:
            raise InvalidRequest(
                f"verifier {self.verifier} verifies chains only: give auto or traversal for a tree"
            )
        if self.shape == "beam" and self.verifier not in ("auto", "exact-match"):
            raise InvalidRequest(
                f"verifier {self.verifier} verifies drawn tokens, which beams are not: give auto for beams"
            )
        if self.grammar is not None and self.json_schema is not None:
            raise InvalidRequest("an answer cannot follow a grammar and a JSON schema: give one of them")
        if self.json_schema is not None:  # fail before any model is loaded
            from spec_local.grammar.matcher import check_json_schema

            check_json_schema(self.json_schema)

    def changed(self, **changes: Any) -> "GenerationSettings":
        """Return the settings with other values, by name, including those of `sampling`.

        Raises:
            TypeError: there is no setting of this name.
        """
        of_sampling = {each.name for each in fields(SamplingSettings)}
        known = of_sampling | {each.name for each in fields(GenerationSettings)}
        for name in changes.keys() - known:
            raise TypeError(f"there is no setting {name!r}{similar(name, known)}")
        sampling = {name: changes.pop(name) for name in of_sampling & changes.keys()}
        if sampling:
            changes["sampling"] = replace(changes.get("sampling", self.sampling), **sampling)
        return replace(self, **changes) if changes else self

    def without(self, tokens: Iterable[int]) -> "GenerationSettings":
        """Return the settings with which an answer has none of these tokens."""
        bias = dict(self.sampling.logit_bias) | dict.fromkeys(tokens, -math.inf)
        return replace(self, sampling=replace(self.sampling, logit_bias=bias))

    @property
    def constrained(self) -> bool:
        """True if the answer must follow a grammar."""
        return any(each is not None for each in (self.grammar, self.json_schema, self.call_grammar))

    @property
    def rule(self) -> str:
        """Name of the verifier; resolves ``auto``.

        Exact match allows trees of the most probable tokens at temperature 0, and Gumbel-coupled ones above
        it, which are accepted about as often as drawn ones and may be truncated anywhere.
        """
        return "exact-match" if self.verifier == "auto" else self.verifier

    @property
    def longest_path(self) -> int:
        """Maximum number of draft tokens on a path; resolves None."""
        if self.draft_max is not None:
            return self.draft_max
        if self.shape in ("tree", "beam"):
            return _TREE_DEPTH
        if self.policy == "off":
            return 0
        default: int = POLICIES[self.policy].draft_max
        return default
