"use strict";
const { tables, axes, charts, maps } = JSON.parse(document.getElementById("numbers").textContent);

// Numbers for people.
const words = {
  number: (v) => v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e5) ? v.toExponential(3) : String(+v.toPrecision(5)),
  amount: (v) => v.toLocaleString("en", { maximumFractionDigits: 0 }),
  brief: (v) => v.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 }),
  share: (v) => `${(100 * v).toFixed(1)} %`,
  GiB: (v) => `${v.toFixed(2)} GiB`,
  seconds: (v) => `${v.toFixed(3)} s`,
};
const clocks = [[3 * 86400, 86400, "d"], [3 * 3600, 3600, "h"], [180, 60, "min"], [0, 1, "s"]];

// What curves can be drawn over: how many of a unit are one mark's, and what is written there.
const kinds = {
  step: () => ({ unit: 1, text: (v) => words.amount(v), name: "step" }),
  tokens: () => ({ unit: 1, text: (v) => words.brief(v), name: "tokens" }),
  epoch: () => ({ unit: 1, text: (v) => String(+v.toPrecision(3)), name: "epoch" }),
  seconds: (high) => {
    const [, unit, name] = clocks.find(([from]) => high >= from);
    return { unit, text: (v) => `${+(v / unit).toPrecision(3)} ${name}`, name: "time" };
  },
};
let axis = "step";

// The first place of a rising list that is not below a value.
const place = (list, value) => {
  let low = 0, high = list.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
};
const between = (from, to, value) => {
  const at = place(from, value);
  if (at === 0 || value >= from[at]) return to[at];
  const share = (value - from[at - 1]) / (from[at] - from[at - 1]);
  return to[at - 1] + share * (to[at] - to[at - 1]);
};
const runOf = (series) => Number(series.table.split(".")[0]);
const tableOf = (series) => tables[runOf(series)][series.table.split(".")[1]];
const ofStep = (run, step) => axis === "step" ? step : between(axes[run].step, axes[run][axis], step);
const toStep = (run, value) => axis === "step" ? value : between(axes[run][axis], axes[run].step, value);
const nearest = (steps, step) => {
  const at = place(steps, step);
  return at > 0 && step - steps[at - 1] < steps[at] - step ? at - 1 : at;
};
const endsOf = (chart) => axis === "step" ? chart.x : [0, Math.max(...chart.series.map((each) => ofStep(runOf(each), each.last)))];
const across = (chart, run, step) => {
  const [low, high] = endsOf(chart);
  return high > low ? 100 * (ofStep(run, step) - low) / (high - low) : 50;
};
const upTo = (chart, value) => {
  const [low, high] = chart.y;
  return 100 - 100 * ((chart.bend === "log" ? Math.log10(value) : value) - low) / (high - low);
};
const beside = (tip, at) => {
  tip.style.left = at < 50 ? `calc(${at}% + 12px)` : "";
  tip.style.right = at < 50 ? "" : `calc(${100 - at}% + 12px)`;
};

// Curves come drawn over their steps; over another axis each of their points is moved.
const figures = [...document.querySelectorAll("[data-chart]")];
const drawn = new Map(figures.map((figure) => [figure, {
  paths: [...figure.querySelectorAll("[data-series] path")].map((path) => [path, path.getAttribute("d")]),
  ticks: [...figure.querySelectorAll(".x")],
}]));
const marksUpTo = (high, unit) => {
  const rough = high / unit / 5, power = 10 ** Math.floor(Math.log10(rough));
  const width = unit * power * [1, 2, 2.5, 5, 10].find((each) => power * each >= rough * 0.999);
  return Array.from({ length: Math.floor(high / width + 1e-9) + 1 }, (_, at) => at * width);
};
const redraw = (figure) => {
  const chart = charts[figure.dataset.chart], { paths, ticks } = drawn.get(figure), [first, last] = chart.x;
  const stepAt = (x) => last > first ? first + (last - first) * x / 1000 : first;
  paths.forEach(([path, over]) => {
    const run = runOf(chart.series[path.parentNode.dataset.series]);
    path.setAttribute("d", axis === "step" ? over : over.replace(/([ML])([\d.]+) /g,
      (_, command, x) => `${command}${(10 * across(chart, run, stepAt(Number(x)))).toFixed(1)} `));
  });
  figure.querySelectorAll(".x").forEach((tick) => tick.remove());
  const plot = figure.querySelector(".plot"), high = endsOf(chart)[1];
  if (axis === "step") return plot.prepend(...ticks);
  const { unit, text, name } = kinds[axis](high);
  plot.prepend(...(high > 0 ? marksUpTo(high, unit) : [0]).map((value) => {
    const tick = document.createElement("span");
    tick.className = "x";
    tick.style.left = `${high > 0 ? 100 * value / high : 50}%`;
    tick.textContent = value === 0 ? `${name} 0` : text(value);
    return tick;
  }));
};
const choice = document.getElementById("axes");
if (choice) {
  const choose = (name) => { axis = name; hide(); figures.forEach(redraw); };
  choice.hidden = false;
  choice.addEventListener("change", (event) => {
    choose(event.target.value);
    try { localStorage.setItem("penstock-axis", axis); } catch { /* a page may not be allowed to remember */ }
  });
  let remembered = null;
  try { remembered = localStorage.getItem("penstock-axis"); } catch { /* as above */ }
  const input = [...choice.elements].find((each) => each.value === remembered);
  if (input && remembered !== axis) { input.checked = true; choose(remembered); }
}

// What is under the pointer.
const show = (value, under) => figures.forEach((figure) => {
  const chart = charts[figure.dataset.chart], title = figure.querySelector("h3").textContent.toLowerCase();
  const rule = figure.querySelector(".rule"), tip = figure.querySelector(".tip"), marks = figure.querySelectorAll(".mark");
  const lines = [];
  let at = null;
  chart.series.forEach((series, index) => {
    const run = runOf(series), table = tableOf(series), found = nearest(table.step, toStep(run, value));
    const step = table.step[found], its = table[series.column][found], mark = marks[index];
    if (at === null) {
      at = across(chart, run, step);
      const kind = kinds[axis](endsOf(chart)[1]);
      const over = axis === "step" ? "" : `${kind.name} ${kind.text(ofStep(run, step))}`;
      // Runs that are compared have come to other steps there.
      const named = axis === "step" || tables.length === 1 ? `step ${step.toLocaleString("en")}` : "";
      lines.push([named, over].filter(Boolean).join(", "));
    }
    mark.hidden = its === null;
    if (its !== null) { mark.style.left = `${across(chart, run, step)}%`; mark.style.top = `${upTo(chart, its)}%`; }
    lines.push(`${series.label.toLowerCase() === title ? "" : `${series.label}  `}${its === null ? "not finite" : words[chart.unit](its)}`);
  });
  rule.hidden = false; rule.style.left = `${at}%`;
  tip.hidden = figure !== under;
  tip.textContent = lines.join("\n");
  beside(tip, at);
});
function hide() { document.querySelectorAll(".rule, .mark, .tip").forEach((part) => { part.hidden = true; }); }
figures.forEach((figure) => {
  const plot = figure.querySelector(".plot");
  const point = (event) => {
    const box = plot.getBoundingClientRect(), [low, high] = endsOf(charts[figure.dataset.chart]);
    show(low + (high - low) * (event.clientX - box.left) / box.width, figure);
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
