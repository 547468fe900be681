"""Sessions that draft with a head: an EAGLE-3 file, or a layer of the main model's own file."""

import time
from dataclasses import replace

import pytest

from spec_local.calibration import cost_store
from spec_local.core.proposal import MAX_DRAFT
from spec_local.core.sampling import SamplingSettings
from spec_local.errors import ContextOverflow, InvalidRequest, ModelError, SpecLocalError
from spec_local.models import pairs
from spec_local.policies.cost_model import CostModel
from spec_local.session import Done, Session, Text
from spec_local.settings import GenerationSettings
from tests.recorded_calls import record_calls
from tests.tiny_architectures import write_tiny
from tests.tiny_block_heads import write_tiny_block_head
from tests.tiny_gemma import write_tiny_assistant, write_tiny_gemma
from tests.tiny_heads import write_tiny_eagle, write_tiny_main
from tests.tiny_mtp import write_tiny_mtp
from tests.unfiltered import unfiltered

pytestmark = pytest.mark.usefixtures("f32_caches")

PLAIN = GenerationSettings(SamplingSettings(temperature=0), max_tokens=40, policy="off")
DRAFT = replace(PLAIN, policy="fixed", proposer="draft", draft_max=3)
LONG = "the of and to in is you that it he was for on are with as his they at be this from have " * 3
WORDS = 'root ::= (" the" | " of" | " water" | " people")+'


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """An own cache folder, so that each file is checked once."""
    with pytest.MonkeyPatch.context() as patch:
        path = str(tmp_path_factory.mktemp("cache"))
        patch.setattr("platformdirs.user_cache_dir", lambda name: path)
        yield


@pytest.fixture(scope="module")
def files(folder):
    """Of each kind of head, the main model's file and the head's."""
    blocks = write_tiny_block_head(folder / "dspark.gguf", "dspark", n_draft_vocab=400)
    several = write_tiny_block_head(folder / "several.gguf", several_positions=True)
    return {
        "eagle": (write_tiny_main(folder / "m.gguf"), write_tiny_eagle(folder / "head.gguf")),
        "mtp": (write_tiny(folder / "own.gguf", "qwen35", n_mtp=1), None),
        "dflash": (folder / "m.gguf", write_tiny_block_head(folder / "dflash.gguf")),
        "dspark": (folder / "m.gguf", blocks),
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
    params=["eagle", "mtp", "hybrid", "dflash", "dspark", "hybrid, blocks", "chained", "assistant"]
)
def open_session(request, files):
    """A function that opens a session with each kind of head."""

    def make(**options):
        return Session.open(*files[request.param], **{"n_ctx": 512, "threads": 1} | options)

    return make


def cheap_drafts():
    """Costs of main and of a draft; those measured on a busy machine could let it draft nothing."""
    return CostModel({1: 1.0, 64: 1.5}), CostModel({1: 0.01, 64: 0.02})


def answer(session, prompt, settings):
    events = list(session.generate(prompt, settings))
    assert isinstance(events[-1], Done)
    return "".join(e.text for e in events if isinstance(e, Text | Done)), events[-1].statistics


def answers(session, prompts, settings):
    texts = [""] * len(prompts)
    for number, event in session.generate_many(prompts, settings):
        if isinstance(event, Text | Done):
            texts[number] += event.text
    return texts


