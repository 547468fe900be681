// Where formulas are in Markdown: $…$, $$…$$, \(…\) and \[…\]. Prices, and variables of shells, are none.

const FORMULAS = [
  { markup: "$$", pattern: /\$\$((?:\\[^]|[^\\$`])+?)\$\$/y },
  { markup: "$", pattern: /\$(?!\s)((?:\\[^]|[^\\$`\n])+?)(?<!\s)\$(?![\p{Lu}\p{N}$])/uy },
  { markup: "\\[", pattern: /\\\[((?:\\[^[\]]|[^\\])+?)\\\]/y },
  { markup: "\\(", pattern: /\\\(((?:\\[^()]|[^\\])+?)\\\)/y },
];
const ENDS = { $$: "$$", "\\[": "\\]" }; // of those that are blocks
const PRICE = /^[\d.,]+[^\\^_={}<>+*]*[a-z]{2}/i; // "5/month and 6"
const WORDS = /^[\s\p{L}.,;'’]*\p{Ll}{3}[\s\p{L}.,;'’]*$/u;

/** An inline rule of markdown-it. */
export function inlineFormula(state, silent) {
  const { src, pos } = state;
  for (const { markup, pattern } of FORMULAS) {
    if (!src.startsWith(markup, pos)) continue;
    pattern.lastIndex = pos;
    const [all, content] = pattern.exec(src) ?? [];
    if (!all || pos + all.length > state.posMax || !/[\p{L}\p{N}]/u.test(content)) continue;
    if (markup[0] === "$" && !isFormula(content, src[pos - 1] ?? "", src[pos + all.length] ?? "")) continue;
    if (!silent) Object.assign(state.push("math", "", 0), { markup, content: content.replaceAll("\n", " ") });
    state.pos += all.length;
    return true;
  }
  return false;
}

/** Return whether a text between dollars, with the characters before and after it, is a formula. */
function isFormula(content, before, after) {
  if (/[\p{L}\p{N}$]/u.test(before) || PRICE.test(content) || WORDS.test(content)) return false;
  return !/\p{L}/u.test(after) || /[\p{L}\p{N})}\]]$/u.test(content); // "$n$th", but not "$HOME/$user"
}

/** A block rule: a formula on lines of its own, which are not empty. One that grows may still have no end. */
export function blockFormula(state, first, end, silent) {
  const { src, bMarks, tShift, eMarks, sCount, blkIndent } = state;
  const start = bMarks[first] + tShift[first];
  const markup = src.slice(start, start + 2);
  if (sCount[first] - blkIndent >= 4 || !ENDS[markup]) return false;
  const lines = [];
  let isEnded = false;
  for (let line = first; line < end && !isEnded; line++) {
    const text = src.slice(line === first ? start + 2 : bMarks[line] + tShift[line], eMarks[line]);
    if (line > first && (!text.trim() || sCount[line] < blkIndent)) return false;
    const at = text.indexOf(ENDS[markup]);
    if (at >= 0 && text.slice(at + 2).trim()) return false; // it is a part of a paragraph
    isEnded = at >= 0;
    lines.push(isEnded ? text.slice(0, at) : text);
  }
  const content = lines.join("\n");
  if (!(isEnded ? /[\p{L}\p{N}]/u.test(content) && !WORDS.test(content) : state.env.running)) return false;
  if (silent) return true;
  state.line = first + lines.length;
  Object.assign(state.push("math", "", 0), { block: true, markup, content, map: [first, state.line] });
  return true;
}
