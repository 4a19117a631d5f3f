"use strict";
const { tables, charts, maps } = JSON.parse(document.getElementById("numbers").textContent);

// What is under the pointer.
const words = {
  number: (v) => v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e5) ? v.toExponential(3) : String(+v.toPrecision(5)),
  amount: (v) => v.toLocaleString("en", { maximumFractionDigits: 0 }),
  share: (v) => `${(100 * v).toFixed(1)} %`,
  GiB: (v) => `${v.toFixed(2)} GiB`,
  seconds: (v) => `${v.toFixed(3)} s`,
};
const nearest = (steps, step) => {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
};
const tableOf = (series) => {
  const [run, kind] = series.table.split(".");
  return tables[run][kind];
};
const upTo = (chart, value) => {
  const [low, high] = chart.y;
  return 100 - 100 * ((chart.bend === "log" ? Math.log10(value) : value) - low) / (high - low);
};
const beside = (tip, across) => {
  tip.style.left = across < 50 ? `calc(${across}% + 12px)` : "";
  tip.style.right = across < 50 ? "" : `calc(${100 - across}% + 12px)`;
};
const figures = [...document.querySelectorAll("[data-chart]")];
const show = (step, under) => figures.forEach((figure) => {
  const chart = charts[figure.dataset.chart];
  const [first, last] = chart.x;
  const place = (at) => last > first ? 100 * (at - first) / (last - first) : 50;
  const rule = figure.querySelector(".rule"), tip = figure.querySelector(".tip");
  const marks = figure.querySelectorAll(".mark");
  const lines = [];
  let across = null;
  chart.series.forEach((series, index) => {
    const table = tableOf(series), at = nearest(table.step, step), value = table[series.column][at];
    if (across === null) { across = place(table.step[at]); lines.push(`step ${table.step[at].toLocaleString("en")}`); }
    const mark = marks[index];
    mark.hidden = value === null;
    if (value !== null) { mark.style.left = `${place(table.step[at])}%`; mark.style.top = `${upTo(chart, value)}%`; }
    lines.push(`${series.label.toLowerCase() === figure.querySelector("h3").textContent.toLowerCase() ? "" : `${series.label}  `}${value === null ? "not finite" : words[chart.unit](value)}`);
  });
  rule.hidden = false; rule.style.left = `${across}%`;
  tip.hidden = figure !== under;
  tip.textContent = lines.join("\n");
  beside(tip, across);
});
const hide = () => document.querySelectorAll(".rule, .mark, .tip").forEach((part) => { part.hidden = true; });
figures.forEach((figure) => {
  const plot = figure.querySelector(".plot"), [first, last] = charts[figure.dataset.chart].x;
  const point = (event) => {
    const box = plot.getBoundingClientRect();
    show(first + (last - first) * (event.clientX - box.left) / box.width, figure);
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", hide);
});
document.querySelectorAll("[data-map]").forEach((figure) => {
  const map = maps[figure.dataset.map], plot = figure.querySelector(".plot"), tip = figure.querySelector(".tip");
  const point = (event) => {
    const box = plot.getBoundingClientRect();
    const among = (count, share) => Math.max(0, Math.min(count - 1, Math.floor(count * share)));
    const x = among(map.columns.length, (event.clientX - box.left) / box.width);
    const y = among(map.rows.length, (event.clientY - box.top) / box.height);
    const value = map.table[x][y];
    tip.hidden = false;
    tip.textContent = `${map.rows[y]}, ${map.columns[x]}\n${value === null ? "not finite" : words.number(value)}`;
    beside(tip, 100 * (x + 0.5) / map.columns.length);
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", hide);
});

// Light and dark.
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("penstock-theme", root.dataset.theme); } catch { /* as above */ }
});

// A page of a run that goes on is written again and again; what was open stays open.
const refresh = Number(document.body.dataset.refresh);
if (refresh) {
  const name = `penstock-open-${location.pathname}`;
  try { for (const id of JSON.parse(sessionStorage.getItem(name) || "[]")) { const part = document.getElementById(id); if (part) part.open = true; } } catch { /* as above */ }
  setInterval(() => {
    if (document.hidden || document.querySelector(".plot:hover")) return;
    try { sessionStorage.setItem(name, JSON.stringify([...document.querySelectorAll("details[open]")].map((part) => part.id))); } catch { /* as above */ }
    location.reload();
  }, 1000 * refresh);
}
