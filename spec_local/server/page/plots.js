// Small plots, drawn by hand as SVG. Colours are classes of style.css.

import { shape } from "./dom.js";

const WIDTH = 240; // units of the picture, as its other sizes
const [LEFT, RIGHT, TOP, BOTTOM] = [34, WIDTH - 6, 8, 110]; // of the area with lines
const MOST_NUMBERS = 12; // that are legible side by side

/** Bars from 0 to 1: a list of {label, share, text}; label: below the bar, text: for those who point at it. */
export function bars(label, values) {
  const height = 64;
  const pitch = Math.min(26, WIDTH / values.length);
  const drawn = values.map(({ label: name, share, text }, i) => {
    const tall = Math.max(1, height * share);
    const x = i * pitch;
    return shape(
      "g",
      {},
      shape("title", {}, text),
      shape("rect", { class: "track", x, y: 0, width: pitch - 4, height, rx: 2 }),
      shape("rect", { class: "bar", x, y: height - tall, width: pitch - 4, height: tall, rx: 2 }),
      shape("text", { x: x + pitch / 2 - 2, y: height + 13, "text-anchor": "middle" }, name),
    );
  });
  return picture(label, height + 18, drawn);
}

/**
 * Lines over the number of tokens, which has a logarithmic scale: a list of {name, points}, where points are
 * [n_tokens, milliseconds].
 */
export function lines(label, series) {
  const all = series.flatMap(({ points }) => points);
  const most = Math.max(...all.map(([n]) => n));
  const slowest = round(Math.max(...all.map(([, ms]) => ms)));
  const x = (n) => LEFT + ((RIGHT - LEFT) * Math.log2(n)) / Math.max(1, Math.log2(most));
  const y = (ms) => BOTTOM - ((BOTTOM - TOP) * ms) / slowest;
  const drawn = grid([0, slowest / 2, slowest], y, String);
  for (let n = 1; n <= most; n *= 2) {
    drawn.push(shape("text", { x: x(n), y: BOTTOM + 14, "text-anchor": "middle" }, String(n)));
  }
  for (const { name, points } of series) {
    const text = ([n, ms]) => `${name} model, ${n} token${n === 1 ? "" : "s"}: ${ms.toPrecision(3)} ms`;
    drawn.push(...curve(name, points.map((point) => [x(point[0]), y(point[1]), text(point)])));
  }
  return picture(label, BOTTOM + 20, drawn);
}

/**
 * Lines of shares, 0 to 1, over whole numbers: a list of {name, kind, points}, where points are [number, share,
 * text], and text is for those who point at it; kind: the class of the colour.
 */
export function shares(label, series) {
  const numbers = [...new Set(series.flatMap(({ points }) => points.map(([n]) => n)))].sort((a, b) => a - b);
  const pitch = (RIGHT - LEFT) / Math.max(1, numbers.length - 1);
  const x = (n) => LEFT + pitch * numbers.indexOf(n);
  const y = (share) => BOTTOM - (BOTTOM - TOP) * share;
  const drawn = grid([0, 0.5, 1], y, (share) => `${100 * share} %`);
  const every = Math.ceil(numbers.length / MOST_NUMBERS);
  for (const n of numbers.filter((_, i) => i % every === 0)) {
    drawn.push(shape("text", { x: x(n), y: BOTTOM + 14, "text-anchor": "middle" }, String(n)));
  }
  for (const { kind, points } of series) {
    drawn.push(...curve(kind, points.map(([n, share, text]) => [x(n), y(share), text])));
  }
  return picture(label, BOTTOM + 20, drawn);
}

/** Horizontal lines at some values. */
function grid(values, y, format) {
  return values.flatMap((value) => [
    shape("line", { class: "grid", x1: LEFT, x2: RIGHT, y1: y(value), y2: y(value) }),
    shape("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, format(value)),
  ]);
}

/** A line through points [x, y, text]. */
function curve(kind, points) {
  const path = points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  const dots = points.map(([x, y, text]) =>
    shape("circle", { class: `point ${kind}`, cx: x, cy: y, r: 2.5 }, shape("title", {}, text)),
  );
  return [shape("path", { class: `line ${kind}`, d: path }), ...dots];
}

function picture(label, height, drawn) {
  return shape("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label }, ...drawn);
}

/** The next larger number of the form 2, 4 or 10 times a power of ten, which can be halved nicely. */
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 10].find((factor) => factor * power >= value);
}
