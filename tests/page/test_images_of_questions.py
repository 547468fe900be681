"""Images on the page: pasted, dropped and chosen, scaled down, sent, kept, and freed."""

import base64
import dataclasses
import io
import json

import pytest
from PIL import Image as Pillow

from spec_local.images.audio import Audio
from spec_local.server.supervision.events import MarkedSpan
from tests.page.conftest import ANSWERS, LOADED, ask, delta, give, picture, shown, text_of
from tests.page.test_sharing import saved
from tests.sounds import clip
from tests.waiting import wait_until

STORED = """() => new Promise((resolve) => {
  indexedDB.open("specdec").onsuccess = ({ target: { result } }) => {
    if (!result.objectStoreNames.length) return resolve([]);
    result.transaction("images").objectStore("images").getAllKeys().onsuccess = (event) => {
      result.close();
      resolve(event.target.result);
    };
  };
})"""
FULL = """() => {
  IDBObjectStore.prototype.put = () => { throw new DOMException("", "QuotaExceededError"); };
}"""


def asked(page, question):
    """Ask; return the messages that were sent."""
    with page.expect_request("**/chat/completions") as request:
        ask(page, question)
    return request.value.post_data_json["messages"]


def decoded(part):
    """The media type, the bytes and the picture of a part of a message."""
    head, data = part["image_url"]["url"].split(",")
    found = base64.b64decode(data)
    return head, found, Pillow.open(io.BytesIO(found))


@pytest.fixture
def page(open_page, seeing):
    page = open_page()
    page.wait_for_selector("#attach-images")
    return page


def with_image(page, question="What is it?"):
    """Ask about an image."""
    give(page, "drop", ("a.png", "image/png", picture()))
    shown(page, 1)
    ask(page, question)


def test_images_are_sent_before_the_question(page, seeing):
    with page.expect_file_chooser() as chooser:
        page.click("#attach-images")
    assert chooser.value.is_multiple()
    assert page.get_attribute("#image-chooser", "accept") == "image/*"
    png = picture(colour="blue")
    files = [("no.png", png), ("blue.png", png)]
    chooser.value.set_files([{"name": n, "mimeType": "image/png", "buffer": data} for n, data in files])
    shown(page, 2)
    photo = picture("JPEG", (60, 20))
    notes = ("notes.txt", "text/plain", b"text")
    assert give(page, "drop", ("photo.jpg", "image/jpeg", photo), notes) is False
    assert shown(page, 3) == ["no.png", "blue.png", "photo.jpg"]
    page.focus("[aria-label='Remove no.png']")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.ariaLabel") == "Remove blue.png"
    [message] = asked(page, "What is it?")
    first, second, text = message["content"]
    assert text == {"type": "text", "text": "notes.txt:\n```txt\ntext\n```\n\nWhat is it?"}
    head, data, _ = decoded(first)
    assert (head, data) == ("data:image/png;base64", png)  # a small PNG stays as it is
    head, _, image = decoded(second)
    assert (head, image.format, image.size) == ("data:image/jpeg;base64", "JPEG", (60, 20))
    [message] = seeing.engine.requests[-1].messages
    assert [(place, image.width) for place, image in message["images"]] == [(0, 40), (0, 60)]
    assert page.locator("#files").is_hidden()
    assert shown(page, 2, ".question") == ["blue.png", "photo.jpg"]
    assert text_of(page, ".question > .images ~ details summary span:first-child") == ["notes.txt"]


def test_an_image_is_a_question(page):
    give(page, "drop", ("a.png", "image/png", picture()))
    shown(page, 1)
    with page.expect_request("**/chat/completions") as request:
        page.click("#send")
    [message] = request.value.post_data_json["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url"]
    page.wait_for_selector("nav .open:has-text('a.png')")
    assert page.get_attribute("article", "aria-label") == "Question: a.png"


def test_images_are_pasted(page):
    for _ in range(2):
        assert give(page, "paste", ("image.png", "image/png", picture())) is False
    assert shown(page, 2) == ["image.png", "image 2.png"]
    assert page.locator("#status").text_content() == "2 files are attached."
    assert len(asked(page, "both?")[0]["content"]) == 3


