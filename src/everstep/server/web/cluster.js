// Nodes and slots as one canvas: one tile per node, its state as a letter and a colour, its slots by task.
// A canvas, because a thousand nodes of eight slots would be nine thousand elements.

import { call } from "./link.js";
import { MOST_SEVERE_FIRST, NODE_STATES, clock, colour, count, decision, duration, element, figures, short, sized, stateBadge, taskColour, taskLetter, write } from "./words.js";

const NEWS_SHOWN = 40;
const EXPLAIN_MS = 2000; // an answer of the planner is shown soon after the event that it is about
const UNWELL_SHOWN = 16;
const GAP = 4;
const LABEL = 15; // above a rack
const TALLEST = 16; // nodes of a rack below each other
const ROUTINE = new Set(["CommitCheckpoint"]); // one line for all of them, so that deaths and drains stay in sight

export class ClusterView {
  constructor(store, act) {
    this.store = store;
    this.act = act;
    this.canvas = document.getElementById("nodes");
    this.chosen = null;
    this.tiles = { columns: 1, width: 1, height: 1 };
    this.map = { spots: [], labels: [], tall: 0 }; // where each node is drawn, in the order of the store
    this.asked = 0;
    this.lines = []; // decisions, newest first
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    document.getElementById("find").addEventListener("input", (event) => this.find(event.target.value));
    document.getElementById("node-legend").append(
      ...Object.entries(NODE_STATES).map(([name, { mark, colour }]) =>
        element("li", {}, element("i", { colour: `var(${colour})` }, mark), name)),
      element("li", {}, element("i", { colour: "var(--quiet)" }, "A"), "slot used by task A"),
    );
  }

  forget() { // a whole picture replaces the state
    this.listed = 0;
    this.lines = [];
    document.getElementById("news").replaceChildren();
  }

  choose(name) {
    this.chosen = name;
    this.paint();
  }

  names() { return [...this.store.nodes.keys()]; }

  click(event) {
    const box = this.canvas.getBoundingClientRect();
    const { width, height } = this.tiles, x = event.clientX - box.left, y = event.clientY - box.top;
    const at = this.map.spots.findIndex(([left, top]) => x >= left && x < left + width + GAP && y >= top && y < top + height + GAP);
    if (at >= 0) this.choose(this.names()[at]);
  }

