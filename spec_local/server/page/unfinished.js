// Markdown that is being written: what its end will probably become, so that markup is not seen while it is
// incomplete.

// The start of a last line that may still become a list, a heading, a rule, a line under a heading or a table's
// head, or a fence. Each beginning of such a line is one, too.
const HELD = /^[ \t>]*(?![ \t>])(?:[-+*=#_~`|:\s]*|\d{1,9}[.)]?\s*|(?:[-+*]|\d{1,9}[.)])\s+\d{1,9}[.)]?|(?:`{3,}|~{3,})[^`]*)$/;

const MATHS = /\$\$[^]+?\$\$|\$(?=\S)[^$\n`]*\S\$|\\\([^]+?\\\)|\\\[[^]+?\\\]/g; // formulas that have ended
const LONGEST = 10_000; // characters of a paragraph whose markup is closed: some time is quadratic in them

// Ends that show what they are when more has come: of an escape, an entity, a tag, an address, or struck text.
const CUT = /(?:\\|&#?\w{0,31}|<\/?[a-z]{0,6}|<https?:\/{0,2}|(?<!~)~)$/i;
const LINK = /\]\([^()\s]*(?:\s+(?:(["'])[^"']*(\1?))?)?$/;
const ADDRESS = /<https?:\/\/[^\s<>]*$/i;

/** A text without a last line that does not yet show what it is. */
export function held(text) {
  const start = text.lastIndexOf("\n") + 1;
  return HELD.test(text.slice(start)) ? text.slice(0, start) : text;
}

/** A text with the markup that closes what is open at its end. tokens: what it is parsed to. */
export function completed(text, tokens) {
  // The last cells of a row that is incomplete are empty.
  const last = tokens.findLastIndex((token) => token.content || (token.nesting === 0 && token.type !== "inline"));
  if (tokens[last]?.type !== "inline" || /\n[ \t]*\n$/.test(text)) return text;
  const { content } = tokens[last];
  if (content.length > LONGEST) return text;
  const { cut, closers } = endOf(content);
  const ended = text.trimEnd(); // as the content
  const closed = cut || closers ? ended.slice(0, ended.length - cut).trimEnd() + closers : text;
  if (tokens[last - 1].type !== "paragraph_open" || !content.split("\n").at(-1).startsWith("|")) return closed;
  const head = closed.trimEnd().split("\n").at(-1);
  return `${closed.trimEnd()}\n${belowHead(head)}`;
}

/** How many characters of an inline text's end do not show what they are, and what closes the rest. */
function endOf(content) {
  const blank = (found) => "x".repeat(found.length);
  let text = content.replace(MATHS, blank).replace(/\\[^]/g, blank).replace(/(?<!`)(`+)(?!`)[^]*?(?<!`)\1(?!`)/g, blank);
  let closers = "";
  let cut = 0;
  const code = /(?<!`)(`+)(?!`)([^`]*)(`*)$/.exec(text);
  if (code) {
    const [all, ticks, inside, closing] = code;
    if (inside) closers = ticks;
    cut = inside ? closing.length : all.length;
    text = text.slice(0, code.index);
  } else {
    cut = CUT.exec(text)?.[0].length ?? 0;
    text = text.slice(0, text.length - cut);
    const link = LINK.exec(text);
    if (link) closers = `${link[2] ? "" : (link[1] ?? "")})`;
    else if (ADDRESS.test(text)) closers = ">";
    text = text.replace(link ? LINK : ADDRESS, blank);
  }
  const open = [];
  for (const { 0: run, index } of text.matchAll(/\*+|_+|~~/g)) {
    const isEnd = index + run.length === text.length && !closers;
    const [before, after] = [text[index - 1] ?? " ", text[index + run.length] ?? (closers ? "x" : " ")];
    const isWord = (character) => run[0] === "_" && /[\p{L}\p{N}]/u.test(character);
    if (!/\s/.test(before) && open.at(-1) === run && !isWord(after)) open.pop();
    else if (!/\s/.test(after) && !isWord(before)) open.push(run);
    else if (isEnd) cut += run.length;
  }
  return { cut, closers: closers + open.reverse().join("") };
}

/** The line below the head of a table, with the same marks of quotes and, for lists, the same indentation. */
function belowHead(head) {
  const prefix = head.slice(0, head.indexOf("|")).replace(/[^>\s]/g, " ");
  const cells = head.trim().replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/);
  return `${prefix}${"|-".repeat(cells.length - 1)}|`;
}
