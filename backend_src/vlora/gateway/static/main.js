// The playground: connects the picture, the questions, the live mode and the list of models.

import { Api } from "./api.js";
import { Column } from "./column.js";
import { byId, showStatus } from "./dom.js";
import { loadExamples, showExamples } from "./gallery.js";
import { Live } from "./live.js";
import { messagePart } from "./media.js";
import { Stage } from "./stage.js";
import { readTasks, taskOf } from "./tasks.js";

/** Interval of reading the list of models, and of trying to reach a server that is gone. */
const REFRESH_MILLISECONDS = 10_000;
const RECONNECT_MILLISECONDS = 2_000;

const api = new Api();
const stage = new Stage(() => {
  for (const column of columns) {
    column.stop();
    column.clear();
  }
  live.pictureChanged();
});
const columns = ["a", "b"].map(
  (name) => new Column(name, { stage, api, onChange: showTask, onRetry: (column) => ask([column]) }),
);
const live = new Live({ api, stage, column: columns[0], makeBody });
let models = [];
let examples = [];
let refreshTimer = 0;

/** Return the mode that is chosen: "ask", "compare" or "live". */
const mode = () => document.querySelector("input[name=mode]:checked").value;

/** Return the columns that answer in this mode. */
const active = () => (mode() === "compare" ? columns : columns.slice(0, 1));

/** Return the body of a request, without model and task, about this medium. */
function makeBody(medium) {
  const content = [{ type: "text", text: byId("question").value }];
  if (medium) content.unshift(messagePart(medium));
  const body = { messages: [{ role: "user", content }] };
  const temperature = byId("temperature").valueAsNumber;
  const tokens = byId("max-tokens").valueAsNumber;
  const choices = byId("choices").value.split("\n").map((line) => line.trim()).filter(Boolean);
  if (!Number.isNaN(temperature)) body.temperature = temperature;
  if (!Number.isNaN(tokens)) body.max_tokens = tokens;
  if (choices.length) body.choices = choices;
  return body;
}

/** Send the question to these columns. */
async function ask(asked) {
  byId("stop").disabled = false;
  const body = makeBody(stage.medium);
  const answers = await Promise.all(asked.map((column) => column.ask(body)));
  byId("stop").disabled = !columns.some((column) => column.isBusy);
  if (answers.includes(null)) refresh();
  const said = asked.map((column, i) => answers[i] && `${column.model}: ${answers[i].text}`);
  byId("announcer").textContent = said.filter(Boolean).join(". ");
}

function stop() {
  for (const column of columns) column.stop();
  byId("stop").disabled = true;
}

/** Label the question for the task of the first column. */
function showTask() {
  const { label, hint } = taskOf(columns[0].effectiveTask);
  byId("question-label").textContent = label;
  byId("question").placeholder = hint && `for example: ${hint}`;
}

function showMode() {
  live.stop();
  stop();
  for (const column of columns) column.clear();
  byId("picks").replaceChildren(...active().map(({ pick }) => pick));
  byId("answers").replaceChildren(...active().map(({ root }) => root));
  for (const id of ["picks", "answers"]) byId(id).classList.toggle("two", mode() === "compare");
  byId("ask-tools").hidden = mode() === "live";
  byId("live-tools").hidden = byId("live-panel").hidden = mode() !== "live";
}

/** Fill in an example and ask its question. */
async function chooseExample(entry, file) {
  stop();
  byId("question").value = entry.prompt;
  byId("choices").value = (entry.choices ?? []).join("\n");
  const base = models[0].id;
  columns[0].choose(entry.adapter ?? base, entry.task);
  columns[1].choose(base, entry.task);
  showTask();
  if ((await stage.load(file)) && mode() !== "live") ask(active());
}

/** Read the list of models, now and from time to time. */
async function refresh() {
  clearTimeout(refreshTimer);
  let next = REFRESH_MILLISECONDS;
  try {
    const found = await api.models();
    if (JSON.stringify(found) !== JSON.stringify(models)) {
      models = found;
      readTasks(models);
      for (const column of columns) column.offer(models);
      showExamples(examples, models, chooseExample);
      showTask();
    }
    const count = models.length - 1;
    showStatus("ok", `Connected, ${count} ${count === 1 ? "adapter" : "adapters"}`);
  } catch (error) {
    if (error.code === "UNAUTHENTICATED") {
      showStatus("bad", api.key ? "The API key is not known" : "Enter an API key");
      byId("key-panel").open = true;
      return;
    }
    showStatus("bad", `${error.title ?? error.message}; trying again`);
    next = Math.max(RECONNECT_MILLISECONDS, (error.retryAfter ?? 0) * 1000);
  }
  refreshTimer = setTimeout(refresh, next);
}

byId("modes").addEventListener("change", showMode);
byId("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (mode() !== "live") ask(active());
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    byId("ask-form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
byId("stop").addEventListener("click", stop);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  api.key = byId("key").value.trim();
  byId("key").value = "";
  byId("key-panel").open = false;
  refresh();
});

showMode();
examples = await loadExamples();
await refresh();
