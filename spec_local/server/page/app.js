// The page: conversations, the answer that is running, settings, and the keyboard.

import { hideRejected } from "./answer.js";
import * as api from "./api.js";
import { byId, element } from "./dom.js";
import { Meter, showStatistics } from "./statistics.js";
import * as store from "./store.js";
import { TurnView } from "./turn_view.js";

const RETRY_MS = 1500; // between two looks at whether the models are loaded
const NAME_LENGTH = 48; // characters of a question that name a conversation

let settings = store.loadSettings();
let conversations = [];
let current; // the conversation that is shown
let views = new Map(); // by turn
let running = null; // {turn, conversation, controller, meter}
let editing = null; // the turn whose question is being edited
let typed = ""; // what was typed before
let costs = null;
let model = null; // the name of the chosen one, if the server has several
let plain_ms; // of a step without draft tokens: measured by the server, or in the last answer

// Conversations

function show(conversation) {
  current = conversation;
  store.saveCurrent(conversation);
  stopEditing();
  views = new Map();
  byId("turns").replaceChildren(...conversation.turns.map(viewOf));
  updateTurns();
  listConversations();
  scrollToEnd();
}

function viewOf(turn) {
  const view = new TurnView(turn, { copy, regenerate, edit });
  views.set(turn, view);
  return view.element;
}

function updateTurns() {
  for (const turn of current.turns) {
    views.get(turn).update({ running: running?.turn === turn, last: !running && turn === current.turns.at(-1) });
  }
  showStatistics(byId("statistics"), running?.meter.values ?? current.turns.at(-1)?.statistics ?? null, costs);
}

function listConversations() {
  const items = conversations.map((conversation) => {
    const button = (name, label, action) => element("button", { type: "button", class: "quiet", "aria-label": label, click: action }, name);
    const name = conversation.name || "New conversation";
    return element(
      "li",
      { class: conversation === current ? "current" : "" },
      element("button", { type: "button", class: "open", "aria-current": conversation === current && "true", click: () => show(conversation) }, name),
      button("✎", `Rename ${name}`, () => rename(conversation)),
      button("×", `Delete ${name}`, () => remove(conversation)),
    );
  });
  byId("list").replaceChildren(...items);
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
  const dialog = byId("name");
  const field = dialog.querySelector("input");
  field.value = conversation.name;
  dialog.onclose = () => {
    if (dialog.returnValue !== "done" || !field.value.trim()) return;
    conversation.name = field.value.trim();
    save(conversation);
    listConversations();
  };
  open(dialog);
}

function remove(conversation) {
  if (running?.conversation === conversation) stop();
  conversations = conversations.filter((other) => other !== conversation);
  store.deleteConversation(conversation);
  if (conversation !== current) listConversations();
  else if (conversations.length) show(conversations[0]);
  else startConversation();
}

function save(conversation) {
  if (!store.saveConversation(conversation)) {
    notify("The browser's storage is full: this conversation is lost when you close the page. Delete others.");
  }
}

function exportConversation() {
  const text = JSON.stringify({ ...current, messages: messagesOf(current.turns) }, null, 2);
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href: address, download: `${current.name.replace(/[^\w -]/g, "") || "conversation"}.json` }).click();
  URL.revokeObjectURL(address);
}

// Answers

function messagesOf(turns) {
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const turn of turns) {
    messages.push({ role: "user", content: turn.question });
    const content = store.textOf(turn.answer);
    if (content || turn.ended) messages.push({ role: "assistant", content });
  }
  return messages;
}

function ask(question) {
  const turn = store.newTurn(question);
  current.turns.push(turn);
  current.name ||= question.slice(0, NAME_LENGTH);
  byId("turns").append(viewOf(turn));
  return answer(turn);
}

function regenerate(turn) {
  Object.assign(turn, store.newTurn(turn.question));
  views.get(turn).clear();
  return answer(turn);
}

async function answer(turn) {
  const conversation = current;
  const controller = new AbortController();
  running = { turn, conversation, controller, meter: new Meter(plain_ms) };
  conversation.changed = Date.now();
  conversations = [conversation, ...conversations.filter((other) => other !== conversation)];
  notify("");
  say("Answering");
  byId("send").hidden = true;
  byId("stop").hidden = false;
  listConversations();
  updateTurns();
  scrollToEnd();
  const body = { model: model ?? "any", messages: messagesOf(conversation.turns.slice(0, conversation.turns.indexOf(turn) + 1)) };
  for (const name of ["temperature", "max_tokens", "seed"]) if (settings[name] !== null) body[name] = settings[name];
  if (!settings.speculative) body.speculative = false;
  try {
    for await (const chunk of api.chat(body, controller.signal)) receive(turn, chunk);
  } catch (error) {
    if (error.name === "AbortError" || controller.signal.aborted) turn.ended = "stopped";
    else turn.error = describe(error);
  }
  running = null;
  byId("send").hidden = false;
  byId("stop").hidden = true;
  if (conversations.includes(conversation)) save(conversation); // it may have been deleted meanwhile
  if (conversation === current) updateTurns();
  say(turn.error || "The answer is complete.");
  if (model && !turn.error) connect(); // it may have been loaded for the answer
  else refreshCosts();
}

