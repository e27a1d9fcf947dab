// The gateway's API: models, metrics, and answers that stream in as server-sent events.

const TITLES = {
  CANCELLED: "The request was cancelled",
  CUT: "The answer broke off",
  INTERNAL: "The server failed",
  INVALID_ARG: "The request is wrong",
  NETWORK: "No connection to the gateway",
  NOT_FOUND: "The adapter is not known",
  PERMISSION_DENIED: "Not allowed",
  RATE_LIMITED: "Too many requests",
  TOO_LARGE: "The picture is too large",
  UNAUTHENTICATED: "An API key is needed",
  UNAVAILABLE: "The server is not available",
  UNSUPPORTED: "Not supported",
};
const RETRYABLE = new Set(["CUT", "INTERNAL", "NETWORK", "RATE_LIMITED", "TIMEOUT", "UNAVAILABLE"]);

/** An error of a request. code: as in docs/gateway.md, or NETWORK or CUT of this page. */
export class RequestError extends Error {
  constructor(code, message, retryAfter = 0) {
    super(message);
    this.code = code;
    this.retryAfter = retryAfter;
  }

  get title() {
    return TITLES[this.code] ?? "The request failed";
  }

  get canRetry() {
    return RETRYABLE.has(this.code);
  }
}

/** Return the error of a response whose status is not 2xx. */
async function errorOf(response) {
  const retryAfter = Number(response.headers.get("retry-after")) || 0;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // A proxy may answer with a page of its own; the status says enough then.
  }
  const code = error.code ?? (response.status >= 500 ? "UNAVAILABLE" : "INVALID_ARG");
  return new RequestError(code, error.message ?? `status ${response.status}`, retryAfter);
}

/** Yield the data of each event in a stream of server-sent events. */
export async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value.replaceAll("\r", "");
      for (let end; (end = buffer.indexOf("\n\n")) >= 0; buffer = buffer.slice(end + 2)) {
        const lines = buffer.slice(0, end).split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export class Api {
  /** key: sent as a bearer token if it is not empty. Held here only. */
  key = "";

  /** Return the models that are known now: the base model first, then the adapters. */
  async models() {
    return (await (await this.#fetch("/v1/models")).json()).data;
  }

  /** Return the text of all metrics. */
  async metrics() {
    return (await this.#fetch("/metrics")).text();
  }

  /** Send a request, and call `onText` with the whole text so far whenever more has arrived.
   *
   * Return {text, finish, usage, vlora}. Throw a RequestError, or an AbortError by `signal`.
   */
  async ask(body, { signal, onText = () => {} } = {}) {
    const whole = { ...body, stream: true, stream_options: { include_usage: true } };
    const response = await this.#fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(whole),
      signal,
    });
    const answer = { text: "", finish: null, usage: null, vlora: {} };
    try {
      for await (const data of readEvents(response.body)) {
        if (data === "[DONE]") return answer;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new RequestError(chunk.error.code, chunk.error.message);
        answer.usage = chunk.usage ?? answer.usage;
        answer.vlora = chunk.vlora ?? answer.vlora;
        for (const choice of chunk.choices) {
          answer.finish = choice.finish_reason ?? answer.finish;
          if (choice.delta.content) {
            answer.text += choice.delta.content;
            onText(answer.text);
          }
        }
      }
    } catch (error) {
      if (error instanceof RequestError || error.name === "AbortError") throw error;
      throw new RequestError("CUT", "the connection was lost before the end of the answer");
    }
    throw new RequestError("CUT", "the gateway ended the stream before the end of the answer");
  }

  async #fetch(path, options = {}) {
    const headers = { ...options.headers };
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new RequestError("NETWORK", "the gateway does not answer; it may be restarting");
    }
    if (!response.ok) throw await errorOf(response);
    return response;
  }
}
