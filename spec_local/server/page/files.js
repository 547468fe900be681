// Files that belong to a question: texts, {name, text}, and images, which images.js describes.

import { element } from "./dom.js";
import { isImage, thumbnail } from "./images.js";

const BYTES_PER_TOKEN = 4; // of English text and code, or less: a longer text does not fit into the context
const MOST_BYTES = 1e6; // of a question's files; the browser keeps some 5 MB of conversations

/** Bytes of the files of one question. n_ctx: tokens of the context; undefined: it is not known. */
export function mostBytes(n_ctx = Infinity) {
  return Math.min(MOST_BYTES, BYTES_PER_TOKEN * n_ctx);
}

/** Read a text file that a user gave. n_bytes: of the question's other files. Throws an error with a line for the user. */
export async function readFile(file, n_bytes, most) {
  const name = file.name.replace(/\s+/g, " ");
  if (n_bytes + file.size > most) {
    throw new Error(`${name} is too large: a question has room for files of ${size(most)}. Attach a part of it.`);
  }
  let bytes;
  try {
    bytes = await file.arrayBuffer();
  } catch {
    throw new Error(`${name} cannot be read: a folder cannot be attached, and a file must still be in its place.`);
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return { name, text: text.replaceAll("\r\n", "\n") };
  } catch {
    // It is not UTF-8.
  }
  throw new Error(`${name} is not a text file in UTF-8: only text, images and sound can be attached.`);
}

/** Bytes of the texts among files. */
export function bytesOf(files) {
  return files.reduce((n, { text = "" }) => n + new TextEncoder().encode(text).length, 0);
}

/** What the model reads as text: the text files of a question in code blocks, then the question. */
export function messageOf({ question, files }) {
  return [...files.filter((file) => !isImage(file)).map(fenced), question].filter(Boolean).join("\n\n");
}

/** The content of a question's message: its text; with images, OpenAI's parts, images first. uris: see `dataUris`. */
export function contentOf(turn, uris) {
  const text = messageOf(turn);
  const parts = turn.files.filter(isImage).map((file) => imagePart(file, uris.get(file.image)));
  if (!parts.length) return text;
  return text ? [...parts, { type: "text", text }] : parts;
}

function imagePart({ name, isSound }, url) {
  if (url) return isSound ? { type: "audio_url", audio_url: { url } } : { type: "image_url", image_url: { url } };
  return { type: "text", text: `[The ${isSound ? "sound" : "image"} ${name} is no longer available.]` }; // so that the model does not invent it
}

function fenced({ name, text }) {
  let fence = "```";
  for (const [run] of text.matchAll(/`{3,}/g)) if (run.length >= fence.length) fence = `${run}\``;
  const language = name.match(/\.(\w+)$/)?.[1] ?? "";
  return `${name}:\n${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** A file of a question that is being written. remove: what its button does. */
export function chip(file, remove) {
  const button = element("button", { type: "button", class: "quiet", "aria-label": `Remove ${file.name}`, click: remove }, "×");
  if (isImage(file)) return element("li", { class: "image" }, thumbnail(file), button);
  return element("li", {}, ...label(file), button);
}

/** A text file of a question that was sent, which shows its text on request. */
export function sentFile(file) {
  const text = element("pre", { tabindex: 0, "aria-label": file.name }, file.text);
  return element("details", { class: "file" }, element("summary", {}, ...label(file)), text);
}

function label(file) {
  return [element("span", {}, file.name), " ", element("span", { class: "note" }, size(bytesOf([file])))];
}

function size(n_bytes) {
  if (n_bytes < 1e3) return `${n_bytes} bytes`;
  return n_bytes < 1e6 ? `${Math.floor(n_bytes / 1e3)} kB` : `${n_bytes / 1e6} MB`;
}
