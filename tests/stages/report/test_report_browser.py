"""A report in a real browser: what fits, what is told under the pointer, what it looks like."""

import html
import json
import re
import shutil
import subprocess
from itertools import accumulate

import pytest

from penstock.train.report import write_comparison
from tests.stages.report.report_pages import points, report_of
from tests.stages.train.told_runs import falling

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed here")


def browse(folder, page, *options):
    """What the browser makes of a file: its output."""
    command = [
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}/profile",
        "--virtual-time-budget=8000",
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


HARNESS = """<!doctype html><pre id="found"></pre><script>
const text = PAGE, found = {}, errors = [];
addEventListener("error", (event) => errors.push(event.message));
const look = async (name, width) => {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.srcdoc = text;
  const loaded = new Promise((done) => { frame.onload = done; });
  document.body.append(frame);
  await loaded;
  const page = frame.contentDocument, view = frame.contentWindow, its = found[name] = { errors };
  view.addEventListener("error", (event) => errors.push(event.message));
  const paper = () => view.getComputedStyle(page.body).backgroundColor;
  its.wide = page.documentElement.scrollWidth;
  its.papers = [paper()];
  page.getElementById("theme").click();
  its.papers.push(paper());
  const plot = page.querySelector('[data-chart="loss"] .plot'), box = plot.getBoundingClientRect();
  const at = { clientX: box.left + box.width * 9 / 19, clientY: box.top + 5, bubbles: true };
  plot.dispatchEvent(new view.PointerEvent("pointermove", at));
  const tip = page.querySelector('[data-chart="loss"] .tip');
  its.tip = tip.hidden ? null : tip.textContent;
  its.rules = [...page.querySelectorAll(".small .rule")].filter((rule) => !rule.hidden).length;
  const middle = (part) => {
    const its = part.getBoundingClientRect();
    return [its.left + its.width / 2 - box.left, its.top + its.height / 2 - box.top];
  };
  its.mark = middle(page.querySelector('[data-chart="loss"] .mark'));
  its.across = box.width;
  its.ticks = [...page.querySelectorAll('[data-chart="loss"] .y')].map(
    (tick) => [Number(tick.textContent), middle(tick)[1]]);
  plot.dispatchEvent(new view.PointerEvent("pointerleave", at));
  its.left = tip.hidden;
  its.axes = {};
  for (const input of page.querySelectorAll("#axes input")) {
    input.click();
    const figure = page.querySelector('[data-chart="loss"]'), point = figure.querySelector(".dots");
    plot.dispatchEvent(new view.PointerEvent("pointermove", { ...at, clientX: box.right }));
    its.axes[input.value] = {
      path: figure.querySelector(".raw").getAttribute("d"),
      point: point.getAttribute("d"),
      ticks: [...figure.querySelectorAll(".x")].map(
        (tick) => [tick.textContent, parseFloat(tick.style.left)]),
      tip: tip.textContent,
      mark: middle(page.querySelector('[data-chart="loss"] .mark'))[0],
    };
  }
  page.querySelector('#axes input[value="step"]').click();
};
look("desktop", 1280).then(() => look("phone", 390)).then(() => {
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>"""


