// A line by step, with its axes; a mark where a new epoch began: its schedule is another one.

import { clock, colour, duration, short, sized } from "./words.js";

const LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 30; // below: marks of epochs, then the words of the axis

// Round numbers that enclose [low, high]: three to six of them.
export function ticks(low, high) {
  const span = high > low ? high - low : Math.abs(low) || 1;
  const rough = span / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((part) => part * power >= rough * 0.999) * power;
  const first = Math.floor(low / step + 1e-9), last = Math.max(first + 1, Math.ceil(high / step - 1e-9));
  return Array.from({ length: last - first + 1 }, (_, index) => Number(((first + index) * step).toPrecision(6)));
}

// As many for all labels of an axis as the longest needs: 5.550 beside 5.545.
export const decimals = (marks) => Math.max(...marks.map((value) => Math.min(10, (String(value).split(".")[1] ?? "").length)));

export function drawChart(canvas, rows, key, { fromZero = false, compare = null } = {}) {
  const width = canvas.clientWidth, height = 170;
  const brush = sized(canvas, width, height);
  const ink = colour("--quiet"), line = colour("--line"), accent = colour("--accent"), broken = colour("--bad");
  const points = rows.filter((row) => row[key] != null && (key !== "seconds" || row.seconds > 0));
  brush.font = "11px system-ui, sans-serif";
  brush.textBaseline = "middle";
  brush.fillStyle = ink;
  if (points.length < 2) {
    brush.textAlign = "center";
    brush.fillText("it appears with the second step", width / 2, height / 2);
    return;
  }
  const [first, last] = [points[0].step, points.at(-1).step];
  const beside = compare ? Object.entries(compare).map(([step, value]) => [Number(step), value]).filter(([step, value]) => step >= first && step <= last && value != null) : [];
  const values = [...points.map((row) => row[key]), ...beside.map(([, value]) => value)].sort((one, other) => one - other);
  const marks = ticks(fromZero ? 0 : values[0], values.at(-1)), [low, high] = [marks[0], marks.at(-1)];
  const x = (step) => LEFT + ((step - first) / Math.max(1, last - first)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - low) / (high - low)) * (height - TOP - BOTTOM);
  const digits = decimals(marks);
  brush.strokeStyle = line;
  brush.textAlign = "right";
  for (const value of marks) {
    const at = Math.round(y(value)) + 0.5;
    brush.beginPath(); brush.moveTo(LEFT, at); brush.lineTo(width - RIGHT, at); brush.stroke();
    brush.fillText(value.toFixed(digits), LEFT - 6, at);
  }
  brush.textAlign = "left"; brush.fillText(String(first), LEFT, height - 9);
  brush.textAlign = "right"; brush.fillText(`step ${last}`, width - RIGHT, height - 9);
  points.forEach((row, index) => {
    if (index === 0 || points[index - 1].epoch === row.epoch) return;
    const at = x(row.step);
    brush.strokeStyle = brush.fillStyle = broken;
    brush.setLineDash([2, 3]);
    brush.beginPath(); brush.moveTo(at, TOP); brush.lineTo(at, height - BOTTOM); brush.stroke();
    brush.setLineDash([]);
    brush.beginPath(); brush.moveTo(at - 4, height - BOTTOM + 7); brush.lineTo(at + 4, height - BOTTOM + 7); brush.lineTo(at, height - BOTTOM); brush.fill();
  });
  if (beside.length > 1) { // the same job without faults: wide and pale, so that a line on it is seen to be on it
    brush.strokeStyle = colour("--free-line");
    brush.lineWidth = 7;
    brush.beginPath();
    beside.forEach(([step, value], index) => brush[index ? "lineTo" : "moveTo"](x(step), y(value)));
    brush.stroke();
  }
  brush.strokeStyle = accent;
  brush.lineWidth = 1.8;
  brush.beginPath();
  points.forEach((row, index) => brush[index ? "lineTo" : "moveTo"](x(row.step), y(row[key])));
  brush.stroke();
  brush.lineWidth = 1;
}

