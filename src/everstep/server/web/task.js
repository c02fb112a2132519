// One task: its workers by replica and stage, its loss, its step time.

import { drawChart } from "./chart.js";
import { call } from "./link.js";
import { OPS, PLACES, awaited, colour, duration, element, figures, happened, loss, percent, short, tone, write } from "./words.js";

const KEPT_ROWS = 2000;
const ASK_MS = 500;
const OVER = ["finished", "failed", "cancelled"];
const FAULTS = { kill: "Kill worker (SIGKILL)", stop: "Stop worker (SIGSTOP)", slow: "Slow worker down" };
const OP = /^(\d+)([FIWBRU])(?:(\d+)\.(\d+))?$/;

export class TaskView {
  constructor(store, act) {
    this.store = store;
    this.name = null;
    this.rows = [];
    this.cells = new Map();
    this.chosen = null; // a worker, in a demo
    document.getElementById("cancel").addEventListener("click", () => act("cancel", this.name));
    document.getElementById("hurt").append(...Object.entries(FAULTS).map(([verb, words]) =>
      element("button", { type: "button", class: "danger", id: `hurt-${verb}`, disabled: true, onclick: () => act(verb, this.name, this.chosen) }, words)));
    document.getElementById("op-legend").append(
      ...Object.entries(OPS).map(([letter, { words, colour }]) => element("li", {}, element("i", { colour }, letter), words)),
      element("li", {}, element("i", { colour: "var(--draining)" }, "⇄"), "work of another replica"),
      element("li", {}, element("i", { colour: "var(--gone)" }, "✕"), "empty; its work runs on other replicas"));
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
    const row = await call("GET", `/v1/tasks/${encodeURIComponent(this.name)}`).catch(() => null);
    if (!row || row.task !== this.name) return;
    this.rows = [];
    this.steps(row.rows);
    this.compare = row.without_faults ?? null; // losses by step, of the failure-free run of a demo
    this.detail = row;
    this.paint();
  }

  steps(rows) {
    for (const row of rows) {
      while (this.rows.length && this.rows.at(-1).step >= row.step) this.rows.pop(); // done again, from a checkpoint
      this.rows.push(row);
    }
    if (this.rows.length > KEPT_ROWS) this.rows.splice(0, this.rows.length - KEPT_ROWS);
  }

  // The current op of every worker is asked for only while the page is visible.
  async ask() {
    clearTimeout(this.timer);
    const name = this.name;
    if (name === null) return;
    if (!document.hidden && !OVER.includes(this.detail?.state)) {
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
      document.getElementById("task-because").textContent = "Task not found.";
      return;
    }
    const state = document.getElementById("task-state");
    write(state, task.state);
    state.className = `state ${tone(task.state)}`;
    const fewer = task.state === "running" && task.working < task.asked;
    write(document.getElementById("task-because"), fewer ? `${task.because}; now ${task.working} of ${task.asked} workers train, and do the work of the others` : task.because);
    const over = OVER.includes(task.state);
    document.getElementById("cancel").hidden = over || !this.store.may.has("cancel");
    document.getElementById("workers-part").hidden = over;
    document.getElementById("hurt-bar").hidden = !this.store.may.has("kill") || OVER.includes(task.state);
    const { issued, committed } = task.microbatches;
    figures(document.getElementById("task-figures"), [
      [`${task.step} / ${task.steps}`, "step"], [loss(task.loss, 6), "loss"],
      [task.step_seconds ? duration(task.step_seconds) : "–", "per step"],
      ...(over ? [] : [[`${task.working} / ${task.asked}`, "workers", fewer ? "warn" : ""], [task.phase ?? "not started", "phase"]]),
      [`${committed} / ${issued}`, "microbatches committed", committed === issued ? "" : "warn"],
      [task.saved.protected ? `step ${task.saved.protected}` : "–", task.saved.protected ? "protected up to" : `nothing saved${over ? "" : " yet"}`, task.saved.failing ? "warn" : ""],
      [percent(task.goodput), "goodput"], [task.owner, "owner"],
      ...Object.entries(task.evaluation?.values ?? {}).map(([name, value]) =>
        [short(value, 6), `${name}, evaluated after step ${task.evaluation.step}`]),
    ]);
    const unsaved = document.getElementById("task-unsaved");
    unsaved.hidden = !task.saved.failing;
    write(unsaved, `Saving fails: ${task.saved.failing}. Training continues; the task is protected up to step ${task.saved.protected}.`);
    this.charts();
    const known = task.loss != null && this.compare?.[task.step] != null;
    const apart = known ? `, without failures ${loss(this.compare[task.step], 6)}` : "";
    write(document.getElementById("loss-now"), task.loss == null ? "" : `${loss(task.loss, 6)} at step ${task.step}${apart}`);
    this.grid();
  }

