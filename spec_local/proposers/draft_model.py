"""A small model of main's vocabulary guesses a chain, token by token."""

from collections.abc import Callable, Iterator, Sequence

from spec_local.dice import Dice
from spec_local.language_model import LanguageModel, common_prefix, prefill
from spec_local.proposers.base import Lap, Proposal
from spec_local.sampling import Distribution, Sampler


class DraftModel:
    """Drafts with a language model through the same sampler as main.

    Args:
        model: its cache is this proposer's own.
        sampler: main's sampler, so that q is shaped as p is.
        n_vocab: main's; a draft's padding beyond it is never guessed.
        is_end: a draft stops after such a token.
        greedy: guess the most probable token instead of drawing one. Lossless too, and at temperature 0
            the same; above, drawing is accepted more often.
    """

    def __init__(
        self,
        model: LanguageModel,
        sampler: Sampler,
        *,
        n_vocab: int,
        is_end: Callable[[int], bool] = lambda token: False,
        greedy: bool = False,
    ) -> None:
        self.model = model
        self._sampler = sampler
        self._n_vocab = n_vocab
        self._is_end = is_end
        self._greedy = greedy
        self._window = sampler.settings.penalty_window if sampler.settings.has_memory else 0

    def prefill(self, history: Sequence[int]) -> Iterator[int]:
        history = self._readable(history)
        # A prompt beyond the draft's own context cannot be continued: see propose.
        if len(history) < self.model.n_ctx:
            yield from prefill(self.model, history[:-1])

    def propose(self, history: Sequence[int], limit: int, dice: Dice, lap: Lap) -> Proposal:
        limit = min(limit, self.model.n_ctx - len(history) + 1)
        if limit < 1:
            return Proposal()
        unread = self._unread(self._readable(history))
        tokens: list[int] = []
        distributions: list[Distribution] = []
        while True:
            logits = self.model.evaluate(unread, 1)[0, : self._n_vocab]
            lap("draft model")
            recent = [*history[-self._window :], *tokens] if self._window else ()
            distribution = self._sampler.distribution(logits, recent)
            if self._greedy:
                distribution = distribution.most_probable()
            token = distribution.draw(dice)
            unread = [token]
            tokens.append(token)
            distributions.append(distribution)
            lap("draft sampling")
            if len(tokens) == limit or self._is_end(token):
                return Proposal(tokens, distributions)

    def commit(self, history: Sequence[int]) -> None:
        self.model.trim(common_prefix(self.model.cached, self._readable(history)))

    def _unread(self, history: Sequence[int]) -> Sequence[int]:
        """The end of the history that goes with the first guess, in the same call of the draft.

        Usually one token, or two after a wholly accepted draft, whose last token the draft has not read.
        """
        model = self.model
        model.trim(common_prefix(model.cached, history[:-1]))
        while len(history) - len(model.cached) > model.max_tokens:
            start = len(model.cached)
            model.evaluate(history[start : start + model.max_tokens], 0)
        return history[len(model.cached) :]

    def _readable(self, history: Sequence[int]) -> Sequence[int]:
        """The history as the draft can read it: main's padding beyond the draft's vocabulary becomes token 0."""
        if self.model.n_vocab >= self._n_vocab:
            return history
        return [token if token < self.model.n_vocab else 0 for token in history]
