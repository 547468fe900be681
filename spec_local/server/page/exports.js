// What can be taken from the page: conversations as Markdown and as JSON.

import { messagesOf, pathOf } from "./conversation.js";
import { element } from "./dom.js";
import { messageOf } from "./files.js";
import { isImage } from "./images.js";
import { summary } from "./statistics.js";
import { textOf } from "./store.js";

const LONGEST = 120; // bytes of a file's name, which leave room for those that encrypted folders add
const RESERVED = /^(?:con|prn|aux|nul|com\d|lpt\d)(?=\.|$)/i; // names of devices, on Windows
const FORBIDDEN = /[\\/:*?"<>|\p{Cc}\p{Cs}\u200e\u200f\u202a-\u202e\u2066-\u2069]+/gu; // in names of files

/** Give a user a file. name: of a conversation or the like. */
export function download(blob, name, extension) {
  const address = URL.createObjectURL(blob);
  element("a", { href: address, download: `${fileName(name)}.${extension}` }).click();
  URL.revokeObjectURL(address);
}

/** A name as that of a file, without its extension, for all systems. */
export function fileName(name) {
  let [safe, n_bytes] = ["", 0];
  for (const { segment } of new Intl.Segmenter().segment(name.replace(FORBIDDEN, " ").replace(/\s+/g, " "))) {
    n_bytes += new TextEncoder().encode(segment).length;
    if (n_bytes > LONGEST) break;
    safe += segment;
  }
  safe = safe.replace(/^[. ]+|[. ]+$/g, "");
  return RESERVED.test(safe) ? `_${safe}` : safe || "conversation";
}

/** The turns that are shown, as Markdown. uris: the data of their images, see `dataUris`. */
export function markdownOf(conversation, uris) {
  const parts = [`# ${conversation.name.replace(/\s+/g, " ") || "Conversation"}`];
  for (const turn of pathOf(conversation)) {
    const images = turn.files.filter(isImage).map((file) => picture(file, uris.get(file.image)));
    parts.push("## Question", ...images, closed(messageOf(turn)), `## Answer${turn.model && ` (${turn.model})`}`);
    if (turn.reasoning.length) {
      parts.push("<details><summary>Reasoning</summary>", closed(textOf(turn.reasoning)), "</details>");
    }
    parts.push(closed(textOf(turn.answer)));
    if (turn.statistics) parts.push(`*${summary(turn.statistics)}*`);
    if (turn.error) parts.push(`*${turn.error}*`);
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}

/** All versions of all turns, the messages of those that are shown, and the images of all by their ids. */
export function jsonOf(conversation, system, uris) {
  const images = uris.size ? { images: Object.fromEntries(uris) } : {};
  return JSON.stringify({ ...conversation, ...images, messages: messagesOf(pathOf(conversation), system, uris) }, null, 2);
}

function picture({ name, isSound }, uri) {
  return uri ? `${isSound ? "" : "!"}[${name.replace(/[\\[\]]/g, "\\$&")}](${uri})` : `*${name} (no longer stored)*`;
}

/** Markdown whose last code block ends: an answer may have been stopped in one. */
function closed(text) {
  let fence = "";
  for (const [, run, rest] of text.matchAll(/^ {0,3}(`{3,}|~{3,})(.*)$/gm)) {
    if (!fence) fence = run;
    else if (run.startsWith(fence) && !rest.trim()) fence = "";
  }
  return fence ? `${text.trim()}\n${fence}` : text.trim();
}
