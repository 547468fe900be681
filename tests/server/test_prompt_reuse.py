"""Conversations whose prompts a server reads once: see `tests.prompt_reuse`."""

from functools import partial

import pytest

from spec_local.llama.tiny import write_tiny_model
from tests import prompt_reuse
from tests.prompt_reuse import TEMPLATE, Replay
from tests.server.conftest import Server
from tests.tiny_architectures import write_tiny

REPLAYS = {
    "more conversations than rows": ("dense", partial(prompt_reuse.conversations, n=6, sizes=(300,))),
    "a changing header": ("dense", partial(prompt_reuse.agent, noise="header")),
    "reasoning that is dropped": ("qwen35", prompt_reuse.reasoning),
    "calls": ("qwen35", prompt_reuse.tool_loop),
    "one system prompt": ("mamba2", prompt_reuse.shared_system),
    "a message that is edited": ("lfm2", prompt_reuse.edited),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Models of each kind, with a template that drops reasoning."""
    folder = tmp_path_factory.mktemp("models")
    models = {
        name: write_tiny(folder / f"{name}.gguf", name, n_ctx=1 << 15, chat_template=TEMPLATE)
        for name in ("qwen35", "mamba2", "lfm2")
    }
    models["dense"] = write_tiny_model(folder / "dense.gguf", n_ctx=1 << 15, chat_template=TEMPLATE)
    return models


def ratio(specdec, model, replay, *options):
    """The prompt tokens that a server read, for each that it needed to read."""
    with Server(specdec, model, "--draft", "none", "--ctx", 1 << 14, "--parallel", 4, *options) as server:
        counted = Replay(server.address)
        replay(counted)
    return counted.n_read / counted.n_needed


@pytest.mark.parametrize("name", REPLAYS)
def test_a_prompt_is_read_once(specdec, files, name):
    kind, replay = REPLAYS[name]
    assert ratio(specdec, files[kind], replay) <= 1.1


@pytest.mark.parametrize("name", ["more conversations than rows", "reasoning that is dropped"])
def test_without_the_cache_it_is_read_again(specdec, files, name):
    """The replays would notice."""
    kind, replay = REPLAYS[name]
    assert ratio(specdec, files[kind], replay, "--prompt-cache", "off") > 2
