"""The main model's hidden states that a sequence of a head has received, as far as it may need them yet."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spec_local.core.sequence import common_prefix
from spec_local.errors import InvalidRequest

State = NDArray[np.float32]


class ReceivedStates:
    """States by the position of their token. Most are forgotten once the pair that they are for is evaluated.

    Attributes:
        tokens: the beginning of the main model's history whose states have been received.
        raw: positions of the states that are not encoded.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.raw: set[int] = set()
        self._states: dict[int, State] = {}
        self._kept = -1  # a position whose state is not forgotten

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, position: int) -> bool:
        return position in self._states

    def get(self, position: int) -> State | None:
        """The state at a position, if it is known."""
        return self._states.get(position)

    def of(self, token: int, position: int) -> State | None:
        """The state at a position, if it is known and that of this token."""
        state = self._states.get(position)
        return None if state is None or self.tokens[position] != token else state

    def replace(self, position: int, state: State) -> None:
        """Replace a state by its encoded form."""
        self._states[position] = state
        self.raw.discard(position)

    def n_usable(self, n_pairs: int, tokens: Sequence[int]) -> int:
        """Number of the first of these tokens whose states are known, or not needed after `n_pairs` pairs."""
        end, n = common_prefix(self.tokens, tokens), max(0, n_pairs - 1)
        while n < end and n in self._states:
            n += 1
        return n

    def receive(
        self, start: int, tokens: Sequence[int], states: NDArray[np.float32], *, are_raw: bool
    ) -> int | None:
        """Add tokens that follow the first `start` ones, and their states, float32 (len(tokens), width).

        Returns:
            the position of the first one that was not known; None: all were known, since a recurrent model
            has evaluated them again.

        Raises:
            InvalidRequest: the states of tokens before them are missing.
        """
        if start > len(self.tokens):
            raise InvalidRequest(f"the states of tokens {len(self.tokens)} to {start - 1} are missing")
        n_known = common_prefix(self.tokens[start:], tokens)
        if n_known == len(tokens):
            return None
        first = start + n_known
        self.truncate(first)
        self.tokens += tokens[n_known:]
        self._states.update(enumerate(states[n_known : len(tokens)], first))
        if are_raw:
            self.raw.update(range(first, len(self.tokens)))
        return first

    @property
    def first(self) -> int:
        """The first position whose state is known; the number of tokens if there is none."""
        return min(self._states, default=len(self.tokens))

    def packed(self, start: int, end: int) -> NDArray[np.uint8] | None:
        """The states at positions from `start` to `end` − 1, as bytes; None: one is unknown."""
        if not all(position in self._states for position in range(start, end)):
            return None
        states = [self._states[position] for position in range(start, end)]
        facts = [(len(state), start + i in self.raw) for i, state in enumerate(states)]
        head = np.array([len(facts), *(each for fact in facts for each in fact)], np.int32)
        return np.concatenate([part.view(np.uint8) for part in (head, *map(np.ascontiguousarray, states))])

    @classmethod
    def unpacked(cls, tokens: Sequence[int], data: NDArray[np.uint8]) -> "ReceivedStates":
        """Tokens with the states of the last ones."""
        found, n = cls(), int(data[:4].view(np.int32)[0])
        head, found.tokens = 4 * (1 + 2 * n), list(tokens)
        facts = data[4:head].view(np.int32).reshape(n, 2)
        ends = np.cumsum(facts[:, 0])
        values = data[head:].view(np.float32)
        for position, end, (size, is_raw) in zip(
            range(len(tokens) - n, len(tokens)), ends, facts, strict=True
        ):
            found._states[position] = values[end - size : end]
            if is_raw:
                found.raw.add(position)
        return found

    def truncate(self, length: int) -> None:
        """Forget tokens and states from a position on."""
        del self.tokens[length:]
        self._drop([position for position in self._states if position >= length])

    def forget(self, start: int) -> None:
        """Forget the states before a position."""
        self._drop([position for position in self._states if position < start and position != self._kept])

    def keep(self, position: int) -> None:
        """Do not forget the state at a position, if it is known; instead of the one that was kept before."""
        if position in self._states:
            self._states[position] = self._states[position].copy()  # without those received with it
            self._kept = position

    def copy(self) -> "ReceivedStates":
        """A copy that shares the states."""
        found = ReceivedStates()
        found.tokens, found.raw, found._states = list(self.tokens), set(self.raw), dict(self._states)
        found._kept = self._kept
        return found

    def _drop(self, positions: Sequence[int]) -> None:
        for position in positions:
            del self._states[position]
            self.raw.discard(position)
