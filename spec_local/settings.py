"""What a program or a person chooses for one answer, and the names that there are to choose from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from spec_local.core.sampling import SamplingSettings
from spec_local.errors import InvalidRequest
from spec_local.verifiers import VERIFIERS

ShapeName = Literal["chain", "tree", "beam", "auto"]
SHAPES: tuple[ShapeName, ...] = ("chain", "tree", "beam", "auto")
ProposerName = Literal["auto", "draft", "suffix", "lookup", "recycling", "none"]
PROPOSERS: tuple[ProposerName, ...] = ("auto", "draft", "suffix", "lookup", "recycling", "none")
CrossVocabName = Literal["auto", "tli", "slem"]
CROSS_VOCAB: tuple[CrossVocabName, ...] = ("auto", "tli", "slem")
PolicyName = Literal["adaptive", "fixed", "confidence", "entropy", "off"]
POLICIES: tuple[PolicyName, ...] = ("adaptive", "fixed", "confidence", "entropy", "off")
MAX_DRAFT = 64
"""Most tokens that may be guessed a step: main's context reserves one row of logits for each."""
MAX_STAGED = 8
"""Most tokens that a lookup may let the draft read along: its context reserves rows of logits for them."""
MAX_LOGPROBS = 20
CHAIN_VERIFIERS = [name for name, verifier in VERIFIERS.items() if verifier.drawing == "one"]
_USUAL_DRAFT = {"fixed": 4, "confidence": 16, "entropy": 16}
"""Tokens a step, by policy; adaptive: as many as pay."""
_SPEED = {"affects": "speed"}
"""Metadata of the settings that change how fast an answer comes, but not the distribution of the output."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """What a program or a person chooses for one answer.

    Args:
        sampling: shapes main's and the draft's distributions alike.
        seed: repeats an answer; None: a new one each time.
        max_tokens: most tokens to say; None: until the model ends its answer or the context is full.
        stops: strings that end the answer and are not part of it.
        proposer: ``draft`` (the draft model), ``suffix`` (all that followed the end of the text before), ``lookup`` (its last
            occurrence), ``recycling`` (what main has expected after the same token), ``none``; ``auto``: the policy
            chooses among those that may pay, step by step.
        policy: how far to guess. ``adaptive``: measured costs and learned chances decide, so that it loses little where
            guessing does not pay; ``fixed``: always `draft_max`; ``confidence``: as long as the draft is surer than `draft_p_min`;
            ``entropy``: as AdaEDL does; ``off``: no guesses.
        draft_max: most tokens to guess a step, one after the other; None: what suits the policy.
        draft_p_min: where policy ``confidence`` stops.
        staged: most tokens that prompt lookup lets the draft model read along, which spares it calls (see
            `spec_local.proposers.draft_model`), 0 to 8; None: as many as pay under policy ``adaptive``, else 0.
        shape: what a draft model guesses: a ``chain``, a ``tree`` or ``beam`` search; ``auto``: the adaptive policy chooses
            between chain and tree.
        tree_nodes: most guesses of a tree or of beams a step.
        beam_width: how many beams.
        verifier: a name of `spec_local.verifiers.VERIFIERS`, all of them exact; ``auto``: ``exact-match``, for a drawn tree
            ``traversal``. Under ``exact-match`` a seed says the same whatever was guessed, and without guesses.
        greedy_draft: guess the draft's most probable token instead of drawing from it.
        grammar: GBNF that the answer must follow (see `spec_local.grammar.gbnf`), from its first character to its end. An
            answer that `max_tokens`, a stop string or a full context cuts is the beginning of one that does.
        json_schema: JSON, instead of a grammar: the answer is JSON and valid under it (see `spec_local.grammar.json_schema`).
        logprobs: 0 to 20: tell each token's log probability and so many alternatives', as the model has them before sampling
            settings and grammar.
        cross_vocab: of a draft of another vocabulary. ``tli``: it guesses those of its tokens that main has, too; any
            shape, any verifier. ``slem``: it says what it likes, and main's tokenizer spells that again; chains under
            ``exact-match`` only. ``auto``: ``tli``.
    """

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    seed: int | None = None
    max_tokens: int | None = None
    stops: Sequence[str] = ()
    proposer: ProposerName = field(default="auto", metadata=_SPEED)
    policy: PolicyName = field(default="adaptive", metadata=_SPEED)
    draft_max: int | None = field(default=None, metadata=_SPEED)
    draft_p_min: float = field(default=0.75, metadata=_SPEED)
    staged: int | None = field(default=None, metadata=_SPEED)
    shape: ShapeName = field(default="chain", metadata=_SPEED)
    tree_nodes: int = field(default=16, metadata=_SPEED)
    beam_width: int = field(default=4, metadata=_SPEED)
    verifier: str = field(default="auto", metadata=_SPEED)
    greedy_draft: bool = field(default=False, metadata=_SPEED)
    cross_vocab: CrossVocabName = field(default="auto", metadata=_SPEED)
    grammar: str | None = None
    json_schema: str | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.proposer not in PROPOSERS:
            raise InvalidRequest(f"proposer {self.proposer!r} is unknown: give {', '.join(PROPOSERS)}")
        if self.policy not in POLICIES:
            raise InvalidRequest(f"policy {self.policy!r} is unknown: give {', '.join(POLICIES)}")
        if self.shape == "auto" and self.policy not in ("adaptive", "off"):
            raise InvalidRequest(f"shape auto is for policy adaptive: with {self.policy} give chain or tree")
        if self.cross_vocab not in CROSS_VOCAB:
            raise InvalidRequest(
                f"cross-vocab {self.cross_vocab!r} is unknown: give {', '.join(CROSS_VOCAB)}"
            )
        if self.cross_vocab == "slem" and (
            self.shape != "chain" or self.verifier not in ("auto", "exact-match")
        ):
            raise InvalidRequest(
                "cross-vocab slem needs shape chain and verifier exact-match: give tli for others"
            )
        if not 0 <= self.draft_p_min <= 1:  # catches NaN too
            raise InvalidRequest(f"draft-p-min is {self.draft_p_min}: give 0 to 1")
        if self.shape not in SHAPES:
            raise InvalidRequest(f"shape {self.shape!r} is unknown: give {', '.join(SHAPES)}")
        if self.verifier != "auto" and self.verifier not in VERIFIERS:
            raise InvalidRequest(f"verifier {self.verifier!r} is unknown: give auto, {', '.join(VERIFIERS)}")
        if self.shape == "tree" and self.verifier in CHAIN_VERIFIERS:
            raise InvalidRequest(
                f"verifier {self.verifier} judges chains only: give auto or traversal for a tree"
            )
        for name, value, low in [
            ("draft-max", self.draft_max, 0),
            ("tree-nodes", self.tree_nodes, 1),
            ("beam-width", self.beam_width, 1),
        ]:
            if value is not None and not low <= value <= MAX_DRAFT:
                raise InvalidRequest(f"{name} is {value}: give {low} to {MAX_DRAFT}")
        if self.staged is not None and not 0 <= self.staged <= MAX_STAGED:
            raise InvalidRequest(f"staged is {self.staged}: give 0 to {MAX_STAGED}")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequest(f"max-tokens is {self.max_tokens}: give 0 or more")
        if self.seed is not None and self.seed < 0:
            raise InvalidRequest(f"seed is {self.seed}: give 0 or more")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs is {self.logprobs}: give 0 to {MAX_LOGPROBS}")
        if self.grammar is not None and self.json_schema is not None:
            raise InvalidRequest("an answer cannot follow a grammar and a JSON schema: give one of them")
        if self.json_schema is not None:  # a wrong schema is known before any model is loaded
            from spec_local.grammar.matcher import check_json_schema

            check_json_schema(self.json_schema)

    @property
    def constrained(self) -> bool:
        """Whether the answer must follow a grammar."""
        return self.grammar is not None or self.json_schema is not None

    @property
    def rule(self) -> str:
        """The name of the rule that judges, and what ``auto`` means.

        Membership takes the most probable nodes of all at temperature 0, and above coupled chains, which are accepted
        about as often as drawn ones and may be cut anywhere. Trees have no coupling: they are drawn.
        """
        if self.verifier != "auto":
            return self.verifier
        drawn = self.shape in ("tree", "auto") and self.sampling.temperature > 0
        return "traversal" if drawn else "exact-match"

    @property
    def longest_path(self) -> int:
        """Most tokens to guess a step, one after the other, and what None means."""
        if self.draft_max is not None:
            return self.draft_max
        if self.shape in ("tree", "beam"):
            return 8
        return _USUAL_DRAFT.get(self.policy, MAX_DRAFT)
