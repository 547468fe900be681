"""The interface to a head: a small drafter that continues the main model's hidden states.

Some predict the token after next from a pair: a token, and the main model's state of the token before it. The
state of a draft token does not exist while drafting; the head's own output takes its place. Once the main
model has evaluated the tokens, the pairs are evaluated again with its states. Others read the states of all
tokens of the history, and predict a block of tokens after the last one in one call.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spec_local.core.language_model import Calls, LanguageModel, States


class Head(LanguageModel, Protocol):
    """A `LanguageModel` whose history is a prefix of that of the main model's row it belongs to."""

    draft_tokens: NDArray[np.intp] | None
    """The tokens that it can draft, ascending; None: all of them. Others have a logit of −∞."""

    @property
    def drafts_blocks(self) -> bool:
        """Whether the call for the first draft token of a step gives the logits for all others, too.

        It takes the longer, the more tokens `begin_draft` names. To measure that, n tokens that are evaluated
        within `known_states` are the draft tokens of a block.
        """

    def begin_draft(self, n: int) -> None:
        """Note that up to `n` tokens, at most `max_draft`, will be drafted after the history."""

    @property
    def n_received(self) -> int:
        """Number of tokens, from the first one of the history, whose states need not be received any more."""

    @property
    def max_draft(self) -> int:
        """Maximum number of tokens that it drafts after the history."""

    def receive(self, start: int, tokens: Sequence[int], states: States) -> None:
        """Receive tokens that the main model has added to its history.

        Args:
            start: number of tokens before them, up to `n_received`. Tokens that were received earlier are
                skipped if they are the same.
            states: float32 (len(tokens), width).

        Raises:
            InvalidRequest: the states of tokens before them are missing.
        """

    def read_calls(self) -> Calls[None]:
        """Evaluate the tokens that were received, once there are enough of them for a call."""
