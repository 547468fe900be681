// Colours of code, as elements: the highlighter's HTML is read as a list of tags and texts, and never parsed as HTML.

import highlighter from "./vendor/highlight.min.js";
import { element } from "./dom.js";

const LONGEST = { growing: 20_000, complete: 200_000 }; // characters: some 30 ms, which is spent often, and 0.3 s
const TAGS_AND_TEXTS = /<span class="([^"]*)">|(<\/span>)|([^<]+)/g;
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#x27;": "'" };

/** The name of a code element's language; "": there is none. */
export function languageOf(code) {
  return /language-(\S+)/.exec(code.className)?.[1] ?? "";
}

/** Colour the text of an element with a class such as language-python. growing: this is done again soon. */
export function highlight(code, growing) {
  const [text, language] = [code.textContent, languageOf(code)];
  if (text.length > LONGEST[growing ? "growing" : "complete"] || !highlighter.getLanguage(language)) return;
  const { value } = highlighter.highlight(text, { language, ignoreIllegals: true });
  code.replaceChildren();
  let inner = code;
  for (const [, kind, end, part] of value.matchAll(TAGS_AND_TEXTS)) {
    if (part) inner.append(part.replace(/&(?:amp|lt|gt|quot|#x27);/g, (entity) => ENTITIES[entity]));
    else if (end) inner = inner.parentNode;
    else inner.append((inner = element("span", { class: kind })));
  }
}
