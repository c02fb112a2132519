// Nodes and slots as one canvas: a tile a node, its state as a letter and a colour, its slots by task.
// A canvas and not elements, because a thousand nodes of eight slots are nine thousand of those.

import { NODE_STATES, clock, colour, decision, duration, element, figure, stateBadge, taskColour, taskLetter } from "./words.js";

const NEWS_SHOWN = 40;
const UNWELL_SHOWN = 16;
const GRAVEST = ["lemon", "isolated", "gone", "silent", "draining"];
const GAP = 4;

export class ClusterView {
  constructor(store, act) {
    this.store = store;
    this.act = act;
    this.canvas = document.getElementById("nodes");
    this.chosen = null;
    this.tiles = { columns: 1, width: 1, height: 1 };
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    document.getElementById("find").addEventListener("input", (event) => this.find(event.target.value));
    document.getElementById("node-legend").append(
      ...Object.entries(NODE_STATES).map(([name, { mark, colour }]) =>
        element("li", {}, element("i", { colour: `var(${colour})` }, mark), name)),
      element("li", {}, element("i", { colour: "var(--quiet)" }, "A"), "slot held by task A"),
    );
  }

  choose(name) {
    this.chosen = name;
    this.paint();
  }

  names() { return [...this.store.nodes.keys()]; }

  click(event) {
    const box = this.canvas.getBoundingClientRect();
    const { columns, width, height } = this.tiles;
    const column = Math.floor((event.clientX - box.left - GAP) / (width + GAP));
    const row = Math.floor((event.clientY - box.top - GAP) / (height + GAP));
    const name = column < columns ? this.names()[row * columns + column] : undefined;
    if (name !== undefined) this.choose(name);
  }

