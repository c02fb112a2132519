// The page: what it knows, which view is open, and what a click does. Views paint from the store, never from
// each other; all painting waits for the next frame, so that many changes are one.

import { ClusterView } from "./cluster.js";
import { IncidentView, IncidentsView } from "./incident.js";
import { Link, call } from "./link.js";
import { TaskView } from "./task.js";
import { element, short, stateBadge, taskColour, taskLetter } from "./words.js";

const KEPT_NEWS = 400;
const store = {
  nodes: new Map(), tasks: new Map(), incidents: { open: [], total: 0 }, news: [], ahead: 0, shown: [],
  touched: new Set(), renewed: true, // nodes that changed since they were painted; all of them
  now() { return Date.now() / 1000 + this.ahead; }, // the coordinator's clock
};
const views = {
  cluster: new ClusterView(store, act), tasks: { paint: () => taskTable("all-tasks", true) }, task: new TaskView(store, act),
  incidents: new IncidentsView(store), incident: new IncidentView(store),
};
let open = "cluster", awaited = false, away = null;

// ------------------------------------------------------------------ hearing

function hear(told) {
  document.body.dataset.known = "";
  store.ahead = told.at - Date.now() / 1000;
  if (told.kind === "picture") {
    store.nodes.clear();
    store.renewed = true;
    store.tasks.clear();
    store.news = [];
    views.task.reload();
    views.incidents.said = null;
  }
  for (const node of told.nodes ?? []) { store.nodes.set(node.node, node); store.touched.add(node.node); }
  for (const task of told.tasks ?? []) store.tasks.set(task.task, task);
  for (const [task, rows] of Object.entries(told.steps ?? {})) if (task === views.task.name) views.task.steps(rows);
  store.news.push(...(told.news ?? []));
  if (store.news.length > KEPT_NEWS) store.news.splice(0, store.news.length - KEPT_NEWS);
  if (told.kind === "changes" && !document.hidden) store.shown.push(...(told.news ?? []).map((news) => news.at));
  store.incidents = told.incidents;
  paintSoon();
}

function paintSoon() {
  if (awaited) return;
  awaited = true;
  const paintNow = () => { if (awaited) { awaited = false; paint(); } };
  requestAnimationFrame(paintNow);
}

function paint() {
  const badge = document.getElementById("open-incidents");
  badge.hidden = store.incidents.open.length === 0;
  badge.textContent = `${store.incidents.open.length} open`;
  if (open === "cluster") taskTable("cluster-tasks", false);
  views[open].paint();
  if (store.shown.length) { // for whoever measures how far the page is behind
    performance.clearMarks("shown");
    performance.mark("shown", { detail: store.shown });
    store.shown = [];
  }
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
  note.hidden = away === null || Date.now() - away < 1500;
  if (!note.hidden) note.textContent = `No word from the coordinator for ${Math.round((Date.now() - away) / 1000)} s (${store.why}). What you see is of then; training does not need it.`;
}

// ------------------------------------------------------------------ tasks

function taskTable(id, full) {
  const rows = [...store.tasks.values()];
  document.getElementById("no-tasks").hidden = rows.length > 0;
  document.querySelector(`#${id} tbody`).replaceChildren(...rows.map((task, index) => element("tr", {},
    element("td", {}, element("span", { class: "letter", colour: taskColour(index) }, taskLetter(index))),
    element("td", {}, element("a", { href: `#/task/${encodeURIComponent(task.task)}` }, task.task)),
    element("td", {}, stateBadge(task.state)), element("td", { class: "num" }, `${task.workers}/${task.places}`),
    element("td", {}, element("progress", { max: task.steps, value: task.step, "aria-label": `steps of ${task.task}` }), ` ${task.step}/${task.steps}`),
    element("td", { class: "num" }, short(task.loss, 5)), element("td", { class: "num" }, task.step_seconds ? task.step_seconds.toFixed(3) : "–"),
    full ? element("td", {}, task.because) : null)).reverse());
}

// ------------------------------------------------------------------ doing

const QUESTIONS = {
  drain: (name) => `Take all workers off node ${name} and give it no new ones?`,
  readmit: (name) => `Let node ${name} have workers again?`,
  cancel: (name) => `End task ${name} for good? Its checkpoints stay.`,
};

async function act(verb, name) {
  if (!(await confirmed(QUESTIONS[verb](name)))) return;
  try {
    const told = await call("POST", `/v1/${verb === "cancel" ? "tasks" : "nodes"}/${encodeURIComponent(name)}/${verb}`);
    say(`${name} is ${told.state}: ${told.because}`);
  } catch (error) {
    say(`${verb} ${name}: ${error.message}`);
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
  const [, view = "", name = ""] = location.hash.replace(/^#/, "").split("/");
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

window.addEventListener("hashchange", () => { route(); document.getElementById("main").focus(); });
window.addEventListener("resize", paintSoon);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintSoon);
setInterval(() => { tellStale(); if (!document.hidden) paintSoon(); }, 1000); // ages go on by themselves
route();
new Link(hear, linkChanged).open();
