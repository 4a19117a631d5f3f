"""The cache's truth table: what changes which stage, and what changes none."""

import os
import shutil
from pathlib import Path

import pytest
import yaml

from penstock.config.loading.load import load
from penstock.core.cache.stage import stage_key
from penstock.pipeline.plan import plan
from penstock.rows.tokenizer import byte_tokenizer
from tests.pipeline.runs import write_chats, write_run

ALL = ("prepare", "pack", "train", "export")


@pytest.fixture
def folder(tmp_path):
    write_chats(tmp_path / "chats.jsonl")
    write_chats(tmp_path / "more.jsonl", 10, salt=" now")
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path


def base(folder: Path) -> Path:
    return write_run(
        folder,
        model={"tokenizer_path": str(folder / "tokenizer")},
        data={
            "datasets": [
                {"path": str(folder / "chats.jsonl"), "type": "chat"},
                {"path": str(folder / "more.jsonl"), "type": "chat"},
            ]
        },
    )


def keys(config: Path) -> dict[str, str]:
    return {step.stage.name: stage_key(step.stage) for step in plan(load(config, [])).steps}


def changed(before: dict[str, str], after: dict[str, str]) -> tuple[str, ...]:
    return tuple(name for name in ALL if before[name] != after[name])


def rewrite(config: Path, change) -> None:
    run = yaml.safe_load(config.read_text())
    change(run)
    config.write_text(yaml.safe_dump(run))


def set_to(section: str, **values):
    return lambda run: run[section].update(values)


def turn_datasets(run):
    run["data"]["datasets"].reverse()


def bound(run):
    run["data"]["datasets"][0]["max_seq_len"] = 40


def name_files(run):
    folder = Path(run["data"]["datasets"][0]["path"]).parent
    run["data"]["datasets"][0] = {
        "path": str(folder),
        "data_files": ["more.jsonl"],
        "ds_type": "json",
        "type": "chat",
    }


