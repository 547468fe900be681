// What the page says: a notice above the conversation, and words for those who do not see the page.

import { byId } from "./dom.js";

/** Show a notice above the conversation; "": none. Return a function that hides it if it is still the one shown. */
export function notify(text, action = "", react = () => {}) {
  const notice = byId("notice");
  notice.hidden = !text;
  notice.querySelector("span").textContent = text;
  const button = notice.querySelector("button");
  button.hidden = !action;
  button.textContent = action;
  button.onclick = react;
  return () => button.onclick === react && notify("");
}

/** Say something to those who do not see the page. */
export function say(text) {
  byId("status").textContent = text;
}
