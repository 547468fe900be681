// The server: its models, whether they are loaded, what their calls cost, and its key.

import * as api from "./api.js";
import { byId, element } from "./dom.js";
import { notify } from "./notices.js";
import { openDialog } from "./panels.js";
import { loadModel, saveModel } from "./store.js";

const RETRY_MS = 1500; // between two looks at whether the models are loaded
const LEARNING_MS = 10_000; // between two looks at what a head has learned

/**
 * What is known of the server. model: the chosen one if there are several, or null; names: of the model and its
 * draft, for people; n_ctx: tokens of its context; sees, hears: whether it reads images and sound, undefined: it is not
 * known; defaults: settings of an answer that sets none; costs, learning: what /costs and /learning returned.
 */
export const server = { model: null, names: "", defaults: {}, costs: null, learning: null };
let onChange;
let hideNotice = () => {}; // that of the connection: one of something else stays

/** changed: called when something is known that was not. */
export function startConnection(changed) {
  onChange = changed;
  byId("models").addEventListener("change", chooseModel);
  connect();
}

export async function connect() {
  try {
    await look();
  } catch (error) {
    if (error.status === 401) askForKey("");
    else if (error.status === 503) untilReady();
    else hideNotice = notify(error.message, "Try again", connect);
  }
}

async function look() {
  const isLoaded = await listModels();
  server.names = server.model ?? "";
  if (isLoaded) {
    const props = await api.get(`props${query()}`);
    const draft = props.draft && `draft ${props.draft}`;
    const says = (...parts) => parts.filter(Boolean).join(", ");
    server.names = says(server.model ?? props.model, draft);
    server.n_ctx = props.n_ctx;
    server.defaults = props.default_generation_settings?.params ?? {};
    const shown = says(!server.model && props.model, draft); // the list shows which one is chosen
    byId("model").textContent = `${shown && `${shown} · `}${props.n_ctx} tokens of context`;
    byId("model").title = `${byId("model").textContent} · specdec ${props.version}`;
    refreshCosts();
  } else {
    byId("model").textContent = "is loaded when you ask";
  }
  const accepted = [server.sees && "image/*", server.hears && "audio/*"].filter(Boolean).join();
  byId("image-chooser").accept = accepted;
  byId("attach-images").hidden = !accepted;
  hideNotice();
}

/** Show the models if there are several; return whether the chosen one, or the only one, is loaded. */
async function listModels() {
  const served = (await api.get("v1/models")).data;
  const isLoaded = ({ meta }) => meta.status === "loaded";
  const wanted = server.model ?? loadModel();
  const chosen = served.find(({ id }) => id === wanted) ?? served.find(isLoaded) ?? served[0];
  server.model = served.length > 1 ? chosen.id : null;
  server.sees = chosen.modalities?.vision ?? false;
  server.hears = chosen.modalities?.audio ?? false;
  byId("models").hidden = !server.model;
  byId("models").replaceChildren(...served.map(({ id }) => element("option", { value: id }, id)));
  byId("models").value = chosen.id;
  return isLoaded(chosen);
}

function chooseModel() {
  server.model = byId("models").value;
  saveModel(server.model);
  server.costs = null;
  server.learning = null;
  server.sees = server.hears = undefined;
  onChange();
  connect();
}

/** The part of an address that names the chosen model. */
function query() {
  return server.model ? `?model=${encodeURIComponent(server.model)}` : "";
}

export async function refreshCosts() {
  try {
    server.costs = await api.get(`costs${query()}`);
    onChange();
    await refreshLearning();
  } catch {
    // They are shown when the server answers again.
  }
}

let nextLook; // at what a head has learned

async function refreshLearning() {
  clearTimeout(nextLook);
  const [asked, before] = [query(), JSON.stringify(server.learning)];
  const found = await api.get(`learning${asked}`);
  if (asked !== query()) return; // another model has been chosen
  server.learning = found;
  if (JSON.stringify(server.learning) !== before) onChange();
  if (!server.learning.enabled) return;
  nextLook = setTimeout(() => refreshLearning().catch(() => {}), LEARNING_MS);
}

let ready = null; // a promise, while the models are being loaded

/** Wait until the models are loaded; the notice says what it waits for. */
export function untilReady() {
  ready ??= poll().finally(() => (ready = null));
  return ready;
}

async function poll() {
  hideNotice = notify("The models are being loaded …");
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    try {
      await api.get("health");
      return await look();
    } catch (error) {
      if (error.status === 401) return askForKey("");
      hideNotice = notify(error.message.replace(/: try again soon$/, " …")); // the page tries again itself
    }
  }
}

export function askForKey(message) {
  const dialog = byId("key");
  dialog.querySelector(".error").textContent = message;
  dialog.onclose = () => {
    if (dialog.returnValue !== "done") return;
    api.useKey(dialog.querySelector("input").value);
    connect();
  };
  if (!dialog.open) openDialog(dialog);
}
