"""The identities of a reference run, as they were: they decide whether results are reused.

When this fails, every result made before is built again. If the same settings now give other
content, raise the stage's `version`; if a setting was added whose default leaves the content as it
was, name it in the stage's `neutral`. Then `python -m tests.test_keys` writes the identities anew.
"""

import json
from pathlib import Path

from penstock.config.loading.load import loads
from penstock.core.cache.stage import identity, stage_key
from penstock.plan import plan

GOLDEN = Path(__file__).parent / "golden" / "identities.json"
REFERENCE = {
    "model": {"config_path": "builtin:tiny-qwen3"},
    "data": {
        "datasets": [{"path": "builtin:arithmetic", "type": "chat", "max_seq_len": 512}],
        "val_set_size": 100,
        "sample_packing_method": "multipack",
        "sample_packing_sequence_len": 1024,
    },
    "train": {"output_dir": "out", "global_batch_size": 4, "data_parallel_mode": "none"},
    "lora": {"enable_lora": True},
    "launch": {"nproc_per_node": 1},
    "push": {"url": "file:///models"},
}


def identities():
    steps = plan(loads(REFERENCE)).steps
    return {
        step.stage.name: {**identity(step.stage), "key": stage_key(step.stage)} for step in steps
    }


def test_the_keys_of_the_reference_run_have_not_moved():
    assert identities() == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(identities(), indent=2, sort_keys=True) + "\n")
