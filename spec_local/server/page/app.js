// The page: which conversation is shown, its turns, the answer that is running, and the keyboard.

import { hideRejected } from "./answer.js";
import { Answering } from "./answering.js";
import { copyText } from "./clipboard.js";
import { Composer } from "./composer.js";
import { askForKey, connect, refreshCosts, server, startConnection } from "./connection.js";
import { addTurn, messagesOf, nameOf, pathOf, previousOf, showVersion, versionsOf } from "./conversation.js";
import { askForName, listConversations, startSearch } from "./conversation_list.js";
import { addDeleted, deleteWithUndo, settleDeleted, startDeletions, undoDeletions } from "./deletions.js";
import { byId } from "./dom.js";
import { download, jsonOf, markdownOf } from "./exports.js";
import { storeImages, sweepImages } from "./image_store.js";
import { dataUris, imagesOf } from "./images.js";
import { merge } from "./merging.js";
import { notify, say } from "./notices.js";
import { closeCover, openDialog, startPanels } from "./panels.js";
import { fieldsOfRequest, settings, startSettings, switchMarks } from "./settings.js";
import { shareSpeed } from "./speed_picture.js";
import { showStatistics } from "./statistics.js";
import * as store from "./store.js";
import { TurnView } from "./turn_view.js";

let conversations = [];
let current; // the conversation that is shown
let running = null; // an Answering
const views = new WeakMap(); // by turn
const ACTIONS = { copy, goOn, regenerate, edit, shareSpeed, showVersion: goToVersion };
const composer = new Composer(send, server);
const firstScreen = byId("first");

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
  const path = pathOf(current);
  const shown = path.length ? path.map((turn) => viewOf(turn).element) : [firstScreen];
  for (const old of [...byId("turns").children]) if (!shown.includes(old)) old.remove();
  byId("turns").append(...shown.filter((element) => !element.isConnected));
  updateTurns();
}

function viewOf(turn) {
  if (!views.has(turn)) views.set(turn, new TurnView(turn, ACTIONS));
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
    isLast: turn === lastTurn(),
    version: versions.indexOf(turn) + 1,
    n_versions: versions.length,
  });
}

function drawStatistics() {
  const statistics = running?.meter.values ?? lastTurn()?.statistics ?? null;
  showStatistics(byId("figures"), statistics, server.costs, server.learning);
}

function drawList() {
  document.title = current.name ? `${current.name} · specdec` : "specdec";
  listConversations(conversations, current, { show, rename, remove });
}

function startConversation() {
  let empty = conversations.find((conversation) => !conversation.turns.length);
  if (!empty) {
    empty = store.newConversation();
    conversations.unshift(empty);
  }
  show(empty);
  composer.focus();
}

function rename(conversation) {
  askForName(conversation.name, (name) => {
    conversation.name = name;
    save(conversation);
    drawList();
  });
}

function remove(conversation, event) {
  if (running?.conversation === conversation) running.stop();
  if (conversation.turns.length) deleteWithUndo(conversation);
  leaveOut(conversation);
  if (event.detail) composer.focus(byId("new")); // with the keyboard, the focus stays in the list
}

/** Take a conversation from the list; if it is shown, another one is. */
function leaveOut(conversation) {
  conversations = conversations.filter((other) => other !== conversation);
  if (conversation !== current) drawList();
  else if (conversations.length) show(conversations[0]);
  else startConversation();
}

function bringBack(restored) {
  conversations = [...conversations, ...restored].sort((a, b) => b.changed - a.changed);
  if (restored.length === 1 || !current.turns.length) show(restored[0]);
  else drawList();
  composer.focus();
}

/** Another tab has changed a conversation: what both have added to it stays. stored: null: it has deleted it for good. */
function onChangeElsewhere(id, stored) {
  const mine = conversations.find((conversation) => conversation.id === id);
  settleDeleted(id);
  if (!stored || stored.deleted) {
    if (mine && mine !== running?.conversation) leaveOut(mine);
    return;
  }
  if (!mine) {
    conversations = [...conversations, stored].sort((a, b) => b.changed - a.changed);
    return drawList();
  }
  const last = lastTurn();
  const isBehind = merge(mine, stored);
  mine.name = stored.name;
  if (isBehind) save(mine);
  if (mine === current) {
    const next = mine.turns.at(-1);
    const isNext = next !== last && previousOf(mine, next) === last;
    if (!running && isNext && (next.ended || next.error)) showVersion(mine, next);
    follow(drawTurns);
  }
  drawList();
}

/** Save a conversation, whose images are stored apart from it; return whether there was room for it. */
function save(conversation) {
  const isSaved = store.saveConversation(conversation);
  if (!isSaved) warnOfLoss("this conversation is", store.canStore());
  return isSaved;
}

/** Store the images of a conversation that are not stored, or that another tab has deleted. */
async function saveImages({ turns }) {
  const images = imagesOf(turns);
  if (!images.length) return;
  try {
    await storeImages(images);
  } catch (error) {
    warnOfLoss("the images of this conversation are", error?.name === "QuotaExceededError");
  }
}

function warnOfLoss(what, isFull) {
  const why = isFull ? "The browser's storage is full" : "The browser stores nothing for this page";
  const advice = isFull ? " Delete others, or export it." : " Export it to keep it.";
  notify(`${why}: ${what} lost when you close the page.${advice}`);
}

/** textOf: of a conversation and the data of its images. */
async function exportAs(type, extension, textOf) {
  const conversation = current;
  const text = textOf(conversation, await dataUris(conversation.turns));
  download(new Blob([text], { type }), conversation.name, extension);
}

// Questions and answers

function lastTurn() {
  return pathOf(current).at(-1);
}