function receive(turn, chunk) {
  const mark = chunk.specdec;
  const choice = chunk.choices[0];
  if (mark) {
    running.meter.count(mark);
    const reasoning = choice.delta.reasoning_content ?? "";
    add(turn, mark.spans, reasoning.length);
  }
  if (choice?.finish_reason) turn.ended = choice.finish_reason;
  if (chunk.timings) {
    turn.statistics = chunk.timings;
    plain_ms = chunk.timings.plain_ms ?? plain_ms;
  }
  if (running.conversation === current) draw();
}

/** Add spans to a turn: the first characters are reasoning. */
function add(turn, spans, n_reasoning) {
  let left = n_reasoning;
  for (const span of spans) {
    const part = { ...span, text: span.text.slice(0, left) };
    const rest = { ...span, text: span.text.slice(left) };
    if (left) turn.reasoning.push(part);
    if (!left || rest.text) turn.answer.push(left ? { ...rest, rejected: [] } : rest);
    left = Math.max(0, left - span.text.length);
  }
}

let drawing = false;

/** Draw what has arrived, at most once for each picture of the screen. */
function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const log = byId("turns");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60; // pixels
    updateTurns();
    if (atEnd) scrollToEnd();
  });
}

function describe(error) {
  if (error.status === 401) {
    askForKey(error.message);
    return "The server needs an API key.";
  }
  if (error.status === 503) waitUntilReady();
  return error.message;
}

function stop() {
  running?.controller.abort();
}

function edit(turn) {
  const question = byId("question");
  if (!editing) typed = question.value;
  editing = turn;
  byId("editing").hidden = false;
  question.value = turn.question;
  question.focus();
  grow();
}

function stopEditing() {
  if (!editing) return;
  editing = null;
  byId("editing").hidden = true;
  byId("question").value = typed;
  grow();
}

async function copy(turn) {
  try {
    await navigator.clipboard.writeText(store.textOf(turn.answer));
    say("Copied.");
  } catch {
    notify("The browser does not allow copying here: select the text instead.");
  }
}

function submit() {
  const field = byId("question");
  const question = field.value.trim();
  if (!question || running) return;
  if (!editing) {
    field.value = "";
    grow();
  } else {
    const turn = editing;
    stopEditing();
    current.turns = current.turns.slice(0, current.turns.indexOf(turn));
    views.get(turn).element.remove();
  }
  ask(question);
}

// The server

async function connect() {
  try {
    const isLoaded = await listModels();
    notify("");
    if (!isLoaded) {
      byId("model").textContent = "is loaded when you ask";
      return;
    }
    const props = await api.get(`props${query()}`);
    const names = [!model && props.model, props.draft && `draft ${props.draft}`].filter(Boolean).join(", ");
    byId("model").textContent = [names, `${props.n_ctx} tokens of context`].filter(Boolean).join(" · ");
    byId("model").title = `specdec ${props.version}`;
    refreshCosts();
  } catch (error) {
    if (error.status === 401) askForKey("");
    else if (error.status === 503) waitUntilReady();
    else notify(error.message, "Try again", connect);
  }
}

/** Show the models if there are several; return whether the chosen one, or the only one, is loaded. */
async function listModels() {
  const served = (await api.get("v1/models")).data;
  const isLoaded = ({ meta }) => meta.status === "loaded";
  const wanted = model ?? store.loadModel();
  const chosen = served.find(({ id }) => id === wanted) ?? served.find(isLoaded) ?? served[0];
  model = served.length > 1 ? chosen.id : null;
  byId("models").hidden = !model;
  byId("models").replaceChildren(...served.map(({ id }) => element("option", { value: id }, id)));
  byId("models").value = chosen.id;
  return isLoaded(chosen);
}

function chooseModel() {
  model = byId("models").value;
  store.saveModel(model);
  costs = null;
  plain_ms = undefined;
  updateTurns();
  connect();
}

/** The part of an address that names the chosen model. */
function query() {
  return model ? `?model=${encodeURIComponent(model)}` : "";
}

async function refreshCosts() {
  try {
    costs = await api.get(`costs${query()}`);
    const plain = costs.main?.find(([n]) => n === 1);
    if (plain) plain_ms ??= 1e3 * plain[1];
    updateTurns();
  } catch {
    // They are shown when the server answers again.
  }
}

