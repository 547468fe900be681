"""Recent conversations, for clients that send the whole conversation with each question."""

from collections import deque
from collections.abc import Mapping, Sequence

from spec_local.chat.conversation import Conversation
from spec_local.chat.messages import Message, messages_of
from spec_local.chat.template import ChatTemplate
from spec_local.chat.tool_use import ToolUse
from spec_local.llama.model import Model


class RecentChats:
    """The conversations that were answered last, with the tokens of their answers as generated.

    A later turn of one of them then has the tokens that are in the KV cache; tokenizing the text of its
    answers again could split it differently.

    Args:
        n_max: number of conversations to keep.

    Raises:
        ModelError: the model has no chat template, or it is invalid.
    """

    def __init__(self, model: Model, n_max: int) -> None:
        self.template = ChatTemplate(model)
        self._chats = deque([Conversation(model, self.template)], maxlen=n_max)

    def following(self, messages: Sequence[Mapping[str, object]], tool_use: ToolUse) -> Conversation:
        """A conversation with these messages; it has the tokens of what they have in common with another.

        Raises:
            InvalidRequest: a message is incomplete or wrong.
        """
        given = messages_of(messages)
        best = max(self._chats, key=lambda chat: _n_common(chat.messages, given))
        return best.following(given, tool_use)

    def keep(self, conversation: Conversation) -> None:
        """Add a conversation that was answered, in place of the oldest one."""
        self._chats.append(conversation)


def _n_common(a: Sequence[Message], b: Sequence[Message]) -> int:
    return next((n for n, (ours, theirs) in enumerate(zip(a, b, strict=False)) if ours != theirs), len(a))