  key(event) {
    const names = this.names();
    const { columns } = this.tiles;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !names.length) return;
    event.preventDefault();
    const at = names.indexOf(this.chosen);
    this.choose(names[Math.max(0, Math.min(names.length - 1, at < 0 ? 0 : at + step))]);
  }

  find(text) {
    const hits = text ? this.names().filter((name) => name.toLowerCase().includes(text.toLowerCase())) : [];
    document.getElementById("found").textContent = text ? `${hits.length} found` : "";
    if (hits.length) this.choose(hits.find((name) => name === text) ?? hits[0]);
  }

  paint() {
    this.space = this.canvas.parentElement.clientWidth - 2; // asked before anything is written: no layout twice
    this.figures();
    this.grid();
    this.details();
    this.unwell();
    this.news();
  }

  figures() {
    const nodes = [...this.store.nodes.values()];
    const up = nodes.filter((node) => node.state === "up");
    const slots = nodes.filter((node) => !["gone", "left"].includes(node.state)).reduce((sum, node) => sum + node.slots, 0);
    const taken = nodes.reduce((sum, node) => sum + node.workers.length, 0);
    const running = [...this.store.tasks.values()].filter((task) => task.state === "running").length;
    document.getElementById("cluster-figures").replaceChildren(
      figure(`${up.length} / ${nodes.length}`, "nodes up"),
      figure(`${taken} / ${slots}`, "slots in use"),
      figure(String(nodes.filter((node) => node.state === "lemon").length), "lemons"),
      figure(`${running} / ${this.store.tasks.size}`, "tasks running"),
      figure(`${this.store.incidents.open.length} / ${this.store.incidents.total}`, "incidents open"),
    );
    document.getElementById("no-nodes").hidden = nodes.length > 0;
    this.canvas.hidden = nodes.length === 0;
  }

  measure(nodes, space) {
    const most = nodes.reduce((sum, node) => Math.max(sum, node.slots), 1);
    const big = nodes.length <= 60, middle = nodes.length <= 250;
    const slot = big ? 22 : middle ? 12 : 6, gap = big ? 4 : middle ? 2 : 1;
    const across = Math.min(most, big && space > 600 ? 8 : 4), down = Math.ceil(most / across);
    const head = big ? 24 : middle ? 15 : 0, side = big || middle ? 0 : 13;
    const inside = across * (slot + gap) + gap + side;
    const width = Math.min(space - 2 * GAP, Math.max(inside, big ? 104 : middle ? 58 : 22));
    const height = Math.max(head + down * (slot + gap) + gap, 14);
    const columns = Math.max(1, Math.floor((space - GAP) / (width + GAP)));
    return { big, middle, slot, gap, across, head, side, width, height, columns };
  }

  grid() {
    const nodes = [...this.store.nodes.values()];
    const space = this.space;
    const tiles = this.tiles = this.measure(nodes, space);
    const tall = Math.ceil(nodes.length / tiles.columns) * (tiles.height + GAP) + GAP;
    const shades = Object.fromEntries(Object.entries(NODE_STATES).map(([name, kind]) => [name, colour(kind.colour)]));
    const palette = { ...shades, card: colour("--card"), ink: colour("--ink"), free: colour("--free"), line: colour("--line"), accent: colour("--accent") };
    const order = new Map([...this.store.tasks.keys()].map((name, index) => [name, index]));
    const drawn = JSON.stringify([space, nodes.length, tiles, palette, [...order.keys()], window.devicePixelRatio]);
    const all = drawn !== this.drawn || this.store.renewed;
    const brush = sized(this.canvas, space, tall, !all);
    const touched = all ? null : new Set([...this.store.touched, this.chosen, this.outlined]);
    nodes.forEach((node, index) => {
      if (touched && !touched.has(node.node)) return;
      const x = GAP + (index % tiles.columns) * (tiles.width + GAP);
      const y = GAP + Math.floor(index / tiles.columns) * (tiles.height + GAP);
      if (touched) brush.clearRect(x - 3, y - 3, tiles.width + 6, tiles.height + 6);
      this.tile(brush, node, x, y, palette, order);
    });
    this.drawn = drawn;
    this.outlined = this.chosen;
    this.store.touched.clear();
    this.store.renewed = false;
  }

  tile(brush, node, x, y, palette, order) {
    const { big, middle, slot, gap, across, head, side, width, height } = this.tiles;
    const kind = NODE_STATES[node.state] ?? NODE_STATES.gone;
    brush.fillStyle = palette[node.state];
    if (head) {
      brush.fillRect(x, y, width, head - 2);
      brush.fillStyle = palette.card;
      brush.font = `600 ${big ? 13 : 10}px system-ui, sans-serif`;
      brush.textBaseline = "middle";
      brush.textAlign = "left";
      brush.fillText(fitted(brush, node.node, width - (big ? 26 : 16)), x + (big ? 7 : 3), y + head / 2);
      brush.textAlign = "right";
      brush.font = `700 ${big ? 14 : 10}px ui-monospace, monospace`;
      brush.fillText(kind.mark, x + width - (big ? 7 : 3), y + head / 2);
    } else {
      brush.fillRect(x, y, side, height);
      brush.fillStyle = palette.card;
      brush.font = "700 10px ui-monospace, monospace";
      brush.textBaseline = "middle";
      brush.textAlign = "center";
      brush.fillText(kind.mark, x + side / 2, y + height / 2);
    }
    brush.strokeStyle = palette.line;
    brush.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
    const held = new Map(node.workers.map((worker) => [worker.slot, worker]));
    for (let number = 0; number < node.slots; number++) {
      const left = x + side + gap + (number % across) * (slot + gap);
      const top = y + head + gap + Math.floor(number / across) * (slot + gap);
      const worker = held.get(number);
      if (!worker) {
        brush.strokeStyle = palette.line;
        brush.fillStyle = palette.free;
        if (kind.good) brush.fillRect(left, top, slot, slot);
        brush.strokeRect(left + 0.5, top + 0.5, slot - 1, slot - 1);
        continue;
      }
      brush.fillStyle = taskColour(order.get(worker.task) ?? 0);
      brush.fillRect(left, top, slot, slot);
      if (big || middle) {
        brush.fillStyle = "#fff";
        brush.textAlign = "center";
        brush.font = `700 ${big ? 13 : 9}px ui-monospace, monospace`;
        brush.fillText(taskLetter(order.get(worker.task) ?? 0), left + slot / 2, top + slot / 2 + 0.5);
      }
    }
    if (node.node === this.chosen) {
      brush.strokeStyle = palette.ink;
      brush.lineWidth = 2.5;
      brush.strokeRect(x - 1.5, y - 1.5, width + 3, height + 3);
      brush.lineWidth = 1;
    }
  }

  details() {
    const node = this.store.nodes.get(this.chosen);
    const place = document.getElementById("node-details");
    const name = node ? node.node : "none chosen", title = document.getElementById("node-name");
    if (title.textContent !== name) title.textContent = name; // it is read aloud when it changes
    if (!node) return;
    const said = JSON.stringify([node, Math.floor(this.store.now())]);
    if (said === this.said) return;
    this.said = said;
    const out = ["draining", "isolated", "lemon"].includes(node.state);
    const verb = out ? "readmit" : "drain";
    const focused = place.contains(document.activeElement);
    const button = element("button", { type: "button", id: "node-verb", class: out ? "" : "danger", onclick: () => this.act(verb, node.node) },
      out ? "Readmit it" : "Drain it");
    button.disabled = ["gone", "left"].includes(node.state);
    const workers = [...node.workers].sort((one, other) => one.slot - other.slot);
    place.replaceChildren(
      element("p", {}, stateBadge(node.state), ` ${NODE_STATES[node.state]?.mark ?? ""} `, node.because),
      element("dl", {},
        element("dt", {}, "heard"), element("dd", {}, this.heard(node)),
        element("dt", {}, "since"), element("dd", {}, node.since ? clock(node.since) : "–"),
        element("dt", {}, "host"), element("dd", {}, node.host),
        element("dt", {}, "isolated"), element("dd", {}, `${node.isolations} times of late`),
        ...workers.flatMap((worker) => [
          element("dt", {}, `slot ${worker.slot}`),
          element("dd", {}, element("a", { href: `#/task/${encodeURIComponent(worker.task)}` }, worker.task), ` ${worker.worker}`)]),
        element("dt", {}, "free"), element("dd", {}, `${node.slots - workers.length} of ${node.slots} slots`)),
      button);
    if (focused) button.focus();
  }

  heard(node) {
    if (node.quiet_since == null) return node.connected ? "less than a second ago" : "its line is cut";
    return `${duration(Math.max(1, this.store.now() - node.quiet_since))} ago${node.connected ? "" : "; its line is cut"}`;
  }

  unwell() {
    const rows = [...this.store.nodes.values()].filter((node) => node.state !== "up" && node.state !== "left")
      .sort((one, other) => GRAVEST.indexOf(one.state) - GRAVEST.indexOf(other.state));
    document.getElementById("unwell-count").textContent = rows.length ? `${rows.length} of ${this.store.nodes.size} nodes` : "none";
    const said = rows.map((node) => node.node + node.state).join();
    if (said === this.ill) return;
    this.ill = said;
    document.getElementById("unwell").replaceChildren(...rows.slice(0, UNWELL_SHOWN).map((node) =>
      element("li", {}, element("button", { type: "button", title: node.because, onclick: () => this.choose(node.node) },
        `${NODE_STATES[node.state]?.mark ?? ""} ${node.node} ${node.state}`))),
    ...(rows.length > UNWELL_SHOWN ? [element("li", { class: "quiet" }, `and ${rows.length - UNWELL_SHOWN} more`)] : []));
  }

  news() {
    const newest = this.store.news.at(-1);
    if (newest === this.newest) return;
    this.newest = newest;
    const rows = [];
    for (let index = this.store.news.length - 1; index >= 0 && rows.length < NEWS_SHOWN; index--) {
      const told = this.store.news[index], last = rows.at(-1);
      const alike = last && last.told.kind === told.kind && last.told.order === told.order && last.told.because === told.because;
      if (alike) { last.times++; last.told = told; } else rows.push({ told, times: 1 });
    }
    document.getElementById("news").replaceChildren(...rows.map(({ told, times }) =>
      element("li", {}, element("time", {}, clock(told.at)), decision(told, times), element("p", {}, `because ${told.because}`))));
  }
}

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

function fitted(brush, text, space) {
  if (brush.measureText(text).width <= space) return text;
  let end = text.length;
  while (end > 1 && brush.measureText(`${text.slice(0, end)}…`).width > space) end--;
  return `${text.slice(0, end)}…`;
}
