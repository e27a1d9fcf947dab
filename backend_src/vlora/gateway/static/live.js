// The live mode sends frames of the camera as one stream of requests. Each request supersedes the
// earlier ones that still wait. The server drops those, so answers stay current.

import { byId, showBars, showMessage, showPairs } from "./dom.js";
import { frameOf } from "./media.js";
import { serverState } from "./metrics.js";

const CLIP_FRAMES = 6;
const KEPT_LATENCIES = 60;
const METRICS_MILLISECONDS = 1000;
const PAUSE_MILLISECONDS = 2000;
/** Maximum number of requests at a time. Browsers open at most six connections to a server; the
 * other two are for the metrics and the list of models.
 */
const MAX_RUNNING = 4;

export class Live {
  #timer = 0;
  #metricsTimer = 0;
  #abort = null;
  #frames = [];

  /** makeBody: returns the body of a request about a medium. */
  constructor({ api, stage, column, makeBody }) {
    Object.assign(this, { api, stage, column, makeBody });
    byId("live-start").addEventListener("click", () => this.start());
    byId("live-stop").addEventListener("click", () => this.stop());
    byId("live-rate").addEventListener("change", () => this.#schedule());
    this.#reset();
  }

  /** Switch on the camera, and send its frames until `stop` is called. */
  async start() {
    showMessage(byId("live-error"), "");
    if (!this.stage.video && !(await this.stage.film())) {
      showMessage(byId("live-error"), byId("picture-error").textContent);
      return;
    }
    this.stop();
    this.#reset();
    this.column.clear();
    this.#abort = new AbortController();
    this.#schedule();
    this.#readMetrics();
    byId("live-start").disabled = true;
    byId("live-stop").disabled = false;
  }

  /** Send no more frames, and cancel the running requests. The last answer and the figures stay. */
  stop() {
    clearInterval(this.#timer);
    clearTimeout(this.#metricsTimer);
    this.#abort?.abort();
    this.#abort = null;
    byId("live-start").disabled = false;
    byId("live-stop").disabled = true;
  }

  /** Stop if the camera is off. */
  pictureChanged() {
    if (!this.stage.video) this.stop();
  }

  #reset() {
    const bytes = crypto.getRandomValues(new Uint8Array(16));
    this.stream = `playground-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
    this.counts = { sent: 0, answered: 0, dropped: 0, skipped: 0, failed: 0 };
    this.latencies = [];
    this.shown = 0;
    this.running = 0;
    this.pausedUntil = 0;
    this.#frames = [];
    this.server = null;
    this.#show();
    showPairs(byId("live-server"), []);
    showBars(byId("live-modes"), []);
  }

  #schedule() {
    clearInterval(this.#timer);
    if (!this.#abort) return;
    this.#timer = setInterval(() => this.#tick(), 1000 / Number(byId("live-rate").value));
  }

  /** Send what the camera shows now, or its last frames to the task `video`. */
  #tick() {
    if (performance.now() < this.pausedUntil) return;
    if (this.running >= MAX_RUNNING) {
      this.counts.skipped++;
      return;
    }
    const { video } = this.stage;
    const size = { width: video.videoWidth, height: video.videoHeight };
    this.#frames = [...this.#frames, frameOf(video)].slice(-CLIP_FRAMES);
    if (this.column.effectiveTask === "video") {
      if (this.#frames.length === CLIP_FRAMES) this.#send({ kind: "clip", urls: this.#frames, ...size });
    } else {
      this.#send({ kind: "image", urls: this.#frames.slice(-1), ...size });
    }
  }

  async #send(medium) {
    const abort = this.#abort;
    const counts = this.counts;
    const number = ++counts.sent;
    const body = { ...this.makeBody(medium), stream_id: this.stream, supersede: true };
    const start = performance.now();
    this.running++;
    try {
      const answer = await this.api.ask(this.column.request(body), { signal: abort.signal });
      if (abort.signal.aborted) return;
      counts.answered++;
      const latency = performance.now() - start;
      this.latencies = [...this.latencies, latency].slice(-KEPT_LATENCIES);
      if (number > this.shown) {
        this.shown = number;
        this.column.showAnswer(answer, [["Latency", `${Math.round(latency)} ms`]]);
      }
    } catch (error) {
      if (abort.signal.aborted) return;
      if (error.code === "CANCELLED") {
        counts.dropped++;
      } else {
        counts.failed++;
        this.column.showError(error);
        this.pausedUntil = performance.now() + Math.max(PAUSE_MILLISECONDS, (error.retryAfter ?? 0) * 1000);
      }
    } finally {
      if (counts === this.counts) {
        this.running--;
        this.#show();
      }
    }
  }

  #show() {
    const { sent, answered, dropped, skipped, failed } = this.counts;
    showPairs(byId("live-frames"), [
      ["Sent", sent],
      ["Answered", answered],
      ["Dropped (superseded)", dropped],
      ["Not sent (busy)", skipped],
      ["Failed", failed],
    ]);
    const sorted = [...this.latencies].sort((one, two) => one - two);
    const at = (share) => (sorted.length ? Math.round(sorted[Math.floor(share * (sorted.length - 1))]) : "–");
    const last = this.latencies.length ? Math.round(this.latencies.at(-1)) : "–";
    showPairs(byId("live-latency"), [["Last", last], ["Median", at(0.5)], ["95th percentile", at(0.95)]]);
    const highest = Math.max(1, ...this.latencies);
    const points = this.latencies.map(
      (latency, i) => `${(i * 300) / (KEPT_LATENCIES - 1)},${(46 - (latency / highest) * 44).toFixed(1)}`,
    );
    byId("spark-line").setAttribute("points", points.join(" "));
  }

  async #readMetrics() {
    const abort = this.#abort;
    try {
      const state = serverState(await this.api.metrics());
      if (abort !== this.#abort) return;
      this.#showServer(state);
    } catch (error) {
      if (abort !== this.#abort) return;
      showPairs(byId("live-server"), [["Metrics", error.title ?? error.message]]);
    }
    this.#metricsTimer = setTimeout(() => this.#readMetrics(), METRICS_MILLISECONDS);
  }

  #showServer(state) {
    if (!state) {
      showPairs(byId("live-server"), [["Metrics", "the gateway has no metrics of the server"]]);
      return;
    }
    const before = this.server ?? state;
    const steps = Object.entries(state.modes).map(([mode, count]) => [mode, count - (before.modes[mode] ?? 0)]);
    const all = steps.reduce((sum, [, count]) => sum + count, 0);
    this.firstSuperseded = this.server ? this.firstSuperseded : state.superseded;
    this.server = state;
    showPairs(byId("live-server"), [
      ["Mode of the last step", state.mode],
      ["Requests waiting", state.waiting],
      ["Requests running", state.running],
      ["Superseded, all clients", state.superseded - this.firstSuperseded],
      ["Adapters loaded", state.adapters || "none"],
    ]);
    showBars(byId("live-modes"), steps.map(([mode, count]) => [mode, all ? count / all : 0]));
  }
}
