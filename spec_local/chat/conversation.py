"""Chat templates, and conversations that keep the tokens they have said.

A conversation is rendered anew for each turn, but only the text that is new is tokenized: the tokens of an
answer are kept as the model said them. Tokenizing an answer's text again can cut it differently, and then the
KV cache of everything after that place would be lost. To go back is then no work at all: the tokens before that
place are the same as they were, and `Session.generate` keeps what its caches share with a prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from spec_local.core.text import bytes_of
from spec_local.errors import InvalidRequest, ModelError
from spec_local.llama.model import Model
from spec_local.llama.vocabulary import Vocabulary


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


class ChatTemplate:
    """Renders messages with the template that the model's file carries.

    Raises:
        ModelError: the file has no template, or one that is no valid Jinja.
    """

    def __init__(self, model: Model) -> None:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        template = model.chat_template
        if not template:
            raise ModelError(f"{model.path} has no chat template: use specdec generate --raw")
        vocabulary = model.vocabulary
        self._bos = vocabulary.text(vocabulary.bos).decode("utf-8", "replace") if vocabulary.bos >= 0 else ""
        eos = vocabulary.text(vocabulary.eos).decode("utf-8", "replace") if vocabulary.eos >= 0 else ""
        self._adds_bos = vocabulary.add_bos
        try:
            self._formatter = Jinja2ChatFormatter(template, eos_token=eos, bos_token=self._bos)
        except Exception as error:  # jinja2 raises what it likes on a broken template
            raise ModelError(f"the chat template of {model.path} is broken ({error}): use --raw") from None

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt text up to where the answer begins.

        Raises:
            ModelError: the template refuses these messages (some know no system message).
        """
        try:
            text: str = self._formatter(messages=list(messages)).prompt
        except Exception as error:  # a template raises by itself, or trips over what it did not expect
            raise ModelError(f"the model's chat template refuses this conversation ({error})") from None
        # The tokenizer adds the beginning-of-sequence token by itself; twice would confuse the model.
        return text.removeprefix(self._bos) if self._adds_bos and self._bos else text


@dataclass(frozen=True, slots=True)
class Said:
    """An answer as the model said it.

    at: bytes of the conversation's text before it. tokens: as far as they spell the answer.
    """

    at: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _Part:
    """A stretch of the conversation's text whose tokens can be kept as long as the text stays.

    answer: the number of the message that it says; −1: what the template puts around answers, tokenized as a whole.
    """

    text: bytes
    tokens: list[int]
    answer: int = -1


