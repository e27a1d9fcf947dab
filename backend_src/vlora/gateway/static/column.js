// One column: the choice of an adapter and a task, and the answer to the question.

import { parseAnswer } from "./boxes.js";
import { byId, element, showBars, showPairs } from "./dom.js";
import { automaticTask, taskOf, tasksOf } from "./tasks.js";

const MAX_BARS = 10;

export class Column {
  /** The text of the answer so far. */
  text = "";
  #models = [];
  #abort = null;
  #timer = 0;

  /** name: "a" or "b". onRetry: called to send the question again. */
  constructor(name, { stage, api, onChange, onRetry }) {
    Object.assign(this, { name, stage, api, onRetry });
    const copy = (id) => byId(id).content.firstElementChild.cloneNode(true);
    this.pick = copy("pick-template");
    this.root = copy("answer-template");
    this.parts = {};
    for (const part of ["adapter", "task", "facts"]) {
      this.parts[part] = this.pick.querySelector(`.${part}`);
    }
    for (const part of ["answer", "failure", "scores", "meta"]) {
      this.parts[part] = this.root.querySelector(`.${part}`);
    }
    for (const root of [this.pick, this.root]) root.classList.add(`column-${name}`);
    this.pick.querySelector("legend").textContent = `Model ${name.toUpperCase()}`;
    this.root.setAttribute("aria-label", `Answer ${name.toUpperCase()}`);
    this.parts.answer.setAttribute("aria-label", `Text of answer ${name.toUpperCase()}`);
    this.parts.adapter.addEventListener("change", () => {
      this.#fillTasks("");
      onChange();
    });
    this.parts.task.addEventListener("change", onChange);
    this.clear();
  }

  /** Name of the adapter, or of the base model, that is chosen. */
  get model() {
    return this.parts.adapter.value;
  }

  /** Task that is chosen, "" for the server's own choice. */
  get task() {
    return this.parts.task.value;
  }

