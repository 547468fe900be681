"""Sessions that draft with a head: an EAGLE-3 file, or a layer of the main model's own file."""

from dataclasses import replace

import pytest

from spec_local.calibration import cost_store
from spec_local.core.proposal import MAX_DRAFT
from spec_local.core.sampling import SamplingSettings
from spec_local.errors import ContextOverflow, InvalidRequest
from spec_local.llama.context import MAX_SEQUENCES
from spec_local.models import pairs
from spec_local.policies.cost_model import CostModel
from spec_local.session import Done, Session, Text
from spec_local.settings import GenerationSettings
from tests.llama.answers import text_of
from tests.recorded_calls import record_calls
from tests.tiny_architectures import write_tiny
from tests.tiny_block_heads import write_tiny_block_head
from tests.tiny_gemma import write_tiny_assistant, write_tiny_gemma
from tests.tiny_heads import write_tiny_eagle, write_tiny_main
from tests.tiny_layered_heads import write_layered_eagle
from tests.tiny_mtp import write_tiny_mtp
from tests.unfiltered import unfiltered

pytestmark = pytest.mark.usefixtures("f32_caches", "unchecked")

PLAIN = GenerationSettings(SamplingSettings(temperature=0), max_tokens=40, policy="off")
DRAFT = replace(PLAIN, policy="fixed", proposer="draft", draft_max=3)
LONG = "the of and to in is you that it he was for on are with as his they at be this from have " * 3
WORDS = 'root ::= (" the" | " of" | " water" | " people")+'


@pytest.fixture(scope="module")
def files(folder):
    """Of each kind of head, the main model's file and the head's."""
    blocks = write_tiny_block_head(folder / "dspark.gguf", "dspark", n_draft_vocab=400)
    several = write_tiny_block_head(folder / "several.gguf", several_positions=True)
    main = write_tiny_main(folder / "m.gguf")
    return {
        "eagle": (main, write_tiny_eagle(folder / "head.gguf")),
        "layered": (main, write_layered_eagle(folder / "layered.gguf", main)),
        "peagle": (main, write_layered_eagle(folder / "peagle.gguf", main, "peagle")),
        "mtp": (write_tiny(folder / "own.gguf", "qwen35", n_mtp=1), None),
        "dflash": (folder / "m.gguf", write_tiny_block_head(folder / "dflash.gguf")),
        "dspark": (folder / "m.gguf", blocks),
        "dflash2": (folder / "m.gguf", write_tiny_block_head(folder / "dflash2.gguf", "dflash2")),
        # these predict nothing, as they are made for another main model
        "hybrid, blocks": (write_tiny(folder / "qwen35.gguf", "qwen35", n_layers=5), several),
        "hybrid": (write_tiny(folder / "hybrid.gguf", "lfm2", n_layers=5), folder / "head.gguf"),
        "chained": (write_tiny_mtp(folder / "three.gguf", "step35", n_mtp=3), None),
        "assistant": (
            write_tiny_gemma(folder / "gemma.gguf"),
            write_tiny_assistant(folder / "assistant.gguf"),
        ),
    }


@pytest.fixture(
    params=[
        *("eagle", "layered", "peagle", "mtp", "hybrid", "dflash", "dspark", "dflash2", "hybrid, blocks"),
        *("chained", "assistant"),
    ]
)
def open_session(request, files):
    """A function that opens a session with each kind of head."""

    def make(**options):
        return Session.open(*files[request.param], **{"n_ctx": 512, "threads": 1} | options)

    return make


def give_costs(session, draft=0.01):
    """Let drafts be cheap; costs measured on a busy machine could let a policy draft nothing."""
    session._costs.calls = CostModel({1: 1.0, 64: 1.5}), CostModel({1: draft, 64: 2 * draft})


def answer(session, prompt, settings):
    events = list(session.generate(prompt, settings))
    assert isinstance(events[-1], Done)
    return text_of(events), events[-1].statistics


def answers(session, prompts, settings):
    texts = [""] * len(prompts)
    for number, event in session.generate_many(prompts, settings):
        if isinstance(event, Text):
            texts[number] += event.text
    return texts


