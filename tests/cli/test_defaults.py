"""The defaults of the command and of the library are the same."""

import inspect
from dataclasses import fields

from spec_local import GenerationSettings, Session
from specdec_cli.options import ModelOptions, SamplingOptions, generation_settings


def test_an_answer_has_the_same_settings():
    assert generation_settings(ModelOptions(), SamplingOptions()) == GenerationSettings()


def test_a_session_is_opened_in_the_same_way(monkeypatch):
    given = {}
    monkeypatch.setattr(Session, "open", lambda *args, **kwargs: given.update(kwargs))
    ModelOptions(main="main.gguf").open(print)
    monkeypatch.undo()
    parameters = inspect.signature(Session.open).parameters
    del given["log"], given["main"]
    assert given == {name: parameters[name].default for name in given}


def test_each_sampling_option_reaches_the_sampler():
    """A changed value of any option changes the settings, so that none is ignored."""
    changed = {
        "temp": 0.1, "top_k": 7, "top_p": 0.3, "min_p": 0.2, "repeat_penalty": 1.5, "frequency_penalty": 0.2,
        "presence_penalty": 0.3, "repeat_last_n": 9, "logit_bias": ["1=2"], "seed": 5, "stop": ["x"],
        "max_tokens": 3, "json_schema": "{}",
    }  # fmt: skip
    assert {f.name for f in fields(SamplingOptions)} == {*changed, "grammar_file"}
    usual = generation_settings(ModelOptions(), SamplingOptions())
    for name, value in changed.items():
        assert generation_settings(ModelOptions(), SamplingOptions(**{name: value})) != usual, name
