"""A conversation: its messages and their tokens, with each answer's tokens kept as the model generated them.

For each turn the whole conversation is rendered, but only new text is tokenized. Tokenizing the text of an
answer again could split it differently, and the KV cache would be invalid from there on. An answer after
reasoning is tokenized: most templates leave out the reasoning of earlier answers, so that the answer must be
read again anyway, and the KV cache is valid up to the question. With `as_generated`, its tokens are kept for
templates that show it. Removing messages
needs no extra work: the tokens before them stay the same, and `Session.generate` reuses the longest prefix
that the KV cache shares with a prompt.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import InstanceOf

from spec_local.answers.text import Done, Text
from spec_local.arguments import Int32, checked
from spec_local.chat.meaning import meaning_of
from spec_local.chat.messages import Message, check_last, messages_of
from spec_local.chat.rendered import Rendered
from spec_local.chat.template import ChatTemplate
from spec_local.chat.tool_calls import ToolCallParser
from spec_local.chat.tool_use import ToolUse
from spec_local.errors import ContextOverflow, InvalidRequest
from spec_local.images.media import Media
from spec_local.llama.model import Model
from spec_local.llama.vocabulary import Vocabulary
from spec_local.reasoning.markers import Splitter
from spec_local.text import bytes_of

_Event = TypeVar("_Event")
_MORE = 1024
"""Bytes by which a template may write an answer longer than twice what the model generated."""


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """The tokens of an answer, as generated.

    offset: bytes of the rendered conversation before the answer. tokens: those that spell its text.
    """

    offset: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of the rendered conversation; its tokens stay valid as long as the part does.

    answer: index of the message; -1: the text between two answers, which is tokenized as a whole. shown:
    what the template writes in place of an answer, up to and with the end token; n_shown: bytes without it.
    """

    part: Rendered
    tokens: list[int]
    answer: int = -1
    shown: Rendered | None = None
    n_shown: int = 0

    def is_still(self, part: Rendered) -> bool:
        """Return whether the tokens are those of a part of the conversation as it is now."""
        return part == self.part if self.answer < 0 else part.text == self.part.text


