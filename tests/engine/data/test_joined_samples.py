"""Samples that see what is before them in their row: they are trained as one text would be."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.rows.reader import PackedRows, UnmaskedRows
from penstock.rows.schema import PACKED
from tests.engine import runs
from tests.engine.loops import each, loop_of, step
from tests.engine.step.held_out import random_model
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = pytest.mark.dist

# Sums of a few hundred fp32 losses of about 6, computed in another order.
RTOL = 2e-6
LENGTHS = [[5, 30, 2], [40], [1, 1, 20], [17, 9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joined")
    random_model(folder / "model")
    rng, rows = np.random.default_rng(0), {"input_ids": [], "labels": [], "lengths": LENGTHS}
    for lengths in LENGTHS:
        ids = rng.integers(0, runs.VOCAB, size=sum(lengths))
        labels = np.roll(ids, -1)
        labels[np.cumsum(lengths) - 1] = -100
        rows["input_ids"].append(ids.tolist())
        rows["labels"].append(labels.tolist())
    for split in ("train", "validation"):
        data = folder / "packed" / "data" / split
        data.mkdir(parents=True)
        with pa.ipc.new_file(str(data / "rows-00000-of-00001.arrow"), PACKED) as writer:
            writer.write_table(pa.table(rows, schema=PACKED))
    return folder


def job(folder, out, *, isolate, **train):
    model = {"model_path": str(folder / "model")}
    settings = {"data_parallel_mode": "none", "model": model, "eval_steps": 1, **train}
    data = {"isolate_samples": isolate, "val_set_size": 1, **settings.pop("data", {})}
    run = runs.run_config(folder / out, folder / "model", data=data, **settings)
    return runs.job_of(run, folder / "packed")


def looked(job):
    """The loss of the first step, of all rows, and of an evaluation of the same ones before it."""
    loop = loop_of(job)
    assert loop.held_out
    told = loop.held_out.evaluate(lambda: False)
    assert told
    return told["eval_loss"], step(loop)["loss"]


@torch.no_grad()
def by_transformers(folder, *, isolate):
    """The mean loss of all trained tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    rows, total, trained = PackedRows(folder / "packed" / "data" / "train"), 0.0, 0
    for row in (rows.row(number) for number in range(len(rows))):
        ids, labels = (torch.from_numpy(x.astype(np.int64)) for x in (row.input_ids, row.labels))
        parts = row.lengths.tolist() if isolate else [len(ids)]
        logits = torch.cat([model(input_ids=part[None]).logits[0] for part in ids.split(parts)])
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        trained += int((labels != -100).sum())
    return total / trained


def test_samples_see_what_is_before_them_in_their_row_if_that_is_written(folder):
    jobs = {str(each): job(folder, f"{each}", isolate=each) for each in (True, False)}
    [found] = on_ranks(1, each, looked, jobs)
    apart, joined = (by_transformers(folder, isolate=isolate) for isolate in (True, False))
    assert abs(apart - joined) > 1e-3
    assert found["True"] == pytest.approx((apart, apart), rel=RTOL)
    # An evaluation keeps them apart.
    assert found["False"] == pytest.approx((apart, joined), rel=RTOL)


@one_day_in(2, of=1)
def test_rows_that_are_read_ahead_are_joined_too(folder):
    ahead = job(folder, "ahead", isolate=False, data={"dataloader_num_workers": 1})
    [told] = on_ranks(1, looked, ahead)
    wanted = tuple(by_transformers(folder, isolate=isolate) for isolate in (True, False))
    assert told == pytest.approx(wanted, rel=RTOL)


def test_what_a_joined_row_costs_is_what_one_document_of_its_length_does(folder):
    data = folder / "packed" / "data" / "train"
    rows, apart = UnmaskedRows(data), PackedRows(data)
    assert rows.squares().tolist() == [sum(lengths) ** 2 for lengths in LENGTHS]
    assert rows.documents().tolist() == [1] * len(LENGTHS)
    assert [rows.row(n).lengths.tolist() for n in range(4)] == [[sum(x)] for x in LENGTHS]
    assert [apart.row(n).lengths.tolist() for n in range(4)] == LENGTHS
