// Dialogs, and the panels beside the conversation. In a narrow window, one panel at a time covers the conversation.

import { byId } from "./dom.js";

const PANELS = ["conversations", "statistics"];
const NARROW = matchMedia("(max-width: 60rem)"); // as in narrow.css
const WIDE = matchMedia("(min-width: 70rem)"); // room for both panels beside the conversation

export function openDialog(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
}

/** Close the panel that covers the conversation, if there is one; return whether there was. */
export function closeCover() {
  const name = NARROW.matches && PANELS.find((panel) => !byId(panel).hidden);
  if (!name) return false;
  setPanel(name, false);
  byId(`${name}-button`).focus();
  return true;
}

function setPanel(name, isOpen) {
  byId(name).hidden = !isOpen;
  byId(`${name}-button`).setAttribute("aria-expanded", isOpen);
  const isCovered = NARROW.matches && PANELS.some((panel) => !byId(panel).hidden);
  for (const part of document.querySelectorAll("main > *")) part.inert = isCovered;
}

function closeAll() {
  for (const name of PANELS) setPanel(name, false);
}

function toggle(name) {
  const opens = byId(name).hidden;
  if (NARROW.matches) closeAll();
  setPanel(name, opens);
  if (opens && NARROW.matches) byId(name).focus();
}

export function startPanels() {
  for (const button of document.querySelectorAll("dialog button.main")) button.value = "done";
  for (const name of PANELS) {
    byId(`${name}-button`).addEventListener("click", () => toggle(name));
    setPanel(name, WIDE.matches);
  }
  byId("statistics-close").addEventListener("click", closeCover);
  const main = document.querySelector("main"); // it gets the clicks on its parts while they are covered
  main.addEventListener("click", (event) => event.target === main && closeCover());
  NARROW.addEventListener("change", closeAll);
}
