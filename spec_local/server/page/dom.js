// Elements. Text only ever becomes text nodes: what a model or a user writes is never read as HTML.

/**
 * Make an element. Of the properties, functions become event listeners and others attributes; undefined and
 * false ones are left out.
 */
export function element(name, properties = {}, ...children) {
  return filled(document.createElement(name), properties, children);
}

/** Make an element of an SVG picture. */
export function shape(name, properties = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), properties, children);
}

function filled(made, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** The element with an id. */
export function byId(id) {
  return document.getElementById(id);
}
