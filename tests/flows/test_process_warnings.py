"""What processes that prepare slices warn of is in the log of the task that started them."""

import json
import logging

import pytest

from tests.pipeline.runs import write_run
from tests.stages.prepare.test_encode_templates import tokenizer_of
from tests.stages.prepared import write_lines
from tests.waiting import soon

# pyright: reportMissingImports=false

TURNS = [{"role": role, "content": role[0]} for role in ("user", "assistant") * 2]


@pytest.mark.exhaustive
def test_a_warning_of_preparing_processes_is_once_in_the_log_of_the_task(
    reporting, tmp_path, monkeypatch
):
    import finetune
    from penstock.prepare import workers

    monkeypatch.setattr(workers, "MIN_BYTES_PER_PROCESS", 1)
    # Shows answers differently once others follow, of which each process warns.
    tokenizer_of("qwen3").save_pretrained(tmp_path / "mine")
    paths = [
        write_lines(tmp_path / f"{name}.jsonl", [{"messages": TURNS, "n": name}] * 400)
        for name in "abcd"
    ]
    config = write_run(
        tmp_path / "run",
        model={"tokenizer_path": str(tmp_path / "mine")},
        data={
            "datasets": [{"path": str(path), "type": "chat"} for path in paths],
            "dataset_num_proc": 2,
        },
    )
    finetune.prepare(config)
    [run] = reporting.ask("flow_runs", flows={"name": {"any_": ["prepare"]}})
    [task] = reporting.ask("task_runs", flow_runs={"id": {"any_": [run["id"]]}})

    def warned() -> list[str]:
        found = reporting.ask("logs", logs={"task_run_id": {"any_": [task["id"]]}})
        return [
            line["message"]
            for line in found
            if line["level"] == logging.WARNING and "answers differently" in line["message"]
        ]

    assert soon(warned, 20)
    assert len(warned()) == 1, json.dumps(warned())
