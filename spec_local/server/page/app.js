// The page: which conversation is shown, its turns, the answer that is running, and the keyboard.

import { hideRejected } from "./answer.js";
import { Answering } from "./answering.js";
import { Composer } from "./composer.js";
import { askForKey, connect, refreshCosts, server, startConnection } from "./connection.js";
import { addTurn, messagesOf, pathOf, previousOf, showVersion, versionsOf } from "./conversation.js";
import { askForName, listConversations } from "./conversation_list.js";
import { byId } from "./dom.js";
import { download, jsonOf, markdownOf } from "./exports.js";
import { notify, say } from "./notices.js";
import { closeCover, openDialog, startPanels } from "./panels.js";
import { settings, startSettings } from "./settings.js";
import { shareSpeed } from "./speed_picture.js";
import { showStatistics } from "./statistics.js";
import * as store from "./store.js";
import { TurnView } from "./turn_view.js";

const NAME_LENGTH = 48; // characters of a question that name a conversation

let conversations = [];
let current; // the conversation that is shown
let running = null; // an Answering
const views = new WeakMap(); // by turn
const composer = new Composer(send, () => server.n_ctx);

// Conversations

function show(conversation) {
  current = conversation;
  store.saveCurrent(conversation);
  composer.stopEditing();
  closeCover();
  drawTurns();
  drawList();
  scrollToEnd();
}

/** Bring the turns on the page into line with the path that is shown; those that stay are not touched. */
function drawTurns() {
  const shown = pathOf(current).map((turn) => viewOf(turn).element);
  for (const old of [...byId("turns").children]) if (!shown.includes(old)) old.remove();
  byId("turns").append(...shown.filter((element) => !element.isConnected));
  updateTurns();
}

function viewOf(turn) {
  if (!views.has(turn)) views.set(turn, new TurnView(turn, { copy, regenerate, edit, shareSpeed, showVersion: goToVersion }));
  return views.get(turn);
}

function updateTurns() {
  pathOf(current).forEach(updateTurn);
  drawStatistics();
}

function updateTurn(turn) {
  const versions = versionsOf(current, turn);
  viewOf(turn).update({
    running: running?.turn === turn,
    waiting: running?.turn === turn ? running.waiting : "",
    busy: running !== null,
    version: versions.indexOf(turn) + 1,
    n_versions: versions.length,
  });
}

function drawStatistics() {
  const statistics = running?.meter.values ?? lastTurn()?.statistics ?? null;
  showStatistics(byId("figures"), statistics, server.costs, server.learning);
}

function drawList() {
  listConversations(conversations, current, { show, rename, remove });
}

function startConversation() {
  let empty = conversations.find((conversation) => !conversation.turns.length);
  if (!empty) {
    empty = store.newConversation();
    conversations.unshift(empty);
  }
  show(empty);
  byId("question").focus();
}

function rename(conversation) {
  askForName(conversation.name, (name) => {
    conversation.name = name;
    save(conversation);
    drawList();
  });
}

function remove(conversation) {
  if (running?.conversation === conversation) running.stop();
  conversations = conversations.filter((other) => other !== conversation);
  store.deleteConversation(conversation);
  if (conversation !== current) drawList();
  else if (conversations.length) show(conversations[0]);
  else startConversation();
}

function save(conversation) {
  if (!store.saveConversation(conversation)) {
    notify("The browser's storage is full: this conversation is lost when you close the page. Delete others.");
  }
}

function exportAs(type, extension, text) {
  download(new Blob([text], { type }), current.name, extension);
}

// Questions and answers

function lastTurn() {
  return pathOf(current).at(-1);
}

/** edited: the turn whose question this is another version of, or null. */
function send({ question, files, edited }) {
  const previous = edited ? previousOf(current, edited) : lastTurn();
  current.name ||= (question || files[0].name).slice(0, NAME_LENGTH);
  return answer(addTurn(current, question, files, previous));
}

/** Answer a question again: beside the answer, if there is something of one. */
function regenerate(turn) {
  if (running) return;
  if (turn.answer.length || turn.reasoning.length) {
    answer(addTurn(current, turn.question, turn.files, previousOf(current, turn)));
  } else {
    answer(Object.assign(turn, store.newTurn(turn.question, turn.files, turn.parent)));
  }
  viewOf(lastTurn()).element.focus();
}

