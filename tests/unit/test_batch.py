"""Batches: the lines of a file of prompts, and resuming with the answers in an output file."""

import json
import resource
from dataclasses import fields, replace

import pytest

from spec_local.batch.answers import open_answers
from spec_local.batch.runner import read_entries
from spec_local.core.sampling import SamplingSettings
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.settings import GenerationSettings
from tests.unfiltered import unfiltered

SETTINGS = GenerationSettings(unfiltered(), max_tokens=9)


@pytest.fixture
def main(tmp_path):
    path = tmp_path / "main.gguf"
    path.write_bytes(b"GGUF" * 10)
    return path


@pytest.fixture
def read(main):
    def entries(*lines, settings=SETTINGS, **more):
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        return read_entries(raw, "prompts.jsonl", main, settings, **more)

    return entries


def answer(entry, **more):
    return {"index": entry.index, "id": entry.id, "key": entry.key, "content": "é 🎉"} | more


def write_records(path, records):
    """Append records, and return the content of the file."""
    with open_answers(path) as answers:
        for record in records:
            answers.append(record)
    return path.read_bytes()


def read_keys(path):
    with open_answers(path) as answers:
        return dict(answers.keys)


def test_lines_and_their_settings(read):
    messages = [{"role": "user", "content": "c"}]
    entries = read(
        b'\xef\xbb\xbf{"prompt": "a", "id": "first"}\r',
        b"  \r",
        {"prompt": "b", "id": 2, "seed": 70, "max_tokens": 3, "system": "own"},
        {"messages": messages},
        {"prompt": "before", "suffix": "after"},
        settings=replace(SETTINGS, seed=5),
        system="shared",
    )
    assert [e.index for e in entries] == [0, 1, 2, 3]
    assert [e.id for e in entries] == ["first", 2, None, None]
    assert [e.settings.seed for e in entries] == [5, 70, 7, 8]  # by index, whatever other lines set
    assert [e.settings.max_tokens for e in entries] == [9, 3, 9, 9]
    assert [e.request.system for e in entries] == ["shared", "own", None, None]
    assert entries[2].request.messages == messages
    assert entries[3].request.suffix == "after"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{", "JSON"),
        (b"[]", "object"),
        (b'"text"', "object"),
        (b'{"prompt": "\xff"}', "JSON"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b'{"a":' * 3000, "JSON"),
        ({}, "no prompt"),
        ({"prompt": " \n"}, "no prompt"),
        ({"prompt": 3}, "prompt: "),
        ({"prompt": "a", "promt": "b"}, "promt: unknown key"),
        ({"prompt": "a", "seed": -1}, "seed: "),
        ({"prompt": "a", "seed": "1"}, "seed: "),
        ({"prompt": "a", "seed": True}, "seed: "),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens: "),
        ({"prompt": "a", "id": [1]}, "id."),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "give one of them"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role: "),
        ({"prompt": "a", "suffix": "b", "system": "c"}, "remove `system`"),
    ],
)
def test_an_invalid_line_is_an_error_with_its_number(read, line, what):
    with pytest.raises(InvalidRequest, match=r"^prompts\.jsonl, line 3: ") as raised:
        read({"prompt": "fine"}, b"", line)
    assert what in str(raised.value)


def read_text(main, lines, name="prompts.txt"):
    return [e.request.prompt for e in read_entries(lines, name, main, SETTINGS, raw=True)]


def test_a_line_of_text_is_a_prompt(main):
    lines = [b"\xef\xbb\xbfWhy?\r", b" \r", b"  Where to?", b'{"prompt": "a"}', "Où ?".encode()]
    assert read_text(main, lines) == ["Why?", "  Where to?", '{"prompt": "a"}', "Où ?"]
    entries = read_entries(lines, "prompts.txt", main, replace(SETTINGS, seed=3), system="s")
    assert [(e.settings.seed, e.request.system) for e in entries] == [(3 + i, "s") for i in range(4)]


def test_lines_are_json_by_the_name_or_the_first_line(main):
    lines = [b"", b' {"prompt": "a"}', b'{"prompt": "b"}']
    assert read_text(main, lines, "prompts.txt") == ["a", "b"]
    with pytest.raises(InvalidRequest, match=r"^prompts\.txt, line 4: .*JSON"):
        read_text(main, [*lines, b"Why?"])
    with pytest.raises(InvalidRequest, match=r"^p\.jsonl, line 1: .*JSON"):
        read_text(main, [b"Why?"], "p.jsonl")


def test_a_line_of_text_that_is_not_utf8(main):
    with pytest.raises(InvalidRequest, match=r"^prompts\.txt, line 2: it is not UTF-8 \(byte 1\)"):
        read_text(main, [b"Why?", b"a\xff"])


def test_a_file_without_prompts(read):
    for lines in ([], [b"", b"\n"]):
        with pytest.raises(InvalidRequest, match=r"^prompts\.jsonl has no prompts"):
            read(*lines)


def test_the_key_depends_on_what_affects_the_output_only(read, main):
    def key(settings=SETTINGS, line=None, **more):
        return read(line or {"prompt": "a"}, settings=settings, **more)[0].key

    default = key()
    different = {
        default,
        key(line={"prompt": "b"}),
        key(line={"prompt": "a", "system": "s"}),
        key(line={"prompt": "a", "suffix": "s"}),
        key(line={"prompt": "a", "seed": 1}),
        key(line={"prompt": "a", "max_tokens": 1}),
        key(line={"messages": [{"role": "user", "content": "a"}]}),
        key(system="t"),
        key(raw=True),
        key(replace(SETTINGS, stops=["x"])),
        key(replace(SETTINGS, seed=0)),
        key(replace(SETTINGS, sampling=SamplingSettings(temperature=0))),
        key(replace(SETTINGS, sampling=unfiltered(logit_bias={3: float("-inf")}))),
    }
    main.write_bytes(b"another model")
    different.add(key())
    assert len(different) == 14
    main.write_bytes(b"GGUF" * 10)
    faster = replace(SETTINGS, proposer="lookup", policy="fixed", draft_max=3, verifier="token", staged=0)
    assert {key(faster), key(replace(SETTINGS, stops=[])), key(line={"prompt": "a", "id": "x"})} == {default}


