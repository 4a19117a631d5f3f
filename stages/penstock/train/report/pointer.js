"use strict";
const { values, places } = JSON.parse(document.getElementById("steps").textContent);
const figures = document.querySelectorAll("[data-chart]");
const steps = values.step;
const first = steps[0], span = steps[steps.length - 1] - first;
const brief = (v) => v === null ? "not finite" : v !== 0 && Math.abs(v) < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(4));
const told = (i) => [
  `step ${steps[i].toLocaleString("en")}`,
  `loss ${brief(values.loss[i])}`,
  `lr ${brief(values.lr[i])}`,
  `gradient norm ${brief(values.grad_norm[i])}`,
  `${Math.round(values.tokens_per_second[i]).toLocaleString("en")} tokens/s`,
].join("\n");
const nearest = (step) => {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
};
const show = (i, under) => figures.forEach((figure) => {
  const across = span ? 100 * (steps[i] - first) / span : 50;
  const [rule, mark, tip] = [".rule", ".mark", ".tip"].map((name) => figure.querySelector(name));
  const up = places[figure.dataset.chart][i];
  rule.hidden = false; rule.style.left = `${across}%`;
  mark.hidden = up === null; mark.style.left = `${across}%`; mark.style.top = `${up}%`;
  tip.hidden = figure !== under;
  tip.textContent = told(i);
  tip.style.left = across < 50 ? `calc(${across}% + 12px)` : "";
  tip.style.right = across < 50 ? "" : `calc(${100 - across}% + 12px)`;
});
const hide = () => document.querySelectorAll(".rule, .mark, .tip").forEach((part) => { part.hidden = true; });
figures.forEach((figure) => {
  const plot = figure.querySelector(".plot");
  const point = (event) => {
    const box = plot.getBoundingClientRect();
    show(nearest(first + span * (event.clientX - box.left) / box.width), figure);
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", hide);
});