async function answer(turn) {
  const conversation = current;
  running = new Answering(conversation, turn, server.plain_ms);
  conversation.changed = Date.now();
  conversations = [conversation, ...conversations.filter((other) => other !== conversation)];
  notify("");
  say("Answering");
  composer.setRunning(true);
  save(conversation); // a question is not lost if the page is closed
  drawList();
  drawTurns();
  scrollToEnd();
  const path = pathOf(conversation);
  const body = { model: server.model ?? "any", messages: messagesOf(path.slice(0, path.indexOf(turn) + 1), settings.system) };
  for (const name of ["temperature", "max_tokens", "seed"]) if (settings[name] !== null) body[name] = settings[name];
  if (!settings.speculative) body.speculative = false;
  const status = await running.generate(body, draw);
  running = null;
  end(conversation, turn, status);
}

function end(conversation, turn, status) {
  turn.model = server.names;
  server.plain_ms = turn.statistics?.plain_ms ?? server.plain_ms;
  composer.setRunning(false);
  if (conversations.includes(conversation)) save(conversation); // it may have been deleted meanwhile
  follow(updateTurns);
  say(turn.error || "The answer is complete.");
  if (status === 401) askForKey(turn.error);
  else if (server.model && !turn.error) connect(); // it may have been loaded for the answer
  else refreshCosts();
}

let drawing = false;

/** Draw what has arrived, at most once for each picture of the screen. */
function draw() {
  if (running.waiting) say(running.waiting);
  if (drawing || running.conversation !== current) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    if (running?.conversation !== current) return;
    follow(() => {
      updateTurn(running.turn);
      drawStatistics();
    });
  });
}

/** Change the turns; where their end is seen, it stays in sight. */
function follow(change) {
  const log = byId("turns");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60; // pixels
  change();
  if (isAtEnd) scrollToEnd();
}

function edit(turn) {
  if (!running) composer.edit(turn);
}

function goToVersion(turn, number) {
  const version = versionsOf(current, turn)[number - 1];
  const label = document.activeElement.ariaLabel;
  showVersion(current, version);
  save(current);
  composer.stopEditing();
  drawTurns();
  viewOf(version).element.querySelector(`.versions [aria-label="${label}"]`)?.focus();
  viewOf(version).element.scrollIntoView({ block: "nearest" });
}

async function copy(turn) {
  try {
    await navigator.clipboard.writeText(store.textOf(turn.answer));
    say("Copied.");
  } catch {
    notify("The browser does not allow copying here: select the text instead.");
  }
}

function scrollToEnd() {
  const log = byId("turns");
  log.scrollTop = log.scrollHeight;
}

/** What hovers over the turns goes; that of the place that has the focus, to which the arrow keys scroll, moves along. */
function onScroll() {
  hideRejected();
  if (document.activeElement.matches(".corrected")) document.activeElement.dispatchEvent(new FocusEvent("focus"));
}

// The keyboard

const SHORTCUTS = {
  "/": () => byId("question").focus(),
  "?": () => openDialog(byId("help")),
  n: startConversation,
  r: () => lastTurn() && regenerate(lastTurn()),
  e: () => lastTurn() && edit(lastTurn()),
  c: () => lastTurn() && copy(lastTurn()),
};

function onKey(event) {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    hideRejected();
    if (closeCover()) return;
    if (running) running.stop();
    else composer.stopEditing();
    return;
  }
  const typing = event.target.matches("input, textarea, select");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !SHORTCUTS[event.key]) return;
  event.preventDefault();
  SHORTCUTS[event.key]();
}

function start() {
  byId("stop").addEventListener("click", () => running?.stop());
  byId("new").addEventListener("click", startConversation);
  byId("export-markdown").addEventListener("click", () => exportAs("text/markdown", "md", markdownOf(current)));
  byId("export-json").addEventListener("click", () => exportAs("application/json", "json", jsonOf(current, settings.system)));
  byId("help-button").addEventListener("click", () => openDialog(byId("help")));
  document.addEventListener("keydown", onKey);
  byId("turns").addEventListener("scroll", onScroll);
  addEventListener("pagehide", () => running && store.saveConversation(running.conversation));
  startPanels();
  startSettings(updateTurns);
  conversations = store.loadConversations().conversations;
  const last = conversations.find((conversation) => conversation.id === store.loadCurrent());
  if (last) show(last);
  else startConversation();
  startConnection(updateTurns);
}

start();
