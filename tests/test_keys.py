"""Cache keys as they were: they decide whether results that exist are reused.

When this fails, every result made before is built again. If the same settings now give other
content, raise the stage's `version`; if a setting was added whose default leaves the content as it
was, declare its key with the field. Then `python -m tests.test_keys` writes the keys anew.
"""

import json
from pathlib import Path

import pytest

from penstock.config.identity import LAYER_VERSIONS
from penstock.config.loading.load import loads
from penstock.core.cache.stage import identity, stage_key
from penstock.pipeline.plan import plan
from tests.engine import runs
from tests.engine.inputs import MODELS, SHAPE
from tests.models.families import FAMILIES

GOLDEN = Path(__file__).parent / "golden" / "identities.json"
KEYS = Path(__file__).parent / "golden" / "keys.json"
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
QLORA = {"lora": {"enable_lora": True, "enable_qlora": True, "quant_format": "nf4"}}
PINNED = {
    "reference": {},
    "weights": {"lora": {"enable_lora": False}, "train": {"optimizer": "muon", "lr": 1e-3}},
    "dora": {"lora": {"use_dora": True, "lora_rank": 4, "lora_target_modules": "all-linear"}},
    "nf4": QLORA,
    "nf4, groups of 32": {"lora": {**QLORA["lora"], "quant_group_size": 32}},
    "two ranks": {
        "train": {"data_parallel_mode": "fsdp2", "data_parallel_shard_size": 2},
        "launch": {"nproc_per_node": 2},
    },
    "mixed precision off": {"train": {"enable_mixed_precision": False, "precision": "fp32"}},
    "adamw in bf16": {"train": {"optimizer": "anyprecision_adamw", "lr_decay_style": "cosine"}},
    "early stopping": {
        "train": {"eval_steps": 5, "early_stopping": {"patience": 2, "metric": "eval_loss"}}
    },
    "sequential rows": {"data": {"sample_packing_method": "sequential", "val_set_size": 0}},
    "tail and workers": {"data": {"dataloader_drop_last": False, "dataloader_num_workers": 2}},
    "quantized export": {"export": {"merge_lora": True, "quantise": "fp8"}},
}
"""What is laid over the reference, section by section."""


def steps_of(over):
    sections = {
        name: {**REFERENCE.get(name, {}), **over.get(name, {})} for name in {*REFERENCE, *over}
    }
    return plan(loads(sections), for_this_machine=False).steps


def identities():
    return {
        step.stage.name: {**identity(step.stage), "key": stage_key(step.stage)}
        for step in steps_of({})
    }


def keys():
    return {
        name: {step.stage.name: stage_key(step.stage) for step in steps_of(over)}
        for name, over in PINNED.items()
    }


def test_the_keys_of_the_reference_run_have_not_moved():
    assert identities() == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", PINNED)
def test_the_keys_of_a_dozen_runs_have_not_moved(name):
    found = {step.stage.name: stage_key(step.stage) for step in steps_of(PINNED[name])}
    assert found == json.loads(KEYS.read_text())[name]


def test_groups_of_16_do_not_share_a_key_with_groups_of_the_formats_own_size():
    written = {"lora": {**QLORA["lora"], "quant_group_size": 16}}
    unset, sixteen = ({s.stage.name: s for s in steps_of(over)} for over in (QLORA, written))
    assert stage_key(unset["train"].stage) != stage_key(sixteen["train"].stage)
    assert stage_key(unset["pack"].stage) == stage_key(sixteen["pack"].stage)


def test_layers_that_compute_otherwise_since_change_the_keys_of_their_models_alone(tmp_path):
    """Of equal index scores the earliest tokens are selected, since version 2."""
    has_indexer = {name: "indexer" in str([*family.roles]) for name, family in FAMILIES.items()}
    assert LAYER_VERSIONS.keys() == {name for name, has_one in has_indexer.items() if has_one}
    over = {
        "train": {"objective": "preference"},
        "data": {"datasets": [{"path": "dummy", "type": "preference"}], "val_set_size": 0},
    }
    for kind, versions in {
        "latent attention": None,
        "sparse attention": {"sparse_attention": 2},
    }.items():
        model = runs.write_config(tmp_path / kind, **{**SHAPE, **MODELS[kind]})
        steps = steps_of(
            {**over, "model": {"config_path": str(model), "tokenizer_path": "builtin:bytes"}}
        )
        settings = {s.stage.name: identity(s.stage)["settings"] for s in steps}
        assert settings["train"].get("layer_versions") == versions
        assert settings["reference"].get("layer_versions") == versions


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(identities(), indent=2, sort_keys=True) + "\n")
    KEYS.write_text(json.dumps(keys(), indent=2, sort_keys=True) + "\n")
