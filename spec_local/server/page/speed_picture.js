// A picture of an answer's speed, to share: no text of the conversation is on it.

import { byId, shape } from "./dom.js";
import { download } from "./exports.js";
import { openDialog } from "./panels.js";
import { ofDrafts, summary, tokensPerSecond } from "./statistics.js";

const [WIDTH, HEIGHT] = [1200, 630]; // pixels: the shape that most programs show whole
const MARGIN = 80;
const LONGEST = 560; // of the bars, which leaves room for their texts
const [PAGE, TEXT, QUIET, ACCENT, TRACK] = ["#14171a", "#e4e7ea", "#9aa4af", "#4cb96a", "#363c43"];
const MOST_CHARACTERS = 64; // of the models' names, which then fit

/** An SVG picture that needs no style sheet. statistics: of an answer that was faster; models: names of the main and the draft model. */
export function speedPicture(statistics, models) {
  const write = (x, y, size, fill, text, more = {}) => shape("text", { x, y, "font-size": size, fill, ...more }, text);
  const speed = statistics.predicted_per_second;
  const { times, words } = statistics.gain;
  const plain = speed / times;
  const bar = (y, value, fill, text) => {
    const width = (LONGEST * value) / speed;
    const rect = shape("rect", { x: MARGIN, y, width, height: 40, rx: 6, fill });
    return [rect, write(MARGIN + width + 18, y + 30, 26, QUIET, text)];
  };
  const names = models.length > MOST_CHARACTERS ? `${models.slice(0, MOST_CHARACTERS - 1)}…` : models;
  const drawn = [
    shape("rect", { width: WIDTH, height: HEIGHT, fill: PAGE }),
    write(MARGIN, 105, 34, TEXT, "specdec", { "font-weight": "bold" }),
    write(MARGIN, 150, 28, QUIET, names),
    write(MARGIN, 290, 120, TEXT, tokensPerSecond(speed), { "font-weight": "bold" }),
    write(MARGIN, 555, 28, QUIET, `${statistics.predicted_n} tokens · draft tokens accepted: ${ofDrafts(statistics)}`),
    write(MARGIN, 352, 38, ACCENT, words),
    ...bar(390, speed, ACCENT, `with draft tokens ${tokensPerSecond(speed)}`),
    ...bar(446, plain, TRACK, `without ${tokensPerSecond(plain)}`),
  ];
  const size = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT };
  return shape("svg", { ...size, role: "img", "font-family": "system-ui, sans-serif" }, ...drawn);
}

/** Show the picture of a turn's speed in a dialog that saves it. */
export function shareSpeed({ statistics, model }) {
  const dialog = byId("picture");
  const image = dialog.querySelector("img");
  const text = new XMLSerializer().serializeToString(speedPicture(statistics, model));
  const svg = new Blob([text], { type: "image/svg+xml" });
  const name = `speed of ${model || "specdec"}`;
  image.src = URL.createObjectURL(svg);
  image.alt = [model, summary(statistics)].filter(Boolean).join(" · ");
  byId("save-svg").onclick = () => download(svg, name, "svg");
  byId("save-png").onclick = async () => download(await pngOf(image), name, "png");
  dialog.onclose = () => URL.revokeObjectURL(image.src);
  openDialog(dialog);
}

async function pngOf(image) {
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: WIDTH, height: HEIGHT });
  canvas.getContext("2d").drawImage(image, 0, 0, WIDTH, HEIGHT);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}