  key(event) {
    const names = this.names();
    const turn = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1], Home: 0, End: names.length - 1 }[event.key];
    if (turn === undefined || !names.length) return;
    event.preventDefault();
    const at = names.indexOf(this.chosen);
    this.choose(names[typeof turn === "number" ? turn : at < 0 ? 0 : this.beside(at, ...turn)]);
  }

  // The nearest node in this direction; at the edge the next one in order, as at the end of a line of text.
  beside(at, right, down) {
    const { spots } = this.map, [x, y] = spots[at];
    let best = Math.max(0, Math.min(spots.length - 1, at + right + down)), least = Infinity;
    spots.forEach(([left, top], index) => {
      const along = right * (left - x) + down * (top - y), aside = Math.abs(right ? top - y : left - x);
      if (along > 0 && along + 8 * aside < least && aside < (right ? this.tiles.height : Infinity)) [best, least] = [index, along + 8 * aside];
    });
    return best;
  }

  find(text) {
    const hits = text ? this.names().filter((name) => name.toLowerCase().includes(text.toLowerCase())) : [];
    document.getElementById("found").textContent = text ? `${hits.length} found` : "";
    if (hits.length) this.choose(hits.find((name) => name === text) ?? hits[0]);
  }

  paint() {
    this.space = this.canvas.parentElement.clientWidth - 2; // asked before anything is written: no layout twice
    this.headline();
    this.figures();
    this.grid();
    this.details();
    this.unwell();
    this.explain();
    this.news();
  }

  // The first sentence: is anything wrong, and does training continue?
  headline() {
    const states = {}, first = {};
    for (const node of this.store.nodes.values()) {
      if (node.state === "up" || node.state === "left") continue;
      states[node.state] = (states[node.state] ?? 0) + 1;
      first[node.state] ??= node.node;
    }
    const said = MOST_SEVERE_FIRST.filter((state) => states[state]).map((state) => (states[state] === 1 ? `${first[state]} is ${state}` : `${states[state]} nodes are ${state}`));
    const tasks = [...this.store.tasks.values()], open = this.store.incidents.open.length;
    const short = tasks.filter((task) => task.state === "running" && task.working < task.asked);
    for (const task of short.slice(0, 3)) said.push(working(task));
    if (short.length > 3) said.push(`${short.length - 3} more tasks run with fewer workers`);
    const stuck = tasks.filter((task) => ["failed", "waiting", "stalled"].includes(task.state));
    for (const task of stuck.slice(0, 2)) said.push(`${task.task} ${task.state === "failed" ? "failed" : `is ${task.state}`}: ${task.because}`);
    if (open) said.push(`${count(open, "incident")} open`);
    const running = tasks.filter((task) => task.state === "running").length, number = this.store.nodes.size;
    const goes = `${count(running, "task")} running`;
    const place = document.getElementById("headline");
    write(place, said.length ? `${open ? "●" : "▲"} ${said.join("; ")}; ${goes}.` : `✓ Healthy: ${count(number, "node")} up, ${goes}.`);
    const look = `headline ${open || stuck.some((task) => task.state === "failed") ? "bad" : said.length ? "warn" : ""}`.trim();
    if (place.className !== look) place.className = look;
    place.hidden = number === 0;
  }

  // What the planner weighed at its last decision.
  async explain() {
    if (Date.now() - this.asked < EXPLAIN_MS || document.hidden || document.body.dataset.known === undefined) return;
    this.asked = Date.now();
    const [plan] = await call("GET", "/v1/plans?last=1").catch(() => []);
    document.getElementById("plan-part").hidden = !plan;
    if (!plan || plan.event === this.explained) return;
    this.explained = plan.event;
    write(document.getElementById("plan-because"), plan.because + (plan.prepared ? " (prepared before the event)" : ""));
    document.querySelector("#plan-options tbody").replaceChildren(...plan.weighed.map((option) => element("tr", option.chosen ? { class: "chosen" } : {},
      element("td", {}, option.task),
      element("td", {}, (option.chosen ? "→ " : "") + option.what),
      element("td", { class: "num" }, String(option.workers)),
      element("td", { class: "num" }, option.throughput.toFixed(2)),
      element("td", { class: "num" }, option.transition_s ? `${option.transition_s.toPrecision(2)} s` : ""),
      element("td", {}, option.because))));
  }

  figures() {
    let number = 0, up = 0, slots = 0, taken = 0, lemons = 0, running = 0;
    for (const node of this.store.nodes.values()) {
      number++;
      if (node.state === "up") up++;
      if (node.state === "lemon") lemons++;
      if (node.state !== "gone" && node.state !== "left") slots += node.slots;
      taken += node.workers.length;
    }
    for (const task of this.store.tasks.values()) if (task.state === "running") running++;
    const { open, total } = this.store.incidents;
    figures(document.getElementById("cluster-figures"), [
      [`${up} / ${number}`, "nodes up", up < number ? "warn" : ""],
      [`${taken} / ${slots}`, "slots in use"],
      [String(lemons), "lemons", lemons ? "warn" : ""],
      [`${running} / ${this.store.tasks.size}`, "tasks running"],
      [`${open.length} / ${total}`, "incidents open", open.length ? "bad" : "", open.length ? `#/incident/${open[0]}` : "#/incidents"],
    ]);
    document.getElementById("no-nodes").hidden = number > 0;
    this.canvas.hidden = number === 0;
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
    const palette = Object.fromEntries(Object.entries(NODE_STATES).map(([name, kind]) => [name, colour(kind.colour)]));
    for (const name of ["card", "ink", "free", "line", "accent"]) palette[name] = colour(`--${name}`);
    const order = new Map([...this.store.tasks.keys()].map((name, index) => [name, index]));
    const drawn = [space, nodes.length, Object.values(tiles), Object.values(palette), [...order.keys()], window.devicePixelRatio].join();
    const all = drawn !== this.drawn || this.store.renewed;
    const touched = new Set(this.store.touched);
    if (this.chosen !== this.outlined) touched.add(this.chosen).add(this.outlined);
    if (!all && !touched.size) return;
    if (all) this.map = this.place(nodes, tiles, space);
    const brush = sized(this.canvas, space, this.map.tall, !all);
    if (all) this.label(brush, palette);
    nodes.forEach((node, index) => {
      if (!all && !touched.has(node.node)) return;
      const [x, y] = this.map.spots[index];
      if (!all) brush.clearRect(x - 3, y - 3, tiles.width + 6, tiles.height + 6);
      this.tile(brush, node, x, y, palette, order);
    });
    this.drawn = drawn;
    this.outlined = this.chosen;
    this.store.touched.clear();
    this.store.renewed = false;
  }

  // Line by line; or, where racks are known, each rack as a block of its own with its name above.
  place(nodes, { columns, width, height }, space) {
    if (!nodes.some((node) => node.rack)) {
      const spots = nodes.map((_, index) => [GAP + (index % columns) * (width + GAP), GAP + Math.floor(index / columns) * (height + GAP)]);
      return { spots, labels: [], tall: Math.ceil(nodes.length / columns) * (height + GAP) + GAP };
    }
    const spots = [], labels = [], racks = new Map();
    for (const { rack } of nodes) racks.set(rack, (racks.get(rack) ?? 0) + 1);
    let left = GAP, top = GAP, deepest = 0;
    for (const [rack, number] of racks) {
      const across = Math.min(columns, Math.ceil(number / TALLEST)), down = Math.ceil(number / across);
      const wide = across * (width + GAP);
      if (left > GAP && left + wide > space) [left, top, deepest] = [GAP, top + deepest + GAP, 0];
      labels.push([rack || "no rack", left, top, wide - GAP]);
      for (let index = 0; index < number; index++) spots.push([left + Math.floor(index / down) * (width + GAP), top + LABEL + (index % down) * (height + GAP)]);
      left += wide + 2 * GAP;
      deepest = Math.max(deepest, LABEL + down * (height + GAP));
    }
    return { spots, labels, tall: top + deepest + GAP };
  }

  label(brush, palette) {
    brush.fillStyle = palette.ink;
    brush.font = "600 11px system-ui, sans-serif";
    brush.textBaseline = "middle";
    brush.textAlign = "left";
    for (const [text, x, y, wide] of this.map.labels) brush.fillText(fitted(brush, text, wide, true), x, y + LABEL / 2 - 1);
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
    const name = node ? node.node : "none selected", title = document.getElementById("node-name");
    write(title, name); // screen readers announce changes
    if (!node) return;
    this.look(node);
    const said = JSON.stringify([node, Math.floor(this.store.now()), this.looked?.checks?.at]);
    if (said === this.said) return;
    this.said = said;
    const out = ["draining", "isolated", "lemon"].includes(node.state);
    const verb = out ? "readmit" : "drain";
    const focused = place.contains(document.activeElement) ? document.activeElement.id : "";
    const button = this.store.may.has(verb) && element("button", { type: "button", id: "node-verb", class: out ? "" : "danger", onclick: () => this.act(verb, node.node) },
      out ? "Readmit node" : "Drain node");
    if (button) button.disabled = ["gone", "left"].includes(node.state);
    const workers = [...node.workers].sort((one, other) => one.slot - other.slot);
    const free = node.state === "up" ? `${node.slots - workers.length} of ${node.slots} slots` : `0 of ${node.slots} slots (${node.state})`;
    place.replaceChildren(
      element("p", {}, stateBadge(node.state), ` ${NODE_STATES[node.state]?.mark ?? ""} `, node.because),
      element("dl", {},
        element("dt", {}, "last heartbeat"), element("dd", {}, this.heard(node)),
        element("dt", {}, "since"), element("dd", {}, node.since ? clock(node.since) : "–"),
        element("dt", {}, "host"), element("dd", {}, node.host),
        ...(node.rack ? [element("dt", {}, "rack"), element("dd", {}, node.rack)] : []),
        element("dt", {}, "isolations"), element("dd", {}, `${node.isolations} recently`),
        element("dt", {}, "checks"), element("dd", {}, this.checks(node)),
        ...workers.flatMap((worker) => [
          element("dt", {}, `slot ${worker.slot}`),
          element("dd", {}, element("a", { href: `#/task/${encodeURIComponent(worker.task)}` }, worker.task), ` ${worker.worker}`)]),
        element("dt", {}, "free"), element("dd", {}, free)),
      button || "");
    if (focused) document.getElementById(focused)?.focus();
  }

  // The last checks of the selected node, which are not in the picture of all.
  async look(node) {
    const key = `${node.node} ${node.state} ${node.since}`;
    if (key === this.looking) return;
    this.looking = key;
    this.looked = { node: node.node, ...await call("GET", `/v1/nodes/${encodeURIComponent(node.node)}`).catch(() => ({})) };
    this.paint();
  }

  checks(node) {
    const { checks, pairs = [] } = this.looked?.node === node.node ? this.looked : {};
    if (!checks) return "none";
    const rows = [...Object.entries(checks.figures).map(([name, value]) => `${name} ${short(value)}`), ...Object.entries(checks.facts).map(([name, fact]) => `${name}: ${fact}`),
      ...pairs.map((pair) => `network to ${pair.peer}: ${pair.error || `${short(pair.out_mb_s)} MB/s out, ${short(pair.in_mb_s)} in, ${short(pair.answer_ms)} ms`}`)];
    return element("details", { open: this.unfolded, ontoggle: (event) => { this.unfolded = event.target.open; } },
      element("summary", { id: "node-checks" }, `${clock(checks.at)}, ${count(rows.length, "result")}`), element("ul", { class: "plain" }, ...rows.map((row) => element("li", {}, row))));
  }

  heard(node) {
    if (node.quiet_since == null) return node.connected ? "less than a second ago" : "not connected";
    return `${duration(Math.max(1, this.store.now() - node.quiet_since))} ago${node.connected ? "" : "; not connected"}`;
  }

  unwell() {
    const rows = [];
    for (const node of this.store.nodes.values()) if (node.state !== "up" && node.state !== "left") rows.push(node);
    rows.sort((one, other) => MOST_SEVERE_FIRST.indexOf(one.state) - MOST_SEVERE_FIRST.indexOf(other.state));
    write(document.getElementById("unwell-count"), rows.length ? `${rows.length} of ${this.store.nodes.size} nodes` : "none");
    const shown = rows.slice(0, UNWELL_SHOWN), left = rows.length - shown.length;
    const list = document.getElementById("unwell");
    const before = new Map([...list.children].map((item) => [item.dataset.key, item]));
    const items = shown.map((node) => before.get(`${node.node} ${node.state}`) ?? element("li", { "data-key": `${node.node} ${node.state}` },
      element("button", { type: "button", title: node.because, onclick: () => this.choose(node.node) },
        element("i", { colour: `var(${NODE_STATES[node.state]?.colour ?? "--gone"})` }, NODE_STATES[node.state]?.mark ?? ""), ` ${node.node} ${node.state}`)));
    if (left > 0) items.push(before.get(`${left}`) ?? element("li", { class: "quiet", "data-key": `${left}` }, `and ${left} more`));
    if (items.length !== list.childElementCount || items.some((item, index) => list.children[index] !== item)) list.replaceChildren(...items);
  }

  // Newest first; decisions of one kind for one reason that follow each other are one line.
  news() {
    const list = document.getElementById("news");
    const fresh = this.store.heard - this.listed;
    if (!fresh) return;
    this.listed = this.store.heard;
    for (const row of this.store.news.slice(-Math.min(fresh, this.store.news.length))) {
      const routine = this.lines.find((line) => ROUTINE.has(row.order) && line.row.order === row.order && line.row.task === row.task);
      const last = routine ?? this.lines[0];
      if (routine || (last && last.row.kind === row.kind && last.row.order === row.order && last.row.because === row.because)) {
        last.times++;
        last.item.children[1].textContent = decision(last.row, last.times, row.at);
        continue;
      }
      const item = element("li", {}, element("time", {}, clock(row.at)), element("span", {}, decision(row, 1)), element("p", {}, row.because));
      this.lines.unshift({ row, times: 1, item });
      list.prepend(item);
      if (this.lines.length > NEWS_SHOWN) this.lines.pop().item.remove();
    }
    document.getElementById("no-news").hidden = this.lines.length > 0;
  }
}

// As the grid of the task says it: a worker that is being replaced does not work yet.
function working(task) {
  if (!task.working) return `${task.task} is starting`;
  const coming = Math.max(0, task.workers - task.working);
  const rest = coming ? `, ${coming} ${coming === 1 ? "is" : "are"} being replaced and peers do the work` : "";
  return `${task.task} runs on ${task.working} of ${task.asked} workers${rest}`;
}

// Racks differ at the end of their names.
function fitted(brush, text, space, end = false) {
  const cut = (length) => (length === text.length ? text : end ? `…${text.slice(text.length - length)}` : `${text.slice(0, length)}…`);
  let length = text.length;
  while (length > 1 && brush.measureText(cut(length)).width > space) length--;
  return cut(length);
}
