// Formulas, drawn by KaTeX, which is loaded with the first of them.

import { element } from "./dom.js";

const FOLDER = "vendor/katex";
const OPTIONS = { trust: false, strict: "ignore", maxSize: 20, maxExpand: 1000 };

let katex = null;
let loading = null;

/** Draw the formulas in a root: its elements `code.math`. Until KaTeX is there, they show their source. */
export function typeset(root) {
  const formulas = root.querySelectorAll("code.math");
  if (katex) formulas.forEach(draw);
  else if (formulas.length) loading ??= load();
}

async function load() {
  document.head.append(element("link", { rel: "stylesheet", href: `${FOLDER}/katex.min.css` }));
  try {
    await import(`./${FOLDER}/katex.min.js`);
    katex = globalThis.katex;
  } catch {
    return; // the source stays
  }
  typeset(document);
}

function draw(source) {
  const displayMode = source.matches(".display");
  try {
    const tree = katex.__renderToDomTree(source.textContent, { displayMode, ...OPTIONS });
    withoutStyles(tree);
    const formula = element("span", { class: source.className });
    formula.append(tree.toNode());
    source.replaceWith(formula);
  } catch {
    source.classList.remove("math"); // it is no formula that KaTeX knows
  }
}

/** Leave out style attributes, which the page's policy does not allow: they repeat other attributes. */
function withoutStyles(node) {
  delete node.attributes?.style;
  node.children?.forEach(withoutStyles);
}
