"""What a few steps of training take of this process's memory, as the system counts it."""

import ctypes
import gc
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.engine.distributed.ranks import init_process_group
from penstock.rows.schema import PACKED
from penstock.train.launch.job import Job
from tests.engine import runs
from tests.engine.loops import loop_of, step

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
SMALL = 64 << 10

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def write_model(folder: Path, changes: Mapping[str, Any]) -> Path:
    """A folder with a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MODEL, **changes}))
    return folder


def write_rows(folder: Path, lengths: Sequence[int], num_rows: int) -> Path:
    """Rows of documents with these lengths, every token trained but the last of each."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 512, size=sum(lengths)).tolist() for _ in range(num_rows)]
    ends = set((np.cumsum(lengths) - 1).tolist())
    labels = [[-100 if at in ends else row[at + 1] for at in range(len(row))] for row in ids]
    table = pa.table(
        {"input_ids": ids, "labels": labels, "lengths": [list(lengths)] * num_rows}, schema=PACKED
    )
    train = folder / "data" / "train"
    train.mkdir(parents=True)
    with pa.ipc.new_file(str(train / "rows-00000-of-00001.arrow"), PACKED) as writer:
        writer.write_table(table)
    return folder


def peak(warm: Job, job: Job) -> dict[str, int]:
    """Bytes beyond those that the process has once it has trained `warm`, a tiny model: `at_rest`
    before the first step, and at most, in three steps."""
    libc = ctypes.CDLL(None)
    # What is freed goes back to the system at once.
    libc.mallopt(M_MMAP_THRESHOLD, SMALL)
    libc.mallopt(M_TRIM_THRESHOLD, SMALL)
    ranks = init_process_group(60)
    loop = loop_of(warm, ranks)
    step(loop)
    step(loop)
    loop.close()
    del loop
    before = _now(libc)
    loop = loop_of(job, ranks)
    at_rest = _now(libc) - before
    step(loop)
    (Path("/proc/self") / "clear_refs").write_text("5")
    step(loop)
    step(loop)
    found = _status("VmHWM") - before
    loop.close()
    return {"at_rest": at_rest, "most": found}


def peaks(warm: Job, jobs: Mapping[str, Job]) -> dict[str, Any]:
    """Each job's, one after another."""
    return {name: peak(warm, job) for name, job in jobs.items()}


def _now(libc: ctypes.CDLL) -> int:
    gc.collect()
    libc.malloc_trim(0)
    return _status("VmRSS")


def _status(name: str) -> int:
    text = (Path("/proc/self") / "status").read_text()
    found = re.search(rf"^{name}:\s*(\d+) kB$", text, re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def job(folder: Path, name: str, rows: Path, model: Path, /, **settings: Any) -> Job:
    """The job of a run with these settings, of all sections, those of `train` by name."""
    run = runs.run_config(folder / name, model, **{"max_steps": 3, "save_epochs": 0, **settings})
    return runs.job_of(run, rows)
