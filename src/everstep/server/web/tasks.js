// All tasks; those that wait, with what they wait for and their expected start; and who has how much.

import { call } from "./link.js";
import { duration, element, fillTable, headings } from "./words.js";

const ASK_MS = 2000;
const QUEUE = [["", true], ["task", false], ["owner", false], ["priority", true], ["slots needed", true], ["expected start", false], ["reason", false]];

export class TasksView {
  constructor(store, table) {
    this.store = store;
    this.table = table;
    this.asked = 0;
    headings(document.getElementById("queue"), QUEUE);
  }

  paint() {
    this.table();
    this.ask();
  }

  // Asked only while the page is visible. The page of one run has no queue.
  async ask() {
    if (Date.now() - this.asked < ASK_MS || document.hidden || document.body.dataset.known === undefined) return;
    this.asked = Date.now();
    const waiting = await call("GET", "/v1/queue").catch(() => ({ queue: [] }));
    document.getElementById("queue-part").hidden = waiting.queue.length === 0;
    document.getElementById("queue-free").textContent = `${waiting.free} of ${waiting.slots} slots free`;
    fillTable(document.querySelector("#queue tbody"), waiting.queue, (row) => row.task, (row) => [
      [row.place, null, { class: "num" }],
      [row.task, () => element("a", { href: `#/task/${encodeURIComponent(row.task)}` }, row.task)],
      [row.owner],
      [row.weight, null, { class: "num" }],
      [row.needs_slots, null, { class: "num" }],
      [`${row.starts_in_s == null ? "not known" : row.starts_in_s ? `in ${duration(row.starts_in_s)}` : "now"}: ${row.starts}`],
      [row.because],
    ]);
  }
}
