// One task: replicas × stages as they are now, its loss, its pace.

import { drawChart } from "./chart.js";
import { call } from "./link.js";
import { OPS, awaited, duration, element, figure, short, tone } from "./words.js";

const KEPT_ROWS = 2000;
const ASK_MS = 500;
const OP = /^(\d+)([FIWBRU])(?:(\d+)\.(\d+))?$/;

export class TaskView {
  constructor(store, act) {
    this.store = store;
    this.name = null;
    this.rows = [];
    this.cells = new Map();
    document.getElementById("cancel").addEventListener("click", () => act("cancel", this.name));
    document.getElementById("op-legend").append(
      ...Object.entries(OPS).map(([letter, { words, colour }]) => element("li", {}, element("i", { colour }, letter), words)),
      element("li", {}, element("i", { colour: "var(--draining)" }, "⇄"), "work of another replica"),
      element("li", {}, element("i", { colour: "var(--gone)" }, "✕"), "nobody here: others do its work"));
  }

  async open(name) {
    this.name = name;
    this.rows = [];
    this.places = null;
    document.getElementById("task-name").textContent = name;
    await this.reload();
    this.ask();
  }

  close() { this.name = null; clearTimeout(this.timer); }

  async reload() {
    if (this.name === null) return;
    const told = await call("GET", `/v1/tasks/${encodeURIComponent(this.name)}`).catch(() => null);
    if (!told || told.task !== this.name) return;
    this.rows = told.rows;
    this.detail = told;
    this.paint();
  }

  steps(rows) {
    for (const row of rows) {
      while (this.rows.length && this.rows.at(-1).step >= row.step) this.rows.pop(); // done again, from a checkpoint
      this.rows.push(row);
    }
    if (this.rows.length > KEPT_ROWS) this.rows.splice(0, this.rows.length - KEPT_ROWS);
  }

  // What every worker does now is asked for only while somebody looks at it.
  async ask() {
    clearTimeout(this.timer);
    const name = this.name;
    if (name === null) return;
    if (!document.hidden) {
      const path = `/v1/tasks/${encodeURIComponent(name)}`;
      const [detail, readings] = await Promise.all([call("GET", `${path}?rows=0`), call("GET", `${path}/readings`)]).catch(() => [null, null]);
      if (name !== this.name) return;
      if (detail) { this.detail = detail; this.readings = readings.workers; this.grid(); }
    }
    const many = (this.detail?.places ?? 0) > 128 ? 4 : 1;
    this.timer = setTimeout(() => this.ask(), ASK_MS * many);
  }

  paint() {
    const task = this.store.tasks.get(this.name);
    if (!task) {
      document.getElementById("task-because").textContent = "There is no such task.";
      return;
    }
    const state = document.getElementById("task-state");
    state.textContent = task.state;
    state.className = `state ${tone(task.state)}`;
    document.getElementById("task-because").textContent = `because ${task.because}`;
    document.getElementById("cancel").disabled = ["finished", "failed", "cancelled"].includes(task.state);
    const { issued, committed } = task.microbatches;
    document.getElementById("task-figures").replaceChildren(
      figure(`${task.step} / ${task.steps}`, "step"), figure(short(task.loss, 6), "loss"),
      figure(task.step_seconds ? duration(task.step_seconds) : "–", "a step"),
      figure(`${task.workers} / ${task.places}`, "workers"), figure(String(task.epoch), `epoch, ${task.phase ?? "not begun"}`),
      figure(`${committed} / ${issued}`, "microbatches counted"));
    drawChart(document.getElementById("loss"), this.rows, "loss");
    drawChart(document.getElementById("seconds"), this.rows, "seconds", { fromZero: true });
    document.getElementById("loss-now").textContent = task.loss == null ? "" : `${short(task.loss, 6)} at step ${task.step}`;
    const sorted = this.rows.map((row) => row.seconds).filter((seconds) => seconds > 0).sort((one, other) => one - other);
    document.getElementById("seconds-now").textContent = sorted.length ? `median ${duration(sorted[sorted.length >> 1])}` : "";
    this.grid();
  }

  grid() {
    const detail = this.detail;
    if (!detail || detail.task !== this.name) return;
    const { replicas, stages } = detail.shape;
    if (this.places !== `${replicas}×${stages}`) this.build(replicas, stages);
    const seats = new Map(detail.seats.map((seat) => [seat.worker, seat]));
    const readings = new Map((this.readings ?? []).map((row) => [row.worker, row]));
    for (const [worker, cell] of this.cells) this.fill(cell, worker, seats.get(worker), readings.get(worker));
    const list = document.getElementById("task-incidents"), said = detail.incidents.join();
    if (list.dataset.said !== said || !list.childElementCount) {
      list.dataset.said = said;
      list.replaceChildren(...(detail.incidents.length ? detail.incidents.slice(-60).reverse().map((number) =>
        element("li", {}, element("a", { href: `#/incident/${number}` }, `incident ${number}`))) : [element("li", { class: "quiet" }, "none")]));
    }
  }

  build(replicas, stages) {
    this.places = `${replicas}×${stages}`;
    this.cells.clear();
    const head = element("tr", {}, element("th", {}, ""), ...Array.from({ length: stages }, (_, stage) => element("th", { scope: "col" }, `stage ${stage}`)));
    const rows = Array.from({ length: replicas }, (_, replica) => element("tr", {}, element("th", { scope: "row" }, `replica ${replica}`),
      ...Array.from({ length: stages }, (_, stage) => {
        const cell = element("td", {}, element("b", {}), element("span", {}), element("span", {}));
        this.cells.set(`${replica}:${stage}`, cell);
        return cell;
      })));
    document.getElementById("places").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  }

  fill(cell, worker, seat, row) {
    const [big, middle, small] = cell.children;
    const over = ["finished", "failed", "cancelled"].includes(this.detail.state);
    const reading = row?.reading, op = reading && OP.exec(reading.doing);
    const elsewhere = op?.[3] !== undefined && op[3] !== worker.split(":")[0];
    cell.classList.toggle("absent", !seat);
    cell.classList.toggle("elsewhere", Boolean(elsewhere));
    cell.style.setProperty("--c", op && reading.busy ? OPS[op[2]].colour : "var(--left)");
    big.textContent = !seat ? (over ? "–" : "✕") : op ? `${op[2]}${op[3] === undefined ? "" : ` ${op[3]}.${op[4]}`}${elsewhere ? " ⇄" : ""}` : reading ? "…" : "·";
    middle.textContent = !seat ? (over ? "over" : "work re-routed") : seat.leaving || (seat.standing !== "member" ? seat.standing : "")
      || (op ? OPS[op[2]].words : reading?.doing && (reading.busy ? reading.doing : awaited(reading.doing))) || "no reading";
    small.textContent = !seat ? "" : `${reading ? `${reading.done} done, ${reading.num_ops} to do · ` : ""}${seat.node}:${seat.slot}`;
    cell.title = seat ? `${worker} on ${seat.node}, slot ${seat.slot}: ${reading ? `step ${reading.step}, ${reading.doing}` : seat.standing}` : `${worker}: nobody`;
  }
}
