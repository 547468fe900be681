"""Answers as rendered Markdown: CommonMark's examples, hostile texts, marks, and texts that grow."""

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from spec_local.server.supervision.events import MarkedSpan
from tests.page.conftest import ANSWERS, ask, delta, keep_settings
from tests.page.markdown_texts import DOCUMENT, HOSTILE_TEXTS
from tests.waiting import wait_until

EXAMPLES = [
    [part.replace("→", "\t") for part in example]
    for example in json.loads((Path(__file__).parents[1] / "data/commonmark.json").read_text())["examples"]
]

OF_MARKDOWN = r"/?(?:p|em|strong|a|ul|ol|li|pre|code|blockquote|del)\b"  # the tags of examples with HTML

RENDERED = """async examples => {
  const { blocksOf, sanitized } = await import("/markdown.js");
  const inert = new DOMParser().parseFromString("", "text/html");
  const LEFT_OUT = ["target", "rel", "data-text"];
  function canonical(html) {
    const box = inert.createElement("div");
    box.innerHTML = html;
    for (const span of box.querySelectorAll("span")) span.replaceWith(...span.childNodes);
    for (const each of box.querySelectorAll("*")) {
      const attributes = each.getAttributeNames().sort().map((name) => [name, each.getAttribute(name)]);
      for (const [name] of attributes) each.removeAttribute(name);
      for (const [name, value] of attributes) {
        if (!LEFT_OUT.includes(name)) each.setAttribute(name, value.trim());
      }
    }
    const lines = /\\s*(<\\/?(?:p|ul|ol|li|blockquote|pre|hr|br|h\\d)\\b[^>]*>)\\s*/g;
    return box.innerHTML.replace(lines, "$1").trim();
  }
  return examples.map(([, markdown, html]) => {
    const fragment = sanitized(blocksOf(markdown).blocks.map((block) => block.html).join(""));
    const box = document.createElement("div");
    box.append(fragment);
    return [canonical(box.innerHTML), canonical(html)];
  });
}"""

STREAM = """async ([text, n, compare]) => {
  const { FormattedText } = await import("/answer.js");
  const spansOf = (part) => [{ text: part, kind: "main", rejected: [] }];
  const drawn = (part, running) => {
    const parent = document.createElement("div");
    new FormattedText(parent).show(spansOf(part), running);
    return parent.innerHTML;
  };
  const parent = document.createElement("div");
  const growing = new FormattedText(parent);
  const different = [];
  const shown = [];
  const given = [];
  for (let end = n; end < text.length + n; end += n) {
    given.push(...spansOf(text.slice(end - n, end)));
    growing.show(given, true);
    shown.push(parent.textContent);
    const whole = compare && drawn(text.slice(0, end), true);
    if (compare && parent.innerHTML !== whole) different.push(text.slice(0, end).slice(-40));
  }
  growing.show(given, false);
  if (compare && parent.innerHTML !== drawn(text, false)) different.push("the end");
  return [different, shown];
}"""


def render(page, spans, running=False):
    """Show spans (text, kind, rejected texts) as the only answer on the page."""
    return page.evaluate(
        """async ([spans, running]) => {
          const { FormattedText } = await import("/answer.js");
          const answer = Object.assign(document.createElement("div"), { className: "answer" });
          document.getElementById("turns").replaceChildren(answer);
          const given = spans.map(([text, kind, rejected]) => ({ text, kind, rejected }));
          new FormattedText(answer).show(given, running);
        }""",
        [[list(span) for span in spans], running],
    )


def why_different(markdown, ours, reference):
    """The reason why an example is rendered unlike the reference; None: there is none."""

    def link(found):
        alt, source, title = found.groups()
        return f'<a class="picture" href="{source}"{title or ""}>{alt or "untitled"}</a>'

    image = r'<img alt="([^"]*)" src="([^"]*)"( title="[^"]*")?>'
    in_links = re.sub(rf'(?<=<a href="/uri">){image}', r"\1", reference)
    if ours == re.sub(image, link, in_links):
        return "pictures are links"
    if re.fullmatch(r"<(?:irc|a\+b\+c|made-up-scheme|localhost):.*>\n", markdown):
        return "links have known schemes"
    if re.sub(r'<a href="(https://[^"]*)">\1</a>', r"\1", ours) == reference:
        return "addresses are links"
    if re.search(r"</?[a-zA-Z!?]", markdown) and not re.search(f"<(?!{OF_MARKDOWN})", ours):
        return "HTML is text"
    return None


