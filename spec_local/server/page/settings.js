// The settings: their dialog, and what they change on the page.

import { byId } from "./dom.js";
import { server } from "./connection.js";
import { openDialog } from "./panels.js";
import { DEFAULTS, loadSettings, saveSettings, watchSettings } from "./store.js";

export const settings = loadSettings();

function fieldOf(name) {
  return byId("settings").querySelector(`[name=${name}]`);
}

function openSettings() {
  for (const [name, value] of Object.entries(settings)) {
    const field = fieldOf(name);
    if (field.type === "checkbox") field.checked = value;
    else field.value = value ?? "";
    if (name in server.defaults) field.placeholder = server.defaults[name] ?? "";
  }
  openDialog(byId("settings"));
}

function read() {
  for (const [name, value] of Object.entries(DEFAULTS)) {
    const field = fieldOf(name);
    if (field.type === "checkbox") settings[name] = field.checked;
    else if (!field.validity.valid) continue; // the dialog was left without "Done"
    else if (value === null) settings[name] = Number.isFinite(field.valueAsNumber) ? field.valueAsNumber : null;
    else settings[name] = field.value;
  }
  keep();
}

function keep() {
  saveSettings(settings);
  apply();
}

function apply() {
  document.documentElement.dataset.theme = settings.theme;
  document.body.classList.toggle("marked", settings.marks);
  document.body.classList.toggle("marked-code", settings.marks && settings.marks_in_code);
}

function switchTheme() {
  const isDark = settings.theme ? settings.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  settings.theme = isDark ? "light" : "dark";
  keep();
}

/** The fields of a request that the settings change. */
export function fieldsOfRequest() {
  const fields = {};
  for (const name of ["temperature", "top_p", "min_p", "max_tokens", "seed"]) {
    if (settings[name] !== null) fields[name] = settings[name];
  }
  const stops = settings.stop.split("\n").filter(Boolean);
  if (stops.length) fields.stop = stops;
  if (!settings.speculative) fields.speculative = false;
  return fields;
}

/** Switch the marks of draft tokens on or off. */
export function switchMarks() {
  settings.marks = !settings.marks;
  keep();
}

/** changed: called when the dialog has been used, here or in another tab. */
export function startSettings(changed) {
  byId("settings-button").addEventListener("click", openSettings);
  byId("settings").addEventListener("close", () => {
    read();
    changed();
  });
  byId("theme-button").addEventListener("click", switchTheme);
  watchSettings(() => {
    Object.assign(settings, loadSettings());
    apply();
    changed();
  });
  apply();
}
