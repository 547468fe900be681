// The switch between the versions of a turn: "‹ 2 / 3 ›".

import { element } from "./dom.js";

/** number: of the shown version, from 1; go: called with the number to show. After the last comes the first. */
export function versionSwitch(number, n_versions, go) {
  const button = (label, text, next) => {
    const choose = () => go(((next - 1 + n_versions) % n_versions) + 1);
    return element("button", { type: "button", class: "quiet", "aria-label": label, click: choose }, text);
  };
  return element(
    "span",
    { class: "versions", role: "group", "aria-label": `Version ${number} of ${n_versions}` },
    button("Previous version", "‹", number - 1),
    `${number} / ${n_versions}`,
    button("Next version", "›", number + 1),
  );
}
