// Letters, colours and small parts of every view. The words are the coordinator's (tables.js).

import { PARCELS } from "./tables.js";

export { INCIDENT_COLUMNS, MOST_SEVERE_FIRST, NODE_STATES, OPS, PLACES, TASK_COLUMNS } from "./tables.js";

const PARCEL = new RegExp(`^([${Object.keys(PARCELS).join("")}])\\[(\\d+) stage (\\d+) ([^\\]]*)`);

// What a worker waits for, from its beacon: G[23 stage 0 0.3] is the gradient of microbatch 0.3.
export function awaited(doing) {
  const [, what, , stage, detail] = PARCEL.exec(doing) ?? [];
  if (!what) return `waits for ${doing}`;
  if (what === "N") return `waits for ${PARCELS[what]} of stage ${stage}`;
  if (detail.includes(".")) return `waits for ${PARCELS[what]} ${detail}`;
  return `waits for ${PARCELS[what]} of replica ${detail.split(">")[0]}`;
}

export const MOMENTS = {
  evidence: { mark: "◆", colour: "--silent" },
  verdict: { mark: "▲", colour: "--isolated" },
  remedy: { mark: "●", colour: "--up" },
  planned: { mark: "■", colour: "--draining" },
  resumed: { mark: "✓", colour: "--good" },
};

const TASK_COLOURS = ["#00805d", "#a8508a", "#8a6d00", "#005a8c", "#6a4ca3", "#c65102", "#4d5a66", "#7a3b12"];
const GOOD = new Set(["up", "running", "finished"]);
const BAD = new Set(["failed", "gone", "isolated", "lemon", "silent"]);

export const taskColour = (index) => TASK_COLOURS[index % TASK_COLOURS.length];
export const taskLetter = (index) => String.fromCharCode(65 + (index % 26));
export const tone = (state) => (GOOD.has(state) ? "good" : BAD.has(state) ? "bad" : "mid");
const known = new Map(); // a lookup makes the browser compute all styles
export const colour = (name) => {
  if (!name.startsWith("--")) return name;
  if (!known.has(name)) known.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return known.get(name);
};
export const forgetColours = () => known.clear();

export const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });

export function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export const short = (value, digits = 4) => (value == null ? "–" : Number(value.toPrecision(digits)).toString());

export const percent = (part) => (part == null ? "–" : `${(100 * part).toFixed(1)} %`);

// With all its digits, so that a column of them does not jump: 5.5110.
export const loss = (value, digits = 5) => (value == null || Math.abs(value) >= 10 ** digits ? short(value, digits) : value.toPrecision(digits));

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "colour") made.style.setProperty("--c", value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

// Only what is different is written: the browser then lays out and paints no more than that.
export function write(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

// A canvas of this size on this screen, and its brush.
export function sized(canvas, width, height, keep = false) {
  const scale = window.devicePixelRatio || 1;
  const across = Math.round(width * scale), down = Math.round(height * scale);
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
    canvas.style.height = `${height}px`;
  }
  const brush = canvas.getContext("2d");
  brush.setTransform(scale, 0, 0, scale, 0, 0);
  if (!keep) brush.clearRect(0, 0, width, height);
  return brush;
}

// [value, what it is, its tone, where a click leads] each.
export function figures(place, list) {
  while (place.childElementCount > list.length) place.lastChild.remove();
  list.forEach(([value, what, mood = "", href = null], index) => {
    const made = place.children[index] ?? place.appendChild(element("div", {}, element("b", {}), element("span", {})));
    const look = `figure ${mood}`.trim();
    if (made.className !== look) made.className = look;
    const [big, small] = made.children;
    if (!href) write(big, value);
    else if (big.textContent !== value || !big.firstElementChild) big.replaceChildren(element("a", { href }, value));
    write(small, what);
  });
}

// The shape of a curve, as a small area; null where a value is not a number.
export function sparkline(values) {
  const known = values.filter((value) => value != null), low = Math.min(...known), span = Math.max(...known) - low || 1;
  const percent = (part) => `${(100 * part).toFixed(1)}%`;
  const points = values.flatMap((value, index) => (value == null ? [] : [`${percent(index / (values.length - 1))} ${percent(0.9 * (1 - (value - low) / span))}`]));
  const made = element("span", { class: "spark", "aria-hidden": "true" });
  made.style.clipPath = `polygon(0 100%, ${points.join(", ")}, 100% 100%)`;
  return made;
}

// A click anywhere in a row opens what its link opens, unless text is being selected.
export function openRow(event) {
  const link = event.currentTarget.querySelector("a[href]");
  if (!link || event.target.closest("a, button, input") || getSelection().toString()) return;
  event.currentTarget.ownerDocument.location.hash = link.getAttribute("href");
}

// A table's rows by key: a row stays the same element while its cells change, so focus and selection stay too.
// `cells` gives for each item a list of [what it says, how it is made]; rebuilt only where it says another thing.
export function fillTable(body, items, key, cells) {
  const before = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const rows = items.map((item, index) => {
    const name = String(key(item));
    const row = before.get(name) ?? element("tr", { "data-key": name, onclick: openRow });
    row.said ??= [];
    cells(item, index).forEach(([says, make, attributes = {}], column) => {
      const text = String(says);
      if (row.said[column] === text) return;
      row.said[column] = text;
      const made = element("td", attributes, make ? make() : text);
      if (row.children[column]) row.children[column].replaceWith(made); else row.append(made);
    });
    return row;
  });
  if (rows.length !== body.children.length || rows.some((row, index) => body.children[index] !== row)) body.replaceChildren(...rows);
}

export const stateBadge = (state) => element("span", { class: `state ${tone(state)}` }, state);

// One decision in words; `times` of the same kind for the same reason are one line.
// The list is in the order of the first ones.
export const decision = (row, times, last = row.at) =>
  (times === 1 ? row.text : `${row.text} (and ${times - 1} more like it${clock(last) === clock(row.at) ? "" : `, the last at ${clock(last)}`})`);

// An incident in a few words: of a death the coordinator says how, the workers say who.
export function happened({ what, workers }) {
  return workers.length && !what.includes(workers[0]) && !what.startsWith("node ") ? `worker${workers.length > 1 ? "s" : ""} ${workers.join(", ")}: ${what}` : what;
}

export const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

export function headings(table, columns) {
  table.tHead.replaceChildren(element("tr", {}, ...columns.map(([words, number]) => element("th", { class: number ? "num" : null, scope: "col" }, words))));
}
