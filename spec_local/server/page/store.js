// What the browser keeps: settings and conversations. Damaged data is left out, and a full storage reported.
//
// A conversation is {id, name, changed, deleted, turns, last}; a turn is {id, changed, question, files, reasoning,
// answer, statistics, model, ended, error, parent}. `parent` is the index in `turns` of the turn before it, -1: none, and
// `last` that of the last turn that is shown: see conversation.js. `files` are {name, text}, images, {name, image,
// width, height}, or sounds, {name, image, isSound}; image_store.js keeps their data. `reasoning` and `answer` are
// lists of spans {text, kind, rejected}, as the server sends them. `changed` and `deleted` (0: it is not) are in
// milliseconds. Each conversation has a key of its own, and what two tabs add to one of them is merged.

import { merge } from "./merging.js";

const SETTINGS = "specdec.settings";
const CURRENT = "specdec.current";
const MODEL = "specdec.model";
const CONVERSATION = "specdec.conversation.";

export const DEFAULTS = {
  system: "",
  temperature: null,
  top_p: null,
  min_p: null,
  max_tokens: null,
  seed: null,
  stop: "",
  speculative: true,
  marks: false,
  marks_in_code: false,
  theme: "",
};

/** The settings; those that are missing or damaged have their defaults. */
export function loadSettings() {
  const stored = read(SETTINGS) ?? {};
  const settings = { ...DEFAULTS };
  for (const [name, normal] of Object.entries(DEFAULTS)) {
    const kind = normal === null ? "number" : typeof normal;
    if (typeof stored[name] === kind) settings[name] = stored[name];
  }
  return settings;
}

/** changed: called when another tab has saved settings. */
export function watchSettings(changed) {
  addEventListener("storage", ({ key }) => key === SETTINGS && changed());
}

export function saveSettings(settings) {
  return write(SETTINGS, settings);
}

/** Return the conversations, also deleted ones, newest first; damaged ones stay as they are. */
export function loadConversations() {
  const stored = keys().filter((name) => name.startsWith(CONVERSATION)).map(read);
  return stored.map(conversationFrom).filter(Boolean).sort((a, b) => b.changed - a.changed);
}

/** All that is stored of conversations, also of damaged ones, as a text. */
export function storedText() {
  return keys().filter((name) => name.startsWith(CONVERSATION)).map((name) => localStorage.getItem(name)).join("\n");
}

/** Save a conversation with what another tab has added to it; return whether there was room for it. */
export function saveConversation(conversation) {
  const stored = conversationFrom(read(CONVERSATION + conversation.id));
  if (stored) merge(conversation, stored);
  return write(CONVERSATION + conversation.id, conversation);
}

/** changed: called with the id of a conversation that another tab has changed, and what it is now, or null. */
export function watchConversations(changed) {
  addEventListener("storage", ({ key }) => {
    // What is stored now may be newer than the value of the event.
    if (key?.startsWith(CONVERSATION)) changed(key.slice(CONVERSATION.length), conversationFrom(read(key)));
  });
}

export function deleteConversation(conversation) {
  try {
    localStorage.removeItem(CONVERSATION + conversation.id);
  } catch {
    // The browser allows no storage.
  }
}

export function newConversation() {
  return { id: newId(), name: "", changed: Date.now(), deleted: 0, turns: [], last: -1 };
}

function newId() {
  const random = crypto.getRandomValues(new Uint32Array(2)); // `randomUUID` needs https
  return [...random].map((n) => n.toString(36)).join("");
}

/** A turn without an answer. parent: the index of the turn before it, -1: none. */
export function newTurn(question, files, parent) {
  const answer = { reasoning: [], answer: [], statistics: null, model: "", ended: "", error: "" };
  return { id: newId(), changed: Date.now(), question, files, ...answer, parent };
}

/** The id of the conversation that was shown last, in this tab if it was loaded again. */
export function loadCurrent() {
  try {
    return sessionStorage.getItem(CURRENT) ?? read(CURRENT);
  } catch {
    return null; // the browser allows no storage
  }
}

export function saveCurrent(conversation) {
  write(CURRENT, conversation.id);
  try {
    sessionStorage.setItem(CURRENT, conversation.id);
  } catch {
    // As above.
  }
}

/** The text of spans. */
export function textOf(spans) {
  return spans.map((span) => span.text).join("");
}

/** The name of the model that was chosen last, where there are several. */
export function loadModel() {
  return read(MODEL);
}

export function saveModel(name) {
  write(MODEL, name);
}

// The storage itself

/** Return whether the browser keeps anything at all. */
export function canStore() {
  return write("specdec.test", "") && (localStorage.removeItem("specdec.test"), true);
}

function keys() {
  try {
    return Object.keys(localStorage);
  } catch {
    return []; // the browser allows no storage
  }
}

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

// Checks of what was stored: each returns null for what is damaged

function conversationFrom(stored) {
  if (!isObject(stored) || typeof stored.id !== "string" || !Array.isArray(stored.turns)) return null;
  const turns = stored.turns.map(turnFrom);
  if (turns.includes(null)) return null;
  const last = Number.isInteger(stored.last) && turns[stored.last] ? stored.last : turns.length - 1;
  const [changed, deleted] = [stored.changed, stored.deleted].map((ms) => Number(ms) || 0);
  return { id: stored.id, name: String(stored.name ?? ""), changed, deleted, turns, last };
}

/** Before there were versions and files, each turn followed the one at the index before its own, and had no id. */
function turnFrom(stored, index) {
  if (!isObject(stored) || typeof stored.question !== "string") return null;
  if (![stored.reasoning, stored.answer].every((spans) => Array.isArray(spans) && spans.every(isSpan))) return null;
  const { question, reasoning, answer, files = [], parent = index - 1 } = stored;
  if (!Array.isArray(files) || !files.every(isFile)) return null;
  if (!Number.isInteger(parent) || parent < -1 || parent >= index) return null;
  const statistics = isStatistics(stored.statistics) ? stored.statistics : null;
  const [model, ended, error] = [stored.model, stored.ended, stored.error].map((text) => String(text ?? ""));
  const [id, changed] = [String(stored.id ?? index), Number(stored.changed) || 0];
  return { id, changed, question, files, reasoning, answer, statistics, model, ended, error, parent };
}

function isSpan(span) {
  return isObject(span) && typeof span.text === "string" && typeof span.kind === "string" && Array.isArray(span.rejected);
}

function isFile(file) {
  if (!isObject(file) || typeof file.name !== "string") return false;
  if (typeof file.image !== "string") return typeof file.text === "string";
  return file.isSound === true || [file.width, file.height].every(Number.isFinite);
}

function isStatistics(value) {
  const numbers = ["predicted_n", "predicted_per_second", "steps_n", "draft_n", "draft_n_accepted"];
  const lists = ["tested_at", "accepted_at"];
  return (
    isObject(value) &&
    isObject(value.steps_by) &&
    Object.values(value.steps_by).every(Number.isFinite) &&
    numbers.every((name) => Number.isFinite(value[name])) &&
    (value.gain === undefined || (isObject(value.gain) && typeof value.gain.words === "string")) &&
    lists.every((name) => value[name] === undefined || (Array.isArray(value[name]) && value[name].every(Number.isFinite)))
  );
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
