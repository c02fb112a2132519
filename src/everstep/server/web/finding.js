// A diagnosis on the grid of replicas and stages: which worker waits for which, or how slow each worker is.

import { colour, sized, write } from "./words.js";

const CELL = 96, TALL = 46, GAP_X = 44, GAP_Y = 26, LEFT = 74, TOP = 30;

const place = (worker) => worker.split(":").map(Number);

export function drawFinding(canvas, finding, suspects, title, words) {
  const slow = Object.keys(finding.paces).length > 0;
  const known = [...suspects, ...finding.waits.flatMap((wait) => [wait.waiter, wait.for ?? wait.waiter]), ...Object.keys(finding.paces)].map(place);
  const rows = Math.max(...known.map(([replica]) => replica)) + 1, columns = Math.max(...known.map(([, stage]) => stage)) + 1;
  const space = canvas.parentElement.clientWidth - 28, scale = Math.min(1, space / (LEFT + columns * (CELL + GAP_X)));
  const brush = sized(canvas, space, (TOP + rows * (TALL + GAP_Y)) * scale);
  brush.scale(scale, scale);
  write(title, slow ? "Op time of each worker, relative to its usual time" : "Which worker waits for which");
  const x = (stage) => LEFT + stage * (CELL + GAP_X), y = (replica) => TOP + replica * (TALL + GAP_Y);
  brush.textBaseline = "middle";
  brush.font = "600 12px system-ui, sans-serif";
  brush.fillStyle = colour("--quiet");
  brush.textAlign = "center";
  for (let stage = 0; stage < columns; stage++) brush.fillText(`stage ${stage}`, x(stage) + CELL / 2, 12);
  brush.textAlign = "left";
  for (let replica = 0; replica < rows; replica++) brush.fillText(`replica ${replica}`, 0, y(replica) + TALL / 2);
  const waiting = new Map(finding.waits.map((wait) => [wait.waiter, wait]));
  for (let replica = 0; replica < rows; replica++) {
    for (let stage = 0; stage < columns; stage++) {
      const worker = `${replica}:${stage}`;
      cell(brush, worker, x(stage), y(replica), { suspect: suspects.includes(worker), wait: waiting.get(worker), pace: finding.paces[worker] });
    }
  }
  for (const wait of finding.waits) if (wait.for && wait.for !== wait.waiter) arrow(brush, place(wait.waiter), place(wait.for), x, y);
  write(words, slow ? finding.ops.map(({ step, took_ms, usual_ms }) => `step ${step}: ${took_ms} ms, usually ${usual_ms} ms`).join(" · ")
    : "An arrow points from a waiting worker to the worker that should send. A waiting worker is not at fault; the cause is where the arrows end.");
}

function cell(brush, worker, left, top, { suspect, wait, pace }) {
  if (pace !== undefined) { // slower is darker: read in grey too
    brush.globalAlpha = Math.min(0.75, Math.max(0.06, (pace - 1) * 0.6));
    brush.fillStyle = colour("--bad");
    brush.fillRect(left, top, CELL, TALL);
    brush.globalAlpha = 1;
  }
  brush.strokeStyle = colour(suspect ? "--bad" : "--line");
  brush.lineWidth = suspect ? 3 : 1;
  brush.strokeRect(left, top, CELL, TALL);
  const below = pace !== undefined ? (suspect ? `${worker} slow` : worker) : wait ? `waits ${wait.seconds.toFixed(2)} s` : "";
  brush.textAlign = "center";
  brush.fillStyle = colour("--ink");
  brush.font = "700 14px ui-monospace, monospace";
  brush.fillText(pace !== undefined ? `${pace.toFixed(2)}×` : suspect ? `${worker} ✕` : worker, left + CELL / 2, top + (below ? 15 : TALL / 2));
  brush.font = "11px system-ui, sans-serif";
  brush.fillText(below, left + CELL / 2, top + 34);
}

function arrow(brush, [fromReplica, fromStage], [toReplica, toStage], x, y) {
  const from = [x(fromStage) + CELL / 2, y(fromReplica) + TALL / 2], to = [x(toStage) + CELL / 2, y(toReplica) + TALL / 2];
  const edge = ([ax, ay], [bx, by]) => { // where the line leaves the cell
    const dx = bx - ax, dy = by - ay, reach = Math.min(dx ? (CELL / 2 + 3) / Math.abs(dx) : Infinity, dy ? (TALL / 2 + 3) / Math.abs(dy) : Infinity);
    return [ax + dx * reach, ay + dy * reach];
  };
  const [sx, sy] = edge(from, to), [ex, ey] = edge(to, from), angle = Math.atan2(ey - sy, ex - sx);
  brush.strokeStyle = brush.fillStyle = colour("--silent");
  brush.lineWidth = 2;
  brush.beginPath(); brush.moveTo(sx, sy); brush.lineTo(ex, ey); brush.stroke();
  brush.beginPath(); brush.moveTo(ex, ey);
  for (const turn of [2.6, -2.6]) brush.lineTo(ex + 10 * Math.cos(angle + turn), ey + 10 * Math.sin(angle + turn));
  brush.fill();
}