def test_a_large_photo_is_scaled_and_upright(page):
    """It is 6000 × 4000 pixels on its side, and its file says where it was taken."""
    exif = Pillow.Exif()
    exif[0x0112] = 6  # orientation: turn it clockwise
    exif[0x010E] = "secret place"
    large = Pillow.new("RGB", (6000, 4000), "red")
    large.paste("blue", (0, 0, 3000, 4000))  # left: above, when it is upright
    file = io.BytesIO()
    large.save(file, "JPEG", exif=exif)
    give(page, "drop", ("photo.jpg", "image/jpeg", file.getvalue()))
    shown(page, 1)
    _, data, image = decoded(asked(page, "What?")[0]["content"][0])
    assert image.size == (1365, 2048)
    assert image.convert("RGB").getpixel((1300, 100))[2] > 200
    assert image.convert("RGB").getpixel((1300, 1900))[0] > 200
    assert not image.getexif()
    assert b"secret" not in data


@pytest.mark.parametrize(
    ("name", "file", "form", "size"),
    [
        ("wide.png", picture(size=(4096, 1024)), "PNG", (2048, 512)),
        ("drawing.bmp", picture("BMP"), "PNG", (40, 30)),
        ("a.gif", picture("GIF"), "PNG", (40, 30)),
    ],
)
def test_the_format_that_is_sent(page, name, file, form, size):
    give(page, "drop", (name, f"image/{name[-3:]}", file))
    shown(page, 1)
    _, _, image = decoded(asked(page, "What?")[0]["content"][0])
    assert (image.format, image.size) == (form, size)


def test_what_is_transparent_becomes_white_in_jpeg(page):
    noise = [Pillow.effect_noise((900, 900), 200) for _ in range(3)]
    alpha = Pillow.new("L", (900, 900), 255)
    alpha.paste(0, (0, 0, 100, 100))
    file = io.BytesIO()
    Pillow.merge("RGBA", [*noise, alpha]).save(file, "PNG")
    give(page, "drop", ("noise.png", "image/png", file.getvalue()))
    shown(page, 1)
    _, _, image = decoded(asked(page, "What?")[0]["content"][0])
    assert (image.format, image.size) == ("JPEG", (900, 900))
    assert min(image.getpixel((50, 50))) > 240


# Images are read when the test says so.
HOLD = """() => {
  const read = createImageBitmap;
  const held = new Promise((done) => (window.readImages = done));
  window.createImageBitmap = (...given) => held.then(() => read(...given));
}"""


