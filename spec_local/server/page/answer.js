// An answer as elements: paragraphs, code blocks and inline code, with marks where draft tokens were accepted
// or rejected. Formatting and marks overlap freely, so both are ranges of the text: `blocksOf` divides the
// text, and `cut` takes the spans of a range.

import { element } from "./dom.js";

const FENCE = /^ {0,3}```/;
const INLINE_CODE = /`[^`\n]+`/g;

/** Shows spans in an element. Only the last block and those after it are drawn again when text is added. */
export class FormattedText {
  constructor(parent) {
    this.parent = parent;
    this.n_complete = 0; // blocks that no further text will change
  }

  show(spans) {
    const text = spans.map((span) => span.text).join("");
    const blocks = blocksOf(text);
    while (this.parent.childNodes.length > this.n_complete) this.parent.lastChild.remove();
    for (const block of blocks.slice(this.n_complete)) this.parent.append(drawn(block, text, spans));
    this.n_complete = Math.max(0, blocks.length - 1);
    const places = this.parent.querySelectorAll(".corrected");
    places.forEach((place, i) => (place.tabIndex = i ? -1 : 0)); // one stop for Tab; arrows go on from it
  }
}

/**
 * Divide a text into blocks {code, start, end, from, to}. The blocks cover the text; from `from` to `to` it is
 * shown, and the rest is markup.
 */
export function blocksOf(text) {
  const blocks = [];
  let block = null;
  let start = 0;
  while (start < text.length || !blocks.length) {
    const newline = text.indexOf("\n", start);
    const end = newline < 0 ? text.length : newline + 1;
    const line = text.slice(start, end);
    const fence = FENCE.test(line);
    if (block?.code) {
      block.end = end;
      if (fence) block = null;
      else block.to = end;
    } else if (fence) {
      block = { code: true, start, end, from: end, to: end };
      blocks.push(block);
    } else {
      if (!block || (line.trim() && block.blank)) {
        block = { code: false, start, end, from: start, to: start, blank: false };
        blocks.push(block);
      }
      block.end = end;
      if (line.trim()) block.to = end;
      else if (block.to === block.from) block.from = block.to = end; // blank lines before it
      block.blank = !line.trim() && block.to > block.from;
    }
    start = end;
  }
  for (const each of blocks) if (text[each.to - 1] === "\n" && each.to > each.from) each.to -= 1;
  blocks.at(-1).end = Infinity; // rejected tokens at the very end belong to it
  return blocks;
}

/** The parts of spans in a range of the text; each rejection is in one part only. */
export function cut(spans, start, end) {
  const parts = [];
  let at = 0;
  for (const span of spans) {
    const from = Math.max(at, start);
    const to = Math.min(at + span.text.length, end);
    const begins = at >= start && at < end;
    if (from < to || (begins && span.rejected.length)) {
      parts.push({ text: span.text.slice(from - at, to - at), kind: span.kind, rejected: begins ? span.rejected : [] });
    }
    at += span.text.length;
  }
  return parts;
}

function drawn(block, text, spans) {
  const before = markup(spans, block.start, block.from);
  const after = markup(spans, block.to, block.end);
  if (block.code) {
    const language = text.slice(block.start, block.from).replace(/[\s`]/g, "");
    const code = element("code", {}, ...before, ...shown(spans, block.from, block.to), ...after);
    return element("pre", { tabindex: 0, "aria-label": "Code", "data-language": language || false }, code);
  }
  return element("p", {}, ...before, ...prose(text, spans, block.from, block.to), ...after);
}

function* prose(text, spans, start, end) {
  let at = start;
  for (const found of text.slice(start, end).matchAll(INLINE_CODE)) {
    const from = start + found.index;
    const to = from + found[0].length;
    yield* shown(spans, at, from);
    const parts = [...markup(spans, from, from + 1), ...shown(spans, from + 1, to - 1), ...markup(spans, to - 1, to)];
    yield element("code", {}, ...parts);
    at = to;
  }
  yield* shown(spans, at, end);
}

function shown(spans, start, end) {
  return cut(spans, start, end).map(marked);
}

/** Text that is not shown itself: only the places where tokens were rejected. */
function markup(spans, start, end) {
  const places = cut(spans, start, end).filter((part) => part.rejected.length);
  return places.map((part) => marked({ ...part, text: "" }));
}

function marked({ text, kind, rejected }) {
  if (rejected.length) return place(text, rejected);
  return kind === "accepted" ? element("span", { class: "accepted" }, text) : text;
}

/** The text where draft tokens were rejected, which shows them while it is hovered over or focused. */
function place(text, rejected) {
  const kind = text.trim() ? "corrected" : "corrected blank";
  const show = (event) => showRejected(event.currentTarget, rejected);
  return element(
    "span",
    { class: kind, tabindex: -1, mouseenter: show, mouseleave: hideRejected, focus: show, blur: hideRejected, keydown: move },
    text,
  );
}

/** Go to the next place with the arrow keys. */
function move(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const places = [...event.currentTarget.closest(".answer, .reasoning").querySelectorAll(".corrected")];
  places[places.indexOf(event.currentTarget) + step]?.focus();
}

function showRejected(place, rejected) {
  const tip = document.getElementById("rejected");
  const texts = rejected.map((text) => element("del", {}, visible(text)));
  tip.replaceChildren(element("span", {}, "rejected "), ...texts);
  tip.hidden = false;
  place.setAttribute("aria-describedby", tip.id);
  const box = place.getClientRects()[0] ?? place.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const margin = 6; // pixels
  const above = box.top - height - margin;
  tip.style.left = `${Math.max(margin, Math.min(box.left, innerWidth - width - margin))}px`;
  tip.style.top = `${above > margin ? above : box.bottom + margin}px`;
}

export function hideRejected() {
  document.getElementById("rejected").hidden = true;
}

/** Spaces and line ends of a token as characters that one can see. */
function visible(text) {
  return text.replace(/^ | $/g, "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "␣";
}
