// The list of conversations, and the search in them.

import { byId, element } from "./dom.js";
import { openDialog } from "./panels.js";
import { textOf } from "./store.js";

/** Draw the list. actions: show, rename and remove, each called with a conversation and the event. */
export function listConversations(conversations, current, { show, rename, remove }) {
  const focused = byId("list").contains(document.activeElement) && document.activeElement.id;
  const wanted = byId("search").value.trim().toLowerCase();
  const found = wanted ? conversations.filter((conversation) => hasText(conversation, wanted)) : conversations;
  const items = found.map((conversation) => {
    const name = conversation.name || "New conversation";
    const isCurrent = conversation === current;
    const button = (what, properties, text) => element("button", { type: "button", id: `${what}-${conversation.id}`, ...properties }, text);
    // The second click of a double click would delete the next one, which has moved up.
    const removeOnce = (event) => event.detail > 1 || remove(conversation, event);
    return element(
      "li",
      { class: isCurrent ? "current" : "" },
      button("open", { class: "open", dir: "auto", "aria-current": isCurrent && "true", click: () => show(conversation) }, name),
      button("rename", { class: "quiet", "aria-label": `Rename ${name}`, click: () => rename(conversation) }, "✎"),
      button("delete", { class: "quiet", "aria-label": `Delete ${name}`, click: removeOnce }, "×"),
    );
  });
  byId("list").replaceChildren(...items);
  byId("found").textContent = wanted ? `${found.length} of ${conversations.length} conversations` : "";
  if (focused) (byId(focused) ?? byId("new")).focus(); // it stays where it was
}

/** search: called when another text is searched for. */
export function startSearch(search) {
  const field = byId("search");
  field.addEventListener("input", search);
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !field.value) return;
    event.stopPropagation(); // an answer that is running goes on
    field.value = "";
    search();
  });
}

function hasText({ name, turns }, wanted) {
  const has = (text) => text.toLowerCase().includes(wanted);
  const texts = turns.flatMap(({ question, answer, files }) => [question, textOf(answer), ...files.map((file) => file.name)]);
  return has(name) || texts.some(has);
}

/** Ask for another name; renamed: called with it. */
export function askForName(name, renamed) {
  const dialog = byId("name");
  const field = dialog.querySelector("input");
  field.value = name;
  dialog.onclose = () => {
    if (dialog.returnValue === "done" && field.value.trim()) renamed(field.value.trim());
  };
  openDialog(dialog);
}
