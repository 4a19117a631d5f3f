"""Steps whose rows have no trained token have no loss: it is null, and counts nowhere."""

import json

import pyarrow as pa

from penstock.api.report import first_loss
from tests.engine import runs
from tests.ranks import on_ranks


def test_a_step_without_trained_tokens_has_a_null_loss_and_the_run_ends_with_the_last_real_one(
    tmp_path,
):
    runs.write_rows(tmp_path / "packed", 4)
    [file] = (tmp_path / "packed" / "data" / "train").iterdir()
    table = pa.ipc.open_file(file.read_bytes()).read_all()
    labels = table["labels"].to_pylist()
    for row in (0, 3):
        labels[row] = [-100] * len(labels[row])
    column = pa.array(labels, type=table.schema.field("labels").type)
    with pa.ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table.set_column(1, table.schema.field("labels"), column))
    runs.write_config(tmp_path / "model")
    job = runs.short_job(tmp_path, "run", max_steps=4, global_batch_size=1)
    [facts] = on_ranks(1, runs.train_here, job)
    records = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().split("\n")[:-1]
    ]
    losses = [record["loss"] for record in records if "loss" in record]
    trained = [record["trained_tokens"] for record in records if "loss" in record]
    assert [loss is None for loss in losses] == [count == 0 for count in trained]
    real = [loss for loss in losses if loss is not None]
    assert len(real) == 2
    assert facts["final_loss"] == real[-1] > 0
    assert first_loss(tmp_path / "run" / "metrics.jsonl") == real[0]
