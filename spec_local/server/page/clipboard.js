// Copying, also over http from another machine, where browsers have no `navigator.clipboard`.

import { element } from "./dom.js";
import { notify, say } from "./notices.js";

/** Copy a text; where the browser allows that in no way, `shown`, the element that shows it, is selected. */
export async function copyText(text, shown) {
  if ((await written(text)) || copiedByCommand(text)) {
    say("Copied");
    return true;
  }
  getSelection().selectAllChildren(shown);
  notify("The browser does not allow copying here. The text is selected: copy it with Ctrl+C, or ⌘C on a Mac.");
  return false;
}

async function written(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

function copiedByCommand(text) {
  const before = document.activeElement;
  const field = element("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  let isCopied = false;
  try {
    isCopied = document.execCommand("copy");
  } catch {
    // An old browser, or a policy.
  }
  field.remove();
  before?.focus({ preventScroll: true });
  return isCopied;
}
