"""Measure what a user gains from earlier answers, where all requests are of one kind.

    python benchmarks/learning.py --main MAIN.gguf --draft DRAFT.gguf --user letters

A session with a datastore answers the first half of a user's requests (see users.py). The requests of the
second half are then answered at temperature 0 by plain decoding, by the adaptive policy with the draft model,
and by the same with the datastore of the first half, in turns; none of them adds to it. Whole times, the
prompt included. All three texts must be equal.

`--acceptance` compares drafts instead: the share of all tokens of the second half that is the draft model's
most probable token, and that of a mixture of its distribution with counts of what followed the last tokens
in the first half (n-grams). The weight of the counts depends on the length of the match, and on how many
tokens followed it and how equal they were; it is that which makes the last quarter of the first half most
probable.
"""

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common import chat_text, geometric_mean, machine, model_options, note, table, tokens_of
from numpy.typing import NDArray
from record_traces import answer_of, outputs_along
from users import USERS

from spec_local import Session
from spec_local.datastore.datastore import Datastore
from spec_local.llama.row import LlamaRow

_ORDER = 5  # maximum number of tokens that are matched
_WEIGHTS = np.arange(0, 1, 0.05)
_ENOUGH = 10  # tokens with which a weight is trusted; with fewer, it is smaller in proportion


def main() -> None:
    arguments = model_options(__doc__, draft="required", n=112)
    arguments.add_argument("--user", choices=USERS, required=True)
    arguments.add_argument("--answers", type=int, default=120, help="of both halves")
    arguments.add_argument("--acceptance", action="store_true", help="compare drafts instead of times")
    options = arguments.parse_args()
    requests = USERS[options.user]()[: options.answers]
    half = len(requests) // 2
    with tempfile.TemporaryDirectory() as folder:
        session = Session.open(
            options.main,
            options.draft,
            n_ctx=options.ctx,
            threads=options.threads,
            branches=64 if options.acceptance else 1,  # rows of logits
            draft_vocab="all" if options.acceptance else "auto",
        )
        with session:
            model = session.main.model
            prompts = [tokens_of(model, chat_text(model, request)) for request in requests]
            if options.acceptance:
                _compare_drafts(session, prompts, half, options.n)
            else:
                datastore = Datastore(Path(folder) / "texts", model.vocabulary.n_tokens)
                _compare_times(session, datastore, prompts, half, options.n)
    print(machine())


def _compare_times(
    session: Session, datastore: Datastore, prompts: Sequence[list[int]], half: int, n: int
) -> None:
    for i, prompt in enumerate(prompts[:half]):
        note(f"learning from answer {i + 1} of {half}")
        session.datastore = datastore
        answer_of(session, prompt, n, "adaptive")
    datastore.read_only = True
    whole: dict[str, list[float]] = defaultdict(list)
    for i, prompt in enumerate(prompts[half:]):
        note(f"answer {i + 1} of {len(prompts) - half}")
        texts = []
        for name, policy, used in (
            ("plain", "off", None),
            ("draft", "adaptive", None),
            ("draft and datastore", "adaptive", datastore),
        ):
            session.main.truncate(0)
            session.datastore = used
            started = time.perf_counter()
            texts.append(answer_of(session, prompt, n, policy))
            whole[name].append(time.perf_counter() - started)
        assert texts[0] == texts[1] == texts[2]
    note("")
    plain = np.array(whole["plain"])
    rows = [
        [name, f"{geometric_mean(list(plain / np.array(seconds))):.2f}"] for name, seconds in whole.items()
    ]
    table(["variant", "speed, relative to plain decoding"], rows)


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


def _compare_drafts(session: Session, prompts: Sequence[list[int]], half: int, n: int) -> None:
    assert isinstance(session.draft, LlamaRow)
    answers = []
    for i, prompt in enumerate(prompts):
        note(f"answer {i + 1} of {len(prompts)}")
        session.main.truncate(0)
        answers.append(answer_of(session, prompt, n, "adaptive"))
    texts = list(zip(prompts, answers, strict=True))
    known, calibrating, unseen = texts[: half * 3 // 4], texts[half * 3 // 4 : half], texts[half:]

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


def _positions(draft: LlamaRow, texts: Sequence[tuple[list[int], list[int]]]) -> Iterator[_Position]:
    for prompt, answer in texts:
        text = [*prompt, *answer]
        for i, (_, logits) in enumerate(outputs_along(draft, prompt, answer), len(prompt)):
            powers = np.exp(logits - logits.max())
            yield _Position(text[max(0, i - _ORDER) : i], text[i], powers / powers.sum())


if __name__ == "__main__":
    main()
