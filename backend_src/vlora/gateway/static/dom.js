// Helpers for building elements. Text is always set as text, never as markup.

/** Return a new element. properties: its properties, or `class` and `aria-…` attributes. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Return the element with this id. */
export const byId = (id) => document.getElementById(id);

/** Show a message in an element that is hidden while it is empty. */
export function showMessage(target, text) {
  target.textContent = text;
  target.hidden = !text;
}

/** Show the state of the connection: "ok", "wait" or "bad". */
export function showStatus(state, text) {
  const status = byId("status");
  if (status.textContent === text) return;
  status.dataset.state = state;
  status.textContent = text;
}

/** Fill a <dl> with pairs of a name and a value. */
export function showPairs(list, pairs) {
  const rows = pairs.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value))),
  );
  list.replaceChildren(...rows);
}

/** Fill a list with one bar per entry. entries: [label, share from 0 to 1], shown in percent. */
export function showBars(list, entries) {
  const rows = entries.map(([label, share]) => {
    const bar = element("span", { className: "bar-fill" });
    bar.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
    return element(
      "li",
      {},
      element("span", { className: "bar-label", title: label }, label),
      element("span", { className: "bar-track", "aria-hidden": "true" }, bar),
      element("span", { className: "bar-value" }, `${(share * 100).toFixed(1)} %`),
    );
  });
  list.replaceChildren(...rows);
  list.hidden = !rows.length;
}
