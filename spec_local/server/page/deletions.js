// Conversations that were deleted can be brought back for some seconds, also after the page was loaded again: until
// then they are stored with the time of their deletion.

import { byId } from "./dom.js";
import { deleteImages } from "./image_store.js";
import { imagesOf } from "./images.js";
import { say } from "./notices.js";
import { deleteConversation, saveConversation } from "./store.js";

const UNDO_MS = 10_000;
const LOOK_MS = 500; // between two looks at whether the time is over

let pending = [];
let onRestored;

/** restored: called with the conversations that were brought back, the last one that was deleted first. */
export function startDeletions(restored) {
  onRestored = restored;
  byId("deleted").querySelector("button").addEventListener("click", undoDeletions);
  setInterval(forget, LOOK_MS);
}

/** Offer to bring a conversation back; one whose time is over is deleted. */
export function addDeleted(conversation) {
  pending.unshift(conversation);
  forget();
  show();
}

/** Mark a conversation as deleted, and offer to bring it back. */
export function deleteWithUndo(conversation) {
  conversation.deleted = Date.now();
  if (!saveConversation(conversation)) deleteConversation(conversation); // no room: it is kept here only
  addDeleted(conversation);
  say(`Deleted ${nameOf(conversation)}. Control Z, or the button Undo, brings it back.`);
}

export function undoDeletions() {
  const restored = pending;
  pending = [];
  show();
  if (!restored.length) return;
  for (const conversation of restored) {
    conversation.deleted = 0;
    saveConversation(conversation);
  }
  say(restored.length === 1 ? `${nameOf(restored[0])} is back.` : `${restored.length} conversations are back.`);
  onRestored(restored);
}

/** What another tab has brought back, or deleted for good, is no longer offered here. */
export function settleDeleted(id) {
  pending = pending.filter((conversation) => conversation.id !== id);
  show();
}

/** Delete for good what was deleted some time ago, unless someone is about to press the button. */
function forget() {
  const last = Math.max(0, ...pending.map(({ deleted }) => deleted));
  if (!pending.length || Date.now() - last < UNDO_MS || byId("deleted").matches(":hover, :focus-within")) return;
  for (const conversation of pending) {
    deleteConversation(conversation);
    deleteImages(imagesOf(conversation.turns));
  }
  pending = [];
  show();
}

function show() {
  const [notice, [last]] = [byId("deleted"), pending];
  notice.hidden = !last;
  const many = `${pending.length} conversations`;
  notice.querySelector("span").textContent = last ? `Deleted ${pending.length > 1 ? many : nameOf(last)}.` : "";
}

function nameOf({ name }) {
  return `“${name || "New conversation"}”`;
}
