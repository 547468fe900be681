// Requests to the server: the key, errors, and the stream of an answer.

const RETRY_S = 2; // where the server does not say after how many seconds to ask again
const LONGEST_S = 60; // a server may say more

/** An error to show. status: of HTTP; 0: there was no response of this server. retry_s: when to ask again. */
export class Refused extends Error {
  constructor(status, message, retryAfter = "") {
    super(message);
    this.status = status;
    this.retry_s = retryAfter > 0 ? Math.min(retryAfter, LONGEST_S) : RETRY_S; // it may be a date
  }
}

const UNREACHED = "The proxy does not reach the server: check that specdec serve is running";
const ELSEWHERE = {
  401: "The proxy before the server wants you to log in: reload this page",
  403: "The proxy before the server does not allow this",
  404: "There is no specdec server at this address: check its path",
  413: "The question is longer than the proxy before the server allows: send less",
  502: UNREACHED,
  503: UNREACHED,
  504: "The proxy waited too long for the server: give it more time, or send less",
};

const KEY = "specdec.key";
let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // The browser allows no storage: the key is kept in memory.
}

/** Use an API key for all requests from now on. */
export function useKey(given) {
  key = given;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // As above.
  }
}

/** The object that the server has at a path. */
export async function get(path) {
  return (await request(path)).json();
}

/**
 * Yield the chunks of the answer to a chat; what the server does until it answers is a text. Throws `Refused`, or an
 * AbortError after `signal`.
 */
export async function* chat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, marks: true, return_progress: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const { comment, data } of events(response.body, signal)) {
    if (data === "[DONE]") return;
    const chunk = comment ?? JSON.parse(data);
    if (chunk.error) throw new Refused(0, chunk.error.message);
    yield chunk;
  }
  throw new Refused(0, "The connection was lost before the answer ended.");
}

/** Yield {data} of each server-sent event, and {comment} of each comment. */
async function* events(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const complete = (rest + value).split("\n\n");
      rest = complete.pop();
      for (const event of complete) {
        if (event.startsWith("data: ")) yield { data: event.slice(6) };
        else if (event.startsWith(": ")) yield { comment: event.slice(2) };
      }
    }
  } catch (error) {
    if (signal.aborted || error instanceof Refused) throw error;
    return; // the connection was lost
  } finally {
    reader.cancel().catch(() => {}); // it may have failed before
  }
}

async function request(path, options = {}) {
  const authorization = key ? { authorization: `Bearer ${key}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...options.headers, ...authorization } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server does not answer: check that specdec serve is running.");
  }
  if (!response.ok) throw await refusal(response);
  if (response.headers.get("content-type")?.startsWith("text/html")) {
    throw new Refused(0, "A web page came in place of an answer: a proxy may want you to log in. Reload this page.");
  }
  return response;
}

async function refusal(response) {
  const { status } = response;
  const retryAfter = response.headers.get("retry-after");
  try {
    return new Refused(status, (await response.json()).error.message, retryAfter);
  } catch {
    // It is that of a proxy, whose key, if it wants one, is not that of this server.
    return new Refused(status === 401 ? 0 : status, `${ELSEWHERE[status] ?? "The request failed"} (status ${status}).`, retryAfter);
  }
}