@pytest.mark.parametrize(
    "how",
    [
        DRAFT,
        replace(DRAFT, policy="adaptive"),
        replace(DRAFT, policy="adaptive", proposer="auto"),
        replace(DRAFT, policy="confidence"),
        replace(DRAFT, grammar=WORDS),
        replace(DRAFT, sampling=SamplingSettings(temperature=0, repeat_penalty=1.3)),
        replace(DRAFT, sampling=unfiltered(temperature=0.8), seed=7, verifier="exact-match"),
        replace(DRAFT, staged=2),
    ],
    ids=["fixed", "adaptive", "auto", "confidence", "grammar", "penalty", "seed", "staged"],
)
def test_the_text_is_that_without_a_head(open_session, how):
    """Of one answer, of a conversation that goes on, and of three answers at the same time."""
    with open_session(parallel=3) as session:
        session._costs.calls = cheap_drafts()
        without = replace(how, policy="off", proposer="auto")
        prompts = ["the of and to", LONG, LONG + " water", "the of"]
        expected = [answer(session, prompt, without)[0] for prompt in prompts]
        found = [answer(session, prompt, how) for prompt in prompts]
        assert [text for text, _ in found] == expected
        assert any(statistics.draft_n for _, statistics in found)
        if how.seed is None:
            assert answers(session, prompts, how) == expected


def test_distributions_are_verified(open_session):
    with open_session() as session:
        how = replace(DRAFT, sampling=unfiltered(temperature=1.0), verifier="block")
        assert answer(session, LONG, how)[1].draft_n > 40


def test_a_prompt_that_is_asked_again_is_not_read_again(open_session):
    with open_session() as session:
        calls = record_calls(session.main)
        first, _ = answer(session, LONG, DRAFT)
        calls.clear()
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


def test_the_log_says_which_head_is_used(files, folder):
    for kind, line in (
        ("eagle", "draft: head.gguf, an EAGLE-3 head"),
        ("dflash", "draft: dflash.gguf, a DFlash head"),
        ("dspark", "draft: dspark.gguf, a DSpark head"),
        ("mtp", "draft: the layer for multi-token prediction of own.gguf"),
        ("chained", "draft: the 3 layers for multi-token prediction of three.gguf"),
        ("assistant", "draft: assistant.gguf, a Gemma 4 assistant"),
    ):
        lines = []
        with Session.open(*files[kind], n_ctx=256, log=lines.append):
            assert line in lines
    with Session.open(files["mtp"][0], n_ctx=256, mtp=False, log=lines.append) as session:
        assert session.draft is None
    two = write_tiny(folder / "two.gguf", "qwen35", n_mtp=2)
    with Session.open(two, n_ctx=256, log=lines.append) as session:
        assert session.draft is None
    assert "two.gguf: its layers for multi-token prediction are not supported" in lines


def test_a_head_for_another_model(files, folder):
    other = write_tiny_eagle(folder / "other.gguf", target_width=128)
    with pytest.raises(ModelError, match="EAGLE-3 head for another model"):
        Session.open(files["eagle"][0], other, n_ctx=256)
    with pytest.raises(ModelError, match=r"head\.gguf is an EAGLE-3 head: give it as the draft"):
        Session.open(files["eagle"][1], n_ctx=256)
    other = write_tiny_assistant(folder / "other-assistant.gguf", target_width=128)
    with pytest.raises(ModelError, match="Gemma 4 assistant for another model"):
        Session.open(files["assistant"][0], other, n_ctx=256)
    with pytest.raises(ModelError, match=r"m\.gguf has the architecture llama"):
        Session.open(files["eagle"][0], files["assistant"][1], n_ctx=256)
    with pytest.raises(ModelError, match=r"assistant\.gguf is a Gemma 4 assistant: give it as the draft"):
        Session.open(files["assistant"][1], n_ctx=256)


def test_a_pair_with_a_head_is_checked_by_its_headers(files, folder):
    main, head = files["eagle"]
    report = pairs.check(main, head)
    assert (report.vocabulary_match.verdict, report.draft.path) == ("same", head)
    with pytest.raises(ModelError, match="EAGLE-3 head for another model"):
        pairs.check(main, write_tiny_eagle(folder / "wide.gguf", target_width=128))
    main, head = files["assistant"]
    report = pairs.check(main, head)
    assert (report.vocabulary_match.verdict, report.draft.path) == ("same", head)


