"""Reports as a browser reads them, and what is in them."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from penstock.core.cache.record import write_record
from penstock.train.launch.job import OUTCOME
from penstock.train.report import write_report
from tests.stages.train.told_runs import job_in, tell

VOID = {"meta", "link", "br", "img", "input"}


class Page(HTMLParser):
    """A page as a browser reads it. Fails on tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def named(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def report_of(folder, records, evaluations=(), outcome="finished", **sections):
    job_in(folder, **sections)
    tell(folder, [*records, *({"step": step, "eval_loss": loss} for step, loss in evaluations)])
    if outcome == "finished":
        write_record(folder / OUTCOME, {"facts": {}, "step": len(records), "signal": None})
    return write_report(folder).read_text()


def numbers_of(page_text):
    """What the page carries for its script, as a browser would read it."""
    payload = re.search(r'id="numbers">(.*?)</script>', page_text)
    assert payload
    return json.loads(
        payload[1], parse_constant=lambda name: pytest.fail(f"browsers cannot read {name}")
    )


def chart_of(page_text, name):
    figure = page_text.split(f'data-chart="{name}"')[1].split("</figure>")[0]
    (drawing,) = re.findall(r"<svg.*?</svg>", figure, re.S)
    svg = ElementTree.fromstring(drawing)
    paths = {
        (int(group.get("data-series") or 0), (path.get("class") or "").split()[0]): path.get("d")
        for group in svg.findall(".//{*}g")
        for path in group.findall("{*}path")
    }
    ticks = re.findall(r'class="y" style="top:([\d.]+)%">([^<]+)<', figure)
    return paths, [(float(at), float(label)) for at, label in ticks]


def points(path):
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)]


def section_of(text, heading):
    (section,) = [s for s in re.split("<section[^>]*>", text) if f"<h2>{heading}</h2>" in s]
    return section.split("</section>")[0]
