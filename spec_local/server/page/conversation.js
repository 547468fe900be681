// A conversation is a tree of turns: a question that is edited, or an answer that is generated again, is another
// version beside the old one. What is shown is the path from a first turn to the turn `last`.

import { contentOf } from "./files.js";
import { newTurn, textOf } from "./store.js";

/** The turns that are shown, from the first to the last. */
export function pathOf(conversation) {
  const path = [];
  for (let at = conversation.last; at >= 0; at = path.at(-1).parent) path.push(conversation.turns[at]);
  return path.reverse();
}

/** The turn that a turn follows; undefined: it is a first one. */
export function previousOf(conversation, turn) {
  return conversation.turns[turn.parent];
}

/** Add a turn behind another, or a first one if that is undefined, and show it. */
export function addTurn(conversation, question, files, previous) {
  const turn = newTurn(question, files, conversation.turns.indexOf(previous));
  conversation.last = conversation.turns.push(turn) - 1;
  return turn;
}

/** The versions of a turn, oldest first: those that follow the same turn as it. */
export function versionsOf(conversation, turn) {
  return conversation.turns.filter(({ parent }) => parent === turn.parent);
}

/** Show a turn, and the newest ones that follow it. */
export function showVersion(conversation, turn) {
  let at = conversation.turns.indexOf(turn);
  while (at >= 0) {
    conversation.last = at;
    at = conversation.turns.findLastIndex(({ parent }) => parent === conversation.last);
  }
}

const NAME_LENGTH = 48; // characters of a question that name a conversation

/** The name of a conversation that begins with a question. */
export function nameOf(question) {
  const words = question.trim().replace(/\s+/g, " ");
  const characters = [...new Intl.Segmenter().segment(words)].map(({ segment }) => segment);
  return characters.length > NAME_LENGTH ? `${characters.slice(0, NAME_LENGTH - 1).join("").trim()}…` : words;
}

/**
 * The messages of turns, for the server. system: the system message, "": none; uris: the data of their images, see
 * `dataUris`; goesOn: the last answer does.
 */
export function messagesOf(turns, system, uris, goesOn = false) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    messages.push({ role: "user", content: contentOf(turn, uris) });
    const content = textOf(turn.answer);
    if (content || turn.ended) messages.push({ role: "assistant", content });
  }
  if (goesOn) {
    const { answer, reasoning } = turns.at(-1);
    if (messages.at(-1).role === "user") messages.push({ role: "assistant", content: textOf(answer) });
    messages.at(-1).reasoning_content = textOf(reasoning);
  }
  return messages;
}
