// The page of `vlora watch`: reads the state once a second, and changes only the cards that differ.
// Answers of models and names of cameras are set as text, never as markup.

import { byId, element, showPairs, showStatus } from "./dom.js";

const MILLISECONDS = 1000;
const RETRY_MILLISECONDS = 3000;

/** Cards by list and key, each {root, shown}: its element, and the JSON of what it shows. */
const cards = { camera: new Map(), event: new Map() };

const seconds = (value) => (value === null ? "–" : `${value.toFixed(1)} s`);
const clock = (value) => new Date(value * 1000).toLocaleString();

/** Show a picture, or nothing if there is none. */
function showPicture(image, url, alt) {
  image.hidden = !url;
  image.alt = alt;
  if (url) image.src = url;
  else image.removeAttribute("src");
}

function fillCamera(root, camera) {
  const query = new URLSearchParams({ camera: camera.name, time: camera.answered ?? "" });
  showPicture(root.querySelector("img"), camera.picture && `picture?${query}`, `Last picture of ${camera.name}`);
  root.querySelector(".name").textContent = camera.name;
  const state = root.querySelector(".state");
  state.textContent = state.dataset.state = camera.overloaded ? "overloaded" : camera.state;
  root.querySelector(".detail").textContent = camera.detail;
  root.querySelector(".text").textContent = camera.answer;
  showPairs(root.querySelector(".meta"), [
    ["Lag", seconds(camera.lag)],
    ["Chunks", camera.chunks],
    ["Dropped", camera.drops],
    ["Unchanged", `${(camera.skipped * 100).toFixed(0)} %`],
    ["Reconnections", camera.reconnections],
    ["Gaps", camera.gaps],
    ["Errors", camera.errors],
    ["Damaged frames", camera.damaged],
    ["Events", camera.events],
    ["Adapter", camera.adapter || "none"],
  ]);
}

function fillEvent(root, event) {
  const file = (name) => name && `events/${encodeURIComponent(name)}`;
  showPicture(root.querySelector("img"), file(event.picture), `Picture of ${event.rule}`);
  root.querySelector(".name").textContent = `${event.camera}: ${event.rule}`;
  const state = root.querySelector(".state");
  state.dataset.state = event.end === null ? "open" : "ended";
  state.textContent = event.end === null ? "now" : `for ${seconds(event.end - event.begin)}`;
  root.querySelector(".text").textContent = event.text;
  showPairs(root.querySelector(".meta"), [
    ["Begin", clock(event.begin)],
    ["Score", event.score.toFixed(2)],
    ["Adapter", event.adapter || "none"],
  ]);
  const video = root.querySelector("video");
  video.hidden = !event.clip;
  video.setAttribute("aria-label", `Clip of ${event.rule}`);
  const source = file(event.clip) ?? "";
  if (video.getAttribute("src") !== source) {
    if (source) video.src = source;
    else video.removeAttribute("src");
  }
}

/** Show one card per entry, in their order. A card whose entry is the same stays as it is. */
function showCards(kind, entries, key, fill) {
  const known = cards[kind];
  const before = new Map(known);
  known.clear();
  for (const entry of entries) {
    const card = before.get(entry[key]) ?? {
      root: byId(`${kind}-template`).content.firstElementChild.cloneNode(true),
    };
    const shown = JSON.stringify(entry);
    if (card.shown !== shown) fill(card.root, entry);
    card.shown = shown;
    known.set(entry[key], card);
  }
  const list = byId(`${kind}s`);
  const roots = [...known.values()].map(({ root }) => root);
  // Moving a card would stop its video.
  if (roots.length !== list.children.length || roots.some((root, i) => root !== list.children[i])) {
    for (const child of [...list.children]) if (!roots.includes(child)) child.remove();
    roots.forEach((root, i) => {
      if (list.children[i] !== root) list.insertBefore(root, list.children[i] ?? null);
    });
  }
}

function showSinks(sinks) {
  const away = Object.entries(sinks).filter(([, sink]) => sink.away);
  const parts = away.map(([name, sink]) => element("span", {}, `${name}: ${sink.away}, ${sink.queued} waiting. `));
  byId("sinks").replaceChildren(...parts);
}

async function refresh() {
  let next = MILLISECONDS;
  try {
    const response = await fetch("state");
    if (!response.ok) throw new Error(`the page's server answers ${response.status}`);
    const { cameras, events, sinks } = await response.json();
    showCards("camera", cameras, "name", fillCamera);
    showCards("event", events, "id", fillEvent);
    byId("no-events").hidden = events.length > 0;
    showSinks(sinks);
    const running = cameras.filter(({ state }) => state === "running").length;
    const late = cameras.filter(({ overloaded }) => overloaded).length;
    const text = `${running} of ${cameras.length} cameras running${late ? `, ${late} overloaded` : ""}`;
    showStatus(running === cameras.length && !late ? "ok" : "wait", text);
  } catch (error) {
    showStatus("bad", "No connection to vlora watch; trying again");
    next = RETRY_MILLISECONDS;
  }
  setTimeout(refresh, next);
}

refresh();
