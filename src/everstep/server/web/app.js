// The page: its state, the open view, and its actions. Views paint from the store, never from each other; all
// painting waits for the next frame, so that many changes are painted once.

import { ClusterView } from "./cluster.js";
import { IncidentView, IncidentsView } from "./incident.js";
import { Link, call } from "./link.js";
import { TaskView } from "./task.js";
import { TasksView } from "./tasks.js";
import { INCIDENT_COLUMNS, TASK_COLUMNS, element, fillTable, forgetColours, headings, loss, percent, sparkline, stateBadge, taskColour, taskLetter, write } from "./words.js";

const KEPT_NEWS = 400;
const byName = new Intl.Collator("en", { numeric: true }); // node-2 before node-10
const store = {
  nodes: new Map(), tasks: new Map(), incidents: { open: [], total: 0 }, news: [], heard: 0, ahead: 0, shown: [],
  may: new Set(), // allowed actions: the page of a run has no nodes to drain, a demo has workers to kill
  touched: new Set(), renewed: true, // nodes that changed since they were painted; all of them
  now() { return Date.now() / 1000 + this.ahead; }, // the coordinator's clock
};
const views = {
  cluster: new ClusterView(store, act), tasks: new TasksView(store, () => taskTable("all-tasks", true)), task: new TaskView(store, act),
  incidents: new IncidentsView(store), incident: new IncidentView(store),
};
headings(document.getElementById("cluster-tasks"), TASK_COLUMNS.slice(0, -1));
headings(document.getElementById("all-tasks"), TASK_COLUMNS);
headings(document.getElementById("all-incidents"), INCIDENT_COLUMNS);
let open = "cluster", awaited = false, away = null, first = null, landed = /^#\/./.test(location.hash);

// ------------------------------------------------------------------ hearing

function hear(row) {
  document.body.dataset.known = "";
  store.ahead = row.at - Date.now() / 1000;
  if (row.kind === "picture") {
    store.nodes.clear();
    store.renewed = true;
    store.tasks.clear();
    store.news = [];
    store.heard = 0;
    store.may = new Set(row.may);
    views.cluster.forget();
    views.task.reload();
    views.incidents.said = null;
  }
  const moved = (row.nodes ?? []).some((node) => store.nodes.get(node.node)?.rack !== node.rack);
  for (const node of row.nodes ?? []) { store.nodes.set(node.node, node); store.touched.add(node.node); }
  if (moved) { // a new one has its place among the others of its rack, whenever it joined
    store.nodes = new Map([...store.nodes].sort(([one, { rack: here }], [other, { rack: there }]) =>
      !here - !there || byName.compare(here, there) || byName.compare(one, other)));
    store.renewed = true;
  }
  for (const task of row.tasks ?? []) store.tasks.set(task.task, task);
  land();
  for (const [task, rows] of Object.entries(row.steps ?? {})) if (task === views.task.name) views.task.steps(rows);
  store.news.push(...(row.news ?? []));
  store.heard += (row.news ?? []).length;
  if (store.news.length > KEPT_NEWS) store.news.splice(0, store.news.length - KEPT_NEWS);
  if (row.kind === "changes" && !document.hidden) store.shown.push(...(row.news ?? []).map((news) => news.at));
  store.incidents = row.incidents;
  paintSoon();
}