def test_every_setting_affects_either_the_output_or_only_the_speed():
    """List a new setting here, or mark it in `GenerationSettings` so that a batch resumes when it changes."""
    output = {
        *("sampling", "seed", "max_tokens", "stops", "grammar", "json_schema", "call_grammar"),
        *("min_indent", "max_seconds", "reasoning_budget", "control_text", "logprobs", "sampled_logprobs"),
    }
    speed = {f.name for f in fields(GenerationSettings) if f.metadata == {"affects": "speed"}}
    assert {f.name for f in fields(GenerationSettings)} - speed == output


def test_the_key_is_the_same_in_every_version(read):
    # A different value makes every existing output file unusable.
    key = read({"prompt": "a"}, settings=replace(SETTINGS, seed=1))[0].key
    assert key == "e126e804ef156e46482f0b09f788e0af"


def test_resumes_with_the_unanswered_prompts(read, tmp_path):
    entries = read({"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    path = tmp_path / "answers.jsonl"
    before = write_records(path, [answer(entries[0]), answer(entries[2])])
    with open_answers(path) as answers:
        assert answers.unanswered(entries) == [entries[1]]
        answers.append(answer(entries[1]))
    assert path.read_bytes().startswith(before)
    with open_answers(path) as answers:
        assert answers.unanswered(entries) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.jsonl", "main.gguf"]


def test_an_edited_file_of_prompts_is_an_error(read, tmp_path):
    path = tmp_path / "answers.jsonl"
    entries = read({"prompt": "a"}, {"prompt": "b"})
    write_records(path, map(answer, entries))
    with open_answers(path) as answers:
        longer = read({"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
        assert answers.unanswered(longer) == longer[2:]
        for edited in (["a", "B"], ["b", "a"], ["a"], ["x", "a", "b"]):
            with pytest.raises(InvalidRequest, match=r"written for another prompt \d"):
                answers.unanswered(read(*({"prompt": text} for text in edited)))
        with pytest.raises(InvalidRequest, match="other settings"):
            answers.unanswered(read({"prompt": "a"}, {"prompt": "b"}, settings=replace(SETTINGS, seed=1)))


def test_a_partial_last_line_is_removed(read, tmp_path):
    entries = read({"prompt": "a"}, {"prompt": "b", "id": "ü"})
    path = tmp_path / "answers.jsonl"
    whole = write_records(path, map(answer, entries))
    first = whole.index(b"\n") + 1
    for length in {first, first + 1, *range(first, len(whole), 7), *range(len(whole) - 3, len(whole) + 1)}:
        path.write_bytes(whole[:length])
        complete = length >= len(whole) - 1  # without its newline, the answer is whole
        assert read_keys(path) == {e.index: e.key for e in entries[: 1 + complete]}
        assert path.read_bytes() == (whole if complete else whole[:first])


def test_only_failed_prompts_are_removed(read, tmp_path):
    entries = read(*({"prompt": str(n)} for n in range(4)))
    path = tmp_path / "answers.jsonl"
    failed = {"index": 1, "id": None, "key": entries[1].key, "error": "too long"}
    whole = write_records(path, [answer(entries[0]), failed, answer(entries[3])])
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    with open_answers(link) as answers:
        assert answers.unanswered(entries) == [entries[1], entries[2]]
    assert link.is_symlink()
    assert path.read_bytes() == b"".join(line for line in whole.splitlines(True) if b"error" not in line)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "a"}\n',
        b'{"prompt": "a"}',
        b"notes without an end of line",
        b'{"index": 0, "key": "k"}\n',
        b'{"index": "0", "key": "k", "content": ""}\n',
        b'{"index": 0, "key": "k", "content": ""}\n{"index": 1, "k\n{"index": 2, "key": "", "content": ""}\n',
        b"[1]\n",
        b"null",
        b"\0" * 20,
        b"\n",
    ],
)
def test_a_file_of_something_else_is_left_unchanged(tmp_path, content):
    path = tmp_path / "precious"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"precious, line \d is not an answer"), open_answers(path):
        pass
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_a_second_writer_is_refused(tmp_path, read):
    path = tmp_path / "answers.jsonl"
    entry = read({"prompt": "a"})[0]
    with open_answers(path) as answers:
        with pytest.raises(SpecLocalError, match="another specdec process is writing to"), open_answers(path):
            pass
        answers.append(answer(entry))
    assert read_keys(path) == {0: entry.key}


def test_a_full_disk_leaves_whole_lines(tmp_path, read):
    entries = read({"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    path = tmp_path / "answers.jsonl"
    whole = write_records(path, map(answer, entries[:1]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_answers(path) as answers:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, limits[1]))  # some of a line fits
        try:
            with pytest.raises(OSError, match=r"answers\.jsonl"):
                answers.append(answer(entries[1]))
            assert path.read_bytes() == whole
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        answers.append(answer(entries[2]))
    assert read_keys(path) == {0: entries[0].key, 2: entries[2].key}


def test_a_path_where_no_file_can_be(tmp_path):
    with pytest.raises(FileNotFoundError), open_answers(tmp_path / "absent" / "answers.jsonl"):
        pass
    assert not (tmp_path / "absent").exists()
    with pytest.raises(IsADirectoryError), open_answers(tmp_path):
        pass
