// Incidents: the list, and the timeline of one from evidence to the resumed step.

import { call } from "./link.js";
import { MOMENTS, clock, colour, duration, element, figures, happened, openRow, sized, tone } from "./words.js";

const LISTED = 200;
const LEAST_MS = 1000; // between two questions

export class IncidentsView {
  constructor(store) { this.store = store; this.asked = 0; }

  async paint() {
    const said = JSON.stringify(this.store.incidents);
    if (said === this.said || Date.now() - this.asked < LEAST_MS) return;
    this.asked = Date.now();
    const rows = await call("GET", `/v1/incidents?last=${LISTED}`).catch(() => null);
    if (!rows) return;
    this.said = said;
    document.getElementById("no-incidents").hidden = rows.length > 0;
    document.getElementById("all-incidents").parentElement.hidden = rows.length === 0;
    document.querySelector("#all-incidents tbody").replaceChildren(...rows.reverse().map((one) =>
      element("tr", { onclick: openRow }, element("td", { class: "num" }, element("a", { href: `#/incident/${one.number}` }, String(one.number))),
        element("td", {}, clock(one.opened_at)), element("td", {}, one.task || one.node), element("td", {}, happened(one)),
        element("td", {}, one.verdict ? `${one.verdict.severity} ${one.verdict.kind}` : "–"),
        element("td", { class: "num" }, one.closed_at == null ? "open" : duration(one.closed_at - one.opened_at)))));
  }
}

export class IncidentView {
  constructor(store) { this.store = store; this.number = null; }

  async open(number) {
    this.number = number;
    this.said = this.named = null;
    await this.ask();
  }

  close() { this.number = null; clearTimeout(this.timer); }

  async ask() {
    clearTimeout(this.timer);
    const number = this.number;
    if (number === null) return;
    const row = await call("GET", `/v1/incidents/${encodeURIComponent(number)}`).catch((error) => ({ wrong: error.message }));
    if (number !== this.number) return;
    if (row.wrong) document.getElementById("incident-what").textContent = row.wrong;
    else { this.one = row; this.paint(); }
    if (row.closed_at == null) this.timer = setTimeout(() => this.ask(), LEAST_MS);
  }

  paint() {
    const one = this.one;
    if (!one || String(one.number) !== String(this.number)) return;
    const moments = momentsOf(one);
    this.strip(moments);
    this.finding(one);
    const said = JSON.stringify(one);
    if (said === this.said) return;
    this.said = said;
    document.getElementById("incident-number").textContent = one.number;
    const state = document.getElementById("incident-state");
    state.textContent = one.closed_at == null ? "open" : "closed";
    state.className = `state ${one.closed_at == null ? "bad" : tone("up")}`;
    document.getElementById("incident-what").textContent = [one.what, one.workers.length ? `worker${one.workers.length > 1 ? "s" : ""} ${one.workers.join(", ")}` : "", one.node && `node ${one.node}`].filter(Boolean).join(" · ");
    figures(document.getElementById("incident-figures"), [
      [one.closed_at == null ? "open" : duration(one.closed_at - one.opened_at), "from evidence to recovery", one.closed_at == null ? "bad" : ""],
      [one.verdict?.severity ?? "–", one.verdict?.kind ?? "no verdict"],
      [String(one.step), one.stopped_training ? "interrupted step" : "step; training continued"],
      [String(one.replayed_ops), "ops replayed"],
      ...(one.kept_outputs ? [[String(one.kept_outputs), "outputs of the lost worker kept"]] : []),
      [one.restored_from == null ? "none" : `step ${one.restored_from}`, one.restored_where ? `restored from ${one.restored_where}` : "restored state"],
      ...(one.task ? [[one.task, "task", "", `#/task/${encodeURIComponent(one.task)}`]] : []),
    ]);
    document.getElementById("timeline").replaceChildren(...moments.map(({ at, kind, title, because, outcome }) =>
      element("li", { "data-mark": MOMENTS[kind].mark, colour: `var(${MOMENTS[kind].colour})` },
        element("time", { title: clock(at) }, at <= moments[0].at ? clock(at) : `+${duration(at - moments[0].at)}`), element("b", {}, title),
        because ? element("p", {}, because) : null, outcome ? element("p", {}, `outcome: ${outcome}`) : null)));
  }

  finding(one) {
    const { suspects, ruled_out } = one.finding;
    document.getElementById("finding").hidden = !suspects.length && !ruled_out.length;
    const said = JSON.stringify([suspects, ruled_out]);
    if (said === this.named) return;
    this.named = said;
    document.getElementById("suspects").replaceChildren(...(suspects.length ? suspects : ["none"]).map((who) => element("li", {}, who)));
    document.getElementById("innocent").replaceChildren(...ruled_out.map((who) => element("li", {}, who)));
    document.getElementById("innocent-title").hidden = !ruled_out.length;
  }

  strip(moments) {
    const canvas = document.getElementById("strip"), width = canvas.clientWidth;
    const brush = sized(canvas, width, 64);
    const first = moments[0].at, span = Math.max(1e-3, moments.at(-1).at - first);
    const x = (at) => 24 + ((at - first) / span) * (width - 48);
    brush.strokeStyle = colour("--line");
    brush.lineWidth = 3;
    brush.beginPath(); brush.moveTo(24, 28); brush.lineTo(width - 24, 28); brush.stroke();
    brush.font = "700 17px system-ui, sans-serif";
    brush.textAlign = "center";
    brush.textBaseline = "middle";
    let taken = -Infinity;
    moments.forEach(({ at, kind }, index) => { // side by side where they were at one time, and none past the end
      taken = Math.min(Math.max(x(at), taken + 20), width - 24 - 20 * (moments.length - 1 - index));
      brush.fillStyle = colour(MOMENTS[kind].colour);
      brush.fillText(MOMENTS[kind].mark, taken, 28);
    });
    brush.fillStyle = colour("--quiet");
    brush.font = "12px system-ui, sans-serif";
    brush.textAlign = "left"; brush.fillText("0", 22, 52);
    brush.textAlign = "right"; brush.fillText(duration(span), width - 22, 52);
  }
}

function momentsOf(one) {
  const found = one.evidence.filter((row) => !row.clears).map((row) => ({ at: row.at, kind: "evidence", title: `evidence: ${row.source}`, because: row.text }));
  if (one.verdict) found.push({ at: one.verdict.at, kind: "verdict", title: `verdict: ${one.verdict.severity} ${one.verdict.kind}`, because: one.verdict.because });
  for (const row of one.remedies) found.push({ at: row.at, kind: "remedy", title: `remedy: ${row.what}`, because: row.because, outcome: row.outcome });
  for (const row of one.timeline) found.push({ at: row.at, kind: row.at === one.closed_at ? "resumed" : "planned", title: row.because });
  if (one.closed_at != null && !one.timeline.some((row) => row.at === one.closed_at)) found.push({ at: one.closed_at, kind: "resumed", title: "closed" });
  if (!found.length) found.push({ at: one.opened_at, kind: "evidence", title: one.what });
  return found.map((moment, index) => ({ moment, index })).sort((a, b) => a.moment.at - b.moment.at || a.index - b.index).map(({ moment }) => moment);
}
