"""The line that is drawn while training runs, as a terminal and as a log have it."""

import io
import re

from penstock.train.metrics.progress import build_progress

EVALUATED = {"step": 3, "eval_loss": 1.5}


def drawn(monkeypatch, columns):
    """All that three steps and an evaluation write, on a pipe to a terminal of so many columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    shown = build_progress("progress_bar", 3, 0)
    for step in (1, 2, 3):
        shown.show({"step": step, "loss": 1 / step, "lr": 1e-3, "tokens_per_second": 1e4})
    shown.show(EVALUATED)
    shown.close()
    return written.getvalue()


def test_no_drawn_line_is_wider_than_the_terminal(monkeypatch):
    for columns in (60, 80):
        lines = re.split(r"[\r\n]", drawn(monkeypatch, columns))
        assert max(map(len, lines)) < columns
    assert any("loss 0.3333  ETA 00:00" in line for line in lines)


def test_an_ended_line_is_drawn_once_after_what_was_said(monkeypatch):
    ended = drawn(monkeypatch, 120).partition("eval_loss 1.5\n")[2]
    assert ended.count("3/3") == 1
    assert ended.endswith("\n")