def test_examples_of_commonmark(open_page):
    results = open_page().evaluate(RENDERED, EXAMPLES)
    reasons = Counter()
    for (_, markdown, _), (ours, reference) in zip(EXAMPLES, results, strict=True):
        if ours != reference:
            reason = why_different(markdown, ours, reference)
            assert reason, f"{markdown!r}\n{ours!r}\n{reference!r}"
            reasons[reason] += 1
    assert len(EXAMPLES) == 652
    assert reasons == {
        "HTML is text": 70,
        "pictures are links": 22,
        "links have known schemes": 4,
        "addresses are links": 3,
    }


def test_hostile_texts(open_page):
    page = open_page()
    page.wait_for_selector("#statistics svg")
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    address = page.url
    assert len(HOSTILE_TEXTS) == 40
    tags = "h1 h2 h3 h4 h5 h6 p blockquote ul ol li hr pre code a span table thead tbody tr th td br "
    tags += "b i u s em strong small mark del ins sub sup kbd div button"
    attributes = "class href rel target title start tabindex role aria-label type"
    for text in HOSTILE_TEXTS:
        for running in (True, False):
            render(page, [[text, "accepted", []], ["", "corrected", [text]]], running)
            found = page.evaluate(
                """() => {
                  const all = [...document.querySelectorAll("#turns *")];
                  const unique = (values) => [...new Set(values)];
                  return [
                    unique(all.map((each) => each.localName)),
                    unique(all.flatMap((each) => each.getAttributeNames())),
                    unique(all.map((each) => each.protocol ?? "")),
                  ];
                }"""
            )
            assert set(found[0]) <= set(tags.split()), text
            assert set(found[1]) <= set(attributes.split()), text
            assert set(found[2]) <= {"", ":", "http:", "https:", "mailto:"}, text
    page.wait_for_timeout(100)  # for what would be loaded or run later
    assert page.evaluate("window.ran") is None
    assert (page.url, requests) == (address, [])


def test_a_text_that_grows_is_drawn_as_if_at_once(open_page):
    page = open_page()
    examples = "\n\n".join(markdown for _, markdown, _ in EXAMPLES[::7] if "]:" not in markdown)
    for text, n in ((DOCUMENT, 5), (DOCUMENT, 7), (examples[:2500], 9)):
        different, _ = page.evaluate(STREAM, [text, n, True])
        assert different == []


@pytest.mark.slow
def test_every_beginning_of_an_example_is_drawn(open_page):
    script = """async examples => {
      const { blocksOf, sanitized } = await import("/markdown.js");
      for (const [, markdown] of examples) {
        for (let n = 0; n <= markdown.length; n++) {
          for (const block of blocksOf(markdown.slice(0, n), { running: true }).blocks) sanitized(block.html);
        }
      }
    }"""
    open_page().evaluate(script, EXAMPLES)


def test_nothing_that_was_shown_changes_while_a_text_grows(open_page):
    """What is shown of a beginning begins what is shown later: only brackets of links are seen and vanish."""
    _, shown = open_page().evaluate(STREAM, [DOCUMENT.replace("![x](y", ""), 2, False])
    shown = [re.sub(r"[\s\[\]!]", "", text) for text in shown]
    changed = [(a[-20:], b[-20:]) for a, b in itertools.pairwise(shown) if not b.startswith(a)]
    assert changed == []


