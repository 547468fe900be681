"""The end of an answer: one, whatever meets in the step in which it comes, and the others go on."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_local import Done, Failed, GenerationSettings, SamplingSettings, Session, Text
from spec_local.engine.request import Request
from spec_local.errors import InternalError, InvalidRequest
from spec_local.llama.tiny import write_tiny_model
from tests.llama.answers import text_of
from tests.tiny_heads import write_tiny_eagle, write_tiny_main

pytestmark = pytest.mark.usefixtures("own_cache", "unchecked")

PROMPTS = ["one two three", "four", "five six one two three one two", "<|im_start|>user\nhow<|im_end|>\n"]
GRAMMARS = [None, 'root ::= "ok."', 'root ::= [a-z]+ "." | "{}"', "root ::= oops"]
LENGTH = 12
GREEDY = GenerationSettings(SamplingSettings(temperature=0), max_tokens=LENGTH)
DRAFTING = [
    {"policy": "off"},
    {"policy": "fixed", "draft_max": 4},
    {"policy": "fixed", "draft_max": 8, "proposer": "suffix"},
    {"policy": "fixed", "draft_max": 8, "proposer": "recycling"},
    {"policy": "adaptive"},
]
DEFECT = 7  # number of log probabilities of an answer whose verification fails


@pytest.fixture(scope="module", params=["draft model", "head", "lookups"])
def session(request, tmp_path_factory):
    """A session whose answers often end by themselves within the length that the tests give them."""
    folder = tmp_path_factory.mktemp("ends")
    if request.param == "head":
        main = write_tiny_main(folder / "main.gguf", end_scale=1.0)
        draft = write_tiny_eagle(folder / "head.gguf")
    else:
        options = {"tensor_type": "F32", "end_scale": 1.0}
        main = write_tiny_model(folder / "main.gguf", **options)
        draft = write_tiny_model(folder / "draft.gguf", noise=0.05, **options)
        draft = draft if request.param == "draft model" else "none"
    with Session.open(main, draft, n_ctx=96, threads=1, parallel=8, branches=16) as session:
        yield session


@pytest.fixture(scope="module")
def plain(session):
    """The text of a plain answer without stop strings, by prompt and grammar; None: it fails."""
    texts = {}
    for prompt in PROMPTS:
        for grammar in GRAMMARS:
            own = replace(GREEDY, policy="off", grammar=grammar)
            try:
                texts[prompt, grammar] = text_of(session.generate(prompt, own))
            except InvalidRequest:
                texts[prompt, grammar] = None
    return texts


def cut(text, stops):
    """The text before the stop string that ends first, and that string."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    _, at, word = min(found, default=(0, len(text), ""))
    return text[:at], word


@st.composite
def answers(draw):
    """Prompt, grammar, share of the text at which a stop string begins and its length, and what happens."""
    return {
        "prompt": draw(st.sampled_from(PROMPTS)),
        "grammar": draw(st.sampled_from(GRAMMARS)),
        "stops": draw(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 3)), max_size=2)),
        "drafting": draw(st.sampled_from(DRAFTING)),
        "cancelled_after": draw(st.none() | st.integers(0, 6)),
        "fails": draw(st.integers(0, 5)) == 0,
    }


@pytest.fixture
def defect(monkeypatch):
    """The second verification of some answers raises what nobody foresaw."""
    verify = Request.verify

    def broken(self, logits):
        if self._options.logprobs == DEFECT and self.statistics.n_steps == 1:
            raise ZeroDivisionError("a defect")
        return verify(self, logits)

    monkeypatch.setattr(Request, "verify", broken)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(answers(), min_size=1, max_size=8))
def test_an_answer_ends_once_whatever_meets_in_a_step(session, plain, defect, drawn):
    each, expected = [], []
    for answer in drawn:
        text = plain[answer["prompt"], answer["grammar"]]
        starts = [(int(share * len(text or "")), n) for share, n in answer["stops"]]
        stops = tuple(stop for at, n in starts if (stop := (text or "")[at : at + n]))
        own = replace(GREEDY, grammar=answer["grammar"], stops=stops, **answer["drafting"])
        each.append(replace(own, logprobs=DEFECT) if answer["fails"] else own)
        expected.append((None, "") if text is None else cut(text, stops))

    seen, ends, texts = defaultdict(int), {}, defaultdict(str)

    def cancelled(i):
        after = drawn[i]["cancelled_after"]
        return after is not None and seen[i] >= after

    for i, event in session.generate_many([answer["prompt"] for answer in drawn], each, cancelled=cancelled):
        assert i not in ends
        if isinstance(event, Text):
            seen[i] += 1
            texts[i] += event.text
        elif isinstance(event, Done | Failed):
            ends[i] = event
    assert sorted(ends) == list(range(len(drawn)))
    for i, end in ends.items():
        whole, word = expected[i]
        if isinstance(end, Failed):
            assert whole is None or (drawn[i]["fails"] and isinstance(end.error, InternalError))
        elif end.reason == "cancelled":
            assert drawn[i]["cancelled_after"] is not None
            assert plain[drawn[i]["prompt"], drawn[i]["grammar"]].startswith(texts[i])
        else:
            assert (texts[i], end.stopping_word) == (whole, word)


def test_a_stop_string_in_the_last_step_of_an_answer(session):
    """The grammar ends where the stop string does."""
    own = replace(GREEDY, grammar='root ::= "ok."', stops=(".",), policy="fixed")
    events = list(session.generate("one", own))
    assert [type(event) for event in events].count(Done) == 1
    assert (text_of(events), events[-1].stopping_word) == ("ok", ".")
    ends = [e for _, e in session.generate_many(["one"] * 9, own) if isinstance(e, Done | Failed)]
    assert [end.stopping_word for end in ends] == ["."] * 9


@pytest.mark.parametrize("drafting", DRAFTING)
def test_the_name_of_a_control_token_stops_at_the_token(session, drafting):
    """It has no text; what comes before is unchanged, and the first of several stops ends the answer."""
    (opening,) = session.main.model.vocabulary.control("<|im_start|>")
    for prompt in PROMPTS:
        biased = SamplingSettings(temperature=0, logit_bias={opening: 3.0})
        own = replace(GREEDY, sampling=biased, max_tokens=40, **drafting)
        plain = [t for e in session.generate(prompt, own) if isinstance(e, Text) for t in e.tokens]
        before = plain[: plain.index(opening)] if opening in plain else plain
        stops = replace(own, stops=("never", "<|im_start|>", "<|im_end|>"))
        events = list(session.generate(prompt, stops))
        tokens = [t for event in events if isinstance(event, Text) for t in event.tokens]
        assert tokens == before
        assert text_of(events) == session.main.model.vocabulary.detokenize(before)
        assert events[-1].stopping_word == ("<|im_start|>" if opening in plain else "")
        assert events[-1].statistics.predicted_n == len(before) + (
            opening in plain or events[-1].end_token is not None
        )
        several = [each.event for each in session.generate_many([prompt] * 3, stops)]
        ends = [event for event in several if isinstance(event, Done)]
        assert [end.stopping_word for end in ends] == [events[-1].stopping_word] * 3