class Conversation:
    """Messages and their tokens.

    Args:
        tool_use: the tools of the next answer.
        n_ctx: length of the context; a prompt that is certainly longer is refused before it is tokenized.
            None: it may have any length.

    Raises:
        InvalidRequest: a message is incomplete or wrong.
    """

    @checked
    def __init__(
        self,
        model: Model,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, object]] = (),
        tool_use: ToolUse | None = None,
        n_ctx: Int32 | None = None,
    ) -> None:
        self.model, self.template, self.n_ctx = model, template, n_ctx
        self.messages, self.tool_use = messages_of(messages), tool_use
        self.last_answer: Message | None = None
        """The answer to the last `prompt`; None: it has not ended."""
        self._segments: list[_Segment] = []
        self._as_generated = False

    @property
    def system(self) -> str | None:
        """The system message. After a change, both models read the whole conversation again.

        Raises:
            ModelError: on assignment; the template fails. Nothing has changed.
        """
        return self.messages[0]["content"] if self._n_system else None

    @system.setter
    @checked
    def system(self, content: str | None) -> None:
        message: list[Message] = [] if content is None else [{"role": "system", "content": content}]
        self.template.render([*message, {"role": "user", "content": "?"}])
        self.messages[: self._n_system] = message
        self._segments = []

    @property
    def _n_system(self) -> int:
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    def following(
        self,
        messages: Sequence[Mapping[str, object]],
        tool_use: ToolUse | None = None,
        *,
        as_generated: bool = False,
    ) -> "Conversation":
        """Another conversation with the same model, which keeps the tokens of what both begin with.

        Args:
            as_generated: an answer that means the same as what the model generated has its tokens, too: it
                may have other white space, and its calls other ids and another order of keys.

        Raises:
            InvalidRequest: a message is incomplete or wrong.
        """
        following = Conversation(self.model, self.template, messages, tool_use, self.n_ctx)
        following._segments, following._as_generated = [*self._segments], as_generated
        return following

    @checked
    def ask(self, content: str, images: Sequence[tuple[int, InstanceOf[Media]]] = ()) -> list[int]:
        """Add a user message.

        Args:
            images: with their places, as in `Message`.

        Returns:
            the tokens of the whole conversation, up to the start of the answer.

        Raises:
            ModelError: the template rejects the message; it is not added.
            InvalidRequest: the message is not valid text, or too long; it is not added.
        """
        self.messages += messages_of([{"role": "user", "content": content, "images": images}])
        try:
            return self.prompt()
        except BaseException:
            self.messages.pop()
            raise

    def prompt(self) -> list[int]:
        """The tokens up to the start of the answer to the last message; one of the assistant is continued.

        Raises:
            InvalidRequest: there is no message, or the last one calls tools.
            ModelError: the template rejects these messages.
            ContextOverflow: they are certainly longer than the context.
        """
        self.last_answer = None
        if self.n_ctx is not None and len(self.messages) > self.n_ctx:
            raise ContextOverflow(
                f"there are {len(self.messages)} messages but the context has {self.n_ctx} tokens: give fewer"
            )
        rendered = self.rendered
        self.model.vocabulary.check_length(rendered.text, self.n_ctx)
        self._update(rendered)
        return self.tokens

    @property
    def rendered(self) -> Rendered:
        """The text of the prompt; raises as `prompt` does."""
        return self.tool_use.render(self.messages) if self.tool_use else self.template.prompt(self.messages)

    @property
    def tokens(self) -> list[int]:
        """The known tokens: those of the last `prompt` and its answer, or those that `restore` accepted."""
        return [token for segment in self._segments for token in segment.tokens]

    @checked
    def answer(self, content: str, tokens: Sequence[int], reasoning: str = "") -> None:
        """Add the model's answer to the last `prompt`, or what continues it; it may be incomplete.

        Args:
            content: the text, without a stop string that ended it, and without the reasoning. Calls in it
                become those of the message.
            tokens: without the end token; those that do not spell the content are ignored.
            reasoning: the text before the content, if the model reasons; see `splitter`.

        Raises:
            InvalidRequest: there is nothing to answer, or a text is not valid Unicode.
        """
        check_last(self.messages)
        whole = Rendered.of(content, [(0, len(content))])
        bytes_of(reasoning)  # checks it
        found = self.parser().finish(content)
        is_continued = self.messages[-1]["role"] == "assistant"
        message: Message = self.messages.pop() if is_continued else {"role": "assistant", "content": ""}
        text = bytes_of(message["content"] + found.text)  # joins the halves of a character
        message = message | {"content": text.decode("utf-8", "surrogateescape")}
        if found.calls:
            message["tool_calls"] = [call.message for call in found.calls]
        if reasoning:
            message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
            if self._as_generated and not is_continued:
                self._keep_reasoning(content, tokens, reasoning)
        elif self._segments and (spelled := _spelled(self.model.vocabulary, tokens, whole)):
            part, kept = spelled
            if self._segments[-1].answer == len(self.messages):  # it is continued
                begun = self._segments.pop()
                part, kept = begun.part + part, begun.tokens + kept
            self._segments.append(_Segment(part, kept, len(self.messages)))
        self.messages.append(message)
        self.last_answer = message

    def _keep_reasoning(self, content: str, tokens: Sequence[int], reasoning: str) -> None:
        """Keep the tokens of an answer with its reasoning, for templates that show it."""
        piece = self.model.vocabulary.piece
        text = b"".join([piece(token, special=True) for token in tokens])
        whole = Rendered(text, bytes([1]) * len(text))
        if self._segments and self._splitter_here().finish(str(whole)) == (reasoning, content):
            self._segments.append(_Segment(whole, list(tokens), len(self.messages)))

    def _splitter_here(self) -> Splitter:
        """A splitter of the text that follows the known tokens."""
        return self.template.splitter((), [t for segment in self._segments[-2:] for t in segment.tokens])

    def splitter(self) -> Splitter:
        """A splitter of the text that the model generates after the last `prompt`."""
        return self.template.splitter(self.messages, self.tokens)

    def parser(self, *, partial: bool = False) -> ToolCallParser:
        """A parser of the tool calls in an answer without its reasoning; partial: see `ToolCallParser`."""
        return self.tool_use.parser(partial=partial) if self.tool_use else ToolCallParser(partial=partial)

    def answered(
        self, events: Generator[_Event, None, None], splitter: Splitter
    ) -> Generator[_Event, None, None]:
        """Yield the events of the answer to the last `prompt`, and add the answer when they end."""
        reader = AnswerReader(self, splitter)
        try:
            for event in events:
                yield reader.read(event)
        finally:
            events.close()
            reader.end()

    def undo(self) -> str | None:
        """Remove the last question and its answer, if there is one.

        Returns:
            the question; None: there is none.
        """
        questions = self._questions
        if not questions:
            return None
        content = self.messages[questions[-1]]["content"]
        del self.messages[questions[-1] :]
        return content

    def undo_answer(self) -> list[int]:
        """Remove the last answer and keep its question.

        Returns:
            the tokens up to the start of the answer.

        Raises:
            InvalidRequest: the last message is not an answer.
        """
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise InvalidRequest("there is no answer to replace: ask something first")
        answer = self.messages.pop()
        try:
            return self.prompt()
        except BaseException:
            self.messages.append(answer)
            raise

    def clear(self) -> None:
        """Remove all messages except the system message."""
        del self.messages[self._n_system :]

    def drop_oldest(self) -> int:
        """Remove the oldest question and its answer, but never the system message or the last question.

        Both models read everything after the system message again.

        Returns:
            number of messages removed.
        """
        questions = self._questions
        if len(questions) < 2:
            return 0
        first = self._n_system
        del self.messages[first : questions[1]]
        self._segments = []  # the indices of the messages have changed
        return questions[1] - first

    @property
    def _questions(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]

    @property
    def answer_tokens(self) -> dict[int, AnswerTokens]:
        """The tokens of the answers that are known as generated, by index of the message."""
        found, offset = {}, 0
        for segment in self._segments:
            if 0 <= segment.answer < len(self.messages):
                found[segment.answer] = AnswerTokens(offset, segment.tokens)
            offset += len(segment.part)
        return found

    @checked
    def restore(self, answers: Mapping[int, AnswerTokens]) -> None:
        """Use saved tokens for these answers, in place of tokenizing their text.

        Tokens that do not spell the text at their offset are ignored, and so are all answers after them.
        Control tokens spell nothing, so that a file could hide the end of an answer and a forged turn in
        them: they are treated alike.

        Raises:
            ModelError: the template rejects these messages.
        """
        rendered = self.template.render(self.messages) if answers else Rendered(b"", b"")
        vocabulary = self.model.vocabulary
        self._segments, end = [], 0
        for index, answer in sorted(answers.items()):
            if max(answer.tokens, default=0) >= vocabulary.n_tokens:
                break
            if any(map(vocabulary.is_control, answer.tokens)):
                break
            spelled = _spelled(vocabulary, answer.tokens, rendered, answer.offset)
            if answer.offset <= end or not spelled or len(spelled[1]) < len(answer.tokens):
                break
            self._tokenize(rendered[end : answer.offset])
            self._segments.append(_Segment(*spelled, index))
            end = answer.offset + len(spelled[0])

    def _update(self, rendered: Rendered) -> None:
        """Set the segments to those of this text: keep the ones it starts with and tokenize the rest."""
        end, segments, self._segments = 0, self._segments, []
        for segment in segments:
            if not segment.is_still(rendered[end : end + len(segment.part)]):
                if same := self._as_shown(segment, rendered, end):  # the model reads what it wrote
                    rendered = rendered[:end] + same.part + rendered[end + same.n_shown :]
                    self._segments.append(same)
                    end += len(same.part)
                    continue
                # Some templates strip answers, or remove their reasoning.
                if segment.answer >= 0 and (
                    spelled := _spelled(self.model.vocabulary, segment.tokens, rendered, end)
                ):
                    self._segments.append(_Segment(*spelled, segment.answer))
                    end += len(spelled[0])
                break
            self._segments.append(segment)
            end += len(segment.part)
        if end < len(rendered):
            # From the end of the last answer, so that tokens depend only on the text and the answers.
            if self._segments and self._segments[-1].answer < 0:
                end -= len(self._segments.pop().part)
            self._tokenize(rendered[end:])

    def _as_shown(self, segment: _Segment, rendered: Rendered, start: int) -> _Segment | None:
        """The segment of an answer, if the one that begins here means the same; None: it does not."""
        before = self._segments[-1].part.is_content[-1:] if self._segments else b""
        if not self._as_generated or segment.answer < 0 or before != b"\0":  # after content, it is continued
            return None
        if segment.shown and rendered[start : start + len(segment.shown)] == segment.shown:
            return segment
        rest = rendered[start : start + 2 * len(segment.part) + _MORE]
        n, end = self._n_answer(rest)
        if not end:
            return None
        tools = self.tool_use.tools if self.tool_use else ()
        source = self.template.source
        written, generated = (
            meaning_of(str(part), source, self._splitter_here(), tools) for part in (rest[:n], segment.part)
        )
        return replace(segment, shown=rest[:end], n_shown=n) if written == generated else None

    def _n_answer(self, rest: Rendered) -> tuple[int, int]:
        """Bytes before and after the end token that the template writes after an answer; 0: there is none."""
        vocabulary = self.model.vocabulary
        end = next(filter(vocabulary.is_end, rest.tokens(vocabulary, is_start=False)), None)
        name = b"" if end is None else vocabulary.text(end)
        at = rest.text.find(name) if name else -1
        while at >= 0 and any(rest.is_content[at : at + len(name)]):
            at = rest.text.find(name, at + 1)
        return (at, at + len(name)) if at >= 0 else (0, 0)

    def _tokenize(self, part: Rendered) -> None:
        tokens = part.tokens(
            self.model.vocabulary, is_start=not self._segments, image_tokens=self.model.image_tokens
        )
        self._segments.append(_Segment(part, tokens))