/** edited: the turn whose question this is another version of, or null. */
function send({ question, files, edited }) {
  const previous = edited ? previousOf(current, edited) : lastTurn();
  current.name ||= nameOf(question || files[0].name);
  return answer(addTurn(current, question, files, previous));
}

/** Answer a question again: beside the answer, if there is something of one. */
function regenerate(turn) {
  if (running) return;
  if (turn.answer.length || turn.reasoning.length) {
    answer(addTurn(current, turn.question, turn.files, previousOf(current, turn)));
  } else {
    const { id, question, files, parent } = turn;
    answer(Object.assign(turn, store.newTurn(question, files, parent), { id }));
  }
  viewOf(lastTurn()).element.focus();
}

/** Let an answer go on that was stopped or cut. */
function goOn(turn) {
  if (running) return;
  Object.assign(turn, { ended: "", error: "" });
  answer(turn, true);
  viewOf(turn).element.focus();
}

async function answer(turn, goesOn = false) {
  const conversation = current;
  running = new Answering(conversation, turn);
  conversation.changed = turn.changed = Date.now();
  conversations = [conversation, ...conversations.filter((other) => other !== conversation)];
  notify("");
  say("Answering");
  composer.setRunning(true);
  drawList();
  drawTurns();
  scrollToEnd();
  if (imagesOf([turn]).length) await saveImages(conversation); // first: other tabs then find them
  save(conversation); // a question is not lost if the page is closed
  const path = pathOf(conversation);
  const turns = path.slice(0, path.indexOf(turn) + 1);
  const messages = messagesOf(turns, settings.system, await dataUris(turns), goesOn);
  const status = await running.generate({ model: server.model ?? "any", messages, ...fieldsOfRequest() }, draw);
  running = null;
  end(conversation, turn, status);
}

function end(conversation, turn, status) {
  turn.model = server.names;
  turn.changed = Date.now();
  composer.setRunning(false);
  if (save(conversation)) saveImages(conversation);
  follow(updateTurns);
  say(turn.error || (turn.ended === "stopped" ? "Stopped." : "The answer is complete."));
  if (status === 401) askForKey(turn.error);
  else if (server.model && !turn.error) connect(); // it may have been loaded for the answer
  else refreshCosts();
}

let drawing = false;
let saidWaiting = "";

/** Say what is waited for, and not each number of it. */
function sayWaiting(waiting) {
  const kind = waiting.replace(/^(Reading) .*/, "$1");
  if (kind && kind !== saidWaiting) say(waiting);
  saidWaiting = kind;
}

/** Draw what has arrived, at most once for each picture of the screen. */
function draw() {
  sayWaiting(running.waiting);
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

let isFollowing = true; // the end of the turns stays in sight, until the reader scrolls up
let lastTop = 0;

function follow(change) {
  change();
  if (isFollowing) scrollToEnd();
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

function copy(turn) {
  return copyText(store.textOf(turn.answer), viewOf(turn).answer);
}

function scrollToEnd() {
  const log = byId("turns");
  log.scrollTop = log.scrollHeight;
  isFollowing = true;
}

/** What hovers over the turns goes; that of the place that has the focus, to which the arrow keys scroll, moves along. */
function onScroll() {
  const { scrollTop, scrollHeight, clientHeight } = byId("turns");
  const left = scrollHeight - scrollTop - clientHeight; // pixels below
  if (scrollTop < lastTop) isFollowing = left < 2;
  else if (left < 60) isFollowing = true;
  lastTop = scrollTop;
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
  m: () => {
    switchMarks();
    updateTurns();
    say(settings.marks ? "Draft tokens are marked." : "Draft tokens are not marked.");
  },
};

function onKey(event) {
  if (document.querySelector("dialog[open]") || event.isComposing || event.keyCode === 229) return;
  if (event.key === "Escape") {
    hideRejected();
    if (closeCover()) return;
    if (running) running.stop();
    else composer.stopEditing();
    return;
  }
  const typing = event.target.matches("input, textarea, select");
  if (!typing && event.key === "z" && (event.ctrlKey || event.metaKey)) return undoDeletions();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !SHORTCUTS[event.key]) return;
  event.preventDefault();
  SHORTCUTS[event.key]();
}

function start() {
  byId("stop").addEventListener("click", (event) => {
    if (composer.isSecondClick(event)) composer.focus();
    else running?.stop();
  });
  for (const button of firstScreen.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      if (!running) send({ question: button.textContent, files: [], edited: null });
      composer.focus(byId("stop"));
    });
  }
  byId("new").addEventListener("click", startConversation);
  byId("export-markdown").addEventListener("click", () => exportAs("text/markdown", "md", markdownOf));
  const asJson = (conversation, uris) => jsonOf(conversation, settings.system, uris);
  byId("export-json").addEventListener("click", () => exportAs("application/json", "json", asJson));
  byId("help-button").addEventListener("click", () => openDialog(byId("help")));
  document.addEventListener("keydown", onKey);
  byId("turns").addEventListener("scroll", onScroll);
  addEventListener("pagehide", () => {
    if (!running) return;
    running.turn.changed = Date.now();
    store.saveConversation(running.conversation);
  });
  startPanels();
  startSettings(updateTurns);
  startSearch(drawList);
  startDeletions(bringBack);
  store.watchConversations(onChangeElsewhere);
  const stored = store.loadConversations();
  conversations = stored.filter(({ deleted }) => !deleted);
  stored.filter(({ deleted }) => deleted).forEach(addDeleted);
  const last = conversations.find((conversation) => conversation.id === store.loadCurrent());
  if (last) show(last);
  else startConversation();
  startConnection(updateTurns);
  sweepImages(store.storedText);
}

start();
byId("failed").remove();
