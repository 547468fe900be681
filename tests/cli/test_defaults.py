"""The command and the library have the same defaults, and the same choices of options."""

import inspect
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import gguf
import pytest

from spec_local import GenerationSettings, SamplingSettings, Session, kernels
from spec_local.llama.context import CACHE_TYPES
from spec_local.llama.quantize import KINDS
from spec_local.policies import POLICY_NAMES
from spec_local.prompt_cache.folder import default_folder, default_limit
from spec_local.proposers import SHAPE_NAMES
from spec_local.verifiers import VERIFIER_NAMES
from specdec_cli import options
from specdec_cli.options import ModelOptions, SamplingOptions
from specdec_cli.sessions import generation_settings, session_arguments
from specdec_cli.signatures.drafts import KindChoice
from tests.unfiltered import changed_values


def test_an_answer_has_the_same_settings():
    assert generation_settings(ModelOptions(), SamplingOptions()) == GenerationSettings()


def test_a_session_is_opened_in_the_same_way():
    given = session_arguments(ModelOptions(), (Path("main.gguf"), None))
    parameters = inspect.signature(Session.open).parameters
    del given["main"]
    assert given.pop("draft") == "auto"  # a library opens no file that its caller has not named
    limit = default_limit(default_folder())  # and writes no prompts that its caller has not asked to keep
    assert given.pop("prompt_cache") == pytest.approx(limit, rel=0.01)  # the free space may change
    assert given == {name: parameters[name].default for name in given}


def test_each_sampling_option_reaches_the_sampler():
    """A changed value of any option changes the settings, so that none is ignored."""
    changed = {
        "logit_bias": ["1=2"], "seed": 5, "stop": ["x"], "max_tokens": 3, "json_schema": "{}",
        "thinking_budget": 5,
    }  # fmt: skip
    changed |= {setting.option.replace("-", "_"): value for setting, value in changed_values()}
    assert {f.name for f in fields(SamplingOptions)} == {*changed, "grammar_file"}
    usual = generation_settings(ModelOptions(), SamplingOptions())
    for name, value in changed.items():
        assert generation_settings(ModelOptions(), SamplingOptions(**{name: value})) != usual, name


def test_the_models_own_defaults_come_before_the_general_ones(tmp_path):
    """As in llama.cpp; what is given comes first."""
    own = {"temp": 0.6, "top_k": 20, "penalty_repeat": 1.05, "penalty_last_n": -1, "mirostat": 2}
    own |= {"xtc_probability": 0.5, "xtc_threshold": 0.2}
    model = write_header(tmp_path / "main.gguf", own)
    models = ModelOptions(main=str(model), draft="none")
    found = generation_settings(models, SamplingOptions(top_k=5)).sampling
    known = {"repeat_penalty": 1.05, "xtc_probability": 0.5, "xtc_threshold": 0.2}
    assert found == SamplingSettings(temperature=0.6, top_k=5, penalty_window=2**31 - 1, **known)
    for wrong in ({"temp": "warm"}, {"top_p": 1.5}, {"temp": float("nan")}):
        write_header(model, wrong)
        assert generation_settings(models, SamplingOptions()) == GenerationSettings()
    write_header(model, {"temp": -1.0, "top_k": -1})
    found = generation_settings(models, SamplingOptions()).sampling
    assert (found.temperature, found.top_k) == (0, 0)


def write_header(path, sampling):
    """A GGUF file with nothing but recommended settings."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in sampling.items():
        add = {int: writer.add_int32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"general.sampling.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_choices():
    assert get_args(options.VerifierChoice) == VERIFIER_NAMES
    assert get_args(options.ShapeChoice) == SHAPE_NAMES
    assert get_args(options.PolicyChoice) == POLICY_NAMES
    assert set(get_args(options.CacheChoice)) == set(CACHE_TYPES)
    assert get_args(options.KernelsChoice) == tuple(kernels.MODES)
    assert get_args(KindChoice) == KINDS


def test_help_lists_new_names():
    """A new proposer, policy or verifier needs nothing but a line in the table of its package."""
    script = (
        "from spec_local import policies, proposers, verifiers\n"
        "for package in (policies, proposers, verifiers):\n"
        "    for name in [n for n in vars(package) if n.endswith('_NAMES')]:\n"
        "        new = 'new-' + name.removesuffix('_NAMES').lower()\n"
        "        setattr(package, name, (*getattr(package, name), new))\n"
        "import sys\n"
        "sys.argv = ['specdec', 'generate', '--help-all']\n"
        "from specdec_cli.__main__ import main\n"
        "main()\n"
    )
    environment = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    for kind in ("proposer", "policy", "verifier", "shape"):
        assert f"new-{kind}" in done.stdout
