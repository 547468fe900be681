// What the page says: a notice above the conversation, and words for those who do not see the page.

import { byId } from "./dom.js";

/** Show a notice above the conversation; "": none. */
export function notify(text, action = "", react = () => {}) {
  const notice = byId("notice");
  notice.hidden = !text;
  notice.querySelector("span").textContent = text;
  const button = notice.querySelector("button");
  button.hidden = !action;
  button.textContent = action;
  button.onclick = react;
}

/** Say something to those who do not see the page. */
export function say(text) {
  byId("status").textContent = text;
}
