// The example gallery: the samples of the demo, as far as the server knows their adapters.

import { byId, element } from "./dom.js";

const FOLDER = "examples/";

/** Return the entries of the gallery: {name, images or video, task, adapter, prompt, choices}. */
export async function loadExamples() {
  try {
    const response = await fetch(`${FOLDER}index.json`);
    return response.ok ? await response.json() : [];
  } catch {
    return [];
  }
}

/** Show the examples whose adapter is known. onChoose: called with an entry and its file. */
export function showExamples(entries, models, onChoose) {
  const known = new Set(models.map(({ id }) => id));
  const usable = entries.filter(({ adapter }) => adapter === null || known.has(adapter));
  const items = usable.map((entry) => {
    const source = FOLDER + (entry.video ?? entry.images[0]);
    const picture = entry.video
      ? element("video", { src: source, muted: true, preload: "metadata", "aria-hidden": "true" })
      : element("img", { src: source, alt: "", loading: "lazy" });
    const words = [entry.task, entry.adapter ?? "base", entry.prompt].filter(Boolean).join(", ");
    const button = element(
      "button",
      { type: "button", title: words, onclick: () => choose(entry, source, onChoose) },
      picture,
      element("span", {}, entry.name),
    );
    button.dataset.example = entry.name;
    return element("li", {}, button);
  });
  byId("examples").replaceChildren(...items);
  byId("examples-panel").hidden = !items.length;
}

async function choose(entry, source, onChoose) {
  let blob;
  try {
    blob = await (await fetch(source)).blob();
  } catch {
    return;
  }
  onChoose(entry, new File([blob], source.slice(FOLDER.length), { type: blob.type }));
}
