"""The interface of a head: a small drafter that reads the main model's hidden states.

Some heads predict the next token from a pair: a token, and the main model's state of the token before it.
While drafting, the state of a draft token does not exist yet; the head's own output takes its place. Once the
main model has evaluated the tokens, the pairs are evaluated again with its states. Other heads read the
states of all tokens of the history, and predict a block of tokens after the last one in one call.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from spec_local.core.language_model import LanguageModel, States


@runtime_checkable
class Head(LanguageModel, Protocol):
    """A `LanguageModel` for a row of the main model: a prefix of its history, followed by draft tokens."""

    @property
    def drafts_blocks(self) -> bool:
        """True if the call for the first draft token of a step also returns the logits for all later ones.

        Its time grows with the number of tokens given to `begin_draft`. To measure that, n tokens that are
        evaluated within `known_states` stand for a block of n draft tokens.
        """

    def begin_draft(self, n: int) -> None:
        """Announce that up to `n` tokens, at most `max_draft`, will be drafted after the history."""

    @property
    def n_received(self) -> int:
        """Number of tokens, from the first one of the history, whose states are known or no longer needed."""

    @property
    def max_draft(self) -> int:
        """Maximum number of tokens that it drafts after the history."""

    def receive(self, start: int, tokens: Sequence[int], states: States) -> None:
        """Receive tokens that the main model has added to its history, and their states.

        Args:
            start: number of tokens before them, up to `n_received`. Tokens that were received earlier are
                skipped if they are the same.
            states: float32 (len(tokens), width).

        Raises:
            InvalidRequest: the states of tokens before them are missing.
        """

    async def read(self) -> None:
        """Evaluate the tokens that were received, once there are enough of them for a call."""
