// The question that is being written: its text, its files, and the turn that it edits.

import { byId } from "./dom.js";
import { bytesOf, chip, mostBytes, readFile } from "./files.js";
import { isImage, isPicture, isSound, MOST_IMAGES, readImage, readSound } from "./images.js";
import { notify, say } from "./notices.js";

const SAFARI_MS = 50; // within which Safari reports the key that ended a composition
const DOUBLE_CLICK_MS = 500;

export class Composer {
  /** send: called with {question, files, edited}, where edited is a turn or null; server: see connection.js. */
  constructor(send, server) {
    this.send = send;
    this.server = server;
    this.field = byId("question");
    this.files = [];
    this.edited = null; // the turn whose question is being edited
    this.before = null; // what was written before: {question, files}
    this.isRunning = false; // an answer is
    this.n_reading = 0; // groups of files that are being read
    this.isAwaited = false; // the question is to be sent when they have been read
    this.listen();
  }

  edit(turn) {
    this.before ??= { question: this.field.value, files: this.files };
    this.edited = turn;
    byId("editing").hidden = false;
    this.write(turn);
    this.field.focus();
  }

  stopEditing() {
    if (!this.edited) return;
    this.write(this.before);
    this.edited = this.before = null;
    byId("editing").hidden = true;
  }

  /** Say whether an answer is running: it can be stopped, and no question sent. */
  setRunning(isRunning) {
    const [hidden, shown] = isRunning ? [byId("send"), byId("stop")] : [byId("stop"), byId("send")];
    const hadFocus = document.activeElement === hidden;
    this.isRunning = isRunning;
    this.changed = performance.now();
    hidden.hidden = true;
    shown.hidden = false;
    if (hadFocus) this.focus(shown);
  }

  /** Go on writing. Where that would bring up the keyboard of a phone, another element gets the focus. */
  focus(other) {
    if (matchMedia("(pointer: coarse)").matches) other?.focus();
    else this.field.focus();
  }

  /** Return whether a click is the second one of a double click on "Send", in whose place "Stop" is now. */
  isSecondClick({ detail }) {
    return detail > 1 && performance.now() - this.changed < DOUBLE_CLICK_MS;
  }

  write({ question, files }) {
    this.field.value = question;
    this.grow();
    this.files = files;
    this.listFiles();
  }

  /** Make the field as high as its text, up to a third of the page. */
  grow() {
    this.field.rows = Math.min(8, this.field.value.split("\n").length);
  }

  submit() {
    const question = this.field.value.trim();
    const { files, edited } = this;
    if (this.n_reading) this.isAwaited = true;
    if (this.isRunning || this.n_reading || !(question || files.length)) return;
    if (edited) this.stopEditing();
    else this.write({ question: "", files: [] });
    this.send({ question, files, edited });
  }

  /** Attach files; one line says why some are not. */
  async attach(given) {
    const { edited } = this;
    const refused = new Set();
    this.n_reading += 1;
    byId("reading").hidden &&= !given.some(isPicture);
    for (const file of given) {
      try {
        this.add(await this.read(file), edited);
      } catch (error) {
        refused.add(error.message);
      }
    }
    this.n_reading -= 1;
    if (!this.n_reading) byId("reading").hidden = true;
    if (refused.size) notify([...refused].join(" "));
    else say(this.files.length === 1 ? "1 file is attached." : `${this.files.length} files are attached.`);
    const isAwaited = this.isAwaited && !this.n_reading;
    if (!this.n_reading) this.isAwaited = false;
    if (isAwaited && !refused.size) this.submit();
  }

  read(file) {
    if (!isPicture(file) && !isSound(file)) return readFile(file, bytesOf(this.files), mostBytes(this.server.n_ctx));
    const [isRead, what] = isSound(file) ? [this.server.hears, "sound"] : [this.server.sees, "images"];
    if (isRead === false) throw new Error(`This model reads no ${what}: start the server with one that does.`);
    if (this.files.filter(isImage).length >= MOST_IMAGES) throw new Error(`A question has room for ${MOST_IMAGES} images.`);
    return isSound(file) ? readSound(file) : readImage(file);
  }

  /** Add a file to the question that was written when the file was given: another one may be edited meanwhile. */
  add(file, edited) {
    const isShown = edited === this.edited;
    if (!isShown && edited) return; // the editing has ended
    const files = isShown ? this.files : this.before.files;
    const added = [...files, { ...file, name: unused(file.name, files) }];
    if (!isShown) this.before.files = added;
    else this.files = added;
    this.listFiles();
  }

  remove(file) {
    const at = this.files.indexOf(file);
    this.files = this.files.filter((other) => other !== file);
    this.listFiles();
    const buttons = byId("files").querySelectorAll(".quiet");
    (buttons[Math.min(at, buttons.length - 1)] ?? byId("attach")).focus();
  }

  listFiles() {
    byId("files").replaceChildren(...this.files.map((file) => chip(file, () => this.remove(file))));
    byId("files").hidden = !this.files.length;
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.listenToKeys();
    this.field.addEventListener("input", () => this.grow());
    byId("editing").querySelector("button").addEventListener("click", () => {
      this.stopEditing();
      this.field.focus();
    });
    this.field.addEventListener("paste", (event) => {
      const { files, types } = event.clipboardData;
      if (!files.length || types.includes("text/plain")) return; // cells of a table come as a picture, too
      event.preventDefault();
      this.attach([...files]);
    });
    this.listenToChooser(byId("attach"), byId("file-chooser"));
    this.listenToChooser(byId("attach-images"), byId("image-chooser"));
    this.listenToDrops();
  }

  listenToChooser(button, chooser) {
    button.addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", async () => {
      await this.attach([...chooser.files]);
      chooser.value = ""; // so that the same file can be chosen again
      this.field.focus();
    });
  }

  /**
   * Enter sends, but not the one that ends a composition of an input method: its code is 229, and in Safari it comes
   * after the composition has ended.
   */
  listenToKeys() {
    let ended = -Infinity; // when a composition ended whose key has not come
    this.field.addEventListener("compositionend", ({ timeStamp }) => (ended = timeStamp));
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey) return;
      const isOfComposition = event.isComposing || event.keyCode === 229 || event.timeStamp - ended < SAFARI_MS;
      ended = -Infinity;
      if (isOfComposition) return;
      event.preventDefault();
      if (!event.repeat) this.submit();
    });
  }

  /** Files may be dropped anywhere on the page; without this, the browser would leave it to show them. */
  listenToDrops() {
    const { body } = document;
    const ends = () => body.classList.remove("dropping");
    body.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      body.classList.add("dropping");
    });
    body.addEventListener("dragleave", (event) => event.relatedTarget || ends());
    body.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      ends();
      this.attach([...event.dataTransfer.files]);
    });
  }
}

/** A name that no other file has: all images that are pasted have the same. */
function unused(name, files) {
  const [, stem, extension] = /^(.+?)(\.\w+)?$/.exec(name) ?? [name, name, ""];
  const isTaken = (wanted) => files.some((file) => file.name === wanted);
  let free = name;
  for (let n = 2; isTaken(free); n++) free = `${stem} ${n}${extension ?? ""}`;
  return free;
}