SETTINGS = {
    "order of datasets": (turn_datasets, ALL),
    "data_files": (name_files, ALL),
    "max_seq_len": (bound, ALL),
    "seed": (set_to("train", seed=1), ALL),
    "val_set_size": (set_to("data", val_set_size=5), ALL),
    "split_by": (set_to("data", val_set_size=5, split_by="id"), ALL),
    "shuffle_merged_datasets": (set_to("data", shuffle_merged_datasets=False), ALL),
    "shuffle_before_merging": (set_to("data", shuffle_before_merging_datasets=False), ALL),
    "select_columns": (set_to("data", select_columns=["messages"]), ALL),
    "packing length": (set_to("data", sample_packing_sequence_len=512), ALL[1:]),
    "packing method": (set_to("data", sample_packing_method="multipack"), ALL[1:]),
    "forced sequential": (
        set_to("data", sample_packing_method="multipack", sample_packing_sequentially=True),
        (),
    ),
    "samples that see each other": (set_to("data", isolate_samples=False), ALL[2:]),
    "evaluation unpacked": (set_to("data", eval_sample_packing=False), ALL[1:]),
    "lr": (set_to("train", lr=0.02), ALL[2:]),
    "epochs": (set_to("train", num_train_epochs=3), ALL[2:]),
    "epochs and a half": (set_to("train", num_train_epochs=2.5), ALL[2:]),
    "epochs as a fraction": (set_to("train", num_train_epochs=2.0), ()),
    "evaluating": (set_to("train", eval_steps=3, eval_at_start=True, eval_max_batches=2), ()),
    "evaluating for the best": (
        set_to("train", eval_steps=3, save_best={"metric": "eval_loss"}),
        ALL[2:],
    ),
    "prompts": (set_to("train", sample_prompts=["Why?"], sample_steps=2), ()),
    "decay": (set_to("train", weight_decay=0.1), ALL[2:]),
    "precision": (set_to("train", enable_mixed_precision=True), ALL[2:]),
    "rows in a step": (set_to("train", gradient_accumulation_steps=2), ALL[2:]),
    "last batch": (set_to("data", dataloader_drop_last=False), ALL[2:]),
    "lora": (lambda run: run.update(lora={"enable_lora": True}), ALL[2:]),
    "model": (set_to("model", config_path="builtin:tiny-llama"), ALL[2:]),
    "export dtype": (lambda run: run.update(export={"dtype": "bfloat16"}), ALL[3:]),
    "same rows, cut otherwise": (
        set_to("train", gradient_accumulation_steps=1, global_batch_size=1, micro_batch_size=1),
        (),
    ),
    "as many rows at once as fit": (
        set_to(
            "train", gradient_accumulation_steps=1, global_batch_size=1, micro_batch_size="auto"
        ),
        (),
    ),
    "rank mode": (set_to("train", data_parallel_mode="fsdp2"), ()),
    "logging": (set_to("train", log_format="progress_bar"), ()),
    "save cadence": (set_to("train", save_steps=7), ()),
    "recomputation": (set_to("train", enable_gradient_checkpointing=False), ()),
    "attention": (set_to("model", attn_implementation="eager"), ()),
    "plain norms": (set_to("model", rmsnorm_native=True), ()),
    "attention in bf16": (set_to("model", attention_cast_bf16=True), ALL[2:]),
    "logits in fp32, where all is": (set_to("model", lm_head_fp32=True), ()),
    "workers": (set_to("data", dataset_num_proc=2, dataloader_num_workers=0), ()),
    "padding": (set_to("data", pad_to_multiple_of=64), ()),
    "name": (set_to("pipeline", name="other"), ()),
    "restarts": (set_to("launch", max_restarts=2), ()),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_a_setting_changes_exactly_its_stages(what, folder):
    config = base(folder)
    before = keys(config)
    change, stages = SETTINGS[what]
    rewrite(config, change)
    assert changed(before, keys(config)) == stages


def test_the_content_of_a_data_file_changes_everything(folder):
    config = base(folder)
    before = keys(config)
    file = folder / "chats.jsonl"
    text = file.read_text()
    file.write_text(text.replace("doubled", "tripled", 1))
    assert changed(before, keys(config)) == ALL
    file.write_text(text)
    assert keys(config) == before


def test_a_rewrite_of_the_same_size_and_time_of_day_is_seen(folder):
    config = base(folder)
    file = folder / "chats.jsonl"
    before = keys(config)
    stat = file.stat()
    file.write_text(file.read_text().replace("0", "9", 1))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert changed(before, keys(config)) == ALL


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("chat_template.jinja", "<|im_start|>", "<|im_start|> "),
        ("tokenizer.json", '"add_prefix_space":false', '"add_prefix_space":true'),
    ],
)
def test_a_tokenizer_file_or_chat_template_changes_everything(file, old, new, folder):
    config = base(folder)
    before = keys(config)
    path = folder / "tokenizer" / file
    text = path.read_text()
    changed_text = text.replace(old, new)
    if changed_text == text:  # saved with spaces
        changed_text = text.replace(old.replace(":", ": "), new.replace(":", ": "))
    assert changed_text != text
    path.write_text(changed_text)
    assert changed(before, keys(config)) == ALL


def test_touching_moving_reordering_and_commenting_change_nothing(folder, tmp_path_factory):
    config = base(folder)
    before = keys(config)
    for file in folder.glob("*.jsonl"):
        file.touch()
    run = yaml.safe_load(config.read_text())
    turned = {
        name: dict(reversed(section.items())) for name, section in reversed(list(run.items()))
    }
    config.write_text("# a comment\n" + yaml.safe_dump(turned, sort_keys=False) + "# another\n")
    assert keys(config) == before
    elsewhere = tmp_path_factory.mktemp("moved") / "folder"
    shutil.copytree(folder, elsewhere)
    moved = elsewhere / "run.yaml"
    moved.write_text(config.read_text().replace(str(folder), str(elsewhere)))
    assert keys(moved) == before
