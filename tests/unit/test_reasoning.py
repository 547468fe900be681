"""Reasoning and answer, separated in text that is split in every way."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_local.reasoning.markers import Parts, Splitter, markers_of

FINAL = "<|start|>assistant<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
COMMENTARY = "<|channel|>commentary<|message|>"
KINDS = {  # template, openings in the output after a plain prompt, closings
    "tags": ("{{ x.split('</think>') }}", ["<think>"], ["</think>"]),
    "gpt-oss": (
        f"{{{{ '{FINAL}' + x }}}}",
        [f"<|start|>assistant{ANALYSIS}", f"<|start|>assistant{COMMENTARY}"],
        [FINAL, f"<|end|>{FINAL}"],
    ),
    "Gemma 4": ("{{ x.split('<channel|>') }}", ["<|channel>thought"], ["<channel|>"]),
}
CALLS = [
    f"{before}<|start|>assistant{header} to=functions."
    for before in ("", "<|end|>")
    for header in ("", "<|channel|>analysis", "<|channel|>commentary")
]
# Few letters, and parts of markers, so that they occur, begin, and overlap.
PIECES = [
    *("a", " ", "\n", "<", ">", "|", "<think>", "</think>", "<thi", "nk>", "</", "think"),
    *("<|start|>", "assistant", "<|channel|>", "analysis", "commentary", "final", "<|message|>", "<|end|>"),
    *("<|channel>thought", "<channel|>", "\udcff", "é", " to=functions.", CALLS[-1]),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
SPLITS = st.lists(st.integers(0, 200), max_size=60)
kinds = pytest.mark.parametrize("kind", KINDS)
FEWER = settings(max_examples=40)  # for each kind


def splitter_for(kind, prompt=""):
    return Splitter(markers_of(KINDS[kind][0]), prompt)


def split(splitter, text, splits):
    """The parts of a text that arrives in pieces, split at these offsets."""
    borders = sorted({0, len(text), *(at % (len(text) + 1) for at in splits)})
    parts = [splitter.feed(text[a:b]) for a, b in itertools.pairwise(borders)]
    return Parts(*map("".join, zip(*parts, splitter.finish(), strict=True)))


def calls_of(kind):
    return CALLS if kind == "gpt-oss" else []


def expected(kind, text, prompt=""):
    """The parts of a whole text."""
    _, openings, closings = KINDS[kind]
    begun = max((o[:n] for o in openings for n in range(len(o) + 1) if prompt.endswith(o[:n])), key=len)
    for at_start in ([begun + text] if begun else []) + [text.lstrip()]:
        for opening in filter(at_start.startswith, openings):
            thought, answer = at_start.removeprefix(opening).lstrip("\n"), None
            calls = calls_of(kind)
            ends = [(thought.find(c), c) for c in [*closings, *calls] if c in thought]
            if ends:
                end, which = min(ends)
                if which in calls:
                    return Parts(thought[:end].rstrip("\n"), thought[end:])
                thought, answer = thought[:end].rstrip("\n"), thought[end + len(which) :].lstrip("\n")
            return Parts(thought, answer or "")
        if at_start.startswith(closings[0]):
            return Parts("", at_start.removeprefix(closings[0]).lstrip("\n"))
    return Parts("", text)


@kinds
@FEWER
@given(text=TEXTS, splits=SPLITS, begins=st.booleans())
@example(text="\n a", splits=[1, 2], begins=False)
@example(text="\n\na\n\n</think>\n\n a\n", splits=list(range(40)), begins=True)
@example(text="</think>a", splits=[], begins=True)
@example(text="a</think", splits=[3], begins=True)
def test_any_split_gives_the_same_parts(kind, text, splits, begins):
    text = KINDS[kind][1][-1] * begins + text
    assert split(splitter_for(kind), text, splits) == expected(kind, text)


@kinds
@FEWER
@given(text=TEXTS, splits=SPLITS, n=st.integers(1, 40))
@example(text="\na\n</think>\n\nb", splits=[], n=40)
@example(text="<think>a</think>b", splits=[3], n=1)
@example(text=f"{ANALYSIS}a<|end|>{FINAL}b", splits=[8], n=18)
@example(text="<|channel|>final<|message|>b", splits=[8], n=18)
def test_a_prompt_can_end_within_the_opening_or_after_it(kind, text, splits, n):
    prompt = "a<|end|>" + KINDS[kind][1][0][:n]
    assert split(splitter_for(kind, prompt), text, splits) == expected(kind, text, prompt)


@kinds
@FEWER
@given(text=TEXTS, splits=SPLITS)
def test_text_without_a_marker_at_its_start_is_unchanged(kind, text, splits):
    text = "a" + text
    assert split(splitter_for(kind), text, splits) == Parts("", text)
    assert split(Splitter(), KINDS[kind][1][0] + text, splits) == Parts("", KINDS[kind][1][0] + text)


@kinds
@FEWER
@given(text=TEXTS, splits=SPLITS)
def test_nothing_is_held_back_but_what_may_become_a_marker(kind, text, splits):
    _, openings, closings = KINDS[kind]
    splitter = splitter_for(kind, openings[0])
    shown, sofar = "", ""
    borders = sorted({0, len(text), *(at % (len(text) + 1) for at in splits)})
    for a, b in itertools.pairwise(borders):
        sofar += text[a:b]
        shown += splitter.feed(text[a:b]).reasoning
        ends = [*closings, *calls_of(kind)]
        if any(end in sofar for end in ends):
            return
        held = sofar.lstrip("\n").removeprefix(shown).lstrip("\n")
        assert any(end.startswith(held) for end in ends)


def test_the_answer_is_never_held_back():
    splitter = splitter_for("tags")
    assert splitter.feed("a") == Parts("", "a")
    assert splitter.feed("<thi") == Parts("", "<thi")
    splitter = splitter_for("tags", "<think>\n")
    assert splitter.feed("b</think>\n\nc") == Parts("b", "c")
    assert splitter.feed("\n</thi") == Parts("", "\n</thi")
    assert splitter.finish() == Parts("", "")


@pytest.mark.parametrize(
    ("kind", "prompt", "text", "parts"),
    [
        ("tags", "assistant\n", "<think>\nHm.\n</think>\n\nYes.", Parts("Hm.", "Yes.")),
        ("tags", "assistant\n<think>\n", "Hm.\n</think>\n\nYes.", Parts("Hm.", "Yes.")),
        ("tags", "assistant\n<think>\n\n</think>\n\n", "Yes: <think>", Parts("", "Yes: <think>")),
        ("tags", "assistant\n", "<think>\n\n</think>\n\nYes.", Parts("", "Yes.")),
        ("tags", "assistant\n", "<think>\nHm", Parts("Hm", "")),
        ("tags", "assistant\n", "    code </think>", Parts("", "    code </think>")),
        ("tags", "<think>\n", "\tHm.</think>\n    code\n", Parts("\tHm.", "    code\n")),
        ("gpt-oss", "<|end|><|start|>assistant", f"{ANALYSIS}Hm.<|end|>{FINAL}Yes.", Parts("Hm.", "Yes.")),
        ("gpt-oss", "<|start|>assistant", f"{ANALYSIS}Hm.{FINAL}Yes.", Parts("Hm.", "Yes.")),
        ("gpt-oss", "<|start|>assistant", "<|channel|>final<|message|>Yes.", Parts("", "Yes.")),
        ("gpt-oss", "<|start|>assistant", "Yes.", Parts("", "Yes.")),
        ("gpt-oss", "<|start|>assistant", f"{COMMENTARY}Hm.<|end|>{FINAL}Yes.", Parts("Hm.", "Yes.")),
        ("Gemma 4", "model\n", "<|channel>thought\nHm.\n<channel|>Yes.", Parts("Hm.", "Yes.")),
        ("Gemma 4", "model\n<|channel>thought\n<channel|>", "Yes.", Parts("", "Yes.")),
    ],
)
def test_what_models_write(kind, prompt, text, parts):
    assert splitter_for(kind, prompt).finish(text) == parts


def test_templates_without_markers():
    assert markers_of("") is None
    assert markers_of("{{ messages[0].content }}<|im_start|>assistant\n") is None
    assert markers_of("{# how to <think> #}") is None