@pytest.mark.parametrize("kind", ["eagle", "dspark"])
def test_a_damaged_head_does_not_crash_the_process(files, folder, kind):
    """Its list of tokens names one that the main model does not have."""
    import gguf

    damaged = folder / f"damaged-{kind}.gguf"
    damaged.write_bytes(files[kind][1].read_bytes())
    reader = gguf.GGUFReader(damaged, "r+")
    tensor = next(t for t in reader.tensors if t.name == "d2t")
    tensor.data[-1] = 1 << 40
    tensor.data.flush()
    with pytest.raises(SpecLocalError, match=rf"damaged-{kind}\.gguf"):
        Session.open(files[kind][0], damaged, n_ctx=256)


TREES = {
    "best first": {"shape": "tree"},
    "beam": {"shape": "beam", "beam_width": 3},
    "coupled": {"shape": "tree", "sampling": unfiltered(temperature=0.8), "seed": 7},
    "beam, drawn": {"shape": "beam", "sampling": unfiltered(temperature=0.8), "seed": 7},
    "grammar": {"shape": "tree", "grammar": WORDS},
    "penalty": {"shape": "tree", "sampling": SamplingSettings(temperature=0, repeat_penalty=1.3)},
    "adaptive": {"shape": "auto", "policy": "adaptive"},
    "adaptive tree": {"shape": "tree", "policy": "adaptive"},
}


@pytest.mark.parametrize("kwargs", TREES.values(), ids=TREES.keys())
def test_the_text_is_that_without_a_head_with_trees(files, kwargs):
    """Of one answer, of a conversation that goes on, and of three answers at the same time."""
    with Session.open(*files["eagle"], n_ctx=512, threads=1, parallel=3, branches=24) as session:
        session._costs.calls = cheap_drafts()
        how = replace(DRAFT, tree_nodes=8, **kwargs)
        without = replace(how, policy="off", shape="chain", proposer="auto")
        prompts = ["the of and to", LONG, LONG + " water", "the of"]
        expected = [answer(session, prompt, without)[0] for prompt in prompts]
        calls = record_calls(session.draft)
        found = [answer(session, prompt, how) for prompt in prompts]
        assert [text for text, _ in found] == expected
        assert any(statistics.draft_n for _, statistics in found)
        assert how.policy == "adaptive" or max(call.n_logits for call in calls) > 1  # levels of trees
        if how.seed is None:
            assert answers(session, prompts, how) == expected


@pytest.mark.parametrize("rule", ["spectr", "traversal", "exact-match"])
def test_drawn_trees_are_verified(files, rule):
    with Session.open(*files["eagle"], n_ctx=512, threads=1, branches=24) as session:
        how = replace(DRAFT, sampling=unfiltered(temperature=1.0), shape="tree", verifier=rule)
        _, statistics = answer(session, LONG, how)
        assert statistics.draft_n > 80  # more than chains would have
        assert statistics.draft_n_accepted


@pytest.mark.parametrize(
    ("seconds", "source", "other"),
    [({1: 1.0, 64: 1.0}, "tree", "draft"), ({1: 1.0, 2: 1.25, 64: 17.0}, "draft", "tree")],
    ids=["free nodes", "each node takes time"],
)
def test_the_adaptive_policy_drafts_trees_where_they_pay(files, seconds, source, other):
    with Session.open(*files["eagle"], n_ctx=512, threads=1, branches=24) as session:
        now, costs = 0.0, ({1: 0.05, 64: 0.1}, seconds)
        calls = record_calls(session.draft), record_calls(session.main)
        session._costs.calls = CostModel(costs[1]), CostModel(costs[0])

        def clock():
            nonlocal now
            for made, cost in zip(calls, costs, strict=True):
                now += sum(CostModel(cost).seconds(call.n_tokens) for call in made)
                made.clear()
            return now

        how = replace(DRAFT, shape="auto", policy="adaptive", draft_max=None, max_tokens=100)
        steps = list(session.generate(LONG, how, clock=clock))[-1].statistics.steps_by
        assert steps[source] > 5
        assert other not in steps