class AnswerReader:
    """Reads the events of the answer to the last `prompt` of a conversation, and adds the answer to it.

    Args:
        splitter: of the answer; it has read nothing of it.
    """

    def __init__(self, conversation: Conversation, splitter: Splitter) -> None:
        self._conversation, self._splitter = conversation, splitter
        self._content, self._tokens, self._is_over = "", list[int](), False

    def read(self, event: _Event) -> _Event:
        """The event; the last one with the answer as a message."""
        if isinstance(event, Text):
            self._content += event.text
            self._tokens += event.tokens
        elif isinstance(event, Done):
            self.end(is_whole=event.reason != "cancelled")
            return replace(event, message=self._conversation.last_answer)
        return event

    def end(self, *, is_whole: bool = False) -> None:
        """Add what was generated; nothing, too, if the answer is whole."""
        if not self._is_over and (self._tokens or is_whole):
            parts = self._splitter.finish(self._content)
            self._conversation.answer(parts.answer, self._tokens, parts.reasoning)
        self._is_over = True


def _spelled(
    vocabulary: Vocabulary, tokens: Sequence[int], rendered: Rendered, start: int = 0
) -> tuple[Rendered, list[int]] | None:
    """The longest prefix of the tokens that spells whole characters of the text from `start` on.

    Returns:
        the text that it spells, and its tokens; None: it is empty.
    """
    text = rendered.text
    n, end, position = 0, start, start
    for i, token in enumerate(tokens, 1):
        piece = vocabulary.piece(token)
        if not piece and text.startswith(name := vocabulary.piece(token, special=True), position):
            piece = name  # the template writes a control token of a call
        if not text.startswith(piece, position):
            break
        position += len(piece)
        if not piece:
            continue  # a control token belongs to the text after it
        if position == len(text) or text[position] & 0xC0 != 0x80:  # the next byte starts a character
            n, end = i, position
    else:
        if end == position:
            n = len(tokens)
    return (rendered[start:end], list(tokens[:n])) if end > start else None
