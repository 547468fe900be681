// The data of images. localStorage has room for some 5 MB, so IndexedDB keeps it, by the ids that conversations have of
// their images. What was attached or read in this tab is also in memory, where it outlives a full storage.

const HOUR_MS = 3_600_000;

const blobs = new Map(); // by id

/** Take an image into memory, and return the id that it gets. */
export function addImage(blob) {
  const [random] = crypto.getRandomValues(new Uint32Array(1));
  const id = `${Date.now()}-${random.toString(36)}`; // the time is for `sweepImages`
  blobs.set(id, blob);
  return id;
}

/** The image with an id as a blob; null: it is not stored. */
export async function imageOf(id) {
  if (!blobs.has(id)) {
    try {
      const { type, bytes } = await done("readonly", (images) => images.get(id));
      blobs.set(id, new Blob([bytes], { type }));
    } catch {
      return null; // the browser allows no storage, or the image is not there
    }
  }
  return blobs.get(id);
}

/** Store images of this tab that are not stored yet. Throws the last error after trying all. */
export async function storeImages(ids) {
  const stored = new Set(await done("readonly", (images) => images.getAllKeys()));
  let failure;
  for (const id of new Set(ids)) {
    if (stored.has(id) || !blobs.has(id)) continue;
    const { type } = blobs.get(id);
    const bytes = await blobs.get(id).arrayBuffer(); // private windows of some browsers store no blobs
    await done("readwrite", (images) => images.put({ type, bytes }, id)).catch((error) => (failure = error));
  }
  if (failure) throw failure;
}

export async function deleteImages(ids) {
  for (const id of ids) blobs.delete(id);
  if (!ids.length) return;
  const deleteAll = (images) => ids.map((id) => images.delete(id)).at(-1);
  await done("readwrite", deleteAll).catch(() => {}); // the next start sweeps
}

/**
 * Delete stored images of which no conversation is left, such as those of a page that was closed while it stored them.
 * texts: returns all that is stored of conversations. An hour's grace is for other tabs, which may be storing some now.
 */
export async function sweepImages(texts) {
  try {
    const stored = await done("readonly", (images) => images.getAllKeys());
    const old = stored.filter((id) => Date.now() - parseInt(id, 10) > HOUR_MS);
    if (!old.length) return;
    const used = texts();
    await deleteImages(old.filter((id) => !used.includes(id)));
  } catch {
    // The browser allows no storage.
  }
}

let database = null; // a promise

function opened() {
  database ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("specdec", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("images");
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  }).then((found) => {
    found.onclose = () => (database = null); // Safari closes it in the background
    return found;
  });
  database.catch(() => (database = null));
  return database;
}

/** Make a request to the stored images, and return its result when that is safe on the disk. */
async function done(mode, request) {
  const transaction = (await opened()).transaction("images", mode);
  return new Promise((resolve, reject) => {
    const made = request(transaction.objectStore("images"));
    transaction.oncomplete = () => resolve(made.result);
    transaction.onabort = () => reject(transaction.error ?? made.error);
  });
}
