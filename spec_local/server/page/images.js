// Images of questions: {name, image, width, height} among the files of a turn, where `image` is an id in image_store.js.
// So are sounds: {name, image, isSound}.

import { byId, element } from "./dom.js";
import { addImage, imageOf } from "./image_store.js";
import { openDialog } from "./panels.js";

// A larger image is scaled down to this before it is kept and sent: models look at fewer pixels, and each question
// sends the images of the whole conversation again. A photo then has 0.3 to 1 MB in place of 3 to 15.
const LONGEST_SIDE = 2048; // pixels
const QUALITY = 0.9; // of JPEG
const MOST_PNG = 1e6; // bytes: drawings and screenshots stay exact up to here; anything larger becomes JPEG

const MOST_SOUND = 2 ** 25; // bytes of a file that the server takes
export const MOST_IMAGES = 32; // of a question: the server takes no more in a conversation

/** Whether a file that a user gave is an image of pixels; an SVG is text. */
export function isPicture({ type }) {
  return type.startsWith("image/") && !type.startsWith("image/svg");
}

/** Whether a file that a user gave is sound. */
export function isSound({ type }) {
  return type.startsWith("audio/");
}

/** Whether a file of a question is an image or sound. */
export function isImage(file) {
  return file.image !== undefined;
}

/** The ids of the images of turns. */
export function imagesOf(turns) {
  return turns.flatMap(({ files }) => files.filter(isImage).map(({ image }) => image));
}

/** Read an image that a user gave. Throws an error with a line for the user. */
export async function readImage(file) {
  const name = file.name.replace(/\s+/g, " ");
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
  } catch {
    throw new Error(`${name} is not an image that this browser can read: save it as JPEG or PNG.`);
  }
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((n) => Math.max(1, Math.round(n * scale)));
  const isKept = scale === 1 && file.type === "image/png" && file.size <= MOST_PNG;
  const blob = isKept ? await copied(file) : await encoded(bitmap, width, height, file.type !== "image/jpeg");
  bitmap.close();
  if (!blob) throw new Error(`${name} cannot be read: the browser has too little memory for it. Make it smaller.`);
  return { name, image: addImage(blob), width, height };
}

/** Read a sound that a user gave. Throws an error with a line for the user. */
export async function readSound(file) {
  const name = file.name.replace(/\s+/g, " ");
  if (!/(wave?|mpeg|mp3|flac)$/.test(file.type)) throw new Error(`${name} is not WAV, MP3 or FLAC: convert it.`);
  if (file.size > MOST_SOUND) throw new Error(`${name} has more than 32 MiB: attach a part of it.`);
  return { name, image: addImage(await copied(file)), isSound: true };
}

/** The file on the disk may change or go. */
async function copied(file) {
  return new Blob([await file.arrayBuffer()], { type: file.type });
}

/**
 * A picture as PNG, if that may be and is small, else as JPEG. Photos are always encoded again, so that the place and
 * the camera, which their files name, are neither kept nor sent. null: there is too little memory.
 */
async function encoded(bitmap, width, height, mayBePng) {
  const canvas = element("canvas", { width, height });
  const context = canvas.getContext("2d");
  if (!context) return null;
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  const as = (type) => new Promise((resolve) => canvas.toBlob(resolve, type, QUALITY));
  const png = mayBePng && (await as("image/png"));
  if (png && png.size <= MOST_PNG) return png;
  context.globalCompositeOperation = "destination-over"; // JPEG has no transparency: white, as on the server
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  return as("image/jpeg");
}

/** The data URIs of the images of turns, by id; those that are no longer stored are left out. */
export async function dataUris(turns) {
  const uris = new Map();
  for (const id of new Set(imagesOf(turns))) {
    const blob = await imageOf(id);
    if (blob) uris.set(id, await dataUri(blob));
  }
  return uris;
}

function dataUri(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** An image as a small button that shows it larger, or the player of a sound. */
export function thumbnail(file) {
  const { name, width, height } = file;
  const shown = file.isSound
    ? element("audio", { controls: true, "aria-label": name })
    : element("img", { alt: name, width, height, draggable: "false" });
  const properties = { type: "button", class: "thumbnail", title: name, "aria-label": `Show ${name} larger` };
  const button = file.isSound
    ? element("span", { class: "sound" }, name, shown)
    : element("button", { ...properties, click: () => showLarger(file) }, shown);
  load(shown, file).then((isStored) => {
    if (!isStored) button.replaceWith(element("span", { class: "note" }, `${name} (no longer stored)`));
  });
  return button;
}

async function showLarger(file) {
  const dialog = byId("image");
  const shown = element("img", { alt: file.name, width: file.width, height: file.height });
  byId("image-title").textContent = file.name;
  dialog.querySelector("img").replaceWith(shown);
  openDialog(dialog);
  await load(shown, file);
}

/** Show an image in an element; return whether it is stored. */
async function load(shown, { image }) {
  const blob = await imageOf(image);
  if (!blob) return false;
  shown.src = URL.createObjectURL(blob);
  shown.onload = shown.onerror = () => URL.revokeObjectURL(shown.src);
  return true;
}