// The page of one run has no cluster: it opens at its task. So does that of a cluster that has one task then.
function land() {
  const follows = store.may.has("follow");
  document.body.classList.toggle("one-run", follows);
  if (follows && store.tasks.size) { // its task is all there is
    const link = document.querySelector('nav a[data-view="tasks"]');
    link.textContent = "Run";
    link.href = `#/task/${encodeURIComponent([...store.tasks.keys()][0])}`;
  }
  if (landed || (follows && !store.tasks.size)) return;
  landed = true;
  if (store.tasks.size === 1 && !/^#\/./.test(location.hash)) location.replace(`#/task/${encodeURIComponent([...store.tasks.keys()][0])}`);
}

function paintSoon() {
  if (awaited) return;
  awaited = true;
  requestAnimationFrame(() => { awaited = false; paint(); });
}

const painted = new MessageChannel(); // its messages are heard after the frame they were posted in
painted.port1.onmessage = () => { // for benches that measure how far the page is behind
  performance.clearMarks("shown");
  performance.mark("shown", { detail: store.shown });
  store.shown = [];
};

function paint() {
  const badge = document.getElementById("open-incidents"), number = store.incidents.open.length;
  badge.hidden = number === 0;
  write(badge, `${number} open`);
  document.body.dataset.view = open;
  document.body.classList.toggle("trouble", number > 0);
  if (open === "cluster") taskTable("cluster-tasks", false);
  views[open].paint();
  if (store.shown.length) painted.port2.postMessage(null);
  first ??= document.body.dataset.known === undefined ? null : performance.mark("first");
}

function linkChanged(state, because) {
  const link = document.getElementById("link");
  store.why = because;
  if (link.dataset.state === state) return;
  link.dataset.state = state;
  link.textContent = state === "live" ? "live" : "not connected";
  away = state === "live" ? null : Date.now();
  tellStale();
}

function tellStale() {
  const note = document.getElementById("stale");
  const over = store.may.has("follow") && [...store.tasks.values()].every((task) => ["finished", "failed", "cancelled"].includes(task.state));
  note.hidden = away === null || Date.now() - away < 1500;
  note.classList.toggle("over", over);
  if (note.hidden) return;
  write(note, over ? "This run has ended. The page shows its last state."
    : `Not connected to the coordinator for ${Math.round((Date.now() - away) / 1000)} s (${store.why}). The page shows the last known state; training continues.`);
}

// ------------------------------------------------------------------ tasks

function taskTable(id, full) {
  const order = new Map([...store.tasks.keys()].map((name, index) => [name, index]));
  const rows = [...store.tasks.values()].reverse();
  document.getElementById("no-tasks").hidden = rows.length > 0;
  document.getElementById(id).closest(".scroll").hidden = rows.length === 0;
  if (!full) document.getElementById("no-cluster-tasks").hidden = rows.length > 0;
  fillTable(document.querySelector(`#${id} tbody`), rows, (task) => task.task, (task) => {
    const index = order.get(task.task);
    return [
      [index, () => element("span", { class: "letter", colour: taskColour(index) }, taskLetter(index))],
      [task.task, () => element("a", { href: `#/task/${encodeURIComponent(task.task)}` }, task.task)],
      [task.state, () => stateBadge(task.state)],
      [`${task.working}/${task.asked}`, null, { class: task.working < task.asked && task.state === "running" ? "num short" : "num" }],
      [`${task.step}/${task.steps}`, () => element("span", {}, element("progress", { max: task.steps, value: task.step, "aria-label": `steps of ${task.task}` }), ` ${task.step}/${task.steps}`)],
      [`${loss(task.loss)} ${task.curve.length}`, () => lossCell(task), { class: "num" }],
      [task.step_seconds ? task.step_seconds.toFixed(3) : "–", null, { class: "num" }],
      [percent(task.goodput), null, { class: "num" }],
      [task.owner],
      ...(full ? [[task.because]] : []),
    ];
  });
}

function lossCell(task) { // of a task that is over, with the shape of its curve
  const shape = task.curve.filter((value) => value != null).length > 1 ? sparkline(task.curve) : null;
  return element("span", {}, shape, loss(task.loss));
}

// ------------------------------------------------------------------ doing

const QUESTIONS = {
  drain: (name) => `Drain node ${name}? All its workers move to other nodes, and it gets no new ones.`,
  readmit: (name) => `Readmit node ${name}? It can get workers again.`,
  cancel: (name) => `Cancel task ${name}? It cannot be resumed. Its checkpoints are kept.`,
};
const PLACES = { drain: "nodes", readmit: "nodes" };

// `worker`: of a demo, where no confirmation is needed.
async function act(verb, name, worker = null) {
  if (worker === null && !(await confirmed(QUESTIONS[verb](name)))) return;
  const path = `/v1/${PLACES[verb] ?? "tasks"}/${encodeURIComponent(name)}${worker === null ? "" : `/workers/${encodeURIComponent(worker)}`}/${verb}`;
  try {
    const row = await call("POST", path);
    say(row.said ?? `${name} is ${row.state}: ${row.because}`);
  } catch (error) {
    say(`${verb} ${worker ?? name}: ${error.message}`);
  }
}

function confirmed(question) {
  const dialog = document.getElementById("confirm");
  document.getElementById("confirm-text").textContent = question;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

function say(sentence) {
  const toast = document.getElementById("toast");
  toast.textContent = sentence;
  toast.hidden = false;
  clearTimeout(store.toast);
  store.toast = setTimeout(() => { toast.hidden = true; }, 6000);
}

// ------------------------------------------------------------------ which view

function route() {
  const [, view = "", name = ""] = location.hash.replace(/^#\/?/, "/").split("/");
  views.task.close();
  views.incident.close();
  open = { "": "cluster", tasks: "tasks", task: "task", incidents: "incidents", incident: "incident" }[view] ?? "cluster";
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== open;
  const menu = { task: "tasks", incident: "incidents" }[open] ?? open;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === menu) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  let known = "";
  try { known = decodeURIComponent(name); } catch { /* no name of ours */ }
  document.title = known ? `${known} · Everstep` : "Everstep";
  if (open === "task") views.task.open(known);
  if (open === "incident") views.incident.open(known);
  paintSoon();
}

window.addEventListener("hashchange", () => {
  route();
  scrollTo(0, 0);
  document.getElementById("main").focus({ preventScroll: true }); // else its title scrolls below the bar
});
window.addEventListener("resize", paintSoon);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { forgetColours(); paintSoon(); });
setInterval(() => { tellStale(); if (!document.hidden) paintSoon(); }, 1000); // ages keep counting
route();
new Link(hear, linkChanged).open();
