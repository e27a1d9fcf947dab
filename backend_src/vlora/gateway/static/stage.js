// The picture panel: the picture, the clip or the camera, with the boxes of the answers drawn on it.

import { percent } from "./boxes.js";
import { byId, element, showMessage } from "./dom.js";
import { closeCamera, openCamera, pictureOf, readFile } from "./media.js";

export class Stage {
  /** The medium that is shown, null without one. */
  medium = null;
  /** The video element of the camera, null while it is off. */
  video = null;
  #layer = null;
  #boxes = new Map();
  #reads = 0;

  /** onChange: called when another medium, or none, is shown. */
  constructor(onChange) {
    this.onChange = onChange;
    const stage = byId("stage");
    byId("file").addEventListener("change", (event) => {
      if (event.target.files.length) this.load(event.target.files[0]);
      event.target.value = "";
    });
    for (const name of ["dragenter", "dragover"]) {
      document.addEventListener(name, (event) => {
        event.preventDefault();
        stage.classList.add("over");
      });
    }
    document.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) stage.classList.remove("over");
    });
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      stage.classList.remove("over");
      if (event.dataTransfer.files.length) this.load(event.dataTransfer.files[0]);
    });
    document.addEventListener("paste", (event) => {
      const [file] = event.clipboardData?.files ?? [];
      if (!file) return;
      event.preventDefault();
      this.load(file);
    });
    byId("camera").addEventListener("click", () => (this.video ? this.clear() : this.film()));
    byId("snap").addEventListener("click", () => {
      const medium = pictureOf(this.video);
      this.show(medium);
      byId("camera").focus();
    });
    byId("clear").addEventListener("click", () => {
      this.clear();
      byId("camera").focus();
    });
  }

  /** Show the picture or the clip in a file. Return whether that worked. */
  async load(file) {
    const read = ++this.#reads;
    try {
      const medium = await readFile(file);
      if (read !== this.#reads) return false;
      this.show(medium);
      return true;
    } catch (error) {
      if (read === this.#reads) showMessage(byId("picture-error"), error.message);
      return false;
    }
  }

  /** Show a medium. */
  show(medium) {
    this.#reset();
    this.medium = medium;
    const figures = medium.urls.map((url, i) => {
      const alt = medium.kind === "clip" ? `Frame ${i + 1}` : `Picture ${medium.name}`;
      return this.#figure(element("img", { src: url, alt }), medium.width / medium.height);
    });
    byId("figures").classList.toggle("clip", medium.kind === "clip");
    byId("figures").replaceChildren(...figures);
    const what = medium.kind === "clip" ? `${medium.urls.length} frames of ` : "";
    byId("about").textContent = `${what}${medium.name}, ${medium.width} × ${medium.height}`;
    this.#changed();
  }

  /** Show the camera. Return whether that worked. */
  async film() {
    const read = ++this.#reads;
    let video;
    try {
      video = await openCamera();
    } catch (error) {
      showMessage(byId("picture-error"), error.message);
      return false;
    }
    if (read !== this.#reads) {
      closeCamera(video);
      return false;
    }
    this.#reset();
    this.video = video;
    video.setAttribute("aria-label", "Camera");
    byId("figures").classList.remove("clip");
    byId("figures").replaceChildren(this.#figure(video, video.videoWidth / video.videoHeight));
    byId("about").textContent = `Camera, ${video.videoWidth} × ${video.videoHeight}`;
    this.#changed();
    return true;
  }

  /** Show nothing. */
  clear() {
    this.#reset();
    this.#changed();
  }

  /** Draw the boxes of one column in place of its earlier ones. column: "a" or "b". */
  drawBoxes(column, boxes) {
    this.#boxes.set(column, boxes);
    if (!this.#layer) return;
    const drawn = [...this.#boxes].flatMap(([name, found]) =>
      found.map(({ label, grid }) => {
        const box = element("div", { className: `box box-${name}` });
        const [left, top, width, height] = percent(grid);
        Object.assign(box.style, {
          left: `${left}%`,
          top: `${top}%`,
          width: `${width}%`,
          height: `${height}%`,
        });
        box.classList.toggle("low", top < 8);
        box.classList.toggle("late", left > 50);
        if (label) box.append(element("span", {}, label));
        return box;
      }),
    );
    this.#layer.replaceChildren(...drawn);
  }

  #figure(content, ratio) {
    this.#layer = element("div", { className: "layer", "aria-hidden": "true" });
    const figure = element("div", { className: "figure" }, content, this.#layer);
    figure.style.setProperty("--ratio", String(ratio || 1));
    return figure;
  }

  #reset() {
    this.#reads++;
    if (this.video) closeCamera(this.video);
    this.video = null;
    this.medium = null;
    this.#layer = null;
    this.#boxes.clear();
    byId("figures").replaceChildren();
    byId("about").textContent = "";
    showMessage(byId("picture-error"), "");
  }

  #changed() {
    const shown = Boolean(this.video || this.medium);
    byId("empty").hidden = shown;
    byId("clear").disabled = !shown;
    byId("snap").hidden = !this.video;
    byId("camera").textContent = this.video ? "Camera off" : "Camera";
    this.onChange();
  }
}
