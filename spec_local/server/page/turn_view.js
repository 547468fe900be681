// A question and its answer on the page.

import { FormattedText } from "./answer.js";
import { element } from "./dom.js";
import { sentFile } from "./files.js";
import { isImage, thumbnail } from "./images.js";
import { summary } from "./statistics.js";
import { textOf } from "./store.js";
import { versionSwitch } from "./versions.js";

const ENDINGS = {
  stopped: "Stopped.",
  length: "The answer reached the maximum number of tokens.",
};

const LOST = "The page was closed before the answer ended, or another tab still shows it.";

const REST = 4; // while an answer runs, drawing it takes a fifth of the time at most: the model needs the processor

export class TurnView {
  /** actions: what the buttons do: copy, goOn, regenerate, edit, shareSpeed and showVersion, each called with the turn. */
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.reasoning = element("div");
    this.details = element("details", { class: "reasoning" }, element("summary", {}, "Reasoning"), this.reasoning);
    this.answer = element("div", { class: "answer" });
    this.waiting = element("p", { class: "waiting", hidden: true });
    this.footer = element("footer");
    const images = turn.files.filter(isImage).map(thumbnail);
    const files = turn.files.filter((file) => !isImage(file)).map(sentFile);
    const shown = images.length ? [element("div", { class: "images" }, ...images)] : [];
    const question = element("div", { class: "question", dir: "auto" }, ...shown, turn.question, ...files);
    const name = `Question: ${turn.question || turn.files[0]?.name}`;
    this.element = element("article", { "aria-label": name, tabindex: -1 }, question, this.details, this.waiting, this.answer, this.footer);
    this.clear();
  }

  /** Start again, for another answer. */
  clear() {
    this.formats = [new FormattedText(this.reasoning), new FormattedText(this.answer)];
    this.reasoning.replaceChildren();
    this.answer.replaceChildren();
    this.due = 0; // when it may be drawn again, in milliseconds
    this.answering = false;
    this.details.open = false;
  }

  /**
   * Show the turn as it is now, or soon, if drawing has just taken long. running: its answer is; waiting: for
   * what; busy: some answer is running; isLast: of the turns that are shown; version, n_versions: which version of the
   * turn it is, from 1.
   */
  update(state) {
    clearTimeout(this.timer);
    const { running } = state;
    const { turn } = this;
    const [reasoning, answer] = this.formats;
    const now = performance.now();
    if (!running || now >= this.due) {
      reasoning.show(turn.reasoning, running);
      answer.show(turn.answer, running);
      const end = performance.now();
      this.due = end + REST * (end - now);
    } else {
      this.timer = setTimeout(() => this.update(state), this.due - now);
    }
    this.waiting.textContent = state.waiting && `${state.waiting} …`;
    this.waiting.hidden = !state.waiting;
    this.details.hidden = !turn.reasoning.length;
    this.foldReasoning(running);
    this.element.classList.toggle("running", running);
    this.fillFooter(state);
  }

  /** A footer that does not change is left alone: one of its buttons may have the focus. */
  fillFooter(state) {
    const filled = element("footer", {}, ...this.notes(state), ...(state.running ? [] : this.buttons(state)));
    if (!filled.isEqualNode(this.footer)) this.footer.replaceChildren(...filled.childNodes);
  }

  /** Reasoning is open until the answer begins; then it is the reader's choice. */
  foldReasoning(running) {
    const answering = textOf(this.turn.answer) !== "";
    if (running && !answering) this.details.open = true;
    if (answering && !this.answering) this.details.open = false;
    this.answering = answering;
  }

  *notes({ running }) {
    const { ended, statistics } = this.turn;
    const error = this.turn.error || (!ended && !running && LOST);
    if (error) yield element("p", { class: "error" }, error);
    else if (ENDINGS[ended]) yield element("p", { class: "note" }, ENDINGS[ended]);
    if (statistics) yield element("p", { class: "note" }, summary(statistics));
    const parts = [this.reasoning, this.answer];
    if (parts.some((part) => part.querySelector(".accepted, .corrected"))) yield legend();
  }

  *buttons({ busy, isLast, version, n_versions }) {
    const { turn, actions } = this;
    const button = (name, action) => element("button", { type: "button", class: "quiet", click: () => action(turn) }, name);
    if (turn.answer.length) yield button("Copy", actions.copy);
    if (!busy) {
      const isCut = turn.ended !== "stop" && (turn.answer.length || turn.reasoning.length);
      if (isLast && isCut) yield button("Continue", actions.goOn);
      yield button(turn.error || !turn.ended ? "Retry" : "Regenerate", actions.regenerate);
      yield button("Edit question", actions.edit);
    }
    if (turn.statistics?.gain?.times) yield button("Share speed", actions.shareSpeed);
    if (n_versions > 1 && !busy) yield versionSwitch(version, n_versions, (number) => actions.showVersion(turn, number));
  }
}

/** Shown below the last answer. */
function legend() {
  const accepted = element("span", { class: "accepted" }, "green");
  const corrected = element("span", { class: "corrected" }, "orange");
  const rest = ": draft tokens were rejected here (point at it, or use Tab and the arrow keys, to see them)";
  return element("p", { class: "note legend" }, accepted, ": drafted and accepted · ", corrected, rest);
}
