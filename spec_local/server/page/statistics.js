// Speed and acceptance of an answer: measured here while it is generated, the server's own when it has ended.

import { element } from "./dom.js";
import { bars, lines, shares } from "./plots.js";

const SOURCES = { none: "no draft" }; // other proposers have the names that the server gives

const LEARNED = [
  { data: "user", name: "your answers", kind: "draft" },
  { data: "built_in", name: "built-in prompts", kind: "main" },
];

/** Counts the tokens of a running answer; the same fields as the server's `timings`. */
export class Meter {
  constructor() {
    this.started = 0;
    this.values = { predicted_n: 0, predicted_per_second: 0, steps_n: 0, draft_n: 0, draft_n_accepted: 0 };
    this.values = { ...this.values, tested_at: [], accepted_at: [], steps_by: {} };
  }

  /** Count a step. mark: the object `specdec` of a chunk; now: in milliseconds. */
  count(mark, now = performance.now()) {
    const v = this.values;
    v.predicted_n += mark.draft_n_accepted + 1;
    v.steps_n += 1;
    v.draft_n += mark.draft_n;
    v.draft_n_accepted += mark.draft_n_accepted;
    while (v.tested_at.length < mark.draft_depth) [v.tested_at, v.accepted_at].forEach((counts) => counts.push(0));
    for (let i = 0; i < mark.draft_depth; i++) v.tested_at[i] += 1;
    for (let i = 0; i < mark.draft_n_accepted; i++) v.accepted_at[i] += 1;
    v.steps_by[mark.proposer] = (v.steps_by[mark.proposer] ?? 0) + 1;
    if (v.steps_n === 1) {
      [this.started, this.n_first] = [now, v.predicted_n]; // the first step is that of the prompt
    } else {
      v.predicted_per_second = (1e3 * (v.predicted_n - this.n_first)) / Math.max(1, now - this.started);
    }
  }
}

export function tokensPerSecond(value) {
  return `${number(value)} tokens/s`;
}

/** How many draft tokens were accepted. */
export function ofDrafts({ draft_n, draft_n_accepted }) {
  return draft_n ? `${draft_n_accepted} of ${draft_n} (${percent(draft_n_accepted / draft_n)})` : "none drafted";
}

/** One line about an answer. */
export function summary(statistics) {
  const parts = [`${statistics.predicted_n} tokens`];
  if (statistics.predicted_per_second) parts.push(tokensPerSecond(statistics.predicted_per_second));
  if (statistics.gain) parts.push(statistics.gain.words);
  if (statistics.draft_n) parts.push(`${percent(statistics.draft_n_accepted / statistics.draft_n)} of drafts accepted`);
  return parts.join(" · ");
}

/**
 * Show statistics in the panel. statistics: null: there is no answer; costs, learning: what /costs and /learning
 * returned, or null.
 */
export function showStatistics(panel, statistics, costs, learning) {
  const ofAll = statistics ? ofAnswer(statistics) : [hint()];
  panel.replaceChildren(...ofAll, ...ofCosts(costs), ...ofLearning(learning));
}

function hint() {
  return element("p", { class: "note" }, "Ask something to see how fast the answer is generated.");
}

function ofAnswer(statistics) {
  const speed = statistics.predicted_per_second ? number(statistics.predicted_per_second) : "…";
  const { steps_n, predicted_n } = statistics;
  return [
    element("p", { class: "speed" }, element("strong", {}, speed), " tokens/s"),
    element("p", { class: "note" }, statistics.gain?.words ?? " "),
    section(
      "Draft tokens",
      table([
        ["accepted", ofDrafts(statistics)],
        ["tokens per step", steps_n ? (predicted_n / steps_n).toFixed(2) : "…"],
      ]),
    ),
    ...ofPrompt(statistics),
    ...ofPositions(statistics.tested_at, statistics.accepted_at),
    ...ofSources(statistics.steps_by, steps_n),
  ];
}

function ofPrompt({ cache_n, prompt_n }) {
  if (cache_n === undefined) return []; // the answer is still running
  return [section("Tokens of the prompt", table([["from the cache", String(cache_n)], ["read", String(prompt_n)]]))];
}

function ofPositions(tested = [], accepted = []) {
  const shares = tested.map((n, i) => ({
    label: String(i + 1),
    share: n ? accepted[i] / n : 0,
    text: `position ${i + 1}: ${accepted[i]} of ${n} accepted`,
  }));
  const MOST = 12; // positions that are legible side by side
  if (!shares.length) return [];
  return [section("Acceptance by position in the draft", bars("Acceptance by position", shares.slice(0, MOST)))];
}

function ofSources(steps_by, n_steps) {
  const sorted = Object.entries(steps_by).sort(([, a], [, b]) => b - a);
  if (!sorted.length) return [];
  const rows = sorted.map(([source, n]) => {
    const meter = element("meter", { min: 0, max: 1, value: n / n_steps, "aria-hidden": "true" });
    return [SOURCES[source] ?? source, meter, percent(n / n_steps)];
  });
  return [section("Who proposed, by steps", table(rows))];
}

function ofCosts(costs) {
  const names = ["main", "draft"].filter((name) => costs?.[name]?.length);
  if (!names.length) return [];
  const milliseconds = (points) => points.map(([n, seconds]) => [n, 1e3 * seconds]);
  const series = names.map((name) => ({ name, points: milliseconds(costs[name]) }));
  const legend = names.map((name) => element("span", { class: `key ${name}` }, `${name} model`));
  const plot = lines("Milliseconds of a call by its number of tokens", series);
  return [section("Milliseconds of a call, by its tokens", plot, element("p", { class: "note" }, ...legend))];
}

function ofLearning(learning) {
  if (!learning?.enabled) return [];
  const shown = [element("p", { class: "note" }, learning.state)];
  const [first] = learning.versions;
  if (first) {
    const all = [{ number: 0, after: first.before }, ...learning.versions]; // 0: before the first one
    const series = LEARNED.map(({ data, name, kind }) => {
      const known = all.filter(({ after }) => data in after);
      const text = (n, share) => `${n ? `version ${n}` : "before"}, ${name}: ${percent(share)} accepted`;
      return { name, kind, points: known.map(({ number: n, after }) => [n, after[data], text(n, after[data])]) };
    });
    const legend = LEARNED.map(({ name, kind }) => element("span", { class: `key ${kind}` }, name));
    shown.unshift(shares("Acceptance by version of the head", series), element("p", { class: "note" }, ...legend));
  }
  return [section("What the head has learned, by version", ...shown)];
}

function section(title, ...children) {
  return element("section", {}, element("h2", {}, title), ...children);
}

function table(rows) {
  const cells = (row) => row.map((cell, i) => element(i ? "td" : "th", i ? {} : { scope: "row" }, cell));
  return element("table", {}, ...rows.map((row) => element("tr", {}, ...cells(row))));
}

function number(value) {
  return value < 10 ? value.toFixed(1) : value.toFixed(0);
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}