@dataclass
class Conversation:
    """Messages, and the tokens that they became."""

    model: Model
    template: ChatTemplate
    messages: list[Message] = field(default_factory=list)
    _parts: list[_Part] = field(default_factory=list)

    @property
    def system(self) -> str | None:
        """The system message. With another one, all of the conversation must be read again.

        Raises:
            ModelError: on setting; the template knows no system message, and nothing has changed.
        """
        return self.messages[0]["content"] if self._n_system else None

    @system.setter
    def system(self, content: str | None) -> None:
        message: list[Message] = [] if content is None else [{"role": "system", "content": content}]
        self.template.render([*message, {"role": "user", "content": "?"}])
        self.messages[: self._n_system] = message
        self._parts = []

    @property
    def _n_system(self) -> int:
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    def ask(self, content: str) -> list[int]:
        """Add a user message.

        Returns:
            the tokens of the whole conversation, up to where the answer begins.

        Raises:
            ModelError: the template refuses it; it is not part of the conversation then.
            InvalidRequest: it is no text, or too long; likewise.
        """
        self.messages.append({"role": "user", "content": content})
        try:
            return self.prompt()
        except BaseException:
            self.messages.pop()
            raise

    def prompt(self) -> list[int]:
        """The tokens up to where the answer to the last question begins.

        Raises:
            InvalidRequest: the last message is no question.
            ModelError: the template refuses these messages.
        """
        self._check_asked()
        self._read(self.template.render(self.messages))
        return self.tokens

    @property
    def tokens(self) -> list[int]:
        """Those that are known: of the last `prompt`, and of an answer to it, or what `recall` knew."""
        return [token for part in self._parts for token in part.tokens]

    def answer(self, content: str, tokens: Sequence[int]) -> None:
        """Add what the model said to the last `prompt`, as far as it came.

        Args:
            content: the text; cut where a stop string was.
            tokens: without the end token. Those that say more than the content are left out.

        Raises:
            InvalidRequest: the last message is no question.
        """
        self._check_asked()
        if self._parts and (said := _spelling(self.model.vocabulary, tokens, bytes_of(content))):
            self._parts.append(_Part(*said, len(self.messages)))
        self.messages.append({"role": "assistant", "content": content})

    def withdraw(self) -> str | None:
        """Take the last question back, with its answer if it has one.

        Returns:
            the question; None: there is none.
        """
        questions = self._questions
        if not questions:
            return None
        content = self.messages[questions[-1]]["content"]
        del self.messages[questions[-1] :]
        return content

    def retry(self) -> list[int]:
        """Take the last answer back, and nothing else.

        Returns:
            the tokens up to where it began.

        Raises:
            InvalidRequest: there is no answer.
        """
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise InvalidRequest("there is no answer to take back: ask something first")
        answer = self.messages.pop()
        try:
            return self.prompt()
        except BaseException:
            self.messages.append(answer)
            raise

    def clear(self) -> None:
        """Forget everything but the system message."""
        del self.messages[self._n_system :]

    def forget_oldest(self) -> int:
        """Drop the oldest question and its answer; the system message and the last question stay.

        What comes after the system message must be read again.

        Returns:
            how many messages went; 0: none can go.
        """
        questions = self._questions
        if len(questions) < 2:
            return 0
        first = self._n_system
        del self.messages[first : questions[1]]
        self._parts = []  # the messages have other numbers now
        return questions[1] - first

    def _check_asked(self) -> None:
        if not self.messages or self.messages[-1]["role"] != "user":
            raise InvalidRequest("there is no question to answer: ask one")

    @property
    def _questions(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]

    @property
    def said(self) -> dict[int, Said]:
        """The answers that are known as the model said them, by the numbers of their messages."""
        found, at = {}, 0
        for part in self._parts:
            if 0 <= part.answer < len(self.messages):
                found[part.answer] = Said(at, part.tokens)
            at += len(part.text)
        return found

    def recall(self, said: Mapping[int, Said]) -> None:
        """Have answers again as they were said once.

        What does not spell the text that it is said to be is left out, with all that comes after it.

        Raises:
            ModelError: the template refuses these messages.
        """
        text = bytes_of(self.template.render(self.messages)) if said else b""
        vocabulary = self.model.vocabulary
        self._parts, at = [], 0
        for number, answer in sorted(said.items()):
            if max(answer.tokens, default=0) >= vocabulary.n_tokens:
                break
            spelled = _spelling(vocabulary, answer.tokens, text, answer.at)
            if answer.at <= at or not spelled or len(spelled[1]) < len(answer.tokens):
                break
            self._tokenize(text[at : answer.at])
            self._parts.append(_Part(*spelled, number))
            at = answer.at + len(spelled[0])

    def _read(self, rendered: str) -> None:
        """Let the parts be those of this text: keep what it begins with, and tokenize the rest."""
        text, at = bytes_of(rendered), 0
        parts, self._parts = self._parts, []
        for part in parts:
            if not text.startswith(part.text, at):
                # A template may trim an answer, or leave thoughts out.
                if part.answer >= 0 and (said := _spelling(self.model.vocabulary, part.tokens, text, at)):
                    self._parts.append(_Part(*said, part.answer))
                    at += len(said[0])
                break
            self._parts.append(part)
            at += len(part.text)
        if at < len(text):
            # As a whole up to the answer before it, so that the tokens follow from text and answers alone.
            if self._parts and self._parts[-1].answer < 0:
                at -= len(self._parts.pop().text)
            self._tokenize(text[at:])

    def _tokenize(self, text: bytes) -> None:
        vocabulary, new = self.model.vocabulary, text.decode("utf-8", "surrogateescape")
        if self._parts:
            tokens = vocabulary.continuation(new)
        else:
            tokens = vocabulary.tokenize(new, add_special=True, parse_special=True)
        self._parts.append(_Part(text, tokens))


def _spelling(
    vocabulary: Vocabulary, tokens: Sequence[int], text: bytes, start: int = 0
) -> tuple[bytes, list[int]] | None:
    """As many of the tokens as spell whole characters from a place of a text on, and what they spell; None: no text."""
    n, at, end = 0, start, start
    for i, token in enumerate(tokens, 1):
        piece = vocabulary.piece(token)
        if not text.startswith(piece, end):
            break
        end += len(piece)
        if not piece:
            continue  # a control token: it goes with the text that follows it
        if end == len(text) or text[end] & 0xC0 != 0x80:  # the next byte begins a character
            n, at = i, end
    else:
        if at == end:
            n = len(tokens)
    return (text[start:at], list(tokens[:n])) if at > start else None
