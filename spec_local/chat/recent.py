"""Recent conversations, for clients that send the whole conversation with each question."""

from collections import deque
from collections.abc import Sequence

from spec_local.chat.conversation import Conversation
from spec_local.chat.template import ChatTemplate, Message
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
        self._chats = deque([Conversation(model, ChatTemplate(model))], maxlen=n_max)

    def following(self, messages: Sequence[Message]) -> Conversation:
        """A conversation with these messages; it has the tokens of what they have in common with another."""
        return max(self._chats, key=lambda chat: _n_common(chat.messages, messages)).following(messages)

    def keep(self, conversation: Conversation) -> None:
        """Add a conversation that was answered, in place of the oldest one."""
        self._chats.append(conversation)


def _n_common(a: Sequence[Message], b: Sequence[Message]) -> int:
    n = 0
    for ours, theirs in zip(a, b, strict=False):
        if ours["role"] != theirs["role"] or ours["content"] != theirs["content"]:
            break
        n += 1
    return n