def test_a_question_waits_for_its_images(page):
    page.evaluate(HOLD)
    page.fill("#question", "What?")
    with page.expect_request("**/chat/completions") as request:
        give(page, "drop", ("photo.jpg", "image/jpeg", picture("JPEG")))
        assert page.locator("#reading").is_visible()
        page.keyboard.press("Enter")
        assert text_of(page, ".question") == []
        page.evaluate("readImages()")
    [message] = request.value.post_data_json["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    assert page.locator("#reading").is_hidden()


def test_an_image_belongs_to_the_question_that_was_written_when_it_was_given(page):
    ask(page, "one")
    page.evaluate(HOLD)
    give(page, "drop", ("photo.jpg", "image/jpeg", picture("JPEG")))
    page.click("footer button:has-text('Edit')")
    page.evaluate("readImages()")
    page.wait_for_selector("#reading", state="hidden")
    assert page.locator("#files li").count() == 0
    page.keyboard.press("Escape")
    assert shown(page, 1) == ["photo.jpg"]


def test_a_model_that_reads_no_images(open_page, served):
    page = open_page()
    page.wait_for_selector("#model:has-text('scripted')")
    assert page.locator("#attach-images").is_hidden()
    images = [(name, "image/png", picture()) for name in ("a.png", "b.png")]
    give(page, "drop", *images, ("notes.txt", "text/plain", b"text"))
    page.wait_for_selector("#notice:has-text('This model reads no images')")
    assert page.locator("#notice span").text_content().count("This model") == 1
    page.wait_for_selector("#files li:has-text('notes.txt')")
    assert page.locator("#files li").count() == 1


def test_files_that_are_no_images(page):
    give(
        page,
        "drop",
        ("broken.png", "image/png", picture()[:40]),
        ("drawing.svg", "image/svg+xml", b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
    )
    page.wait_for_selector("#notice:has-text('broken.png is not an image that this browser can read')")
    assert text_of(page, "#files li span:first-child") == ["drawing.svg"]  # a text


def test_a_question_has_room_for_32_images(page):
    give(page, "drop", *[(f"{i}.png", "image/png", picture()) for i in range(33)])
    page.wait_for_selector("#notice:has-text('A question has room for 32 images.')")
    assert len(shown(page, 32)) == 32


def test_an_image_is_shown_larger(page):
    give(page, "drop", ("a.png", "image/png", picture(size=(1600, 1200))))
    shown(page, 1)
    for place in ("#files", ".question"):
        button = page.locator(f"{place} .thumbnail")
        assert button.bounding_box()["width"] < 300
        button.focus()
        page.keyboard.press("Enter")
        assert page.locator("#image-title").text_content() == "a.png"
        large = page.locator("#image img")
        wait_until(lambda image=large: image.evaluate(LOADED))
        assert large.get_attribute("alt") == "a.png"
        assert large.bounding_box()["width"] > 600
        page.keyboard.press("Escape")
        assert page.locator("#image").is_hidden()
        assert page.evaluate("document.activeElement.ariaLabel") == "Show a.png larger"
        if place == "#files":
            ask(page, "What?")


def test_a_reload_keeps_images(page, seeing):
    with_image(page)
    stored = page.evaluate("Object.values(localStorage).join()")
    assert len(stored) < 3000  # no data of images
    assert len(page.evaluate(STORED)) == 1
    page.reload()
    assert shown(page, 1, ".question") == ["a.png"]
    first, answer, second = asked(page, "and?")
    assert decoded(first["content"][0])[1] == picture()
    assert answer == {"role": "assistant", "content": "You said What is it?"}
    assert second == {"role": "user", "content": "and?"}


def test_deleting_a_conversation_frees_its_images(page):
    page.clock.install()
    give(page, "drop", ("other.png", "image/png", picture()))
    shown(page, 1)
    ask(page, "kept")
    page.click("#new")
    with_image(page, "one")
    page.click("nav [aria-label='Delete one']")
    page.click("#deleted button")
    assert shown(page, 1, ".question") == ["a.png"]  # it was undone
    assert len(page.evaluate(STORED)) == 2
    page.click("nav [aria-label='Delete one']")
    page.clock.run_for(20_000)
    wait_until(lambda: len(page.evaluate(STORED)) == 1)
    page.reload()
    assert shown(page, 1, ".question") == ["other.png"]


def test_images_without_a_conversation_are_swept(page):
    with_image(page)
    [used] = page.evaluate(STORED)
    put = """(keys) => new Promise((resolve) => {
      indexedDB.open("specdec").onsuccess = ({ target: { result } }) => {
        const images = result.transaction("images", "readwrite").objectStore("images");
        for (const key of keys) images.put({}, key);
        images.transaction.oncomplete = resolve;
      };
    })"""
    young = page.evaluate("`${Date.now()}-young`")
    page.evaluate(put, ["1000-old", young])
    page.reload()
    wait_until(lambda: sorted(page.evaluate(STORED)) == sorted([used, young]))


def test_editing_and_regenerating_keep_images(page):
    with_image(page, "one")
    with page.expect_request("**/chat/completions") as request:
        page.click("footer button:has-text('Regenerate')")
    page.wait_for_selector(".versions:has-text('2 / 2')")
    assert [part["type"] for part in request.value.post_data_json["messages"][0]["content"]] == [
        "image_url",
        "text",
    ]
    page.click("footer button:has-text('Edit')")
    assert shown(page, 1) == ["a.png"]
    give(page, "drop", ("b.png", "image/png", picture(colour="green")))
    shown(page, 2)
    assert len(asked(page, "two")[0]["content"]) == 3
    page.wait_for_selector(".versions:has-text('3 / 3')")
    assert len(page.evaluate(STORED)) == 2  # one for all versions
    assert shown(page, 2, ".question") == ["a.png", "b.png"]
    page.click("footer button:has-text('Edit')")
    page.click("[aria-label='Remove a.png']")
    page.click("[aria-label='Remove b.png']")
    assert asked(page, "three") == [{"role": "user", "content": "three"}]
    for _ in range(3):
        page.click("[aria-label='Previous version']")
    assert shown(page, 1, ".question") == ["a.png"]


def test_an_answer_about_an_image_goes_on(page, monkeypatch):
    monkeypatch.setitem(ANSWERS, "first ", [delta(MarkedSpan("and the rest."))])
    give(page, "drop", ("a.png", "image/png", picture()))
    shown(page, 1)
    page.fill("#question", "long")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer:has-text('first')")
    page.click("#stop")
    with page.expect_request("**/chat/completions") as request:
        page.click("footer button:has-text('Continue')")
    page.wait_for_selector(".answer:has-text('first and the rest.')")
    first, last = request.value.post_data_json["messages"]
    assert first["content"][0]["type"] == "image_url"
    assert last["content"] == "first "


def test_exports_contain_images(page):
    give(page, "drop", ("a [1].png", "image/png", picture()))
    shown(page, 1)
    ask(page, "one")
    uri = f"data:image/png;base64,{base64.b64encode(picture()).decode()}"
    _, markdown = saved(page, "#export-markdown")
    assert f"## Question\n\n![a \\[1\\].png]({uri})\n\none\n\n" in markdown.decode()
    _, text = saved(page, "#export-json")
    exported = json.loads(text)
    [file] = exported["turns"][0]["files"]
    assert (file["name"], file["width"], file["height"]) == ("a [1].png", 40, 30)
    assert exported["images"] == {file["image"]: uri}
    assert exported["messages"][0]["content"][0] == {"type": "image_url", "image_url": {"url": uri}}


def test_a_full_storage_loses_nothing_at_once(page):
    page.evaluate(FULL)
    with_image(page, "one")
    notice = page.locator("#notice span")
    assert notice.text_content() == (
        "The browser's storage is full: the images of this conversation are lost when you close the page. "
        "Delete others, or export it."
    )
    assert len(asked(page, "two")[0]["content"]) == 2
    page.click("#new")
    page.click("nav .open:has-text('one')")
    assert shown(page, 1, ".question") == ["a.png"]
    page.reload()  # now they are lost, and both the reader and the model know it
    page.wait_for_selector(".question .note:has-text('a.png (no longer stored)')")
    assert asked(page, "three")[0]["content"] == [
        {"type": "text", "text": "[The image a.png is no longer available.]"},
        {"type": "text", "text": "one"},
    ]


def test_a_browser_that_stores_no_images(open_page, browser, seeing):
    context = browser.new_context()
    refusal = "{ get() { throw new DOMException('', 'SecurityError'); } }"
    context.add_init_script(f"Object.defineProperty(window, 'indexedDB', {refusal})")
    page = open_page(context=context)
    page.wait_for_selector("#attach-images")
    with_image(page)
    assert "stores nothing" in page.locator("#notice").text_content()
    assert shown(page, 1, ".question") == ["a.png"]
    assert len(asked(page, "two")[0]["content"]) == 2


def test_another_tab_shows_images_and_does_not_lose_them(open_page, browser, seeing):
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    first = open_page(context=context)
    ask(first, "one")
    second = open_page(context=context)
    first.wait_for_selector("#attach-images")
    with_image(first, "two")
    wait_until(lambda: text_of(second, ".question") == ["one", "two"])
    assert shown(second, 1, ".question") == ["a.png"]
    # One deletes for good what the other is about to store again.
    second.fill("#question", "long")
    second.keyboard.press("Enter")
    second.wait_for_selector(".answer:has-text('first')")
    first.clock.install()
    first.click("nav [aria-label='Delete one']")
    first.clock.run_for(20_000)
    wait_until(lambda: first.evaluate(STORED) == [])
    second.click("#stop")
    second.wait_for_selector("#send")
    wait_until(lambda: len(first.evaluate(STORED)) == 1)
    second.reload()
    assert shown(second, 1, ".question") == ["a.png"]


def test_a_narrow_window_with_images(page):
    page.set_viewport_size({"width": 320, "height": 640})
    sizes = [(1600, 300), (20, 1600), (400, 400), (1, 1), (2048, 2)]
    files = [(f"{'x' * 80}{i}.png", "image/png", picture(size=size)) for i, size in enumerate(sizes)]
    give(page, "drop", *files)
    shown(page, len(files))
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    ask(page, "What?")
    shown(page, len(files), ".question")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert page.evaluate("document.getElementById('turns').scrollWidth") <= 320
    page.click(".question .thumbnail >> nth=1")
    box = page.locator("#image").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 320
    assert box["height"] <= 640


def test_sounds_are_sent_and_played(open_page, served):
    served.engine.loaded = dataclasses.replace(served.engine.loaded, reads=(Audio,))
    page = open_page()
    page.wait_for_selector("#attach-images")
    assert page.get_attribute("#image-chooser", "accept") == "audio/*"
    sound, others = clip(1), [("b.ogg", "audio/ogg", b"OggS"), ("c.png", "image/png", picture())]
    give(page, "drop", ("a.wav", "audio/wav", sound), *others)
    page.wait_for_selector("#files audio")
    [notice] = text_of(page, "#notice")
    assert "b.ogg is not WAV, MP3 or FLAC: convert it" in notice
    assert "This model reads no images" in notice
    [message] = asked(page, "What is it?")
    url = f"data:audio/wav;base64,{base64.b64encode(sound).decode()}"
    assert message["content"][0] == {"type": "audio_url", "audio_url": {"url": url}}
    [message] = served.engine.requests[-1].messages
    assert [(place, each.data) for place, each in message["images"]] == [(0, sound)]
    wait_until(lambda: page.locator("article audio").evaluate("player => player.duration") == 4)
    page.reload()
    wait_until(lambda: page.locator("article audio").evaluate("player => player.duration") == 4)
