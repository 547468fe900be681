"""Images in the terminal: options, commands, and words of a message that name them."""

import json
import re

import PIL.Image
import pytest

from tests.tiny_projectors import write_projector
from tests.tiny_vision import write_vision_model

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

SHORT = ["--temp", 0, "--threads", 1, "--ctx", 512, "-n", 8, "--draft", "none"]
SENT = "will be sent with your next message; /image clear discards it"
BLIND = "specdec: seeing.gguf has no projector, and reads no images: give its mmproj file (--mmproj)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its projector, and images."""
    folder = tmp_path_factory.mktemp("images")
    write_vision_model(folder / "seeing.gguf", "gemma3")
    write_projector(folder / "mmproj-seeing.gguf", "gemma3")
    for name, size in (("a.png", (40, 30)), ("b c.jpg", (64, 48))):
        PIL.Image.effect_noise(size, 90).save(folder / name)
    (folder / "notes.txt").write_text("some text\n")
    return folder


@pytest.fixture
def generate(inside, folder):
    def generate(*arguments, command="generate", **options):
        return inside(command, "seeing.gguf", *SHORT, *arguments, cwd=folder, **options)

    return generate


def answer(done):
    assert done.returncode == 0, done
    return json.loads(done.stdout)


def test_images_of_a_prompt(generate, folder):
    blind, one, both = (
        answer(generate("--json", *options, "look"))
        for options in ((), ("--image", "a.png"), ("--image", "a.png", "--image", "b c.jpg"))
    )
    n = one["timings"]["prompt_n"] - blind["timings"]["prompt_n"]
    assert n > 0
    assert both["timings"]["prompt_n"] + both["timings"]["cache_n"] - blind["timings"]["prompt_n"] == 2 * n
    assert len({each["content"] for each in (blind, one, both)}) == 3
    image = (folder / "a.png").read_bytes()
    piped = generate("--json", "--image", "-", "look", stdin=image)
    assert answer(piped)["content"] == one["content"]
    run = generate("--image", folder / "a.png", "look", command="run")
    assert run.stdout.decode(errors="replace").rstrip("\n") == one["content"].rstrip("\n")
    after_text = generate("--json", "--image", "a.png", stdin=b"look")
    assert answer(after_text)["content"] == one["content"]
    raw = answer(generate("--json", "--raw", "--image", "a.png", "look"))
    assert (
        raw["timings"]["prompt_n"] - n == answer(generate("--json", "--raw", "look"))["timings"]["prompt_n"]
    )