  /** Task that a request gets. */
  get effectiveTask() {
    return this.task || automaticTask(this.#models.find(({ id }) => id === this.model));
  }

  get isBusy() {
    return this.#abort !== null;
  }

  /** Offer these models. The chosen model stays chosen, even if it is no longer known. */
  offer(models) {
    const chosen = this.model;
    this.#models = models;
    const options = models.map(({ id }) => element("option", { value: id }, id));
    if (chosen && !models.some(({ id }) => id === chosen)) {
      options.push(element("option", { value: chosen }, `${chosen} (no longer known)`));
    }
    this.parts.adapter.replaceChildren(...options);
    if (chosen) this.parts.adapter.value = chosen;
    this.#fillTasks(this.task);
  }

  /** Choose a model and a task. */
  choose(model, task) {
    this.parts.adapter.value = model;
    this.#fillTasks(task);
  }

  /** Remove the answer, and its boxes from the picture. */
  clear() {
    this.text = "";
    clearInterval(this.#timer);
    const { answer, failure, scores, meta } = this.parts;
    answer.replaceChildren(element("span", { className: "note" }, "The answer appears here."));
    failure.hidden = true;
    failure.replaceChildren();
    showBars(scores, []);
    showPairs(meta, []);
    this.stage.drawBoxes(this.name, []);
  }

  /** Send a request and show its answer. body: the request without model and task. */
  async ask(body) {
    this.stop();
    this.clear();
    const abort = new AbortController();
    this.#abort = abort;
    this.root.setAttribute("aria-busy", "true");
    this.parts.answer.replaceChildren();
    const start = performance.now();
    let first = 0;
    const onText = (text) => {
      first ||= performance.now() - start;
      if (this.#abort === abort) this.showText(text);
    };
    try {
      const answer = await this.api.ask(this.request(body), { signal: abort.signal, onText });
      const total = performance.now() - start;
      const times = [["First token", ms(first || total)], ["Total", ms(total)]];
      if (this.#abort === abort) this.showAnswer(answer, times);
      return answer;
    } catch (error) {
      if (this.#abort === abort) this.showError(error);
      return null;
    } finally {
      if (this.#abort === abort) {
        this.#abort = null;
        this.root.removeAttribute("aria-busy");
      }
    }
  }

  /** Return the whole body of a request to this column's model. */
  request(body) {
    return { ...body, model: this.model, ...(this.task ? { task: this.task } : {}) };
  }

  /** Cancel the running request. The part of its answer that has arrived stays. */
  stop() {
    if (!this.#abort) return;
    this.#abort.abort();
    this.#abort = null;
    this.root.removeAttribute("aria-busy");
    showPairs(this.parts.meta, [["Stopped", "by you"]]);
  }

  /** Show the text of an answer, which may be unfinished, and its boxes. */
  showText(text) {
    this.text = text;
    const { parts, boxes } = parseAnswer(text);
    const shown = parts.map((part) => element("span", { className: part.kind }, part.text));
    this.parts.answer.replaceChildren(...shown);
    this.stage.drawBoxes(this.name, boxes);
  }

  /** Show a whole answer. times: pairs for its list of facts. */
  showAnswer({ text, finish, usage, vlora }, times) {
    this.parts.failure.hidden = true;
    this.showText(text);
    if (!text.trim()) {
      this.parts.answer.replaceChildren(element("span", { className: "note" }, "(empty answer)"));
    }
    const scores = Object.entries(vlora.scores ?? {}).sort((one, two) => two[1] - one[1]);
    showBars(this.parts.scores, scores.slice(0, MAX_BARS));
    const modes = Object.entries(vlora.modes ?? {}).map(([mode, steps]) => `${mode} × ${steps}`);
    const tokens = usage ? [["Tokens", `${usage.prompt_tokens} + ${usage.completion_tokens}`]] : [];
    const cut = finish === "length" ? [["Ended by", "the token limit"]] : [];
    const pairs = [["Task", vlora.task ?? "?"], ...times, ...tokens, ["Mode", modes.join(", ")]];
    showPairs(this.parts.meta, [...pairs, ...cut]);
  }

  /** Show an error, with a button that asks again where that may help. */
  showError(error) {
    if (!this.text) this.parts.answer.replaceChildren();
    const { failure } = this.parts;
    failure.replaceChildren(
      element("strong", {}, error.title ?? "This page failed"),
      element("p", {}, error.message),
    );
    if (error.code) failure.append(element("code", {}, error.code));
    if (error.canRetry) {
      const button = element("button", { type: "button", onclick: () => this.onRetry(this) });
      failure.append(button);
      this.#countDown(button, error.retryAfter);
    }
    failure.hidden = false;
  }

  /** Enable a button after some seconds. Until then, the button shows the seconds left. */
  #countDown(button, seconds) {
    clearInterval(this.#timer);
    const show = () => {
      button.disabled = seconds > 0;
      button.textContent = seconds > 0 ? `Try again in ${seconds} s` : "Try again";
      if (seconds-- <= 0) clearInterval(this.#timer);
    };
    this.#timer = setInterval(show, 1000);
    show();
  }

  /** Offer the tasks of the chosen model: its own first. */
  #fillTasks(chosen) {
    const model = this.#models.find(({ id }) => id === this.model);
    const base = this.#models.find(({ parent }) => !parent);
    const own = model ? tasksOf(model) : [];
    const others = base ? tasksOf(base).filter((task) => !own.includes(task)) : [];
    const option = (task) => element("option", { value: task }, `${task} – ${taskOf(task).name}`);
    const group = (label, tasks) => element("optgroup", { label }, ...tasks.map(option));
    const automatic = element("option", { value: "" }, `automatic (${automaticTask(model)})`);
    const groups = model?.parent && others.length
      ? [group("Tasks of the adapter", own), group("Other tasks", others)]
      : own.map(option);
    this.parts.task.replaceChildren(automatic, ...groups);
    this.parts.task.value = [...own, ...others].includes(chosen) ? chosen : "";
    this.parts.facts.textContent = factsOf(model);
  }
}

/** Return one line about a model: the context of the base model, or facts about an adapter. */
function factsOf(model) {
  if (!model) return "";
  if (!model.parent) return `Base model, context of ${model.max_model_len} tokens`;
  const accuracy = Object.entries(model.accuracy ?? {}).map(
    ([name, share]) => `${name} ${(share * 100).toFixed(1)} %`,
  );
  const ranks = model.ranks?.length ? [`rank ${model.ranks.join(", ")}`] : [];
  const declared = accuracy.length ? [`declared accuracy ${accuracy.join(", ")}`] : [];
  const head = model.head_tasks?.length ? [`head for ${model.head_tasks.join(", ")}`] : [];
  return [...ranks, ...head, ...declared].join(" · ");
}

/** Return a time in milliseconds as text. */
const ms = (time) => `${Math.round(time)} ms`;
