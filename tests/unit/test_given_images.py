"""Words of a message that name images, as people and terminals write them."""

import PIL.Image
import pytest

from spec_local.errors import InvalidRequest
from spec_local.images.image import Image
from specdec_cli import given_images
from specdec_cli.given_images import begins_with_image, named_first, read_message, readable


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with images, a text, and a folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b c.jpg", "it's.png", "(d).png"):
        PIL.Image.new("RGB", (8, 4)).save(name)
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "folder.png").mkdir()
    return tmp_path


def read(text):
    left, images = read_message(text)
    return left, [(at, image.name) for at, image in images]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("what is @a.png", ("what is ", [(8, "a.png")])),
        ("@a.png and @./a.png?", (" and ?", [(0, "a.png"), (5, "a.png")])),
        (r"(@b\ c.jpg)!", ("()!", [(1, "b c.jpg")])),
        ("""see @'b c.jpg', @"it's.png".""", ("see , .", [(4, "b c.jpg"), (6, "it's.png")])),
        (r"see @'it'\''s.png'", ("see ", [(4, "it's.png")])),
        ("line\n@a.png\nline", ("line\n\nline", [(5, "a.png")])),
    ],
)
def test_marked_words(folder, text, expected):
    assert read(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "@",
            "@b c.jpg",
            "@nobody, hello",
            "me@a.png",
            "@@a.png",
            "@folder.png",
            "a.png",
            "./a.png",
        ),
        *("/nowhere/a.png", "file:///nowhere/a.png", "@" + 5000 * "a", "@a\0b", "'", '"', "\\", "@'a.png"),
    ],
)
def test_other_words_stay_text(folder, text):
    assert read_message(text) == (text, [])


def test_dropped_paths(folder):
    a, b = folder / "a.png", folder / "b c.jpg"
    escaped = str(b).replace(" ", "\\ ")
    for text in (
        b,
        escaped,
        f"'{b}' ",
        f'"{b}"',
        f"file://{b}".replace(" ", "%20"),
        f"file://localhost{escaped}",
    ):
        left, images = read(str(text))
        assert (left.strip(), [name for _, name in images]) == ("", [str(b)]), text
    assert read(f"what is {a}, and '{b}'?") == ("what is , and ?", [(8, str(a)), (14, str(b))])
    assert begins_with_image(f"{a} what is it")
    assert begins_with_image(f"{escaped} what is it")
    assert begins_with_image(str(b))
    for text in ("/help", "/image a.png", f"{folder}/notes.txt", f"{folder}/folder.png", f"read {a}"):
        assert not begins_with_image(text)
    url = f"file://elsewhere{a}"
    assert read_message(f"why is {folder}/notes.txt empty, {url}?") == (
        f"why is {folder}/notes.txt empty, {url}?",
        [],
    )


def test_files_that_are_no_images_are_errors(folder):
    with pytest.raises(InvalidRequest, match=r"^notes.txt: the file is neither a JPEG"):
        read_message("see @notes.txt")
    photo = folder / "photo.HEIC"
    photo.write_bytes(b"\0\0\0\x18ftypheic")
    with pytest.raises(InvalidRequest, match="HEIC images are not supported"):
        read_message(f"{photo}")


def test_the_path_that_a_text_begins_with(folder):
    assert named_first("b c.jpg") == ("b c.jpg", "")
    assert named_first("a.png what is  it") == ("a.png", "what is  it")
    assert named_first("'b c.jpg' what") == ("b c.jpg", "what")
    assert named_first(r"b\ c.jpg what") == ("b c.jpg", "what")
    assert named_first("(d).png what") == ("(d).png", "what")


def test_messages_can_be_read(folder):
    image = Image.open(folder / "a.png")
    assert readable("what is it", [(0, image), (5, image)]) == "[image a.png] what [image a.png] is it"
    assert readable("text", []) == "text"


def test_given_too_often(folder):
    with pytest.raises(InvalidRequest, match="have 33 files: give at most 32"):
        given_images.given_images([folder / "missing.png"] * 33)
