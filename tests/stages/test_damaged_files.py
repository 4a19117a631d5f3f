"""Whoever reads a file says which one is damaged, and what to do; nobody falls over it."""

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models

from penstock.core.cache.data_facts import DATA, LINEAGE, read_data_facts, read_lineage
from penstock.core.cache.input_digests import attempt_record, read_attempt
from penstock.core.cache.manifest import MANIFEST, read_manifest
from penstock.core.cache.record import write_record
from penstock.core.cache.stage import ATTEMPT
from penstock.core.errors import PenstockError
from penstock.core.files import write_json
from penstock.core.releases.remote import open_release_store
from penstock.core.safetensors_header import INDEX, SINGLE
from penstock.engine.hf.config import read_hf_config
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.peft.adapter_config import read_peft_config
from penstock.evaluate.folder import read_base_model
from penstock.rows.arrow import map_batches
from penstock.rows.prepared import PLAN, PreparedSamples
from penstock.rows.tokenizer import load_tokenizer
from penstock.train.launch.job import (
    ENVIRONMENT,
    JOB,
    METRICS,
    OUTCOME,
    SAMPLES,
    Job,
    read_outcome,
)
from penstock.train.report import write_report
from tests.core.toy import Letters
from tests.corruption import damages_of
from tests.manifests import FIELDS
from tests.stages.prepared import prepare, run, texts, write_lines
from tests.stages.report.report_pages import report_of
from tests.stages.report.test_report import AROUND
from tests.stages.train.told_runs import falling, job_in

ROUNDS = 20
"""Places in a file that are damaged in each way that chance decides."""

Read = Callable[[Path], object]


def arrow(folder: Path) -> Path:
    path = folder / "rows.arrow"
    table = pa.table({"input_ids": pa.array([[1, 2], [3]], pa.list_(pa.int32()))})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def plan_of_samples(folder: Path) -> Path:
    path = write_lines(folder / "a.jsonl", texts(3))
    run(prepare((path, {"type": "text"})), folder / "prepared")
    return folder / "prepared" / PLAN


def safetensors(folder: Path) -> Path:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path = folder / SINGLE
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(8)))
    return path


def index(folder: Path) -> Path:
    shard = "model-00001-of-00001.safetensors"
    safetensors(folder).rename(folder / shard)
    write_json(folder / INDEX, {"weight_map": {"a": shard}})
    return folder / INDEX


def in_folder(read: Read) -> Read:
    return lambda path: read(path.parent)


def hf_config(folder: Path) -> object:
    return read_hf_config(str(folder), {})


def tensors_in(path: Path) -> object:
    with SafetensorsFolder(path.parent) as folder:
        return [folder.stored(name) for name in folder.names()]


def written(
    name: str, value: Any, write: Callable[[Path, Any], None] = write_json
) -> Callable[[Path], Path]:
    def write_in(folder: Path) -> Path:
        write(folder / name, value)
        return folder / name

    return write_in


def run_with(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_json(folder / ENVIRONMENT, AROUND)
        (folder / SAMPLES).write_text('{"step": 1, "samples": [{"prompt": "a", "answer": "b"}]}\n')
        report_of(folder, falling(3))
        return folder / name

    return write


def job(folder: Path) -> Path:
    job_in(folder)
    return folder / JOB


def tokenizer(folder: Path) -> Path:
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return folder / "tokenizer.json"


def shelf(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        its = open_release_store(str(folder))
        (folder / "a.txt").write_text("a")
        listed = [{"path": "b.txt", "bytes": 1, "sha256": "0" * 64}]
        with its.writing(lambda _: None):
            its.add(
                lambda _: {**FIELDS, "files": listed},
                {"b.txt": folder / "a.txt"},
                None,
            )
            its.set_latest(1, [2])
        return folder / name

    return write


KINDS: dict[str, tuple[Callable[[Path], Path], Read]] = {
    "packed rows": (arrow, map_batches),
    "plan of prepared data": (
        plan_of_samples,
        lambda path: len(PreparedSamples(path.parent, "train")),
    ),
    "safetensors": (safetensors, tensors_in),
    "index of safetensors": (index, tensors_in),
    "model config": (written("config.json", {"model_type": "x"}), in_folder(hf_config)),
    "adapter config": (
        written("adapter_config.json", {"peft_type": "LORA"}),
        in_folder(read_peft_config),
    ),
    "exported config": (written("config.json", {"model_type": "x"}), in_folder(read_base_model)),
    "tokenizer": (tokenizer, lambda path: load_tokenizer(str(path.parent))),
    "facts of data": (written(DATA, {"packed": {}}), lambda path: read_data_facts(path.parent)),
    "lineage": (written(LINEAGE, {"pack": {}}), lambda path: read_lineage(path.parent)),
    "metrics of a report": (run_with(METRICS), lambda path: write_report(path.parent)),
    "samples of a report": (run_with(SAMPLES), lambda path: write_report(path.parent)),
    "surroundings of a report": (run_with(ENVIRONMENT), lambda path: write_report(path.parent)),
}
"""How a file of each kind is made, and who reads it."""


def attempt(folder: Path) -> Path:
    write_record(folder / ATTEMPT, attempt_record(Letters(), {}))
    return folder / ATTEMPT


DIGESTED: dict[str, tuple[Callable[[Path], Path], Read]] = {
    "manifest": (written(MANIFEST, {**FIELDS}, write_record), lambda p: read_manifest(p.parent)),
    "attempt": (attempt, lambda path: read_attempt(path.parent)),
    "outcome": (
        written(OUTCOME, {"facts": {"steps": 3}}, write_record),
        lambda p: read_outcome(p.parent),
    ),
    "job": (job, Job.read),
    "release": (
        shelf(f"0001/{MANIFEST}"),
        lambda p: open_release_store(str(p.parents[1])).manifest(1),
    ),
    "withdrawn": (shelf("withdrawn.json"), lambda p: open_release_store(str(p.parent)).withdrawn),
}
"""Records that carry their own digest: no damage passes."""


def damage_all(path: Path) -> Iterator[str]:
    """The file with one kind of damage after another; between them it is whole."""
    content = path.read_bytes()
    other = path.with_name("other")
    other.write_bytes(b"neither of this kind\n" * 3)
    for name, damage in damages_of(path, [other]).items():
        if name == "delete":  # what is not there is not damaged
            continue
        for number in range(ROUNDS if name in ("flip", "truncate", "zero") else 1):
            damage(path, random.Random(f"{name} {number}"))
            if path.read_bytes() != content:
                yield name
            path.write_bytes(content)
    other.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *DIGESTED])
def test_who_reads_a_damaged_file_names_it(kind, tmp_path):
    make, read = {**KINDS, **DIGESTED}[kind]
    path = make(tmp_path)
    whole = read(path)
    for name in damage_all(path):
        try:
            found = read(path)
        except PenstockError as error:
            # A file that another one names wrongly is looked for in the same folder.
            named = str(path.parent) if kind in KINDS else path.name
            assert named in str(error), f"{name}: {error}"  # noqa: PT017 - of hundreds, each
        else:
            assert kind in KINDS or found == whole, name
