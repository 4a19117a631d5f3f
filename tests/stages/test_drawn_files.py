"""Drawn damage to files of every kind that a user names: read as independent libraries read it, or
refused by name, within seconds, in bounded memory, without a crash."""

import csv
import gzip
import io
import json
import os
import random
import struct
import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.media import pictures
from tests.stages import fuzzing, hostile_content
from tests.stages.tars import tar_of

ROWS = [{"text": f"row {i} é " * 5, "label": str(i)} for i in range(30)]


def arrow(**options):
    out = io.BytesIO()
    table = pa.Table.from_pylist(ROWS)
    settings = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_file(out, table.schema, options=settings) as writer:
        writer.write_table(table, max_chunksize=10)
    return out.getvalue()


def parquet(**options):
    out = io.BytesIO()
    rows = [{**row, "turns": [{"role": "user", "content": row["label"]}] * 2} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), out, row_group_size=10, **options)
    return out.getvalue()


def lines():
    return "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def table():
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(ROWS[0]))
    writer.writeheader()
    writer.writerows(ROWS)
    return out.getvalue().encode()


def safetensors():
    names = {"a": [2, 2], "b": [4]}
    entries = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [16 * i, 16 * i + 16]}
        for i, (name, shape) in enumerate(names.items())
    }
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(range(32))


CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
ADAPTER = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
LETTERS = {chr(code): code - 32 for code in range(32, 127)}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": r"\s+|\w+"},
        "behavior": "Isolated",
        "invert": False,
    },
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": LETTERS, "merges": []},
}
TEMPLATE = b"{% for m in messages %}{{ m['role'] }}: {{ m.content | trim }}\n{% endfor %}"

KINDS = {
    "data tar": ("rows.tar", lambda: tar_of(ROWS)),
    "data tar.gz": ("rows.tar.gz", lambda: gzip.compress(tar_of(ROWS))),
    "data arrow": ("rows.arrow", arrow),
    "data arrow zstd": ("rows.arrow", lambda: arrow(compression="zstd")),
    "data parquet": ("rows.parquet", parquet),
    "data parquet zstd": (
        "rows.parquet",
        lambda: parquet(compression="zstd", data_page_version="2.0"),
    ),
    "data jsonl": ("rows.jsonl", lines),
    "data jsonl.gz": ("rows.jsonl.gz", lambda: gzip.compress(lines())),
    "data json": ("rows.json", lambda: json.dumps(ROWS).encode()),
    "data csv": ("rows.csv", table),
    "data txt": ("rows.txt", lambda: "".join(row["text"] + "\n" for row in ROWS).encode()),
    "tensors": ("model.safetensors", safetensors),
    "tensors index": (
        "model.safetensors.index.json",
        lambda: json.dumps({"weight_map": {"a": "a.safetensors"}}).encode(),
    ),
    "config": ("config.json", lambda: json.dumps(CONFIG).encode()),
    "adapter": ("adapter_config.json", lambda: json.dumps(ADAPTER).encode()),
    "stop": ("generation_config.json", lambda: b'{"eos_token_id": [1, 2], "do_sample": true}'),
    "tokenizer": ("tokenizer.json", lambda: json.dumps(TOKENIZER).encode()),
    "template": ("chat.jinja", lambda: TEMPLATE),
}
"""Name and content of a whole file, by what is drawn."""


DATA = sorted({name for name, _ in KINDS.values() if name.startswith("rows.")})
PLACES = sorted({(kind.partition(" ")[0], name) for kind, (name, _) in KINDS.items()})


def damaged(make):
    return lambda path, draw: path.write_bytes(fuzzing.damaged(make(), draw))


def written(make):
    return lambda path, draw: path.write_bytes(make(draw))


FILES = {
    kind: ([(kind.partition(" ")[0], name)], damaged(make)) for kind, (name, make) in KINDS.items()
}
IMAGES = {
    **{name: ([("image", "image")], damaged(make)) for name, make in pictures.IMAGES.items()},
    "bomb": ([("image", "image")], written(hostile_content.image_bomb)),
}
NO_FILES = {
    "zip": ([("data", name) for name in ("rows.zip", *DATA)], written(hostile_content.archive)),
    "no file": ([*PLACES, ("image", "image")], hostile_content.no_file),
}
"""Where files of a kind are put (the reader, and the name), and who writes them, by kind."""

JUDGED = ("tar", "arrow", "parquet", "csv", "txt", "safetensors", "")
"""Suffixes of files that a library judges. In JSON, Penstock is the stricter one, and names the
records that it does not read."""


def run_drawn(folder, drawn, count, seed):
    """The lines of outcomes, by kind; files are drawn in turn from all kinds."""
    draw = random.Random(seed)
    kinds = {}
    for number in range(count):
        kind = list(drawn)[number % len(drawn)]
        places, write = drawn[kind]
        reader, name = draw.choice(places)
        path = folder / f"{reader}-{number:05}" / name
        path.parent.mkdir(parents=True)
        write(path, draw)
        kinds[path.parent.name] = kind
    words = [sys.executable, "-m", "tests.stages.fuzzing", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    outcomes = [line.split("\t") for line in done.stdout.splitlines()]
    assert (done.returncode, len(outcomes)) == (0, count), (seed, outcomes[-1:], done.stderr[-900:])
    return [(kinds[name.partition("/")[0]], folder / name, *rest) for name, *rest in outcomes]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("drawn", "count"),
    [
        (FILES, len(FILES)),
        (IMAGES, len(IMAGES)),
        (NO_FILES, 20),
        pytest.param(FILES, 1800, marks=pytest.mark.exhaustive),
        pytest.param(IMAGES, 1800, marks=pytest.mark.exhaustive),
        pytest.param(NO_FILES, 600, marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_drawn_files_are_refused_by_name_or_read_as_libraries_read_them(tmp_path, drawn, count):
    seed = int(os.environ.get("DRAWN_FILES_SEED") or random.randrange(1 << 32))
    print("seed", seed)
    outcomes = run_drawn(tmp_path, drawn, count, seed)
    counts = Counter((kind, outcome) for kind, _, outcome, *_ in outcomes)
    print("\n".join(f"{kind}: {outcome} {n}" for (kind, outcome), n in sorted(counts.items())))
    faults = []
    for kind, path, outcome, seconds, _, result in outcomes:
        is_judged = kind != "data tar.gz" and path.suffix.removeprefix(".") in JUDGED
        is_wrong = outcome == "read" and is_judged and fuzzing.judge(path) != result
        is_wrong = is_wrong or (drawn is NO_FILES and outcome != "refused")
        if outcome in ("unnamed", "raised") or float(seconds) > 10 or is_wrong:
            faults.append((kind, path.parent.name, outcome, seconds, result))
    assert not faults, (seed, len(faults), faults[:9])
    assert int(outcomes[-1][4]) < int(outcomes[0][4]) + 1024, seed