@pytest.mark.parametrize(
    ("text", "selector", "expected"),
    [
        ("a **bo", "strong", "bo"),
        ("a **bold*", "strong", "bold"),
        ("a **bold *and", "strong em", "and"),
        ("a `co", "p code", "co"),
        ("**a `co", "strong code", "co"),
        ("[te](https://exa", "a", "te"),
        ("- a\n- **b", "li strong", "b"),
        ("Text\n-", "p", "Text"),
        ("Text\n\n| a | b", "th", "a b"),
        ("Text\n\n| a | b |\n|--", "th", "a b"),
        ("> | a | b |\n", "blockquote th", "a b"),
        ("| a |\n|---|\n| **b", "td strong", "b"),
        ("```python\nprint(1", "pre code .hljs-number", "1"),
        ("Text\n```py", "p", "Text"),
        ("```\ncode\n``", "pre code", "code\n"),
        ("2 * 3", "p", "2 * 3"),
        ("a_b", "p", "a_b"),
    ],
)
def test_unfinished_markup(open_page, text, selector, expected):
    page = open_page()
    render(page, [[text, "main", []]], running=True)
    found = page.locator(f".answer {selector}")
    assert " ".join(found.all_text_contents()) == expected
    assert not re.search(r"\*\*|\||``", page.locator(".answer").text_content())


def test_complete_blocks_stay_the_same_elements(open_page):
    """Only the last block of an answer is drawn again, and code keeps its element, which may be scrolled."""
    script = """async text => {
      const { FormattedText } = await import("/answer.js");
      const parent = document.createElement("div");
      const growing = new FormattedText(parent);
      const spans = [];
      const replaced = [];
      for (const word of text.match(/[^ ]+ ?/g)) {
        const before = [...parent.children];
        spans.push({ text: word, kind: "main", rejected: [] });
        growing.show(spans, true);
        replaced.push(before.length - before.filter((each) => each.parentNode === parent).length);
      }
      const before = [...parent.children];
      growing.show(spans, false);
      const all = before.slice(0, -1).every((each) => each.parentNode === parent);
      return [Math.max(...replaced), all, before.length];
    }"""
    most, stay, n = open_page().evaluate(script, f"{DOCUMENT}\n" * 4)
    assert (most <= 1, stay, n > 40) == (True, True, True)
    [code] = open_page().evaluate(
        """async () => {
          const { FormattedText } = await import("/answer.js");
          const parent = document.createElement("div");
          const growing = new FormattedText(parent);
          const texts = ["```js\\nlet a", " = 1;\\nlet", " b;"];
          const spans = texts.map((text) => ({ text, kind: "main", rejected: [] }));
          growing.show(spans.slice(0, 1), true);
          const pre = parent.querySelector("pre");
          growing.show(spans.slice(0, 2), true);
          growing.show(spans, false);
          return [parent.querySelector("pre") === pre && pre.textContent];
        }"""
    )
    assert code == "let a = 1;\nlet b;"


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_marks_are_at_their_words(open_page, line_end):
    """Each second word was drafted: whatever the markup, just these are marked, and no spaces."""
    page = open_page()
    text = DOCUMENT.replace("\n", line_end)
    spans = [
        [part, "accepted" if re.fullmatch(r"w\d*[13579]", part) else "main", []]
        for part in re.split(r"(w\d+)", text)
    ]
    render(page, spans)
    accepted = page.locator(".answer .accepted").all_text_contents()
    words = re.findall(r"w\d+", page.locator(".answer").text_content())
    assert len(words) == 67
    hidden = {"w56"}  # of a picture, whose text has no marks
    assert accepted == [word for word in words if int(word[1:]) % 2 and word not in hidden]


def test_random_marks(open_page):
    """Cut anywhere: each rejection is shown once, no mark has spaces, and marks do not change the text."""
    page = open_page()
    dice = random.Random(0)
    render(page, [[DOCUMENT, "main", []]])
    plain = page.locator(".answer").text_content()
    for _ in range(20):
        cuts = sorted(dice.sample(range(len(DOCUMENT)), 300))
        parts = [DOCUMENT[a:b] for a, b in zip([0, *cuts], [*cuts, len(DOCUMENT)], strict=True)]
        spans = [[part, dice.choice(["main", "accepted"]), []] for part in parts]
        for span in spans[::7]:
            span[1:] = "corrected", ["no"]
        render(page, [*spans, ["", "corrected", ["end"]]])
        assert page.locator(".answer").text_content() == plain
        assert page.locator(".answer .corrected").count() == len(spans[::7]) + 1
        accepted = page.locator(".answer .accepted").all_text_contents()
        assert not any(re.search(r"\s", word) for word in accepted)
        words = page.locator(".answer .corrected:not(.blank)").all_text_contents()
        assert all(word == word.strip() for word in words)


