"""Whole runs small enough for a test: a little real data, a tiny model, the real command."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from penstock.core.cache.manifest import MANIFEST

TIMES = ("created", "seconds", "host", "code", "digest")
"""What of a manifest may differ between two runs of the same thing."""


def write_chats(path: Path, count: int = 40, *, salt: str = "") -> Path:
    """A jsonl file of short chats, all different."""
    with path.open("w") as stream:
        for i in range(count):
            turns = [
                {"role": "user", "content": f"What is {i} doubled{salt}?"},
                {"role": "assistant", "content": f"{2 * i}"},
            ]
            stream.write(json.dumps({"messages": turns}) + "\n")
    return path


def write_run(folder: Path, **sections: dict[str, Any]) -> Path:
    """A config in `folder` that runs in seconds; `sections` are laid over it."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "chats.jsonl"
    if not data.exists():
        write_chats(data)
    run: dict[str, dict[str, Any]] = {
        "model": {
            "config_path": "builtin:tiny-qwen3",
            "foundation": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48},
        },
        "data": {
            "datasets": [{"path": str(data), "type": "chat"}],
            "dataset_prepared_path": str(folder / "prepared"),
            "sample_packing_sequence_len": 256,
            "val_set_size": 4,
            "dataset_num_proc": 1,
        },
        "train": {
            "output_dir": str(folder / "out"),
            "data_parallel_mode": "none",
            "enable_mixed_precision": False,
            "lr": 0.01,
            "num_train_epochs": 2,
            "save_steps": 2,
            "save_epochs": 0,
            "log_format": "structured",
        },
        "pipeline": {"artifacts_path": str(folder / "artifacts")},
        "launch": {"env": {"OMP_NUM_THREADS": "1"}},
    }
    for name, values in sections.items():
        run[name] = {**run.get(name, {}), **values}
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(run))
    return config


def penstock(*words: object, check: int | None = 0) -> "subprocess.CompletedProcess[str]":
    """The real command in a process of its own; fails unless it exits with `check`."""
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    if check is not None:
        assert done.returncode == check, done.stdout + done.stderr
    return done


def outcome(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """The closing object of a command run with --json."""
    return json.loads(done.stdout.splitlines()[-1])


def statuses(done: "subprocess.CompletedProcess[str]") -> dict[str, str]:
    """What became of each stage."""
    return {stage["stage"]: stage["status"] for stage in outcome(done)["stages"]}


def sealed(folder: Path) -> dict[str, Any]:
    """Every sealed result below `folder`: the digests of its files, read again, and its manifest
    without times and host."""
    found: dict[str, Any] = {}
    # Named places, not a walk: ranks that are still ending may make and remove folders meanwhile.
    places = ("prepared/*/*", "artifacts/*/*", "out*")
    for path in sorted(p for place in places for p in folder.glob(f"{place}/{MANIFEST}")):
        manifest = json.loads(path.read_text())
        for file in manifest["files"]:
            content = (path.parent / file["path"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == file["sha256"], path.parent / file["path"]
        rest = {name: value for name, value in manifest.items() if name not in TIMES}
        found[str(path.relative_to(folder))] = rest
    return found