VARIANTS = {
    "fixed": {},
    "adaptive": {"policy": "adaptive"},
    "auto": {"policy": "adaptive", "proposer": "auto"},
    "confidence": {"policy": "confidence"},
    "grammar": {"grammar": WORDS},
    "penalty": {"sampling": SamplingSettings(temperature=0, repeat_penalty=1.3)},
    "seed": {"sampling": unfiltered(temperature=0.8), "seed": 7, "verifier": "exact-match"},
    "staged": {"staged": 2},
    "tree": {"shape": "tree"},
    "beam": {"shape": "beam", "beam_width": 3},
    "coupled tree": {"shape": "tree", "sampling": unfiltered(temperature=0.8), "seed": 7},
    "drawn beam": {"shape": "beam", "sampling": unfiltered(temperature=0.8), "seed": 7},
    "tree, grammar": {"shape": "tree", "grammar": WORDS},
    "tree, penalty": {"shape": "tree", "sampling": SamplingSettings(temperature=0, repeat_penalty=1.3)},
    "any shape": {"shape": "auto", "policy": "adaptive"},
    "adaptive tree": {"shape": "tree", "policy": "adaptive"},
}
CASES = {  # what each kind of head is tested with, besides "fixed" and "seed"
    "eagle": ["adaptive", "staged", "tree", "drawn beam", "tree, grammar", "tree, penalty"],
    "layered": ["adaptive", "staged", "tree", "drawn beam"],
    "peagle": ["adaptive", "auto", "grammar", "coupled tree", "any shape"],
    "mtp": ["auto", "grammar", "staged"],
    "hybrid": ["confidence", "penalty"],
    "dflash": ["adaptive", "staged", "tree", "coupled tree", "adaptive tree"],
    "dspark": ["auto", "grammar", "beam", "coupled tree", "any shape"],
    "dflash2": ["auto", "staged", "tree, grammar", "tree, penalty", "coupled tree", "drawn beam"],
    "hybrid, blocks": ["confidence", "adaptive"],
    "chained": ["adaptive", "penalty"],
    "assistant": ["penalty", "staged", "tree", "beam", "coupled tree", "any shape"],
}


def is_tree(event):
    return isinstance(event, Text) and len(set(event.proposal.parents)) < len(event.proposal.parents)


@pytest.mark.parametrize(
    ("kind", "variant"),
    [(kind, variant) for kind, more in CASES.items() for variant in ("fixed", "seed", *more)],
)
def test_the_text_is_that_without_a_head(files, kind, variant):
    """Of one answer, of a conversation that goes on, and of three answers at the same time."""
    with Session.open(*files[kind], n_ctx=512, threads=1, parallel=3, branches=24) as session:
        give_costs(session)
        how = replace(DRAFT, **{"max_tokens": 24, "tree_nodes": 8, "draft_max": 5} | VARIANTS[variant])
        without = replace(how, policy="off", shape="chain", proposer="auto")
        prompts = ["the of and to", LONG, LONG + " water"]
        expected = [answer(session, prompt, without)[0] for prompt in prompts]
        found = [answer(session, prompt, how) for prompt in prompts]
        assert [text for text, _ in found] == expected
        assert any(statistics.draft_n for _, statistics in found)
        if how.shape in ("tree", "beam") and how.policy == "fixed":
            assert any(map(is_tree, session.generate(LONG, how)))
        if how.seed is None:
            assert answers(session, prompts, how) == expected


def test_distributions_are_verified(open_session):
    with open_session() as session:
        how = replace(DRAFT, sampling=unfiltered(temperature=1.0), verifier="block", seed=1)
        assert answer(session, LONG, how)[1].draft_n > 40


def test_a_prompt_that_is_asked_again_is_not_read_again(open_session):
    with open_session() as session:
        first, _ = answer(session, LONG, DRAFT)
        again, statistics = answer(session, LONG, DRAFT)
        assert again == first
        assert statistics.prompt_n == 0


def test_a_prompt_that_rows_share_is_read_once(open_session):
    with open_session(parallel=3) as session:
        calls = record_calls(session.main)
        prompts = [LONG + end for end in (" water", " people", " long")]
        answers(session, prompts, replace(DRAFT, max_tokens=2))
        n_prompt = len(session.main.model.vocabulary.tokenize(LONG))
        assert sum(call.n_tokens for call in calls) < 1.5 * n_prompt


def test_layers_in_a_models_own_file_can_be_left_unused(files, folder):
    two, lines = write_tiny(folder / "two.gguf", "qwen35", n_mtp=2), []
    for path, how in ((files["mtp"][0], {"mtp": False}), (two, {"log": lines.append})):
        with Session.open(path, n_ctx=256, **how) as session:
            assert session.draft is None
    assert any("two.gguf: llama.cpp cannot evaluate" in line for line in lines)


@pytest.mark.usefixtures("unchecked_headers")
@pytest.mark.parametrize("kind", ["eagle", "assistant"])
def test_a_pair_with_a_head_is_checked_by_its_headers(files, kind):
    main, head = files[kind]
    report = pairs.check(main, head)
    assert (report.vocabulary_match.verdict, report.draft.path) == ("same", head)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        *(("eagle", rule) for rule in ("spectr", "traversal", "exact-match")),
        *(("dflash2", rule) for rule in ("spectr", "traversal", "exact-match")),
        *(("dflash", "traversal"), ("dspark", "spectr"), ("assistant", "traversal")),
        *(("layered", "spectr"), ("peagle", "traversal")),
    ],
)
def test_drawn_trees_are_verified(files, kind, rule):
    with Session.open(*files[kind], n_ctx=512, threads=1, branches=24) as session:
        how = replace(DRAFT, sampling=unfiltered(temperature=1.0), shape="tree", verifier=rule)
        _, statistics = answer(session, LONG, how)
        assert statistics.draft_n > 80  # more than chains would have
        assert statistics.draft_n_accepted


