// Small plots, drawn by hand as SVG. Colours are classes of style.css.

import { shape } from "./dom.js";

const WIDTH = 240; // units of the picture, as its other sizes

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
  const [left, right, top, bottom] = [34, WIDTH - 6, 8, 110];
  const all = series.flatMap(({ points }) => points);
  const most = Math.max(...all.map(([n]) => n));
  const slowest = round(Math.max(...all.map(([, ms]) => ms)));
  const x = (n) => left + ((right - left) * Math.log2(n)) / Math.max(1, Math.log2(most));
  const y = (ms) => bottom - ((bottom - top) * ms) / slowest;
  const drawn = [];
  for (const ms of [0, slowest / 2, slowest]) {
    drawn.push(shape("line", { class: "grid", x1: left, x2: right, y1: y(ms), y2: y(ms) }));
    drawn.push(shape("text", { x: left - 5, y: y(ms) + 4, "text-anchor": "end" }, String(ms)));
  }
  for (let n = 1; n <= most; n *= 2) {
    drawn.push(shape("text", { x: x(n), y: bottom + 14, "text-anchor": "middle" }, String(n)));
  }
  for (const { name, points } of series) {
    const path = points.map(([n, ms], i) => `${i ? "L" : "M"}${x(n).toFixed(1)} ${y(ms).toFixed(1)}`).join("");
    drawn.push(shape("path", { class: `line ${name}`, d: path }));
    for (const [n, ms] of points) {
      const text = `${name} model, ${n} token${n === 1 ? "" : "s"}: ${ms.toPrecision(3)} ms`;
      drawn.push(shape("circle", { class: `point ${name}`, cx: x(n), cy: y(ms), r: 2.5 }, shape("title", {}, text)));
    }
  }
  return picture(label, bottom + 20, drawn);
}

function picture(label, height, drawn) {
  return shape("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label }, ...drawn);
}

/** The next larger number of the form 2, 4 or 10 times a power of ten, which can be halved nicely. */
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 10].find((factor) => factor * power >= value);
}
