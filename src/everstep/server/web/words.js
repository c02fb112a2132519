// Words, letters and colours: one table each, used by every view.

export const NODE_STATES = {
  up: { mark: "✓", colour: "--up", good: true },
  silent: { mark: "?", colour: "--silent" },
  draining: { mark: "↓", colour: "--draining" },
  isolated: { mark: "!", colour: "--isolated" },
  lemon: { mark: "L", colour: "--lemon" },
  gone: { mark: "✕", colour: "--gone" },
  left: { mark: "–", colour: "--left" },
};

export const OPS = {
  F: { words: "forward", colour: "#0072b2" },
  B: { words: "backward", colour: "#d55e00" },
  I: { words: "input gradient", colour: "#e69f00" },
  W: { words: "weight gradient", colour: "#009e73" },
  R: { words: "reduce", colour: "#cc79a7" },
  U: { words: "update", colour: "#8458b3" },
};

const PARCELS = { A: "activation", G: "gradient", P: "part", S: "sum", H: "sum held", T: "tied sum", N: "news", C: "copy of the sum", J: "feed" };
const PARCEL = /^([AGPSHTNCJ])\[(\d+) stage (\d+) ([^\]]*)/;

// What a worker waits for, from its beacon's words: G[23 stage 0 0.3] is the gradient of microbatch 0.3.
export function awaited(doing) {
  const [, what, , stage, detail] = PARCEL.exec(doing) ?? [];
  if (!what) return `waits: ${doing}`;
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
const known = new Map(); // asking the browser for a colour has it work out all styles first
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

// A table's rows by key: a row stays the same element while its cells change, so focus and selection stay too.
// `cells` gives for each item a list of [what it says, how it is made]; made anew only where it says another thing.
export function fillTable(body, items, key, cells) {
  const before = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const rows = items.map((item, index) => {
    const name = String(key(item));
    const row = before.get(name) ?? element("tr", { "data-key": name });
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

const ORDERS = {
  StartProcess: "start", KillProcess: "end", OpenTask: "open", CloseTask: "close", TellWorker: "tell",
  KeepOnly: "keep only its workers on", FindCheckpoints: "look for checkpoints on",
};

// One decision in words; `times` of the same kind for the same reason are one line.
export function decision(told, times) {
  const more = times > 1 ? ` (and ${times - 1} more like it)` : "";
  switch (told.kind) {
    case "NodeChanged": return `node ${told.node} is ${told.state}${more}`;
    case "TaskEnded": return `task ${told.task} is ${told.state}`;
    case "IncidentClosed": return `incident ${told.incident} is closed`;
    case "Think": return `task ${told.task}: the rest of the step is scheduled anew${more}`;
    case "ChooseAssignment": return "the planner is asked who gets which slots";
    case "Dispatch": {
      const what = ORDERS[told.order] ?? told.order;
      const who = told.worker ? `${told.task} ${told.worker}` : told.task;
      return `${what} ${who ? `${who} on ` : ""}${told.node}${more}`;
    }
    default: return told.kind;
  }
}
