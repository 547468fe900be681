// The answer that is being generated.

import * as api from "./api.js";
import { untilReady } from "./connection.js";
import { Meter } from "./statistics.js";

const PATIENCE_MS = 500; // without text, after which the page says what it waits for

export class Answering {
  constructor(conversation, turn) {
    this.conversation = conversation;
    this.turn = turn;
    this.meter = new Meter();
    this.reason = ""; // of waiting; "": text has come
    this.controller = new AbortController();
  }

  /** What the answer waits for, as soon as that takes long; "": nothing. */
  get waiting() {
    return this.isLate ? this.reason : "";
  }

  stop() {
    this.controller.abort();
  }

  /**
   * Ask the server, and add what it answers to the turn. changed: called after each change. Never throws: returns the
   * HTTP status of an error, which the turn has as a text, or undefined.
   */
  async generate(body, changed) {
    const { turn } = this;
    const { signal } = this.controller;
    let status;
    this.reason = "Waiting for the server";
    const late = setTimeout(() => {
      this.isLate = true;
      changed();
    }, PATIENCE_MS);
    try {
      const stopped = new Promise((resolve) => signal.addEventListener("abort", resolve));
      for (let refused; (refused = await this.ask(body, changed)); signal.throwIfAborted()) {
        const isLoading = refused.status === 503;
        this.reason = isLoading ? "Waiting for the models to load" : `The server is busy: asking again in ${refused.retry_s} s`;
        changed();
        await Promise.race([isLoading ? untilReady() : seconds(refused.retry_s), stopped]);
      }
    } catch (error) {
      if (signal.aborted) turn.ended = "stopped";
      else [turn.error, status] = [error.message, error.status];
    }
    clearTimeout(late);
    this.reason = "";
    return status;
  }

  /** Ask once; return the refusal of a server that is still loading the models, or has too many requests. */
  async ask(body, changed) {
    try {
      for await (const chunk of api.chat(body, this.controller.signal)) {
        if (typeof chunk === "string") this.reason &&= doing(chunk);
        else this.receive(chunk);
        changed();
      }
      return null;
    } catch (error) {
      if (error.status === 503 || error.status === 429) return error;
      throw error;
    }
  }

  receive(chunk) {
    const { turn } = this;
    const mark = chunk.specdec;
    const choice = chunk.choices[0];
    if (chunk.prompt_progress) this.reason = reading(chunk.prompt_progress);
    if (mark) {
      this.reason = "";
      this.meter.count(mark);
      const reasoning = choice.delta.reasoning_content ?? "";
      add(turn, mark.spans, reasoning.length);
    }
    if (choice?.finish_reason) turn.ended = choice.finish_reason;
    if (chunk.timings) turn.statistics = chunk.timings;
  }
}

/** What a comment of the server says that it does. */
function doing(comment) {
  const loading = /^loading (.*)/.exec(comment)?.[1];
  return loading ? `Loading ${loading}` : "Waiting for the first token";
}

function reading({ processed, total }) {
  const [n, all] = [processed, total].map((number) => number.toLocaleString("en"));
  return `Reading ${n} of ${all} tokens`;
}

function seconds(n) {
  return new Promise((resolve) => setTimeout(resolve, 1000 * n));
}

/** Add spans to a turn: the first characters are reasoning. */
function add(turn, spans, n_reasoning) {
  let left = n_reasoning;
  for (const span of spans) {
    const part = { ...span, text: span.text.slice(0, left) };
    const rest = { ...span, text: span.text.slice(left) };
    if (left) turn.reasoning.push(part);
    if (!left || rest.text) turn.answer.push(left ? { ...rest, rejected: [] } : rest);
    left = Math.max(0, left - span.text.length);
  }
}