def test_errors_come_before_a_model_is_loaded(inside, folder, tmp_path):
    content = (folder / "seeing.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: len(content) // 2])

    def generate(*arguments, command="generate", **options):
        return inside(command, cut, *SHORT, *arguments, cwd=folder, **options)

    assert "cut.gguf" in inside.one_line(generate("look"), 1)
    for command in ("generate", "run", "chat"):
        for path, reason in (
            ("notes.txt", "notes.txt: the file is neither a JPEG, PNG, GIF, WebP or BMP image"),
            ("missing.png", "missing.png does not exist"),
            (".", ". is not a regular file"),
        ):
            prompt = [] if command == "chat" else ["look"]
            done = generate("--image", path, *prompt, command=command)
            assert reason in inside.one_line(done, 2)
    many = [word for _ in range(33) for word in ("--image", "a.png")]
    assert "have 33 files: give at most 32" in inside.one_line(generate(*many, "look"), 2)
    twice = generate("--image", "-", "--image", "-", "look")
    assert "given twice" in inside.one_line(twice, 2)
    both = generate("--image", "-", "--file", "-", "look")
    assert "cannot be both --file and --image" in inside.one_line(both, 2)
    assert "the image is empty" in inside.one_line(generate("--image", "-", "look"), 2)
    chat = generate("--image", "-", command="chat")
    assert "standard input is for messages" in inside.one_line(chat, 2)
    batch = generate("--image", "a.png", "--input", "notes.txt")
    assert "remove the prompt, --file, --image" in inside.one_line(batch, 2)


def test_a_model_without_a_projector(generate, inside):
    done = generate("--mmproj", "none", "--image", "a.png", "look")
    assert inside.one_line(done, 1) == BLIND
    chat = generate("--mmproj", "none", "--no-stats", "--image", "a.png", command="chat", stdin=b"look\n")
    assert chat.returncode == 1
    assert chat.stderr.decode().splitlines()[-1] == BLIND
    lines = b"/image a.png look\nsee @a.png\n/image\nhello\n"
    chat = generate("--mmproj", "none", "--no-stats", command="chat", stdin=lines)
    assert chat.returncode == 0
    assert chat.stderr.decode().splitlines()[1:3] == [BLIND, BLIND]
    assert "no file is attached" in chat.stderr.decode()
    assert chat.stdout.strip()


def test_a_batch(generate, inside, folder, tmp_path):
    (folder / "damaged.png").write_bytes((folder / "a.png").read_bytes()[:99])
    lines = [{"prompt": "look"}, *({"prompt": "look", "images": [name]} for name in ("a.png", "damaged.png"))]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    output = tmp_path / "answers.jsonl"
    done = inside(
        *("generate", folder / "seeing.gguf", *SHORT, "--input", path, "--output", output), cwd=tmp_path
    )
    assert done.returncode == 1
    found = {each["index"]: each for each in map(json.loads, output.read_text().splitlines())}
    assert "damaged.png: the image is damaged" in found[2]["error"]
    alone = [answer(generate("--json", *options, "look")) for options in ((), ("--image", "a.png"))]
    assert [found[i]["content"] for i in range(2)] == [each["content"] for each in alone]
    (folder / "damaged.png").write_bytes((folder / "b c.jpg").read_bytes())
    again = inside("generate", folder / "seeing.gguf", *SHORT, "--input", path, "--output", output)
    assert again.returncode == 0
    for change, reason in (
        ({"images": ["missing.png"]}, "line 1: the image"),
        (
            {"images": ["a.png"], "messages": [{"role": "user", "content": "a"}], "prompt": ""},
            "before a prompt",
        ),
        ({"images": ["a.png"] * 33}, "it has 33 images: give at most 32"),
        ({"images": "a.png"}, "images"),
    ):
        path.write_text(json.dumps(lines[0] | change))
        assert reason in inside.one_line(generate("--input", path), 2)


@pytest.fixture
def person(terminal, folder, specdec):
    def start(*arguments):
        person = terminal("seeing.gguf", *SHORT, "--no-stats", *arguments, specdec=_in(specdec, folder))
        return person, person.prompt()

    return start


def _in(specdec, folder):
    return type(specdec)(folder, specdec.environment)


def saved(person, folder):
    person.say("/save chat.json")
    messages = json.loads((folder / "chat.json").read_text())["messages"]
    return [
        (m["content"], [(each["at"], each["name"]) for each in m.get("images", ())])
        for m in messages
        if m["role"] == "user"
    ]


def test_images_in_a_chat(person, folder):
    p, seen = person("--image", "a.png")
    assert f"image a.png, 40 × 30 pixels, {SENT}" in seen
    p.say("what is this?")
    assert "no file is attached" in p.say("/image")
    assert f"image b c.jpg, 64 × 48 pixels, {SENT}" in p.say("/image b c.jpg")
    assert "image b c.jpg, 64 × 48 pixels\n" in p.say("/image").replace("\r", "")
    assert "no file is attached" in p.say("/image clear")
    assert f"image b c.jpg, 64 × 48 pixels, {SENT}" in p.say("/image 'b c.jpg' and this?")
    p.say("/read notes.txt")
    assert "image a.png, 40 × 30 pixels" in p.say("compare @a.png with @nothing")
    path = f"{folder}/b c.jpg".replace(" ", "\\ ")
    assert f"image b c.jpg, 64 × 48 pixels, {SENT}" in p.say(f"{path} ")  # dropped, and sent by Enter
    p.type(f"\x1b[200~'{folder}/b c.jpg'\x1b[201~")  # a terminal that pastes what is dropped
    assert "image b c.jpg, 64 × 48 pixels\n" in p.say(" and that").replace("\r", "")
    p.type(f"\x1b[200~line @a.png\n{folder}/a.png\x1b[201~")
    assert "image" not in p.say("").replace("@a.png", "")
    assert saved(p, folder) == [
        ("what is this?", [(0, "a.png")]),
        ("and this?", [(0, "b c.jpg")]),
        ("some text\n\ncompare  with @nothing", [(19, "a.png")]),
        (" and that", [(0, "b c.jpg"), (0, "b c.jpg")]),
        (f"line @a.png\n{folder}/a.png", []),
    ]
    assert "removed: line @a.png" in p.say("/undo")
    assert "removed: [image b c.jpg][image b c.jpg] and that" in p.say("/undo")
    p.say("/regen")
    p.say("/image a.png")
    p.say("/clear")
    assert "no file is attached" in p.say("/image")
    assert "loaded 10 messages" in p.say("/load chat.json")
    p.say("/undo")
    p.say("/undo")
    assert len(saved(p, folder)) == 3
    assert saved(p, folder)[0] == ("what is this?", [(0, "a.png")])
    p.type("see @a.p\t")
    assert "image a.png, 40 × 30 pixels" in p.say("")
    p.type("see @b\t")
    assert "image b c.jpg, 64 × 48 pixels" in p.say("")


def test_errors_in_a_chat(person, folder):
    p, _ = person()
    for line, reason in (
        ("/image notes.txt", "notes.txt: the file is neither a JPEG"),
        ("/image missing.png what is it", "missing.png does not exist"),
        ("see @notes.txt", "notes.txt: the file is neither a JPEG"),
        ("/missing/a.png hello", "/missing/a.png is not a command"),
    ):
        assert reason in p.say(line)
    assert saved(p, folder) == []
    assert "@FILE in a message stands for that image or sound file" in p.say("/help")


def test_too_large_for_the_context(person, folder):
    p, _ = person("--ctx", 64, "--when-full", "stop")
    for _ in range(3):
        p.say("/image a.png")
    p.type("what is this?\r")
    assert "this message was not sent" in p.until("and send it? [y/N]: ")
    p.type("n\r")
    seen = p.prompt()
    assert re.search("what was attached was discarded: attach less", seen)
    assert "no file is attached" in p.say("/image")
    for _ in range(3):
        p.say("/image a.png")
    p.type("what is this?\r")
    p.until("and send it? [y/N]: ")
    p.type("y\r")
    p.prompt()
    assert saved(p, folder) == [("what is this?", [(0, "a.png")] * 3)]