def test_marks_in_code_are_asked_for(open_page, monkeypatch):
    code = (
        MarkedSpan("```python\n"),
        MarkedSpan("x = 1\n", "accepted"),
        MarkedSpan("y\n", "corrected", ("z",)),
    )
    monkeypatch.setitem(ANSWERS, "code", [delta(MarkedSpan("Use `a b`:\n", "accepted"), *code)])
    page = open_page()
    page.focus("#turns")
    page.keyboard.press("m")
    ask(page, "code")
    style = "selector => getComputedStyle(document.querySelector(selector)).textDecorationLine"

    def lines():
        marks = ("p > .accepted", "p code .accepted", "pre .accepted", "pre .corrected")
        return [page.evaluate(style, f".answer {mark}") for mark in marks]

    assert lines() == ["underline", "none", "none", "none"]
    legend = page.locator(".legend")
    assert "green: drafted and accepted · orange: draft tokens were rejected" in legend.text_content()
    assert page.evaluate(style, ".legend .accepted") == "underline"
    assert page.locator(".answer [tabindex='0'].corrected").count() == 0
    page.click("#settings-button")
    page.check("[name=marks_in_code]")
    keep_settings(page)
    wait_until(lambda: lines() == ["underline"] * 4)
    assert page.locator(".answer [tabindex='0'].corrected").count() == 1
    page.hover(".answer pre .corrected")
    assert page.locator("#rejected").text_content() == "rejected z"
    page.click("#settings-button")
    page.uncheck("[name=marks]")
    keep_settings(page)
    wait_until(lambda: lines() == ["none"] * 4)
    assert legend.is_hidden()


@pytest.mark.parametrize("how", ["clipboard", "selection"])
def test_code_is_copied(open_page, browser, monkeypatch, how):
    code = 'def f(x):\n    return "<b>" + x\n'
    monkeypatch.setitem(ANSWERS, "code", [delta(MarkedSpan(f"A:\n```python\n{code}```\n", "accepted"))])
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = open_page(context=context)
    ask(page, "code")
    page.evaluate("navigator.clipboard.writeText('')")
    if how == "selection":
        page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(); }")
    assert page.locator(".code .head span").text_content() == "python"
    page.click(".code button")
    wait_until(lambda: page.locator("#status").text_content() == "Copied")
    assert page.evaluate("navigator.clipboard.readText()").strip() == code.strip()
    wait_until(lambda: page.locator(".code button").text_content() == "Copy")


def test_drawing_leaves_time_for_the_model(open_page):
    """An answer that takes long to draw is drawn a fifth of the time, and at its end."""
    n_drawn = open_page().evaluate(
        """async () => {
          const { FormattedText } = await import("/answer.js");
          const { TurnView } = await import("/turn_view.js");
          const { newTurn } = await import("/store.js");
          let now = 0;
          performance.now = () => now;
          let n_drawn = 0;
          FormattedText.prototype.show = function () {
            n_drawn += 1;
            now += 50;
          };
          const view = new TurnView(newTurn("x", [], null), {});
          for (; now < 10_000; now += 16) view.update({ running: true, last: false });
          const n_running = n_drawn;
          view.update({ running: false, last: true });
          view.update({ running: false, last: true });
          return [n_running, n_drawn - n_running];
        }"""
    )
    assert 36 <= n_drawn[0] <= 42  # two in 100 ms, with 400 ms of rest
    assert n_drawn[1] == 4


def test_the_last_text_before_a_pause_is_drawn(open_page):
    page = open_page()
    page.evaluate(
        """async () => {
          const { TurnView } = await import("/turn_view.js");
          const { newTurn } = await import("/store.js");
          const turn = newTurn("x", [], null);
          const view = new TurnView(turn, {});
          document.getElementById("turns").append(view.element);
          view.update({ running: true, last: false });
          view.due = performance.now() + 200;
          turn.answer.push({ text: "before the pause", kind: "main", rejected: [] });
          view.update({ running: true, last: false });
        }"""
    )
    wait_until(lambda: page.locator(".answer").text_content() == "before the pause")