def test_a_head_that_drafts_chains_only(files):
    with Session.open(*files["eagle"], n_ctx=256, threads=1, branches=8) as session:
        session.draft.max_branches = 1
        with pytest.raises(InvalidRequest, match="this head drafts chains only"):
            session.generate("the", replace(DRAFT, shape="tree"))


def test_trees_of_a_session_for_chains(open_session):
    with open_session() as session, pytest.raises(InvalidRequest, match=r"branches=64|a recurrent model"):
        session.generate("the", replace(DRAFT, shape="tree"))


def test_a_hybrid_model_takes_chains_whatever_its_head_could_draft(files):
    with Session.open(files["mtp"][0], n_ctx=256, threads=1, branches=8) as session:
        assert session.draft.max_branches == 1
        with pytest.raises(InvalidRequest, match="a recurrent model cannot evaluate a tree"):
            session.generate("the", replace(DRAFT, shape="beam"))
        assert answer(session, LONG, replace(DRAFT, shape="auto", policy="adaptive"))[0]


@pytest.mark.parametrize(("kind", "n_drafted"), [("dflash", 7), ("dspark", 8)])
def test_the_adaptive_policy_knows_what_a_block_is(files, kind, n_drafted):
    with Session.open(*files[kind], n_ctx=512, threads=1, branches=8) as session:
        factory, slot = session._factory, session._slots[0]
        adaptive = factory._policy(replace(DRAFT, policy="adaptive"), time.perf_counter, slot, 1)
        assert adaptive._max_calls == n_drafted
        assert adaptive._all_drafts.drafts_blocks
        assert factory._tree_costs(slot)[1].drafts_blocks
        assert adaptive._all_drafts.seconds(1) > 0


def test_the_expected_speedup_of_a_block(files):
    """One call for all of its tokens, and no more tokens than it has."""
    main, head = files["dflash"]
    costs = CostModel({1: 1.0, 64: 2.0}), CostModel({1: 0.5, 64: 0.6})
    with Session.open(main, head, n_ctx=512, threads=1) as session:
        for context, table in zip((session.main, session.draft), costs, strict=True):
            cost_store.save(context, table)
    report = pairs.check(main, head, n_ctx=512, threads=1)
    lengths = [each.draft_length for each in report.expected_speedups]
    assert lengths[-1] == 7
    assert report.expected_speedups[-1].speedup == pytest.approx(
        sum(0.95**i for i in range(8)) / (costs[1].seconds(7) + costs[0].seconds(8))
    )


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_heads_that_draft_blocks_draft_trees(files, kind):
    """Of one answer and of three at the same time, with every way to draft and to verify them."""
    with Session.open(*files[kind], n_ctx=512, threads=1, branches=16, parallel=3) as session:
        prompts = ["the of and to", LONG, "the of"]
        expected = [answer(session, prompt, PLAIN)[0] for prompt in prompts]
        for how in (
            replace(DRAFT, shape="tree", draft_max=5),
            replace(DRAFT, shape="beam", draft_max=5),
            replace(DRAFT, shape="tree", policy="adaptive"),
            replace(DRAFT, shape="auto", policy="adaptive"),
        ):
            found = [answer(session, prompt, how) for prompt in prompts]
            assert [text for text, _ in found] == expected
            assert any(statistics.draft_n for _, statistics in found)
            assert answers(session, prompts, how) == expected
        drawn = replace(DRAFT, shape="tree", sampling=unfiltered(temperature=1.0))
        for rule in ("spectr", "traversal", "exact-match"):
            assert answer(session, LONG, replace(drawn, verifier=rule))[1].draft_n > 40


@pytest.mark.parametrize("open_session", ["chained"], indirect=True)
def test_several_layers_draft_chains(open_session):
    with open_session(branches=8) as session:
        with pytest.raises(InvalidRequest, match="this head drafts chains only"):
            session.generate("the", replace(DRAFT, shape="tree"))
        assert answer(session, LONG, replace(DRAFT, shape="auto", policy="adaptive"))[0]


