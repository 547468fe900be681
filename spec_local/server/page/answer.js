// An answer as elements: rendered Markdown with the marks of its draft tokens, drawn again while it grows.

import { element } from "./dom.js";
import { highlight, languageOf } from "./highlight.js";
import { blocksOf, sanitized } from "./markdown.js";
import { copyText } from "./clipboard.js";
import { mark, marksCode, marksText, order } from "./marks.js";
import { typeset } from "./math.js";
import { textOf } from "./store.js";

export { hideRejected } from "./marks.js";

const COPIED_MS = 1500; // for so long a button tells that it has copied

/** Shows spans, to which others are added, in an element. */
export class FormattedText {
  constructor(parent) {
    this.parent = parent;
    this.blocks = []; // {start, html, nodes}
    this.n_complete = 0; // blocks that no further text will change
    this.base = 0; // where the first of the others begins
    this.shown = "";
  }

  /** running: the text will grow, and only its last blocks are parsed and drawn; else those that have changed. */
  show(spans, running) {
    const state = `${spans.length} ${running} ${marksText()} ${marksCode()}`;
    if (state === this.shown) return;
    this.shown = state;
    const n_kept = running ? this.n_complete : 0;
    const base = running ? this.base : 0;
    const { blocks, n_complete, next } = blocksOf(textOf(spans).slice(base), { base, running });
    const drawn = blocks.map((block, i) => {
      const before = this.blocks[n_kept + i];
      const isSame = n_kept + i < this.n_complete && before.start === block.start && before.html === block.html;
      const growing = running && i >= n_complete;
      return isSame ? before : drawnBlock(block, spans, blocks[i + 1]?.start ?? Infinity, before, growing);
    });
    const kept = this.blocks.slice(0, n_kept);
    this.replace(kept.flatMap(nodesOf), drawn.flatMap(nodesOf));
    this.blocks = [...kept, ...drawn];
    this.n_complete = n_kept + n_complete;
    this.base = next;
    order(this.parent);
  }

  /** Let these nodes, some of which may be there, follow those that are kept. */
  replace(kept, nodes) {
    const stay = new Set([...kept, ...nodes]);
    for (const node of [...this.parent.childNodes]) if (!stay.has(node)) node.remove();
    let next = kept.length ? kept.at(-1).nextSibling : this.parent.firstChild;
    for (const node of nodes) {
      if (node === next) next = next.nextSibling;
      else this.parent.insertBefore(node, next);
    }
  }
}

function nodesOf(block) {
  return block.nodes;
}

/** A block as {start, html, nodes}. before: what was drawn in its place; growing: it is drawn again soon. */
function drawnBlock(block, spans, end, before, growing) {
  const fragment = sanitized(block.html);
  for (const code of fragment.querySelectorAll("pre code")) highlight(code, growing);
  mark(fragment, block, spans, end, !growing || marksCode());
  fragment.querySelectorAll("pre").forEach(withCopy);
  fragment.querySelectorAll("table").forEach((table) => withScrolling(table, "table", "Table"));
  fragment.querySelectorAll(".math.display").forEach((formula) => withScrolling(formula, "formula", "Formula"));
  typeset(fragment);
  const nodes = [...fragment.children];
  return { start: block.start, html: block.html, nodes: isSameCode(before?.nodes, nodes) ? grown(before.nodes, nodes) : nodes };
}

/** Put a block of code below its language and a button. */
function withCopy(pre) {
  const language = languageOf(pre.firstChild);
  const copy = element("button", { type: "button", class: "quiet", click: copyCode, "aria-label": "Copy the code" }, "Copy");
  const box = element("div", { class: "code" }, element("div", { class: "head" }, element("span", {}, language), copy));
  scrolling(pre, language ? `Code: ${language}` : "Code");
  pre.replaceWith(box);
  box.append(pre);
}

function withScrolling(wide, kind, name) {
  const box = scrolling(element("div", { class: kind }), name);
  wide.replaceWith(box);
  box.append(wide);
}

/** Let an element be scrolled with the keyboard. */
function scrolling(made, name) {
  made.tabIndex = 0;
  made.setAttribute("role", "group");
  made.setAttribute("aria-label", name);
  return made;
}

/** Code that grows keeps its elements, so that it stays scrolled and its button can be pressed. */
function isSameCode(before, nodes) {
  const [old, made] = [before, nodes].map((each) => (each?.length === 1 && each[0].matches(".code") ? each[0] : null));
  return Boolean(old && made && old.firstChild.textContent === made.firstChild.textContent);
}

function grown(before, nodes) {
  before[0].querySelector("code").replaceWith(nodes[0].querySelector("code"));
  return before;
}

async function copyCode(event) {
  const button = event.currentTarget;
  const code = button.closest(".code").querySelector("code");
  const isCopied = await copyText(code.textContent, code);
  button.textContent = isCopied ? "Copied" : "Selected";
  setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
}
