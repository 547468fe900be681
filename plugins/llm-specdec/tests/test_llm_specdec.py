"""The plug-in in the real llm, with a tiny model."""

import importlib.util
import json
from pathlib import Path

import PIL.Image
import pytest

from spec_local import GenerationSettings, SamplingSettings, Session, Text
from spec_local.images.image import Image
from spec_local.llama.tiny import write_tiny_model
from spec_local.text import printable
from tests.tiny_projectors import write_projector
from tests.tiny_vision import write_vision_model

pytest.importorskip("llm")

import llm
import llm.cli
import llm.plugins
from click.testing import CliRunner

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def plugin():
    """The plug-in as llm finds it, whether or not it is installed."""
    path = Path(__file__).parents[1] / "llm_specdec.py"
    spec = importlib.util.spec_from_file_location("llm_specdec_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    llm.plugins.load_plugins()
    for name, each in llm.plugins.pm.list_name_plugin():
        if name and "specdec" in name:
            llm.plugins.pm.unregister(each)
    llm.plugins.pm.register(module, name="specdec-under-test")
    yield module
    llm.plugins.pm.unregister(module)


@pytest.fixture(scope="module")
def main(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("llm") / "main.gguf", n_layers=1, chat_template=TEMPLATE)


@pytest.fixture
def run(plugin, tmp_path, monkeypatch):
    for name in ("HOME", "LLM_USER_PATH", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))

    def run(*arguments, stdin=""):
        return CliRunner().invoke(llm.cli.cli, list(map(str, arguments)), input=stdin)

    yield run
    while plugin._sessions:
        plugin._sessions.popitem()[1].close()


def options(main, **more):
    given = {"main": main, "temperature": 0, "max_tokens": 8, "ctx": 256} | more
    return [word for name, value in given.items() for word in ("-o", name, value)]


def expected(main, *messages, **more):
    settings = GenerationSettings(sampling=SamplingSettings(temperature=0.0), max_tokens=8)
    roles = ["user", "assistant"] * len(messages)
    chat = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]
    if system := more.get("system"):
        chat.insert(0, {"role": "system", "content": system})
    with Session.open(main, n_ctx=256) as session:
        events = session.chat(chat, settings)
        return "".join(printable(e.text) for e in events if isinstance(e, Text))


def test_an_answer(run, main):
    done = run("-m", "specdec", *options(main), "hello", "--no-log")
    assert done.exit_code == 0, done.output
    assert done.output == expected(main, "hello") + "\n"
    assert run("-m", "specdec", *options(main), "hello", "--no-log", "--no-stream").output == done.output


def test_a_conversation_with_a_system_message(run, main):
    first = run("-m", "specdec", *options(main), "hello", "-s", "Be brief.")
    answer = expected(main, "hello", system="Be brief.")
    assert first.output == answer + "\n"
    second = run("-c", *options(main), "go on")
    assert second.exit_code == 0, second.output
    assert second.output == expected(main, "hello", answer, "go on", system="Be brief.") + "\n"
    logged = json.loads(run("logs", "--json", "-n", "1").output)[0]
    assert logged["output_tokens"] == 8
    assert "draft_tokens" in json.dumps(logged)


def test_a_schema(run, main):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    done = run("-m", "specdec", *options(main, max_tokens=64), "--schema", json.dumps(schema), "hello")
    assert json.loads(done.output)["n"] in (1, 2)


def test_errors_are_one_line(run, tmp_path):
    for arguments, why in (
        (["-o", "main", tmp_path / "absent.gguf"], "absent.gguf"),
        (["-o", "main", "llama3"], "similar names are"),
    ):
        done = run("-m", "specdec", *arguments, "hello")
        assert done.exit_code == 1
        assert why in done.output
        assert "Traceback" not in done.output


def test_models_on_this_machine_are_listed(run):
    listed = run("models", "list").output
    assert "specdec/starter-draft" in listed  # it comes with specdec
    assert "specdec/starter-pair" not in listed  # its main model is not here


def test_the_models_stay_loaded_until_others_are_asked_for(run, plugin, main):
    model = llm.get_model("specdec")
    model.prompt("a", main=str(main), max_tokens=1).text()
    (session,) = plugin._sessions.values()
    model.prompt("b", main=str(main), max_tokens=1).text()
    assert list(plugin._sessions.values()) == [session]
    model.prompt("c", main=str(main), max_tokens=1, ctx=128).text()
    (other,) = plugin._sessions.values()
    assert other is not session


def test_images(run, tmp_path, main):
    seeing = write_vision_model(tmp_path / "seeing.gguf", "gemma3", chat_template=TEMPLATE)
    write_projector(tmp_path / "mmproj-seeing.gguf", "gemma3")
    path = tmp_path / "a b.png"
    PIL.Image.effect_noise((32, 32), 100).save(path)
    image = Image.open(path)

    def tokens(*content):
        return expected(seeing, [*content])

    first = run("-m", "specdec", *options(seeing), "-a", path, "hello")
    assert first.output == tokens(image, "hello") + "\n" != tokens("hello") + "\n"
    second = run("-c", *options(seeing), "go on")
    answer = first.output.removesuffix("\n")
    assert second.output == expected(seeing, [image, "hello"], answer, "go on") + "\n"
    blind = run("-m", "specdec", *options(main), "-a", path, "hello", "--no-log")
    assert blind.exit_code == 1
    assert blind.output == (
        "Error: main.gguf has no projector, and reads no images: give its mmproj file (`mmproj`)\n"
    )
    path.write_bytes(path.read_bytes()[:100])
    damaged = run("-m", "specdec", *options(seeing), "-a", path, "hello", "--no-log")
    assert "a b.png: the image is damaged (it ends too early)" in damaged.output
