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
