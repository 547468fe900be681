// The list of conversations.

import { byId, element } from "./dom.js";
import { openDialog } from "./panels.js";

/** Draw the list. actions: show, rename and remove, each called with a conversation. */
export function listConversations(conversations, current, { show, rename, remove }) {
  const focused = byId("list").contains(document.activeElement) && document.activeElement.id;
  const items = conversations.map((conversation) => {
    const name = conversation.name || "New conversation";
    const isCurrent = conversation === current;
    const button = (what, properties, text) => element("button", { type: "button", id: `${what}-${conversation.id}`, ...properties }, text);
    return element(
      "li",
      { class: isCurrent ? "current" : "" },
      button("open", { class: "open", "aria-current": isCurrent && "true", click: () => show(conversation) }, name),
      button("rename", { class: "quiet", "aria-label": `Rename ${name}`, click: () => rename(conversation) }, "✎"),
      button("delete", { class: "quiet", "aria-label": `Delete ${name}`, click: () => remove(conversation) }, "×"),
    );
  });
  byId("list").replaceChildren(...items);
  if (focused) (byId(focused) ?? byId("new")).focus(); // it stays where it was
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
