"""Measure what a user gains from earlier answers, where all requests are of one kind.

    python benchmarks/learning.py --main MAIN.gguf --draft HEAD.gguf --user letters --cache CACHE --keep
    XDG_CACHE_HOME=CACHE specdec draft train MAIN.gguf --continue HEAD.gguf --from datastore --minutes 30
    python benchmarks/learning.py --main MAIN.gguf --draft HEAD.gguf --user letters --cache CACHE \
        --learned HEAD-learned.gguf

`--keep` answers the first half of a user's requests (see users.py), and keeps the answers in the cache, as
`--learn` does. Then the requests of the second half are answered at temperature 0 by plain decoding, and by
the adaptive policy with the draft model or head, and with a head that has learned from the first half, each
without and with the datastore of the first half, in turns; none of them adds to it. Whole times, the prompt
included. All texts must be equal. The acceptance rate is that of the first draft token of the draft model or
head.

`--acceptance` compares drafts instead: the share of all tokens of the second half that is the draft model's
most probable token, and that of a mixture of its distribution with counts of what followed the last tokens
in the first half (n-grams). The weight of the counts depends on the length of the match, and on how many
tokens followed it and how equal they were; it is that which makes the last quarter of the first half most
probable.
"""

import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from common import chat_text, geometric_mean, machine, model_options, note, table, tokens_of
from numpy.typing import NDArray
from record_traces import answer_of, outputs_along
from users import USERS

from spec_local import Done, GenerationSettings, SamplingSettings, Session, Text
from spec_local.answers.running import BEFORE
from spec_local.datastore.answer_store import answer_store_of
from spec_local.datastore.datastore import Datastore
from spec_local.llama.sequence import LlamaSequence

_ORDER = 5  # maximum number of tokens that are matched
_WEIGHTS = np.arange(0, 1, 0.05)
_ENOUGH = 10  # tokens with which a weight is trusted; with fewer, it is smaller in proportion


