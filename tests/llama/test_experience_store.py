"""Experience on disk: later runs begin with what earlier ones learned, and no file is a reason to fail."""

import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_local.calibration import experience_store
from spec_local.core.sampling import SamplingSettings
from spec_local.llama.tiny import write_tiny_model
from spec_local.policies.acceptance_model import AcceptanceModel
from spec_local.policies.experience import PairExperience, PastAnswers
from spec_local.session import Session
from spec_local.settings import GenerationSettings
from tests.llama.answers import text_of

KIND = (True, "chain", False)
MONTH = 30 * 86_400


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learned")
    return [
        write_tiny_model(folder / f"{name}.gguf", n_layers=1, noise=noise)
        for name, noise in (("main", 0.0), ("draft", 0.05))
    ]


@pytest.fixture
def open_session(paths, own_cache, unchecked):
    return lambda **kwargs: Session.open(*paths, n_ctx=128, threads=1, **kwargs)


@pytest.fixture
def rows(open_session):
    with open_session() as session:
        yield session.main, session.draft


def learned():
    """The experience of a draft model that is often rejected, and of one kind of lookup."""
    model = AcceptanceModel()
    for i in range(60):
        model.draft.observe(0.9, i % 3 == 0)
        model.recent.observe(i % 3 == 0)
        model.lookups["suffix"].observe(0.5, True)
        model.recycled.observe(False)
    return PairExperience({KIND: model}, {KIND: PastAnswers(75.0, {(1, 512): -0.2, (8, 0): 0.1})})


def rates(model):
    return (
        model.draft.rate(0.9),
        model.draft.rate(0.3),
        model.recent.mean,
        model.lookups["suffix"].rate(0.5),
        model.recycled.mean,
    )


def test_what_was_learned_is_read_again_and_fades(rows):
    known = learned()
    experience_store.save(*rows, known)
    same, later, much_later = (
        experience_store.load(*rows, now=now) for now in (None, time.time() + MONTH, time.time() + 20 * MONTH)
    )
    assert rates(same.acceptance[KIND]) == pytest.approx(rates(known.acceptance[KIND]), rel=1e-4)
    assert same.answers == known.answers
    before, usual = rates(known.acceptance[KIND]), rates(AcceptanceModel())
    for seen, faded, gone, prior in zip(
        before, rates(later.acceptance[KIND]), rates(much_later.acceptance[KIND]), usual, strict=True
    ):
        assert min(seen, prior) < faded < max(seen, prior)
        assert gone == pytest.approx(prior, abs=0.01)


def test_a_session_begins_with_what_earlier_ones_learned(open_session, own_cache):
    how = GenerationSettings(sampling=SamplingSettings(temperature=0), max_tokens=24)
    texts, seen = [], []
    for _ in range(2):
        with open_session() as session:
            texts.append(text_of(session.generate("one two " * 8, how)))
            seen.append(session._factory.learned())
    assert texts[0] == texts[1]
    kind = next(iter(seen[0].answers))
    first, second = (each.acceptance[kind].lookups["suffix"].evidence.seen for each in seen)
    assert sum(second) > sum(first) > 0
    assert seen[0].answers[kind].length != PastAnswers().length  # of the last answer, too
    (path,) = (own_cache / "learned").iterdir()
    assert json.loads(path.read_text())["main"] == "main.gguf"


def test_other_conditions_and_other_drafts_have_experience_of_their_own(open_session, rows):
    experience_store.save(*rows, learned())
    assert not experience_store.load(rows[0], None).answers
    with open_session(cache_type="q8_0") as session:
        assert not experience_store.load(session.main, session.draft).answers


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([1.0] * 9)


@given(data=st.data(), value=VALUES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_no_experience_and_gives_no_impossible_rates(rows, data, value):
    experience_store.save(*rows, learned())
    path = experience_store._path(*rows)
    content = json.loads(path.read_text())
    place = content["known"][0]
    for _ in range(data.draw(st.integers(0, 3))):
        inner = [k for k in (place if isinstance(place, dict) else range(len(place)))]
        if not inner or not isinstance(place[key := data.draw(st.sampled_from(inner))], dict | list):
            break
        place = place[key]
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    if keys:
        place[data.draw(st.sampled_from(keys))] = value
    path.write_text(json.dumps(content))
    found = experience_store.load(*rows)
    for model in found.acceptance.values():
        assert all(0 < rate < 1 for rate in rates(model))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", bytes(range(256)), b"{}" * 100_000], ids=range(5))
def test_a_file_that_is_no_experience(rows, content):
    experience_store.save(*rows, learned())
    experience_store._path(*rows).write_bytes(content)
    assert experience_store.load(*rows) == PairExperience()
