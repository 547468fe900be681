// The answer that is being generated.

import * as api from "./api.js";
import { untilReady } from "./connection.js";
import { Meter } from "./statistics.js";

export class Answering {
  /** plain_ms: of a step without draft tokens; undefined: it is not known. */
  constructor(conversation, turn, plain_ms) {
    this.conversation = conversation;
    this.turn = turn;
    this.meter = new Meter(plain_ms);
    this.waiting = false; // for the models to be loaded
    this.controller = new AbortController();
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
    try {
      while (!(await this.isAnswered(body, changed))) {
        this.waiting = true;
        changed();
        await Promise.race([untilReady(), new Promise((resolve) => signal.addEventListener("abort", resolve))]);
        signal.throwIfAborted();
      }
    } catch (error) {
      if (signal.aborted) turn.ended = "stopped";
      else [turn.error, status] = [error.message, error.status];
    }
    this.waiting = false;
    return status;
  }

  /** Return false if the models are still being loaded. */
  async isAnswered(body, changed) {
    try {
      for await (const chunk of api.chat(body, this.controller.signal)) {
        this.waiting = false;
        this.receive(chunk);
        changed();
      }
      return true;
    } catch (error) {
      if (error.status === 503) return false;
      throw error;
    }
  }

  receive(chunk) {
    const { turn } = this;
    const mark = chunk.specdec;
    const choice = chunk.choices[0];
    if (mark) {
      this.meter.count(mark);
      const reasoning = choice.delta.reasoning_content ?? "";
      add(turn, mark.spans, reasoning.length);
    }
    if (choice?.finish_reason) turn.ended = choice.finish_reason;
    if (chunk.timings) turn.statistics = chunk.timings;
  }
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