@pytest.mark.parametrize(
    ("kind", "why"), [("mtp", "a recurrent model cannot evaluate a tree"), ("chained", "drafts chains only")]
)
def test_where_trees_are_not_possible_chains_are_drafted(files, kind, why):
    """Of a hybrid main model, whatever its head could draft, and of several layers."""
    with Session.open(*files[kind], n_ctx=512, threads=1, branches=8) as session:
        assert session.draft.limits.max_branches == 1
        for shape in ("tree", "beam"):
            with pytest.raises(InvalidRequest, match=why):
                session.generate("the", replace(DRAFT, shape=shape))
        assert answer(session, LONG, replace(DRAFT, shape="auto", policy="adaptive"))[0]


@pytest.mark.usefixtures("unchecked_headers")
def test_the_expected_speedup_of_a_block(files):
    """One call for all of its tokens, and no more tokens than it has."""
    main, head = files["dflash"]
    costs = CostModel({1: 1.0, 64: 2.0}), CostModel({1: 0.5, 64: 0.6})
    with Session.open(main, head, n_ctx=512, threads=1) as session:
        for context, table in zip((session.main, session.draft), costs, strict=True):
            cost_store.save(context, table)
    report = pairs.check(main, head, n_ctx=512, threads=1)
    lengths = [each.draft_length for each in report.expectation.speedups]
    assert lengths[-1] == 7
    assert report.expectation.speedups[-1].speedup == pytest.approx(
        sum(0.95**i for i in range(8)) / (costs[1].seconds(7) + costs[0].seconds(8))
    )


@pytest.mark.parametrize(
    "options", [{"reproducible": True, "gpu_layers": 0}, {"cache_type": "q8_0"}], ids=str
)
@pytest.mark.parametrize("kind", ["eagle", "layered", "peagle", "dflash", "dspark", "dflash2", "assistant"])
def test_the_text_is_that_without_a_head_with_other_options(files, kind, options):
    with Session.open(*files[kind], n_ctx=512, threads=1, **options) as session:
        text, statistics = answer(session, LONG, DRAFT)
        assert statistics.draft_n > 40
        if kind != "assistant" or "reproducible" in options:  # it attends to the main model's rounded cache
            assert text == answer(session, LONG, PLAIN)[0]


def test_a_context_too_small_for_a_head(files):
    """llama.cpp would abort the process: a call has less room than the head needs sequence ids."""
    with pytest.raises(InvalidRequest, match="cannot draft for 1 answers at the same time, but for 0"):
        Session.open(*files["eagle"], n_ctx=1, threads=1, parallel=1)
    with Session.open(*files["eagle"], n_ctx=16, threads=1, parallel=MAX_SEQUENCES) as session:
        assert answer(session, [1, 2, 3], replace(DRAFT, max_tokens=4))[0]


@pytest.mark.parametrize(("seconds", "pays"), [(5.0, False), (0.01, True)])
def test_a_head_that_never_pays_is_not_fed(files, seconds, pays):
    with Session.open(*files["eagle"], n_ctx=512, threads=1, parallel=1) as session:
        give_costs(session, draft=seconds)
        calls = record_calls(session.draft)
        adaptive = replace(DRAFT, policy="adaptive", proposer="auto")
        assert answer(session, LONG, adaptive)[0] == answer(session, LONG, PLAIN)[0]
        assert (len(calls) > 0) is pays


@pytest.mark.parametrize("shape", ["chain", "tree", "beam"])
def test_a_head_without_room_for_a_level_drafts_what_it_has(files, monkeypatch, shape):
    with Session.open(*files["eagle"], n_ctx=512, threads=1, parallel=1, branches=64) as session:
        how = replace(DRAFT, shape=shape, draft_max=6)
        expected = answer(session, LONG, PLAIN)[0]
        decode, n_calls = session.draft.context.decode, 0

        def fail_often(calls):
            nonlocal n_calls
            n_calls += 1
            if n_calls % 3 == 0:
                for call in calls:
                    call.sequence.resync()  # as after a call that llama.cpp refused
                raise ContextOverflow("no room")
            return decode(calls)

        monkeypatch.setattr(session.draft.context, "decode", fail_often)
        text, statistics = answer(session, LONG, how)
        assert text == expected
        assert statistics.draft_n > 10


def test_a_block_size_that_no_draft_needs(files, folder):
    """The batch of the head's context is not larger than the longest draft."""
    head = write_tiny_block_head(folder / "huge.gguf", "dflash", size=10**6)
    with Session.open(files["eagle"][0], head, n_ctx=256, threads=1, parallel=1) as session:
        assert session.draft.limits.max_draft == MAX_DRAFT
        assert answer(session, LONG, DRAFT)[0] == answer(session, LONG, PLAIN)[0]
