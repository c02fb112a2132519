// The last step: the ops of every worker as planned (outlined) and, below, as measured (filled), on one axis.

import { OPS, colour, duration, sized, write } from "./words.js";

const LEFT = 64, RIGHT = 12, TOP = 8, BAR = 13, GAP = 10, BOTTOM = 22;
const LETTER = /^\d+([FIWBRU])/;

export function drawGantt(canvas, words, step) {
  const workers = [...new Set([...step.planned, ...step.measured].map(([worker]) => worker))].sort(byPlace);
  const width = Math.max(canvas.parentElement.clientWidth - 2, 544), height = TOP + workers.length * (2 * BAR + GAP) + BOTTOM;
  const brush = sized(canvas, width, height);
  const end = Math.max(...step.planned.map((row) => row[3]), ...step.measured.map((row) => row[3]), 1e-6);
  const x = (at) => LEFT + (at / end) * (width - LEFT - RIGHT);
  brush.textBaseline = "middle";
  workers.forEach((worker, index) => {
    const top = TOP + index * (2 * BAR + GAP);
    brush.fillStyle = colour("--ink");
    brush.font = "700 12px ui-monospace, monospace";
    brush.textAlign = "left";
    brush.fillText(worker, 10, top + BAR);
    bars(brush, step.planned.filter((row) => row[0] === worker), top, x, false);
    bars(brush, step.measured.filter((row) => row[0] === worker), top + BAR, x, true);
    brush.strokeStyle = colour("--line");
    brush.beginPath(); brush.moveTo(0, top + 2 * BAR + GAP / 2 + 0.5); brush.lineTo(width, top + 2 * BAR + GAP / 2 + 0.5); brush.stroke();
  });
  brush.fillStyle = colour("--quiet");
  brush.font = "11px system-ui, sans-serif";
  brush.textAlign = "left"; brush.fillText("0", LEFT, height - 10);
  brush.textAlign = "right"; brush.fillText(duration(end), width - RIGHT, height - 10);
  const plan = step.planned_s ? `planned ${duration(step.planned_s)} (above, outlined)` : "";
  const ran = step.measured_s ? `step ${step.step} took ${duration(step.measured_s)} from its first op to its last (below, filled)` : "";
  const hop = step.hop_s ? `${duration(step.hop_s)} to the next stage` : "";
  const eager = step.eager_updates == null ? "" : `${Math.round(100 * step.eager_updates)} % of updates did not wait for all stages`;
  write(words, [plan, ran, hop, eager].filter(Boolean).join(" · "));
}

function bars(brush, rows, top, x, filled) {
  brush.textAlign = "center";
  brush.font = "700 10px ui-monospace, monospace";
  for (const [worker, op, start, end] of rows) {
    const letter = LETTER.exec(op)?.[1], elsewhere = /[FIWB](\d+)\./.exec(op)?.[1];
    const left = x(start), wide = Math.max(1, x(end) - left - 1), shade = letter ? OPS[letter].colour : colour("--gone");
    const moved = elsewhere !== undefined && elsewhere !== worker.split(":")[0];
    brush.fillStyle = brush.strokeStyle = shade;
    if (filled) brush.fillRect(left, top + 1, wide, BAR - 2);
    else brush.strokeRect(left + 0.5, top + 1.5, Math.max(0.5, wide - 1), BAR - 3);
    if (moved) { brush.strokeStyle = colour("--ink"); brush.strokeRect(left + 0.5, top + 1.5, Math.max(0.5, wide - 1), BAR - 3); }
    if (wide < 12 || !letter) continue;
    brush.fillStyle = filled ? "#fff" : colour("--ink");
    brush.fillText(wide > 30 && elsewhere !== undefined ? `${letter}${op.slice(op.indexOf(letter) + 1)}` : letter, left + wide / 2, top + BAR / 2 + 0.5);
  }
}

function byPlace(one, other) {
  const [a, b] = one.split(":").map(Number), [c, d] = other.split(":").map(Number);
  return b - d || a - c; // by stage: peers of one stage beside each other
}