  charts() {
    const loss = document.getElementById("loss"), seconds = document.getElementById("seconds");
    const last = this.rows.at(-1);
    const drawn = [this.name, this.rows.length, last?.step, last?.at, loss.clientWidth, seconds.clientWidth, colour("--card"), Boolean(this.compare)].join();
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    drawChart(loss, this.rows, "loss", { compare: this.compare });
    drawChart(seconds, this.rows, "seconds", { fromZero: true });
    const sorted = this.rows.map((row) => row.seconds).filter((value) => value > 0).sort((one, other) => one - other);
    write(document.getElementById("seconds-now"), sorted.length ? `median ${duration(sorted[sorted.length >> 1])}` : "");
  }

  grid() {
    const detail = this.detail;
    if (!detail || detail.task !== this.name) return;
    const { replicas, stages } = detail.shape;
    if (this.places !== `${replicas}×${stages}`) this.build(replicas, stages);
    const seats = new Map(detail.seats.map((seat) => [seat.worker, seat]));
    const readings = new Map((this.readings ?? []).map((row) => [row.worker, row]));
    for (const [worker, cell] of this.cells) this.fill(cell, worker, seats.get(worker), readings.get(worker));
    const list = document.getElementById("task-incidents"), said = JSON.stringify(detail.stories);
    if (list.dataset.said === said) return;
    list.dataset.said = said;
    list.replaceChildren(...(detail.stories.length ? detail.stories.slice().reverse().map(({ number, what, workers, step, seconds }) =>
      element("li", {}, element("a", { href: `#/incident/${number}` }, `incident ${number}`), ` step ${step}: ${happened({ what, workers })}, `,
        element("b", {}, seconds == null ? "open" : `recovered in ${duration(seconds)}`))) : [element("li", { class: "quiet" }, "none")]));
  }

  build(replicas, stages) {
    this.places = `${replicas}×${stages}`;
    this.cells.clear();
    const head = element("tr", {}, element("th", {}, ""), ...Array.from({ length: stages }, (_, stage) => element("th", { scope: "col" }, `stage ${stage}`)));
    const rows = Array.from({ length: replicas }, (_, replica) => element("tr", {}, element("th", { scope: "row" }, `replica ${replica}`),
      ...Array.from({ length: stages }, (_, stage) => {
        const worker = `${replica}:${stage}`, cell = element("td", {}, element("b", {}), element("span", {}), element("span", {}));
        if (this.store.may.has("kill")) {
          cell.tabIndex = 0;
          cell.setAttribute("role", "button");
          cell.addEventListener("click", () => this.choose(worker));
          cell.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this.choose(worker); } });
        }
        this.cells.set(worker, cell);
        return cell;
      })));
    document.getElementById("places").style.minWidth = `${4.6 + 7.4 * stages}rem`;
    document.getElementById("places").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
    this.choose(null);
  }

  choose(worker) {
    this.chosen = worker;
    for (const [name, cell] of this.cells) cell.setAttribute("aria-pressed", String(name === worker));
    write(document.getElementById("hurt-who"), worker === null ? "Select a worker below, then:" : `Worker ${worker} (replica:stage)`);
    for (const button of document.getElementById("hurt").children) button.disabled = worker === null;
  }

  fill(cell, worker, seat, row) {
    const [big, middle, small] = cell.children;
    const stopped = (this.detail.empty_stages ?? []).includes(Number(worker.split(":")[1])); // none to reroute to
    const reading = row?.reading, op = reading && OP.exec(reading.doing);
    const elsewhere = op?.[3] !== undefined && op[3] !== worker.split(":")[0];
    const away = seat && ["absent", "starting", "joining"].includes(seat.state);
    cell.classList.toggle("absent", !seat || away);
    cell.classList.toggle("elsewhere", Boolean(elsewhere));
    cell.style.setProperty("--c", op && reading.busy ? OPS[op[2]].colour : "var(--left)");
    write(big, !seat ? "✕" : away ? (seat.state === "absent" ? "✕" : "↻") : op ? `${op[2]}${op[3] === undefined ? "" : ` ${op[3]}.${op[4]}`}${elsewhere ? " ⇄" : ""}` : reading ? "…" : "·");
    write(middle, !seat ? (stopped ? "no worker" : "work rerouted") : seat.leaving || (seat.state === "absent" && stopped ? "no worker" : seat.state !== "member" ? PLACES[seat.state] ?? seat.state : "")
      || (op ? OPS[op[2]].words : reading?.doing && (reading.busy ? reading.doing : awaited(reading.doing))) || "no reading");
    write(small, !seat ? "" : `${reading ? `${reading.done} done, ${reading.num_ops} to do · ` : ""}${this.store.may.has("follow") ? `slot ${seat.slot}` : `${seat.node}:${seat.slot}`}`);
    const carried = Object.entries(row?.carriers ?? {}).map(([peer, by]) => `\ntensors to ${peer} by ${by}`).join("");
    cell.title = seat ? `${worker} on ${seat.node}, slot ${seat.slot}: ${reading ? `step ${reading.step}, ${reading.doing}` : seat.state}${carried}` : `${worker}: empty`;
  }
}