def main() -> None:
    arguments = model_options(__doc__, draft="required", n=192)
    arguments.add_argument("--user", choices=USERS, required=True)
    arguments.add_argument("--cache", type=Path, required=True, help="folder of the kept answers")
    arguments.add_argument("--keep", action="store_true", help="only answer the first half, and keep it")
    arguments.add_argument("--learned", type=Path, help="a head that has learned from the first half")
    arguments.add_argument("--answers", type=int, default=120, help="of both halves")
    arguments.add_argument("--timed", type=int, default=60, help="answers of the second half to time")
    arguments.add_argument("--acceptance", action="store_true", help="compare drafts instead of times")
    options = arguments.parse_args()
    requests = USERS[options.user]()[: options.answers]
    first, second = requests[: len(requests) // 2], requests[len(requests) // 2 :]
    usual = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(options.cache.absolute())
    opened = partial(
        Session.open, options.main, n_ctx=options.ctx, threads=options.threads, prompt_cache="off"
    )
    if options.keep:
        with opened("none", learn=True, parallel=8, log=print) as session:
            _keep(session, first, options.n)
        return
    kept = answer_store_of(options.main).answers()
    if not kept:
        raise SystemExit(f"no answers are kept in {options.cache}: run this with --keep first")
    del os.environ["XDG_CACHE_HOME"]
    if usual:
        os.environ["XDG_CACHE_HOME"] = usual
    if options.acceptance:
        # With rows of logits for each token of a text.
        with opened(options.draft, branches=64, draft_vocab="all") as session:
            texts = [(each.tokens[: each.n_prompt], each.tokens[each.n_prompt :]) for each in kept]
            _compare_drafts(session, [(a.tolist(), b.tolist()) for a, b in texts], second, options.n)
    else:
        drafts = {"draft": options.draft} | ({"learned": options.learned} if options.learned else {})
        with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
            sessions = {name: stack.enter_context(opened(path)) for name, path in drafts.items()}
            datastore = Datastore(Path(folder) / "texts", sessions["draft"].main.model.vocabulary.n_tokens)
            for each in kept:
                before = each.tokens[max(0, each.n_prompt - BEFORE) : each.n_prompt]
                datastore.add_answer(each.tokens[each.n_prompt :].tolist(), before.tolist())
            datastore.read_only = True
            _compare_times(sessions, datastore, second[: options.timed], options.n)
    print(machine())


def _keep(session: Session, requests: Sequence[str], n: int) -> None:
    model = session.main.model
    prompts = [tokens_of(model, chat_text(model, request)) for request in requests]
    settings = GenerationSettings(SamplingSettings(temperature=0), max_tokens=n, proposer="none")
    n_done = 0
    for event in session.generate_many(prompts, settings):
        n_done += isinstance(event.event, Done)
        note(f"{n_done} of {len(requests)} answers are kept")


def _compare_times(
    sessions: Mapping[str, Session], datastore: Datastore, requests: Sequence[str], n: int
) -> None:
    variants: list[tuple[str, str, str, Datastore | None]] = [("plain", "draft", "off", None)]
    for draft in sessions:
        variants += [
            (draft, draft, "adaptive", None),
            (f"{draft} and datastore", draft, "adaptive", datastore),
        ]
    whole: dict[str, list[float]] = defaultdict(list)
    first: Counter[str] = Counter()
    tested: Counter[str] = Counter()
    for i, request in enumerate(requests):
        note(f"answer {i + 1} of {len(requests)}")
        texts = []
        for name, draft, policy, used in variants:
            session = sessions[draft]
            prompt = tokens_of(session.main.model, chat_text(session.main.model, request))
            settings = GenerationSettings(SamplingSettings(temperature=0), max_tokens=n, policy=policy)
            session.main.truncate(0)
            session.datastore = used
            started = time.perf_counter()
            answer: list[int] = []
            for event in session.generate(prompt, settings):
                if isinstance(event, Text):
                    answer += event.tokens
                    if event.proposal.source == "draft" and event.proposal.tokens:
                        tested[name] += 1
                        first[name] += event.n_accepted > 0
            whole[name].append(time.perf_counter() - started)
            texts.append(answer)
        assert all(text == texts[0] for text in texts)
    note("")
    plain = np.array(whole["plain"])
    rows = [
        [
            name,
            f"{geometric_mean(list(plain / np.array(seconds))):.2f}",
            f"{first[name] / tested[name]:.3f}" if tested[name] else "",
            str(tested[name]),
        ]
        for name, seconds in whole.items()
    ]
    table(["variant", "speed, relative to plain decoding", "first draft token accepted", "steps"], rows)


@dataclass(slots=True)
class _Ngrams:
    """How often each token followed up to `_ORDER` others."""

    following: dict[tuple[int, ...], Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, text: Sequence[int]) -> None:
        for i, token in enumerate(text):
            for n in range(1, min(i, _ORDER) + 1):
                self.following[tuple(text[i - n : i])][token] += 1

    def longest(self, before: Sequence[int]) -> tuple[int, Counter[int]]:
        """The length of the longest match of the last tokens, and what followed it."""
        for n in range(min(len(before), _ORDER), 0, -1):
            if found := self.following.get(tuple(before[-n:])):
                return n, found
        return 0, Counter()


@dataclass(frozen=True, slots=True)
class _Position:
    """A token of an answer, those before it, and the draft model's probabilities, float32 (n_vocab,)."""

    before: list[int]
    token: int
    probabilities: NDArray[np.float32]


def _kind(length: int, found: Counter[int]) -> tuple[int, int, int]:
    """What the weight of some counts depends on."""
    total, most = found.total(), max(found.values())
    return length, total.bit_length(), 4 * most // total


def _compare_drafts(
    session: Session, kept: Sequence[tuple[list[int], list[int]]], requests: Sequence[str], n: int
) -> None:
    assert isinstance(session.draft, LlamaSequence)
    known, calibrating = kept[: len(kept) * 3 // 4], kept[len(kept) * 3 // 4 :]
    unseen = []
    for i, request in enumerate(requests):
        note(f"answer {i + 1} of {len(requests)}")
        session.main.truncate(0)
        prompt = tokens_of(session.main.model, chat_text(session.main.model, request))
        unseen.append((prompt, answer_of(session, prompt, n, "adaptive")))

    ngrams = _Ngrams()
    for prompt, answer in known:
        ngrams.add([*prompt, *answer])
    pairs = defaultdict[tuple[int, int, int], list[tuple[float, float]]](list)
    for position in _positions(session.draft, calibrating):
        length, found = ngrams.longest(position.before)
        if found:
            theirs = found[position.token] / found.total()
            pairs[_kind(length, found)].append((float(position.probabilities[position.token]), theirs))
    weights = {kind: _best_weight(np.array(each)) for kind, each in pairs.items()}

    for prompt, answer in calibrating:
        ngrams.add([*prompt, *answer])
    total, alone, mixed, matched = 0, 0, 0, 0
    for position in _positions(session.draft, unseen):
        length, found = ngrams.longest(position.before)
        mixture = position.probabilities
        if found:
            weight = weights.get(_kind(length, found), 0.0)
            mixture = (1 - weight) * mixture
            for token, count in found.items():
                mixture[token] += weight * count / found.total()
        total += 1
        alone += int(position.probabilities.argmax()) == position.token
        mixed += int(mixture.argmax()) == position.token
        matched += length >= 3 and found.most_common(1)[0][0] == position.token
    note("")
    rows = [["draft model", alone], ["mixture", mixed], ["n-grams of 3 or more tokens alone", matched]]
    table(["drafted by", f"accepted, of {total} tokens"], [[name, f"{n / total:.3f}"] for name, n in rows])


def _best_weight(pairs: NDArray[np.float64]) -> float:
    """The weight of the second probabilities, float64 (n, 2), that makes their tokens most probable."""
    mixtures = (1 - _WEIGHTS) * pairs[:, :1] + _WEIGHTS * pairs[:, 1:]
    best = _WEIGHTS[np.log(mixtures + 1e-9).sum(axis=0).argmax()]
    return float(best * min(1, len(pairs) / _ENOUGH))


def _positions(draft: LlamaSequence, texts: Sequence[tuple[list[int], list[int]]]) -> Iterator[_Position]:
    for prompt, answer in texts:
        text = [*prompt, *answer]
        for i, (_, logits) in enumerate(outputs_along(draft, prompt, answer), len(prompt)):
            powers = np.exp(logits - logits.max())
            yield _Position(text[max(0, i - _ORDER) : i], text[i], powers / powers.sum())


if __name__ == "__main__":
    main()