@pytest.mark.parametrize(
    "how",
    [
        replace(DRAFT, shape="tree", tree_nodes=8),
        replace(DRAFT, shape="beam", tree_nodes=8),
        replace(DRAFT, shape="auto", policy="adaptive", proposer="auto"),
        replace(DRAFT, shape="tree", seed=7, sampling=unfiltered(temperature=0.8), verifier="exact-match"),
    ],
    ids=["tree", "beam", "auto", "seed"],
)
def test_an_assistant_drafts_trees(files, how):
    """Without a cache, it evaluates a level in one call."""
    with Session.open(*files["assistant"], n_ctx=512, threads=1, branches=32, parallel=2) as session:
        prompts = ["the of and to", LONG]
        expected = [answer(session, p, replace(how, policy="off", proposer="auto"))[0] for p in prompts]
        widths = []
        evaluate = session.draft.decode_tree_async
        session.draft.decode_tree_async = lambda t, p, n=None: widths.append(len(t)) or evaluate(t, p, n)
        assert [answer(session, p, how)[0] for p in prompts] == expected
        if how.shape != "auto":
            assert max(widths) > 1
        if how.seed is None:
            assert answers(session, prompts, how) == expected


@pytest.mark.parametrize("options", [{"cache_type": "q8_0"}, {"cache_type": "q4_0"}, {"reproducible": True}])
def test_settings_of_an_assistants_session(files, options):
    with Session.open(*files["assistant"], n_ctx=512, threads=1, gpu_layers=0, **options) as session:
        text, statistics = answer(session, LONG, DRAFT)
        assert statistics.draft_n > 40
        if "reproducible" in options:
            assert text == answer(session, LONG, PLAIN)[0]


def test_a_saved_state_is_continued(open_session, tmp_path):
    with open_session() as session:
        text, _ = answer(session, LONG, DRAFT)
        session.save_state(tmp_path / "state")
        session.main.truncate(0)
        session.load_state(tmp_path / "state")
        assert answer(session, LONG + text, DRAFT)[0] == answer(session, LONG + text, PLAIN)[0]


@pytest.mark.parametrize("options", [{"reproducible": True, "gpu_layers": 0}, {"cache_type": "q8_0"}])
@pytest.mark.parametrize("kind", ["eagle", "dflash", "dspark"])
def test_further_sessions(files, kind, options):
    with Session.open(*files[kind], n_ctx=512, threads=1, **options) as session:
        assert answer(session, LONG, DRAFT)[0] == answer(session, LONG, PLAIN)[0]


def test_a_context_too_small_for_a_head(files):
    """llama.cpp would abort the process: a call has less room than the head needs sequence ids."""
    with pytest.raises(InvalidRequest, match="cannot draft for 1 answers at the same time, but for 0"):
        Session.open(*files["eagle"], n_ctx=1, threads=1, parallel=1)
    with pytest.raises(InvalidRequest, match="cannot draft for 256 answers at the same time, but for 255"):
        Session.open(*files["eagle"], n_ctx=16, threads=1, parallel=256)


def test_an_eagle_head_that_reads_a_layer_twice(files, folder):
    head = write_tiny_eagle(folder / "twice.gguf", layers=(2, 2, 4))
    with pytest.raises(ModelError, match="it reads a layer twice"):
        Session.open(files["eagle"][0], head, n_ctx=64, threads=1)


@pytest.mark.parametrize("pays", [False, True])
def test_a_head_that_never_pays_is_not_fed(files, monkeypatch, pays):
    with Session.open(*files["eagle"], n_ctx=512, threads=1, parallel=1) as session:
        costs = CostModel({1: 1.0, 64: 1.5}), CostModel({1: 0.01 if pays else 5.0})
        monkeypatch.setattr(session._factory, "_costs", lambda slot: costs)
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
                    call.row.resync()  # as after a call that llama.cpp refused
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
        assert session.draft.max_draft == MAX_DRAFT
        assert answer(session, LONG, DRAFT)[0] == answer(session, LONG, PLAIN)[0]
