// Marks of draft tokens in what is rendered: words that were accepted, and places where tokens were rejected.

import { element } from "./dom.js";

/**
 * Mark the texts of a block. root: its elements, which are changed; block: as `blocksOf` returns it; spans: of
 * the whole text; end: where the next block begins; inCode: blocks of code have marks, too.
 *
 * Each rejection is marked once: at the first character of its span that is shown, or else in between.
 */
export function mark(root, block, spans, end, inCode) {
  const marker = new Marker(spans, block.start, end);
  const holders = [...root.querySelectorAll("[data-text]")];
  for (const holder of holders) {
    const places = block.texts[holder.dataset.text];
    holder.removeAttribute("data-text");
    if (holder.matches(".math") || (!inCode && holder.matches("pre code"))) {
      marker.skip(places);
      continue;
    }
    let n = 0;
    for (const node of textsIn(holder)) node.replaceWith(...marker.pieces(node.data, places.slice(n, (n += node.length))));
  }
  (holders.at(-1) ?? root.lastElementChild ?? root).append(...marker.unshown(Infinity));
  for (const holder of holders) if (holder.localName === "span") holder.replaceWith(...holder.childNodes);
}

function textsIn(holder) {
  const walker = document.createTreeWalker(holder, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  return texts;
}

/** Goes through spans as the characters of a block do, which is in their order. */
class Marker {
  constructor(spans, start, end) {
    this.spans = spans;
    this.starts = [];
    this.unmarked = []; // spans with rejected tokens in this block
    let at = 0;
    for (const [i, span] of spans.entries()) {
      this.starts.push(at);
      if (span.rejected.length && at >= start && at < end) this.unmarked.push(i);
      at += span.text.length;
    }
    this.starts.push(Infinity);
    this.current = 0;
  }

  /** The index of the span with a place; places that are not in the text belong to none of its marks. */
  at(place) {
    while (this.starts[this.current] > place) this.current -= 1;
    while (this.starts[this.current + 1] <= place) this.current += 1;
    return this.current;
  }

  /** Leave out the marks of characters at places. */
  skip(places) {
    while (places.length && this.unmarked[0] <= this.at(places.at(-1))) this.unmarked.shift();
  }

  /** Yield a text, whose characters are at places, as texts and marks. */
  *pieces(text, places) {
    let from = 0;
    while (from < text.length) {
      const i = this.at(places[from]);
      let to = from + 1;
      while (to < text.length && this.at(places[to]) === i) to += 1;
      yield* this.unshown(i);
      yield* this.marked(text.slice(from, to), i);
      from = to;
    }
  }

  *marked(text, i) {
    const { kind, rejected, text: whole } = this.spans[i];
    if (this.unmarked[0] === i && (text.trim() || !whole.trim())) {
      this.unmarked.shift();
      const [, before, words, after] = /^(\s*)([^]*?)(\s*)$/.exec(text);
      if (words) yield* [before, place(words, rejected), after];
      else yield place(text, rejected);
    } else if (kind === "accepted") {
      for (const part of text.split(/(\s+)/)) yield part.trim() ? element("span", { class: "accepted" }, part) : part;
    } else {
      yield text;
    }
  }

  /** Yield places for the spans before one whose texts are markup. */
  *unshown(before) {
    while (this.unmarked[0] < before) yield place("", this.spans[this.unmarked.shift()].rejected);
  }
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

/** Make the places one stop for Tab; arrows go on from it. Those in code are left out where they are not shown. */
export function order(parent) {
  placesIn(parent).forEach((place, i) => (place.tabIndex = i || !marksText() ? -1 : 0));
}

/** Return whether marks in code are shown. */
export function marksCode() {
  return document.body.classList.contains("marked-code");
}

/** Return whether marks are shown at all. */
export function marksText() {
  return document.body.classList.contains("marked");
}

function placesIn(parent) {
  return parent.querySelectorAll(marksCode() ? ".corrected" : ".corrected:not(code *)");
}

/** Go to the next place with the arrow keys. */
function move(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const places = [...placesIn(event.currentTarget.closest(".answer, .reasoning"))];
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
