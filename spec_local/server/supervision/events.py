"""Messages between the server and the process with the models. All can be pickled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_local.answers.gain import Gain
from spec_local.answers.marked import MarkedSpan
from spec_local.chat.messages import Message
from spec_local.engine.events import FinishReason, Statistics
from spec_local.errors import ContextOverflow, SpecLocalError
from spec_local.images.media import Media
from spec_local.settings import GenerationSettings

if TYPE_CHECKING:
    from spec_local.chat.tool_calls import ToolCall

Prompt = str | Sequence[int | str | Media]
"""Text, or token ids, texts and images in any order."""


@dataclass(frozen=True, slots=True)
class Infill:
    """A gap in a file that the answer fills.

    Attributes:
        prefix, suffix: the text before and after it. prompt: what follows the prefix.
        extra: names and texts of other files.
    """

    prefix: Prompt
    suffix: Prompt
    prompt: Prompt = ""
    extra: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A chat to answer, or a text to continue.

    Args:
        settings: of the answer.
        messages: a chat; empty: `prompt` is continued.
        tools: that the model may call, in OpenAI's form: ``{"type": "function", "function": {…}}``.
        tool_choice: ``auto``, ``none``, ``required``, or the name of the function to call.
        variables: of the chat template: see `ChatTemplate.with_variables`.
        parallel_tool_calls: the answer may have more than one call.
        warnings: sentences about the request for the client.
        prompt: text, token ids, images, or all of them mixed, to continue without a chat template.
        parse_special: the names of control tokens in texts of the prompt are these tokens.
        suffix: the text after a gap, which the answer fills after `prompt`.
        infill: a gap in place of a prompt.
        ignore_end: the answer goes on where the model would end it.
        marks: report which text was drafted: `Delta.spans`.
        text_bias: texts, with what is added to the logits of each of their tokens.
    """

    settings: GenerationSettings
    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    variables: Mapping[str, Any] = field(default_factory=dict)
    parallel_tool_calls: bool = True
    warnings: Sequence[str] = ()
    prompt: Prompt = ""
    parse_special: bool = False
    suffix: str | None = None
    infill: Infill | None = None
    ignore_end: bool = False
    marks: bool = False
    text_bias: Sequence[tuple[str, float]] = ()

    def check_length(self, n_ctx: int) -> None:
        """Raise ContextOverflow if there are more messages or token ids than a context has tokens."""
        ids = () if isinstance(self.prompt, str) else [part for part in self.prompt if isinstance(part, int)]
        n = max(len(self.messages), len(ids))  # a message has at least one token
        if n > n_ctx:
            message = f"the prompt has at least {n} tokens but the context has {n_ctx}: shorten it"
            raise ContextOverflow(message, n, n_ctx, is_exact=False)


@dataclass(frozen=True, slots=True)
class Reading:
    """A slot has been found, and a part of the prompt has been read.

    Attributes:
        n_prompt: tokens of the prompt.
        n_read, n_cached: those of them that have been read, and that were in the cache before.
        seconds: since the slot was found.
    """

    n_prompt: int
    n_read: int
    n_cached: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt has been read. n_prompt: its tokens; n_cached: those of them that were in the cache."""

    n_prompt: int
    n_cached: int


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token, with its log probability and those of the most probable ones if requested.

    piece: its bytes; characters may be divided among tokens.
    """

    id: int
    piece: bytes
    logprob: float | None = None
    top: "Sequence[Token]" = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """The parts that a step adds; any may be empty.

    Attributes:
        content, reasoning: text of the answer, and of the reasoning before it.
        tool_calls: new calls; their text is not part of the content. The last one may be incomplete.
        arguments: more of the arguments of the last call before; they precede everything else.
        tokens: generated in this step, without the end token.
        n_drafted, n_accepted: draft tokens that were verified, and accepted.
        draft_depth: length of the longest path of draft tokens; `n_drafted`, unless they are a tree.
        source: name of the proposer; ``none`` if there was no draft.
        spans: the parts of `reasoning` and `content`, in this order, if requested.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: "Sequence[ToolCall]" = ()
    arguments: str = ""
    tokens: Sequence[Token] = ()
    n_drafted: int = 0
    n_accepted: int = 0
    draft_depth: int = 0
    source: str = "none"
    spans: Sequence[MarkedSpan] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of an answer.

    Attributes:
        rest: text that was held back, and calls that ended with the answer.
        reason: ``stop`` (an end token or a stop string), ``length``, ``context`` (full) or ``cancelled``.
        stopping_word: the stop string that ended it, if any.
        statistics: of the answer.
        plain_seconds: seconds of a step without draft tokens; None: not measured.
        gain: what drafts gained; None: that is not known well enough.
        n_reread: tokens of the prompt that were read again: see `read_again`.
        reasoning_closed_at: see `Done`.
    """

    rest: Delta
    reason: FinishReason
    statistics: Statistics
    stopping_word: str = ""
    plain_seconds: float | None = None
    gain: Gain | None = None
    n_reread: int = 0
    reasoning_closed_at: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """The last event of an answer that cannot be generated."""

    error: SpecLocalError


Event = Reading | Started | Delta | Ended | Refused


@dataclass(frozen=True, slots=True)
class Loaded:
    """The models are ready.

    Attributes:
        name: of the main model, as clients name it. draft: of the draft model or head; None: there is none.
        n_ctx: context length of an answer in tokens. n_parallel: answers at the same time.
        template: the chat template; None: the model has none.
        properties: what /props tells besides.
        draft_path: the file of `draft`. offload: of the main model, as text.
        reads: the kinds of files that the main model's projector reads.
        image_hosts: from which the server fetches images: see `ImageHosts`.
    """

    name: str
    draft: str | None
    n_ctx: int
    n_parallel: int
    template: str | None
    properties: Mapping[str, Any] = field(default_factory=dict)
    draft_path: Path | None = None
    offload: str = "0"
    reads: Sequence[type[Media]] = ()
    image_hosts: Sequence[str] = ()