@needs_browser
@pytest.mark.slow
def test_in_a_browser_the_page_fits_any_width_has_two_themes_and_tells_under_the_pointer(tmp_path):
    records = falling(20, grad_norms={"layers.0": 1.0})
    text = report_of(tmp_path / "run", records, [(20, 1.5)])
    page = tmp_path / "harness.html"
    page.write_text(HARNESS.replace("PAGE", json.dumps(text).replace("</", "<\\/")))
    dumped = re.search('<pre id="found">(.*?)</pre>', browse(tmp_path, page, "--dump-dom"), re.S)
    assert dumped
    found = json.loads(html.unescape(dumped[1]))
    for name, width in (("desktop", 1280), ("phone", 390)):
        its = found[name]
        assert its["wide"] <= width, name
        assert its["errors"] == []
        assert set(its["papers"]) == {"rgb(246, 247, 248)", "rgb(14, 19, 23)"}
        assert its["tip"].splitlines() == ["step 10", "1.4", "evaluation loss  1.5"]
        assert its["left"]
        assert its["rules"] == len(re.findall('class="card chart small"', text))
        x, y = its["mark"]
        assert x == pytest.approx(its["across"] * 9 / 19, abs=1)
        (low, bottom), (high, top) = its["ticks"][0], its["ticks"][-1]
        read = low + (y - bottom) / (top - bottom) * (high - low)
        assert read == pytest.approx(records[9]["loss"], abs=0.03)

    def xs(axis):
        return [x / 10 for x, _ in points(its["axes"][axis]["path"])]

    for its in found.values():
        across = {name: [0, *accumulate(each[name] for each in records)][1:] for name in RISING}
        across["epoch"] = [each["epoch"] for each in records]
        for axis, values in across.items():
            share = [100 * value / values[-1] for value in values]
            assert xs(axis) == pytest.approx(share, abs=0.02)
            assert its["axes"][axis]["mark"] == pytest.approx(its["across"], abs=1)
            ((_, zero), *_, (_, last)) = its["axes"][axis]["ticks"]
            assert (zero, last) == (0, pytest.approx(100, abs=25))
        assert xs("step") == pytest.approx([100 * at / 19 for at in range(20)], abs=0.02)
        assert [tick for tick, _ in its["axes"]["tokens"]["ticks"]] == TOKENS
        assert its["axes"]["seconds"]["ticks"][1][0] == "0.2 s"
        assert its["axes"]["epoch"]["tip"].splitlines()[0] == "step 20, epoch 0.2"
        assert its["axes"]["step"]["ticks"][0][0] == "step 1"


RISING = ("tokens", "seconds")
TOKENS = ["tokens 0", "5K", "10K", "15K", "20K"]

LOOKS = """<!doctype html><pre id="found"></pre><script>
const frame = document.createElement("iframe");
frame.style = "width:390px;height:900px;border:0";
frame.srcdoc = PAGE;
frame.onload = () => {
  const page = frame.contentDocument;
  const cells = [...page.querySelectorAll(".of-runs td")].map(
    (cell) => cell.getBoundingClientRect());
  const spans = [...page.querySelectorAll('[data-chart="loss"] path')];
  page.querySelector('#axes input[value="seconds"]').click();
  document.getElementById("found").textContent = JSON.stringify({
    wide: page.documentElement.scrollWidth,
    right: Math.max(...cells.map((cell) => cell.right)),
    narrow: Math.min(...cells.map((cell) => cell.width)),
    ends: spans.filter((path) => path.matches(".raw")).map((path) => path.getAttribute("d")),
  });
};
document.body.append(frame);
</script>"""


@needs_browser
@pytest.mark.slow
def test_on_a_phone_all_compared_runs_are_seen_and_share_an_axis(tmp_path):
    for name, count in (("one", 20), ("other", 40), ("third", 10)):
        report_of(tmp_path / name, falling(count), pipeline={"name": f"{name} " * 20})
    folders = [tmp_path / name for name in ("one", "other", "third")]
    text = write_comparison(folders, tmp_path / "all.html").read_text()
    page = tmp_path / "harness.html"
    page.write_text(LOOKS.replace("PAGE", json.dumps(text).replace("</", "<\\/")))
    dumped = re.search('<pre id="found">(.*?)</pre>', browse(tmp_path, page, "--dump-dom"), re.S)
    assert dumped
    found = json.loads(html.unescape(dumped[1]))
    assert found["wide"] <= 390
    assert found["right"] <= 390
    assert found["narrow"] >= 60
    # All steps took as long, so over time the runs end where their steps do.
    ends = [points(path)[-1][0] for path in found["ends"]]
    assert ends == pytest.approx([500, 1000, 250], abs=0.2)


@needs_browser
@pytest.mark.slow
def test_a_browser_takes_a_picture_of_the_page(tmp_path):
    report_of(tmp_path, falling(20))
    file = tmp_path / "page.png"
    browse(tmp_path, tmp_path / "report.html", f"--screenshot={file}", "--window-size=800,900")
    picture = file.read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert [int.from_bytes(picture[at : at + 4], "big") for at in (16, 20)] == [800, 900]
    # One that shows nothing is a few thousand bytes.
    assert len(picture) > 20_000
