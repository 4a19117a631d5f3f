"""Warnings of processes that prepare slices are logged where the run's log is, once each."""

import logging
import warnings

import pytest

from penstock.prepare import workers
from penstock.prepare.process_warnings import (
    ProcessWarnings,
    collect_warnings,
    log_process_warnings,
)
from tests.stages.prepare.test_encode_templates import tokenizer_of
from tests.stages.prepared import prepare, run, write_lines

TURNS = [{"role": role, "content": role[0]} for role in ("user", "assistant") * 2]


def messages_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_warning_of_preparing_processes_is_logged_once_by_the_one_that_started_them(
    tmp_path, monkeypatch, caplog, capfd
):
    monkeypatch.setattr(workers, "MIN_BYTES_PER_PROCESS", 1)
    # Shows answers differently once others follow, of which each process warns.
    tokenizer_of("qwen3").save_pretrained(tmp_path / "mine")
    paths = [
        write_lines(tmp_path / f"{name}.jsonl", [{"messages": TURNS, "n": name}] * 400)
        for name in "abcdef"
    ]
    told = []
    for num_proc in (1, 2):
        caplog.clear()
        stage = prepare(
            *((path, {"type": "chat"}) for path in paths),
            tokenizer=str(tmp_path / "mine"),
            num_proc=num_proc,
        )
        run(stage, tmp_path / str(num_proc) / "x")
        told.append(messages_of(caplog))
    alone, spread = told
    assert all("answers differently" in message for message in alone)
    assert len(spread) == 1
    assert spread[0].removesuffix(" (in 2 processes)") == alone[0]
    assert "answers differently" not in capfd.readouterr().err


def test_each_warning_is_logged_once_with_the_number_of_processes_that_it_is_of(caplog):
    log_process_warnings(
        [
            ProcessWarnings("here:7", ("a", "b")),
            ProcessWarnings("here:7", ("a",)),
            ProcessWarnings("there:7", ("100% a",)),
            ProcessWarnings("there:7", ("a",)),
        ]
    )
    assert messages_of(caplog) == ["a (in 2 processes)", "b", "100% a"]


def test_warnings_of_libraries_are_collected_too_and_only_while_the_block_runs():
    show, handlers = warnings.showwarning, list(logging.getLogger().handlers)
    with collect_warnings() as found:
        for _ in range(2):
            logging.getLogger("some.library").warning("odd")
            logging.getLogger("some.library").info("usual")
        warnings.showwarning(UserWarning("old"), UserWarning, "file.py", 3)
    logging.getLogger("some.library").warning("later")
    assert found[0] == "odd"
    assert "UserWarning: old" in found[1]
    assert len(found) == 2
    assert warnings.showwarning is show
    assert logging.getLogger().handlers == handlers