let waiting = false;

async function waitUntilReady() {
  if (waiting) return;
  waiting = true;
  notify("The models are being loaded …");
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    try {
      await api.get("health");
      break;
    } catch (error) {
      notify(error.status === 503 ? "The models are being loaded …" : error.message);
    }
  }
  waiting = false;
  connect();
}

function askForKey(message) {
  const dialog = byId("key");
  dialog.querySelector(".error").textContent = message;
  dialog.onclose = () => {
    if (dialog.returnValue !== "done") return;
    api.useKey(dialog.querySelector("input").value);
    connect();
  };
  open(dialog);
}

// What the page says

/** Show a notice above the conversation; "": none. */
function notify(text, action = "", react = () => {}) {
  const notice = byId("notice");
  notice.hidden = !text;
  notice.querySelector("span").textContent = text;
  const button = notice.querySelector("button");
  button.hidden = !action;
  button.textContent = action;
  button.onclick = react;
}

/** Say something to those who do not see the page. */
function say(text) {
  byId("status").textContent = text;
}

function scrollToEnd() {
  const log = byId("turns");
  log.scrollTop = log.scrollHeight;
}

/** Make the field for the question as high as its text, up to a third of the page. */
function grow() {
  const field = byId("question");
  field.rows = Math.min(8, field.value.split("\n").length);
}

// Settings and panels

function open(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
}

function openSettings() {
  const dialog = byId("settings");
  for (const [name, value] of Object.entries(settings)) {
    const field = dialog.querySelector(`[name=${name}]`);
    if (field.type === "checkbox") field.checked = value;
    else field.value = value ?? "";
  }
  open(dialog);
}

function readSettings() {
  for (const [name, value] of Object.entries(store.DEFAULTS)) {
    const field = byId("settings").querySelector(`[name=${name}]`);
    if (field.type === "checkbox") settings[name] = field.checked;
    else if (value === null) settings[name] = Number.isFinite(field.valueAsNumber) ? field.valueAsNumber : null;
    else settings[name] = field.value;
  }
  applySettings();
  updateTurns();
}

function applySettings() {
  document.documentElement.dataset.theme = settings.theme;
  document.body.classList.toggle("marked", settings.marks);
  document.body.classList.toggle("marked-code", settings.marks && settings.marks_in_code);
  store.saveSettings(settings);
}

function isDark() {
  return settings.theme ? settings.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function switchTheme() {
  settings.theme = isDark() ? "light" : "dark";
  applySettings();
}

/** Show or hide a panel; narrow windows have room for one. */
function toggle(panel) {
  byId(panel).hidden = !byId(panel).hidden;
  byId(`${panel}-button`).setAttribute("aria-expanded", !byId(panel).hidden);
}

// The keyboard

const SHORTCUTS = {
  "/": () => byId("question").focus(),
  "?": () => open(byId("help")),
  n: startConversation,
  r: () => lastTurn() && !running && regenerate(lastTurn()),
  e: () => lastTurn() && !running && edit(lastTurn()),
  c: () => lastTurn() && copy(lastTurn()),
};

function lastTurn() {
  return current.turns.at(-1);
}

function onKey(event) {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    hideRejected();
    if (running) stop();
    else stopEditing();
    return;
  }
  const typing = event.target.matches("input, textarea, select");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !SHORTCUTS[event.key]) return;
  event.preventDefault();
  SHORTCUTS[event.key]();
}

function start() {
  for (const button of document.querySelectorAll("dialog button.main")) button.value = "done";
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  byId("question").addEventListener("input", grow);
  byId("editing").querySelector("button").addEventListener("click", stopEditing);
  byId("stop").addEventListener("click", stop);
  byId("models").addEventListener("change", chooseModel);
  byId("new").addEventListener("click", startConversation);
  byId("export").addEventListener("click", exportConversation);
  byId("settings-button").addEventListener("click", openSettings);
  byId("settings").addEventListener("close", readSettings);
  byId("theme-button").addEventListener("click", switchTheme);
  byId("help-button").addEventListener("click", () => open(byId("help")));
  for (const panel of ["conversations", "statistics"]) {
    byId(`${panel}-button`).addEventListener("click", () => toggle(panel));
  }
  document.addEventListener("keydown", onKey);
  byId("turns").addEventListener("scroll", hideRejected);
  if (matchMedia("(min-width: 70rem)").matches) ["conversations", "statistics"].forEach(toggle);
  applySettings();
  const stored = store.loadConversations();
  conversations = stored.conversations;
  const last = conversations.find((conversation) => conversation.id === store.loadCurrent());
  if (last) show(last);
  else startConversation();
  connect();
}

start();
