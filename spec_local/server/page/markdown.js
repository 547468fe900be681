// Markdown as HTML of blocks, in which each shown character knows its place in the text.
//
// HTML in the text stays text, but for a few tags without attributes. What is rendered is sanitized all the same.

import "./vendor/markdown-it.umd.min.js";
import "./vendor/purify.min.js";
import { blockFormula, inlineFormula } from "./formulas.js";
import { completed, held } from "./unfinished.js";

const { markdownit, DOMPurify } = globalThis;

const TAGS = /^<\/?(?:br|b|i|u|s|em|strong|small|mark|del|ins|sub|sup|kbd)\s*\/?>$/i; // of the text itself
const LINK = /^(?:(?:https?|mailto):|[^a-z]|[a-z+.-]+(?:[^a-z+.\-:]|$)|$)/i; // or without a scheme
const SANITIZED = {
  ALLOWED_TAGS: [
    ...["h1", "h2", "h3", "h4", "h5", "h6", "p", "blockquote", "ul", "ol", "li", "hr", "pre", "code", "a", "span"],
    ...["table", "thead", "tbody", "tr", "th", "td", "br", "b", "i", "u", "s", "em", "strong", "small", "mark"],
    ...["del", "ins", "sub", "sup", "kbd"],
  ],
  ALLOWED_ATTR: ["class", "data-text", "href", "rel", "start", "target", "title"],
  ALLOWED_URI_REGEXP: LINK,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const markdown = markdownit({ html: true, linkify: true }).disable(["html_block", "fragments_join", "text_join"]);
markdown.core.ruler.disable("linkify"); // only addresses with a scheme, which a rule of the same name finds
markdown.inline.ruler.before("escape", "math", inlineFormula);
markdown.block.ruler.before("fence", "math", blockFormula, { alt: ["paragraph", "reference", "blockquote", "list"] });
markdown.validateLink = (address) => LINK.test(address);

/** The state of inline rules, whose tokens know where they begin: `places`, roughly, until it is `located`. */
markdown.inline.State = class extends markdown.inline.State {
  pushPending() {
    const { pending, pos } = this;
    const token = super.pushPending();
    token.places = this.src.lastIndexOf(pending, pos - pending.length);
    return token;
  }

  push(type, ...rest) {
    const token = super.push(type === "text_special" ? "text" : type, ...rest);
    token.places = this.pos;
    return token;
  }
};

/**
 * Return {blocks, n_complete, next}: the blocks {start, html, texts} of a text, how many of them no further text
 * changes, but for links whose addresses are defined later, and where the others begin.
 *
 * start: where the block begins. texts: for each element with data-text="i", the places of its characters.
 * base: the place of the text's first character. running: further text is expected.
 */
export function blocksOf(text, { base = 0, running = false } = {}) {
  const shown = running ? held(text) : text;
  let tokens = markdown.parse(shown, { running });
  const groups = [...grouped(tokens)];
  let lines = linesOf(shown, base);
  const n_complete = Math.max(0, groups.length - 1);
  const next = groups.length ? lines[groups.at(-1)[0].map[0]].start : base;
  const complete = running ? completed(shown, tokens) : shown;
  if (complete !== shown) {
    tokens = markdown.parse(complete, { running });
    lines = linesOf(complete, base);
  }
  locate(tokens, lines);
  const blocks = [...grouped(tokens)].map((group) => {
    const env = { texts: [] };
    const html = markdown.renderer.render(group, markdown.options, env);
    return { start: lines[group[0].map[0]].start, html, texts: env.texts };
  });
  return { blocks, n_complete, next };
}

/** HTML as a document fragment of harmless elements. */
export function sanitized(html) {
  return DOMPurify.sanitize(html, SANITIZED);
}

/** The tokens of each block. */
function* grouped(tokens) {
  let from = 0;
  let depth = 0;
  for (let i = 0; i < tokens.length; i++) {
    depth += tokens[i].nesting;
    if (depth) continue;
    yield tokens.slice(from, i + 1);
    from = i + 1;
  }
}

// Where characters are in the text: `places` of tokens become arrays of the places of their content

function linesOf(text, base) {
  const lines = [];
  for (const { 0: line, index } of text.matchAll(/[^\r\n]*(?:\r\n|\r|\n|$)/g)) {
    lines.push({ start: base + index, text: line.replace(/[\r\n]+$/, "") });
  }
  return lines;
}

function locate(tokens, lines) {
  let row = null; // of a table: its cells share one line
  let column = 0; // where the last cell of it ended
  for (const token of tokens) {
    if (token.type === "tr_open") [row, column] = [token.map, 0];
    if (token.type === "tr_close") row = null;
    if (!token.content) continue;
    const first = (token.map ?? row)[0] + (token.type === "fence" ? 1 : 0);
    const places = [];
    token.content.split("\n").forEach((part, i) => {
      const line = lines[first + i] ?? lines.at(-1);
      // A part is the end of its line, after marks of lists and quotes, unless tabs are in it.
      const written = row ? part.replaceAll("|", "\\|") : part;
      const found = row ? line.text.indexOf(written, column) : line.text.lastIndexOf(written);
      let at = found >= 0 ? found : Math.max(column, line.text.length - written.length);
      for (const character of part) {
        if (row && character === "|") at += 1; // behind its backslash
        for (let k = 0; k < character.length; k++) places.push(line.start + at++);
      }
      places.push(line.start + at); // the line end
      if (row) column = at;
    });
    token.places = places;
    const source = token.content.replaceAll("\n", " ");
    for (const child of token.children ?? []) if (child.content) child.places = located(child, source, places);
  }
}

/** The places of an inline token's content: that which is nearest to where its rule was, and the same. */
function located({ content, places: near }, source, places) {
  const found = [source.indexOf(content, near), source.lastIndexOf(content, near)].filter((at) => at >= 0);
  const [at] = found.sort((a, b) => Math.abs(a - near) - Math.abs(b - near));
  if (at !== undefined) return places.slice(at, at + content.length);
  return Array(content.length).fill(places[near]); // an entity
}

// HTML

const { rules } = markdown.renderer;
const escaped = markdown.utils.escapeHtml;

/** An attribute that names the text of a token, for `marks.js`. */
function named(token, env) {
  return `data-text="${env.texts.push(token.places ?? []) - 1}"`;
}

rules.text = (tokens, i, options, env) => `<span ${named(tokens[i], env)}>${escaped(tokens[i].content)}</span>`;

rules.code_inline = (tokens, i, options, env) => `<code ${named(tokens[i], env)}>${escaped(tokens[i].content)}</code>`;

rules.math = (tokens, i, options, env) => {
  const { content, block, markup } = tokens[i];
  const kind = markup === "$$" || markup === "\\[" ? "math display" : "math";
  const formula = `<code class="${kind}" ${named(tokens[i], env)}>${escaped(content)}</code>`;
  return block ? `<p>${formula}</p>\n` : formula;
};

rules.softbreak = () => '<span class="line-end">\n</span>';

rules.html_inline = (tokens, i, ...rest) => (TAGS.test(tokens[i].content) ? tokens[i].content : rules.text(tokens, i, ...rest));

rules.fence = rules.code_block = (tokens, i, options, env) => {
  const { content, info } = tokens[i];
  const [language] = markdown.utils.unescapeAll(info).trim().split(/\s+/);
  const kind = language && `class="language-${escaped(language)}"`;
  return `<pre><code ${kind} ${named(tokens[i], env)}>${escaped(content)}</code></pre>\n`;
};

rules.link_open = (tokens, i, options, env, renderer) => {
  tokens[i].attrSet("target", "_blank");
  tokens[i].attrSet("rel", "noopener noreferrer");
  return renderer.renderToken(tokens, i, options);
};

/** Pictures are not loaded: a link to each, or only its text within a link. */
rules.image = (tokens, i, options, env, renderer) => {
  const text = escaped(renderer.renderInlineAsText(tokens[i].children, options, env));
  const before = tokens.slice(0, i).filter((token) => token.type.startsWith("link_"));
  if (before.at(-1)?.type === "link_open") return text;
  const title = tokens[i].attrGet("title");
  const attributes = `href="${escaped(tokens[i].attrGet("src"))}"${title ? ` title="${escaped(title)}"` : ""}`;
  return `<a class="picture" ${attributes} target="_blank" rel="noopener noreferrer">${text || "untitled"}</a>`;
};

/** The policy of the page allows no style attributes. */
rules.th_open = rules.td_open = (tokens, i, options, env, renderer) => {
  const [, align] = tokens[i].attrGet("style")?.split(":") ?? [];
  tokens[i].attrs = align ? [["class", `align-${align}`]] : null;
  return renderer.renderToken(tokens, i, options);
};
