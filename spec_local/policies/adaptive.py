"""Measured costs and learned chances decide, step by step, who guesses and how far.

A step of k guesses brings 1 + Σ C_i tokens, C_i being the chance that guesses 1 to i all stand, and takes what the draft's
calls and main's call of k + 1 tokens take. Of all that can be done next, that is done which brings most tokens a
second: nothing, a copy of any length, or asking the draft, and there one call more, or main's judgement of the best
part of what is there. Costs come from a table, since a call's time climbs in steps and may even fall, so that
every number of guesses is looked at and not the next one only.

Estimates err, so there is a purse of plain steps that guessing may lose, and what copies and the draft win is added for them, each
its own: copies that seem sure and fail shall not spend what the draft wins. A step may risk no more than that if all its guesses fail. So a text that cannot be guessed costs what the purse holds at first and less than a hundredth of the time, whatever the
estimates say, and long copies begin with short ones. What seldom fails wholly, as the copy after a long match, is charged less,
and never refused altogether: or one failure too many would end all guessing in an answer that repeats its prompt.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from spec_local.core.proposal import Limit
from spec_local.lookups.base import Candidates
from spec_local.policies.base import DraftOutput, Offer, Policy, Source
from spec_local.policies.copying import Candidate, fates, merged
from spec_local.policies.cost_model import CostModel
from spec_local.policies.experience import Experience, Floats, Guesser, Yield
from spec_local.policies.planner import plan, plan_chain

MAX_READ = 16
"""Most calls of a draft model a step: beyond, nothing was ever gained."""

# Found with benchmarks/simulate.py, where each was moved both ways.
_LEAST, _KEPT, _MOST = 2.2, 3.0, 40.0  # in the purse: at the start of an answer between these, and ever
_STAKE = 0.6  # share of the purse that one copy may lose: a first failure shall not be the last
# What is charged of a copy's loss: times the chance of losing it; and at least.
_RISK, _LEAST_RISK = 8.0, 0.1
_SURE, _SPARE = 0.5, 0.3  # what is charged less than the first may always take as much as the second
_DEBT = -0.5  # in the purse, at worst, when a call took longer than was to be expected
_PROBES = 0.006  # share of the time that flows into the purse, and that a probe of a poor draft may lose
_MARGIN = 1.1  # what is more than a plain step must bring more than it costs: of many estimates the best one flatters
_AMORTISED = 6.0  # steps that share what the draft has to catch up with: good stretches last
_OWN = 0.6  # of what the draft saves of an answer: copies would have saved the rest without it
_DOUBT = 3.0  # plain steps, over the steps that a belief counts for: it may err by that
_FRESH = 1.5  # steps that a belief counts for at the start of an answer: every answer is another text
_AHEAD = 0.8  # chance of a guess that the draft has yet to make
_SELDOM = 8  # plain steps of which one is looked at: on a small model, that takes a percent of a step
_REVIEW = 32  # steps from one look at what a copy must be like to the next
_RESHAPE = 16  # steps from one choice of a shape to the next
_OBSERVED = 64  # tokens: larger calls are told apart by their tokens alone
_HOPE = 0.95  # a draft that loses even if this share of its guesses stands is never asked
_BY_RANK = (0.34, 0.14, 0.09)  # where main goes if not to the draft's first choice: `planning.plan`


class Adaptive(Policy):
    """Never slower than plain decoding for long, and as fast as the guesses allow.

    Args:
        main, draft: seconds a call; the policy keeps both up to date.
        experience: of earlier answers; grows.
        may_cut: see `Policy`.
        tree: most nodes of a tree, where trees may be asked for.
        most: tokens of the answer, if that is known.
        staging: seconds a call of the draft that gives its opinion after each token; None: it stages nothing.
        n_staged: see `Policy`.
        clock: seconds.
    """

    name = "adaptive"

    def __init__(
        self,
        main: CostModel,
        draft: CostModel | None = None,
        experience: Experience | None = None,
        *,
        may_cut: bool = True,
        tree: int = 0,
        most: int | None = None,
        staging: CostModel | None = None,
        n_staged: int = 8,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(may_cut, n_staged)
        self._main, self._draft, self._staging = main, draft, staging
        self._n_along = 0  # tokens that the draft reads along with the next one
        self._experience = known = experience or Experience()
        self._max_tree, self._clock = tree, clock
        self._n_steps = 0
        self._n_guessed = self._n_plain = 0  # steps of either kind in a row, up to now
        self._reviewed, self._timed, self._shaped = 0, 0, -_RESHAPE  # steps until this was done last
        self._saved = 0.0  # seconds that a probe may lose
        known.purse = min(_KEPT, max(known.purse + sum(known.won.values()), _LEAST))
        known.won = {"lookup": 0.0, "draft": 0.0}
        known.ahead = 0.5 * (known.ahead + _AHEAD)
        self._hopeful = draft is not None and could_gain(main, draft)
        if draft and self._hopeful:
            self._expect("draft", *_chain(_AHEAD, main, draft))
        self._source: Source = "none"
        self._plain = main.seconds(1)
        self._review()
        self._costs: Floats = main.first(2)  # of main's calls, by their tokens; as of this step
        known.start(_saving(main, draft) if draft else 0.0)
        self._most_said = most
        self._begin(Offer(Limit(1, 1, 1)))

    def wants_draft(self, unread: int) -> bool:
        saving = self._experience.saving
        if not unread or not self._hopeful or not self._draft or saving is None:
            return False
        return _OWN * saving * self._left() * self._plain > self._draft.seconds(unread)

    def _left(self) -> float:
        """Tokens that the answer has still to come, as far as others tell: and as many as there were, beyond."""
        said = self._experience.said
        expected = max(self._experience.length - said, said)
        return expected if self._most_said is None else min(expected, self._most_said - said)

    def begin(self, offer: Offer) -> Source:
        self._begin(offer)
        source: Source = "none"
        if (
            self._n_guessed >= _REVIEW or self._main.is_in_doubt
        ):  # what plain decoding costs must not become hearsay
            return source
        kind: Source = "none" if self._until_asked() else self._kind()
        if self._n_steps - self._reviewed >= _REVIEW:
            self._review()
        hopeful = [copies for copies in offer.copies if self.hopes(copies)]
        if not hopeful and kind == "none":
            return source  # as in most steps, which are kept short: on a small model, all that is done here takes a percent of them
        self._costs = self._main.first(offer.limit.nodes + 1)
        best = 1.0 / self._plain
        for candidate in self._candidates(hopeful):
            values = candidate.values
            most = offer.limit.nodes if candidate.is_chain else min(offer.limit.nodes, offer.limit.branches)
            order = (-values).argsort(kind="stable")[:most]  # a parent comes before its equals
            rates = self._rates(values[order])
            n = int(rates[: self._affordable("lookup", risk=_risk(float(candidate.chances[0]))) + 1].argmax())
            if rates[n] > best:
                best, source = float(rates[n]), "lookup"
                self.copy = candidate.part(order[:n].tolist())
        if kind != "none" and self._draft:
            loss = self._loss(kind, 1.0 / best)
            # A probe is made when it can be paid out of what is put aside for it.
            if loss < self._saved and self._affordable("draft", self._draft.seconds(offer.unread)):
                self._saved -= max(0.0, loss)
                source = kind
        self._source = source
        if source != "none":
            self._asked = self._clock()
        return source

    def reads_on(self) -> bool:
        if self._n_read and not self._pays_to_read():
            return False
        self._asked = self._clock()
        return True

    @property
    def may_stage(self) -> bool:
        return self._staging is not None

    def stages(self, confidence: Sequence[float], unread: int) -> int:
        assert self._draft
        if not self._staging or unread > _OBSERVED:
            return 0
        chances = self._experience.staged.of_each(np.array(confidence[: self._n_staged])).cumprod()
        # What the draft reads along saves it a call for each that it guesses.
        saved = np.concatenate(([0.0], chances.cumsum())) * self._draft.seconds(1)
        costs = np.array([self._staging.seconds(unread + n) for n in range(len(chances) + 1)])
        self._n_along = int((saved - _MARGIN * (costs - costs[0])).argmax())
        return self._n_along

    def staged(self, confidence: Sequence[float], n_stood: int) -> None:
        for i, sure in enumerate(confidence):
            self._experience.staged.count(sure, i < n_stood)

    def takes(self, opinion: DraftOutput) -> bool:
        assert self._draft
        if n := opinion.n_read:
            table = self._staging if self._staging and self._n_along else self._draft
            if n <= _OBSERVED:
                table.observe(n, self._clock() - self._asked)
            self._spent += table.seconds(n)
            self._n_along = 0
        self._n_read += 1
        self._sure.append(opinion.confidence)
        chance = self._experience.guesses.of(self._sure[-1])
        if not self.may_cut and not self._pays_to_draw(chance):
            return False
        self._chances.append(self._chances[-1] * chance)
        return True

    def keeps(self, n: int) -> int:
        if not self.may_cut or not n:
            return n
        rates = self._rates(np.array(self._chances[1 : n + 1]))
        return int(rates[: self._affordable("draft") + 1].argmax())

    def drafted(self) -> None:
        now = self._clock()
        if not self._n_read and self._source in ("draft", "tree"):  # another shape than a chain
            self._spent = now - self._asked
        self._asked = now

    def learn(self, guesses: Sequence[int], said: Sequence[int], n_tested: int) -> None:
        took = self._clock() - self._asked
        self._n_guessed = self._n_guessed + 1 if n_tested else 0
        self._n_plain = 0 if n_tested else self._n_plain + 1
        as_usual = not n_tested and 0.8 < took / self._plain < 1.25
        if not as_usual or self._n_plain < 3 or self._n_steps - self._timed >= _SELDOM:
            self._timed = self._n_steps
            self._main.observe(n_tested + 1, took)
            before, self._plain = self._plain, self._main.seconds(1)
            if not 0.8 < self._plain / before < 1.25:
                # What was charged since the machine changed was not fair.
                self._experience.purse = max(self._experience.purse, _LEAST)
        known = self._experience
        for i, stood in _outcomes(guesses, said):
            if i < len(self._sure):
                known.guesses.count(self._sure[i], stood)
            known.ahead += 0.04 * (stood - known.ahead)
        self._hear(self._offer.copies, said)
        known.said += len(said)
        # The table more than the clock: a neighbour's noise is no fault of the guesses, but a table can be out of date.
        usual = self._main.seconds(n_tested + 1) if n_tested else self._plain
        seconds = self._spent + (min(2.0 * usual, max(0.5 * usual, took)) if n_tested else usual)
        self._saved += _PROBES * seconds
        won = len(said) - (1.0 - _PROBES) * seconds / self._plain
        if self._source != "none":
            who: Guesser = "lookup" if self._source == "lookup" else "draft"
            own = min(_MOST, known.won[who] + won)
            known.won[who], won = max(0.0, own), min(0.0, own)
        known.purse = max(_DEBT, min(_MOST, known.purse + won))
        if self._source in known.yields:
            known.saved = (known.saved or 0.0) + len(said) - seconds / self._plain
            known.yields[self._source].count(len(said), seconds - self._late())
        self.rests = self._until_asked() if as_usual and self._n_plain >= 3 else 0

    def hopes(self, copies: Candidates) -> bool:
        chance = self._experience.copies[copies.source].of(copies.confidence[0])
        n = min(len(copies.tokens), bisect_right(self._within, 1.0 + self._may_lose("lookup", _risk(chance))))
        return n > 0 and chance >= self._needed[n - 1]

    def rested(self, steps: Sequence[tuple[Sequence[Candidates], int]]) -> None:
        n = len(steps)
        for found, token in steps:
            self._hear(found, (token,))
        self._n_steps += n
        self._n_plain += n
        self._n_guessed = 0
        self._saved += _PROBES * self._plain * n
        known = self._experience
        known.said += n
        known.purse = min(_MOST, known.purse + _PROBES * n)

    def _hear(self, several: Sequence[Candidates], said: Sequence[int]) -> None:
        """What became of copies, those that main did not look at among them."""
        for copies in several:
            chances = self._experience.copies[copies.source]
            for node, stood in fates(copies, said):
                chances.count(copies.confidence[node], stood)

    def _until_asked(self) -> int:
        """Plain steps in which the draft will not be asked, whatever main says; beyond a few that is not known."""
        if not self._draft or not self._offer.unread or not self._hopeful:
            return _SELDOM - 1
        loss = self._loss(self._kind(), self._plain)
        dear = self._costs[2] + self._draft.seconds(self._offer.unread)
        # Both purses grow by so much in a plain step, if they grow.
        lacking = max(loss - self._saved, dear - (1.0 + self._may_lose("draft", 1.0)) * self._costs[1])
        return min(_SELDOM - 1, max(0, int(lacking / (_PROBES * self._plain))))

    def _begin(self, offer: Offer) -> None:
        self._offer = offer
        self._n_read, self._spent = 0, 0.0
        self._sure: list[float] = []
        self._chances = [1.0]  # that guesses 1 … i all stand
        self._source = "none"
        self._n_steps += 1

    def _late(self) -> float:
        """Seconds that the draft has to catch up, where main has said tokens without it."""
        assert self._draft
        return self._draft.seconds(self._offer.unread) - self._draft.seconds(1)

    def _loss(self, kind: Source, a_token: float) -> float:
        """Seconds that a step with the draft loses at least, where a token can be had in so many.

        A few unlucky steps are no proof: without the doubt, three of them ended all asking of a draft that gains a quarter. What the doubt costs comes out of the purse.
        """
        known = self._experience.yields[kind]
        # Asked in the step before, it has one token to read, or two if all its guesses stood.
        doubt = _DOUBT * self._plain / known.weight if self._offer.unread <= 2 else 0.0
        return known.loss(a_token) - doubt + self._owed()

    def _owed(self) -> float:
        """What one step has to earn of that: a part, as others follow, but all where no answer has gained from the draft yet."""
        return self._late() / (_AMORTISED if (self._experience.saving or 0.0) > 0.0 else 1.0)

    def _review(self) -> None:
        """What copies of at most 1, 2, … tokens must be like, so that one look tells of most that they cannot pay.

        needed: the chance of their first token, if all others stood with it. within: plain steps that must be allowed for them.
        """
        self._reviewed = self._n_steps
        steps = self._main.first(65)[2:] / self._plain
        gained = np.arange(1.0, len(steps) + 1.0)
        self._needed: list[float] = np.minimum.accumulate(_MARGIN * (steps - 1.0) / gained).tolist()
        self._within: list[float] = np.minimum.accumulate(steps[::-1])[::-1].tolist()

    def _candidates(self, several: Sequence[Candidates]) -> Sequence[Candidate]:
        """Candidates with calibrated chances; in one tree where there may be branches."""
        found = [
            Candidate(
                copies.tokens,
                copies.parents,
                self._experience.copies[copies.source].of_each(np.array(copies.confidence)),
                copies.source,
            )
            for copies in several
        ]
        return [merged(found)] if self._max_tree and len(found) > 1 else found

    def _kind(self) -> Source:
        """Whether the draft is asked for a chain or a tree."""
        assert self._draft
        if self._max_tree and self._n_steps - self._shaped >= _RESHAPE:
            self._shaped = self._n_steps
            usual = self._experience.ahead
            ranks = [usual, *((1.0 - usual) * share for share in _BY_RANK)]
            most = min(self._max_tree, self._offer.most)
            tree = plan(ranks, self._main, self._draft, most, most)
            chain = plan_chain(ranks, self._main, self._draft, most, most)
            self.tree_nodes = 0
            if not tree.is_chain and tree.speed > 1.03 * chain.speed:
                self.tree_nodes, self.tree_depth = len(tree.parents), tree.depth
                self._expect("tree", tree.tokens_per_step, tree.seconds)
        return "tree" if self.tree_nodes else "draft"

    def _expect(self, kind: str, tokens: float, seconds: float) -> None:
        """Believe this of a kind of guess, and half of what is remembered."""
        believed, known = Yield(tokens, seconds, _FRESH), self._experience.yields.get(kind)
        if known:
            known.weight = min(known.weight, 3.0 * _FRESH)
            share = known.weight / (known.weight + _FRESH)
            believed.tokens += share * (known.tokens - tokens)
            believed.seconds += share * (known.seconds - seconds)
            believed.weight += known.weight
        self._experience.yields[kind] = believed

    def _affordable(self, who: Guesser, spent: float | None = None, risk: float = 1.0) -> int:
        """The most guesses for which the purse lasts if none of them stands.

        spent: seconds on them so far. risk: share of the loss that is charged.
        """
        spent = self._spent if spent is None else spent
        allowed = (1.0 + self._may_lose(who, risk)) * self._costs[1] - spent
        within = (self._costs[2:] <= allowed).nonzero()[0]
        return int(within[-1]) + 1 if len(within) else 0

    def _may_lose(self, who: Guesser, risk: float) -> float:
        """Plain steps."""
        known = self._experience
        return max(_SPARE if risk < _SURE else 0.0, known.purse + known.won[who]) / risk

    def _rates(self, chances: Floats) -> Floats:
        """Tokens a second of the whole step, with 0, 1, … guesses that stand with these chances."""
        tokens = np.concatenate(([1.0], 1.0 + chances.cumsum()))
        return self._rate(tokens, self._costs[1 : len(tokens) + 1] - self._costs[1], self._costs[1])

    def _rate(self, tokens: Floats, more: Floats, plain: float) -> Floats:
        """Tokens a second of a step that takes `more` seconds than a plain one, and what was spent already."""
        rates: Floats = tokens / (self._spent + plain + _MARGIN * more)
        return rates

    def _rates_ahead(self, standing: Floats, n_calls: Floats) -> Floats:
        """The same, if guesses that stand with these chances followed those there are, after so many calls of the draft."""
        assert self._draft
        n = len(self._chances)
        tokens = sum(self._chances) + standing.cumsum()
        more = self._costs[n + 1 : n + 1 + len(standing)] - self._costs[1] + self._draft.seconds(1) * n_calls
        return self._rate(tokens, more, self._costs[1])

    def _ahead(self, standing: float, n: int) -> Floats:
        """The chances that the next n guesses stand, as far as so many may be made."""
        n = min(n, min(MAX_READ, self._offer.most, self._affordable("draft")) - len(self._chances) + 1)
        found: Floats = standing * self._experience.ahead ** np.arange(1.0, n + 1.0)
        return found

    def _pays_to_read(self) -> bool:
        ahead = self._ahead(self._chances[-1], MAX_READ)
        if not len(ahead):
            return False
        rates = self._rates(np.array(self._chances[1:]))
        further = self._rates_ahead(ahead, np.arange(1.0, len(ahead) + 1))
        return bool(further.max() > (rates.max() if self.may_cut else rates[-1]))

    def _pays_to_draw(self, chance: float) -> bool:
        """Whether main should look at one guess more, or with it at some that would follow."""
        standing = self._chances[-1] * chance
        ahead = np.concatenate(([standing], self._ahead(standing, MAX_READ - len(self._chances))))
        ahead = ahead[: len(self._costs) - len(self._chances) - 1]
        further = self._rates_ahead(ahead, np.arange(float(len(ahead))))
        return bool(further.max(initial=0.0) > self._rates(np.array(self._chances[1:]))[-1])


def _risk(chance: float) -> float:
    """Share of its loss that is charged for a copy whose first token stands with this chance."""
    return min(1.0, max(_LEAST_RISK, _RISK * (1.0 - chance))) / _STAKE


def _outcomes(guesses: Sequence[int], said: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Which guesses stood, up to the first that did not; what was said no more of is not known."""
    for i, (guess, token) in enumerate(zip(guesses, said, strict=False)):
        yield i, guess == token
        if guess != token:
            break


def _chain(usual: float, main: CostModel, draft: CostModel) -> tuple[float, float]:
    """Tokens and seconds of the best step with at least one guess."""
    n = np.arange(1, MAX_READ + 1)
    tokens = 1.0 + np.cumsum(usual**n)
    seconds = n * draft.seconds(1) + main.first(MAX_READ + 1)[2:]
    best = int((tokens / seconds).argmax())
    return float(tokens[best]), float(seconds[best])


def _saving(main: CostModel, draft: CostModel) -> float:
    """Plain steps that a draft saves a token, if it guesses as usual."""
    tokens, seconds = _chain(_AHEAD, main, draft)
    return 1.0 - seconds / tokens / main.seconds(1)


def could_gain(main: CostModel, draft: CostModel) -> bool:
    """Whether a draft would gain if nearly all of its guesses stood; or else it is never asked."""
    tokens, seconds = _chain(_HOPE, main, draft)
    return tokens / seconds > 1.02 / main.seconds(1)
