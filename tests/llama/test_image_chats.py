"""Images in a ChatSession: they stay in the conversation, and are saved with it."""

import base64
import io
import json

import PIL.Image
import pytest

from spec_local.chat import saved_chat
from spec_local.chat_session import ChatSession
from spec_local.errors import InvalidRequest, ModelError
from spec_local.images.image import Image
from spec_local.images.media import MAX_BYTES, MAX_IMAGES
from spec_local.llama.tiny import CHAT_TEMPLATE
from spec_local.session import Session
from spec_local.settings import GenerationSettings, SamplingSettings
from tests.tiny_projectors import write_projector
from tests.tiny_vision import write_vision_model

pytestmark = pytest.mark.usefixtures("own_cache", "unchecked")
SETTINGS = GenerationSettings(sampling=SamplingSettings(temperature=0.0), max_tokens=6)


def noise(name, sigma=90):
    made = io.BytesIO()
    PIL.Image.effect_noise((40, 30), sigma).save(made, "PNG")
    return Image(made.getvalue(), name)


@pytest.fixture(scope="module")
def images():
    return [noise("folder/a.png"), noise("b\udcff.png")]


@pytest.fixture(scope="module")
def session(folder):
    main = write_vision_model(folder / "seeing.gguf", "gemma3", chat_template=CHAT_TEMPLATE)
    projector = write_projector(folder / "for-images.gguf", "gemma3")
    with Session.open(main, "none", n_ctx=512, threads=1, mmproj=projector) as session:
        yield session


@pytest.fixture(scope="module")
def blind(session):
    with Session.open(session.main.model.path, "none", n_ctx=512, threads=1, mmproj="none") as blind:
        yield blind


@pytest.fixture
def chat(session):
    return ChatSession(session, settings=SETTINGS)


def said(events):
    *_, done = events
    return done


def cells(chat):
    return [token for token in chat.conversation.tokens if token < 0]


def test_an_image_stays_in_the_conversation(chat, images):
    said(chat.send("what is it", images=[(8, images[0])]))
    answer = chat.conversation.messages[-1]
    first = cells(chat)
    assert first
    done = said(chat.send("and now?"))
    assert cells(chat) == first
    assert done.statistics.cached_n > len(first)  # it is not read again
    chat.conversation.undo()
    said(chat.regenerate())
    assert chat.conversation.messages[-1] == answer
    assert chat.conversation.messages[0]["images"] == [(8, images[0])]
    said(chat.send("another", images=[(0, images[1])]))
    assert len(cells(chat)) == 2 * len(first)
    with pytest.raises(InvalidRequest, match="has 33 images and sounds: give at most 32"):
        said(chat.send("many", images=[(0, images[0])] * (MAX_IMAGES - 1)))
    assert len(chat.conversation.messages) == 4
    with pytest.raises(InvalidRequest, match="pairs"):
        said(chat.send("x", images=[(2, images[0])]))


def test_saved_and_loaded(chat, session, images, tmp_path):
    said(chat.send("caf\udcff what", images=[(4, images[0]), (5, images[1])]))
    said(chat.send("and now?"))
    path = tmp_path / "chat.json"
    chat.save(path)
    saved = json.loads(path.read_text())["messages"][0]["images"]
    assert [(each["at"], each["name"]) for each in saved] == [(4, "a.png"), (5, "b�.png")]
    assert base64.b64decode(saved[0]["data"]) == images[0].data
    other = ChatSession(session, settings=SETTINGS)
    n_cached = other.load(path)
    assert other.conversation.messages == chat.conversation.messages
    assert n_cached == len(chat.conversation.tokens) - 1  # the last one is never evaluated
    assert other.conversation.prompt() == chat.conversation.prompt()
    assert saved_chat.is_saved(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data": "%%%"}, "messages.0.images.0: a.png: the file's base64 is invalid"),
        ({"data": base64.b64encode(b"text").decode()}, "messages.0.images.0: a.png: the file is neither"),
        ({"data": ""}, "messages.0.images.0: a.png: the file is empty"),
        ({"at": 9}, "is not a saved conversation: messages[0].images: give pairs"),
        ({"at": -1}, "is not a saved conversation (messages.0.images.0.at"),
        ({"path": "/etc/passwd"}, "is not a saved conversation (messages.0.images.0.path"),
    ],
)
def test_damaged_images(chat, session, images, tmp_path, change, reason):
    said(chat.send("what is", images=[(0, images[0])]))
    path = tmp_path / "chat.json"
    chat.save(path)
    content = json.loads(path.read_text())
    content["messages"][0]["images"][0].update(change)
    path.write_text(json.dumps(content))
    other = ChatSession(session, settings=SETTINGS)
    before = other.conversation
    with pytest.raises(InvalidRequest) as error:
        other.load(path)
    assert reason in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    assert other.conversation is before


def test_what_can_be_saved_can_be_loaded():
    """The limits of a file and of a conversation agree."""
    assert MAX_IMAGES * len(base64.b64encode(bytes(MAX_BYTES))) < saved_chat._MAX_BYTES


def test_a_model_without_a_projector(chat, blind, images, tmp_path):
    said(chat.send("what is", images=[(0, images[0])]))
    chat.save(tmp_path / "chat.json")
    before = chat.conversation
    with pytest.raises(ModelError, match="has no projector"):
        chat.use(blind)
    assert chat.conversation is before
    other = ChatSession(blind, settings=SETTINGS)
    with pytest.raises(ModelError, match="has no projector"):
        other.load(tmp_path / "chat.json")
    with pytest.raises(ModelError, match="has no projector"):
        said(other.send("what is", images=[(0, images[0])]))
    assert not other.conversation.messages
    said(other.send("what is"))
