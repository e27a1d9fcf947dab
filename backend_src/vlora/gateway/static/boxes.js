// Boxes in answers: <ref>name</ref><box>(x1,y1),(x2,y2)</box>, on a grid of 0 to 999, and the same
// with Qwen2-VL's tags, on a grid of 0 to 1000. Boxes in JSON may be in pixels of a picture that only
// the server knows, so they are shown as text.
//
// The rules are those of the server's `vlora/vision/results.py`: all boxes after a name have that
// name, a box before any name has none, and what is malformed is left out.

const GRID = 1000;
const TAG = /<(\/?)(ref|box)>|<\|(object_ref|box)_(start|end)\|>/g;
const BOX = /^\s*\(\s*([0-9]{1,4})\s*,\s*([0-9]{1,4})\s*\)\s*,?\s*\(\s*([0-9]{1,4})\s*,\s*([0-9]{1,4})\s*\)\s*$/;

/** Return {parts, boxes} of an answer, which may be unfinished.
 *
 * parts: what to show, in order, each {kind: "text" | "ref" | "box", text}.
 * boxes: each {label, grid}; label is null without a name, grid is [left, top, right, bottom].
 */
export function parseAnswer(text) {
  const parts = [];
  const boxes = [];
  let label = null;
  let open = null;
  let shown = 0;
  const show = (kind, from, to) => {
    if (to > from) parts.push({ kind, text: text.slice(from, to) });
  };
  for (const tag of text.matchAll(TAG)) {
    const [whole, slash, papers, others, edge] = tag;
    const kind = (papers ?? others).replace("object_", "");
    const last = papers ? GRID - 1 : GRID;
    const end = tag.index + whole.length;
    const closes = slash || edge === "end";
    if (closes && (open?.kind !== kind || open.last !== last)) continue;
    if (!closes) {
      open = { kind, last, start: tag.index, end };
      if (kind === "ref") label = null;
      continue;
    }
    const body = text.slice(open.end, tag.index);
    const grid = kind === "box" ? parseGrid(body, last) : null;
    if (kind === "ref") label = body.trim() || null;
    else if (grid) boxes.push({ label, grid });
    if (kind === "ref" || grid) {
      show("text", shown, open.start);
      show(kind, open.end, tag.index);
      shown = end;
    }
    open = null;
  }
  // A tag that is still being written is not shown.
  const rest = text.slice(shown).replace(/<(\/?[a-z]{0,3}|\|[a-z_]{0,16}\|?)$/, "");
  show("text", shown, shown + rest.length);
  return { parts, boxes };
}

/** Return left, top, right, bottom on the grid; null for anything else. */
function parseGrid(body, last) {
  const found = BOX.exec(body);
  if (!found) return null;
  const [x1, y1, x2, y2] = found.slice(1).map(Number);
  if (Math.max(x1, y1, x2, y2) > last) return null;
  return [Math.min(x1, x2), Math.min(y1, y2), Math.max(x1, x2), Math.max(y1, y2)];
}

/** Return [left, top, width, height] of a box in percent of the picture. */
export function percent([left, top, right, bottom]) {
  return [left, top, right - left, bottom - top].map((value) => (value / GRID) * 100);
}
