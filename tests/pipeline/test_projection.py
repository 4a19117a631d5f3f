"""What is written in a config arrives at the stage it is meant for, and at none before it."""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.loading.load import loads
from penstock.config.schema.dataset import PAIRS, DatasetConfig
from penstock.config.schema.effect import conditions_of
from penstock.core.cache.stage import stage_key
from penstock.core.errors import ArtifactError, ConfigError
from penstock.pack.stage import Pack
from penstock.pipeline.plan import RebuildOptions, dataset_settings, execute_stage, plan
from penstock.prepare.settings import DatasetSettings
from penstock.prepare.stage import Prepare
from penstock.push.stage import Push
from tests.corruption import flip
from tests.pipeline.runs import write_chats
from tests.pipeline.sections import (
    COMMIT,
    OPTIMIZED,
    adapter,
    beside,
    biased,
    dataset,
    dropping,
    hub,
    in_float8,
    indexed,
    judged,
    on_experts,
    predicting,
    preferring,
    quantized,
    scored,
    section,
    sparse,
)
from tests.stages.exports import sealed_export


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return str(write_chats(tmp_path_factory.mktemp("projection") / "chats.jsonl"))


def planned(chats, sections):
    """The plan of a run up to a push, with `sections` laid over it and over its one data set."""
    run = {
        "model": {"config_path": "builtin:tiny-qwen3"},
        "data": {"datasets": [{"path": chats, "type": "chat"}]},
        "train": {"output_dir": "out", "data_parallel_mode": "none"},
        "lora": {"enable_lora": True},
        "push": {"repo_id": "someone/model"},
    }
    for name, values in sections.items():
        run[name] = {**run.get(name, {}), **values}
    return plan(loads(run))


def keys(chats, sections):
    return {step.stage.name: stage_key(step.stage) for step in planned(chats, sections).steps}


ORDER = ("prepare", "pack", "train", "export", "push")
PLAIN = section("data")


def reading(name, column=None):
    """A data set of a type that reads the column that `name` names, and names it so."""
    only_with, _ = conditions_of(DatasetConfig, name)
    types = [one for one in only_with[0].values if one] if only_with else ["chat"]
    kind = "chat" if "chat" in types else types[0]

    def sections(chats):
        named = {name: column} if column else {}
        written: dict[str, Any] = {"data": {"datasets": [{"path": chats, "type": kind, **named}]}}
        if kind in PAIRS:
            written["train"] = {"objective": "preference"}
            written["preference"] = {"loss_type": "kto" if kind == "kto" else "sigmoid"}
        return written

    return sections


CHANGES = {
    # what is written, over what, and the first stage that it changes
    "data.bad_rows_allowed": (section("data", bad_rows_allowed=0.5), PLAIN, "prepare"),
    "data.num_dataset_shards_to_save": (
        section("data", num_dataset_shards_to_save=3),
        PLAIN,
        "prepare",
    ),
    "data.test_datasets": (
        lambda chats: {"data": {"test_datasets": [{"path": chats, "type": "chat"}]}},
        PLAIN,
        "prepare",
    ),
    "data.sample_packing_group_size": (
        section("data", sample_packing_method="multipack", sample_packing_group_size=9),
        section("data", sample_packing_method="multipack"),
        "pack",
    ),
    "data.share_prompts": (preferring(share_prompts=False), preferring(), "pack"),
    **{
        f"data.datasets[].{name}": (scored(**{name: "x"}), scored(), "prepare")
        for name in ("field_chosen_score", "field_rejected_score")
    },
    "data.mix_strategy": (section("data", mix_strategy="interleave_over"), PLAIN, "prepare"),
    "data.weight_unit": (
        section("data", mix_strategy="random", weight_unit="tokens"),
        section("data", mix_strategy="random"),
        "prepare",
    ),
    "data.samples_per_epoch": (
        section("data", mix_strategy="random", samples_per_epoch=9),
        section("data", mix_strategy="random"),
        "prepare",
    ),
    "epochs that are drawn": (
        lambda _: {"data": {"mix_strategy": "random"}, "train": {"num_train_epochs": 3}},
        section("data", mix_strategy="random"),
        "prepare",
    ),
    "train.max_tokens": (section("train", max_tokens=999), PLAIN, "train"),
    "train.max_hours": (section("train", max_hours=0.5), PLAIN, "train"),
    "train.early_stopping.patience": (
        judged(early_stopping={"patience": 2}),
        judged(early_stopping={"patience": 1}),
        "train",
    ),
    "train.save_best.mode": (
        judged(save_best={"metric": "eval_loss", "mode": "max"}),
        judged(save_best={"metric": "eval_loss"}),
        "train",
    ),
    "evaluations that a run is judged by": (
        judged(save_best={"metric": "eval_loss"}, eval_max_batches=3),
        judged(save_best={"metric": "eval_loss"}),
        "train",
    ),
    "train.eval_rows_per_batch": (
        judged(save_best={"metric": "eval_loss"}, eval_max_batches=3, eval_rows_per_batch=2),
        judged(save_best={"metric": "eval_loss"}, eval_max_batches=3),
        "train",
    ),
    "data.deduplicate": (section("data", deduplicate="exact"), PLAIN, "prepare"),
    "data.near_duplicate_threshold": (
        section("data", deduplicate="near", near_duplicate_threshold=0.5),
        section("data", deduplicate="near"),
        "prepare",
    ),
    "data.decontaminate_datasets": (
        lambda chats: {"data": {"decontaminate_datasets": [{"path": chats, "type": "chat"}]}},
        PLAIN,
        "prepare",
    ),
    "data.decontaminate_ngram": (
        lambda chats: {
            "data": {
                "decontaminate_datasets": [{"path": chats, "type": "chat"}],
                "decontaminate_ngram": 5,
            }
        },
        lambda chats: {"data": {"decontaminate_datasets": [{"path": chats, "type": "chat"}]}},
        "prepare",
    ),
    "data.datasets[].weight": (
        lambda chats: {
            "data": {
                "datasets": [{"path": chats, "type": "chat", "weight": 2}],
                "mix_strategy": "random",
            }
        },
        section("data", mix_strategy="random"),
        "prepare",
    ),
    "data.datasets[].max_samples": (dataset(max_samples=3), dataset(), "prepare"),
    "data.datasets[].loss_weight": (dataset(loss_weight=0.5), dataset(), "prepare"),
    "data.datasets[].field_weight": (dataset(field_weight="w"), PLAIN, "prepare"),
    "data.datasets[].type": (dataset(type="text"), dataset(), "prepare"),
    "data.datasets[].path": (hub(path="org/other"), hub(), "prepare"),
    "data.datasets[].name": (hub(name="main"), hub(), "prepare"),
    "data.datasets[].split": (hub(split="test"), hub(), "prepare"),
    "data.datasets[].revision": (hub(revision=COMMIT[::-1]), hub(), "prepare"),
    "data.datasets[].data_files": (hub(data_files="a.parquet"), hub(), "prepare"),
    "data.datasets[].ds_type": (dataset(ds_type="text"), dataset(), "prepare"),
    "data.datasets[].splits_string": (dataset(splits_string="9,1"), dataset(), "prepare"),
    "data.datasets[].streaming": (hub(streaming=True), hub(), "prepare"),
    "data.datasets[].shards": (dataset(shards=2), dataset(), "prepare"),
    "data.datasets[].shards_idx": (
        dataset(shards=2, shards_idx=1),
        dataset(shards=2),
        "prepare",
    ),
    "data.datasets[].preprocess_shards": (dataset(preprocess_shards=2), dataset(), "prepare"),
    "data.dataset_shard_num": (
        section("data", dataset_shard_num=3, dataset_shard_idx=1),
        section("data", dataset_shard_num=2, dataset_shard_idx=1),
        "prepare",
    ),
    "data.dataset_shard_idx": (
        section("data", dataset_shard_num=2, dataset_shard_idx=0),
        section("data", dataset_shard_num=2, dataset_shard_idx=1),
        "prepare",
    ),
    "data.turn_rendering": (section("data", turn_rendering="per_turn"), PLAIN, "prepare"),
    "data.chat_template": (section("data", chat_template="chatml"), PLAIN, "prepare"),
    "data.chat_template_kwargs": (
        section("data", chat_template_kwargs={"enable_thinking": False}),
        PLAIN,
        "prepare",
    ),
    "data.train_on_turns": (section("data", train_on_turns="last"), PLAIN, "prepare"),
    "data.train_on_prompt": (section("data", train_on_prompt=True), PLAIN, "prepare"),
    "data.add_eos": (
        beside(dataset(type="text"), add_eos=False),
        dataset(type="text"),
        "prepare",
    ),
    "data.datasets[].roles_to_train": (
        dataset(roles_to_train=["tool", "assistant"]),
        PLAIN,
        "prepare",
    ),
    "data.datasets[].train_on_eos": (dataset(train_on_eos="all"), PLAIN, "prepare"),
    "data.mask_eos_in_loss": (section("data", mask_eos_in_loss=True), PLAIN, "prepare"),
    "data.truncation_mode": (
        beside(dataset(max_seq_len=9), truncation_mode="drop_turns"),
        dataset(max_seq_len=9),
        "prepare",
    ),
    "data.max_prompt_len": (
        beside(dataset(max_seq_len=9), max_prompt_len=4),
        dataset(max_seq_len=9),
        "prepare",
    ),
    **{
        f"data.datasets[].{name}": (reading(name, "x"), reading(name), "prepare")
        for name in (
            "field_messages",
            "field_message_role",
            "field_message_content",
            "field_message_training",
            "field_message_training_detail",
            "field_instruction",
            "field_input",
            "field_output",
            "field_system",
            "field_text",
            "field_tools",
            "field_prompt",
            "field_chosen",
            "field_rejected",
            "field_completion",
            "field_label",
        )
    },
    "data.datasets[].message_roles": (
        dataset(type="chat", message_roles={"user": ["x"]}),
        dataset(type="chat"),
        "prepare",
    ),
    "data.datasets[].drop_system_message": (
        dataset(type="chat", drop_system_message=True),
        dataset(type="chat"),
        "prepare",
    ),
    "model.foundation": (
        section("model", foundation={"num_hidden_layers": 1}),
        section("model"),
        "train",
    ),
    "model.merge_qkv": (section("model", merge_qkv=False), section("model"), "train"),
    "lora.lora_alpha": (section("lora", lora_alpha=3), section("lora"), "train"),
    "lora.moe_shared_lora": (on_experts(moe_shared_lora=True), on_experts(), "train"),
    "lora.moe_hybrid_shared_lora": (
        on_experts(moe_hybrid_shared_lora=True),
        on_experts(),
        "train",
    ),
    "lora.lora_dropout": (section("lora", lora_dropout=0.1), section("lora"), "train"),
    "lora.use_rslora": (section("lora", use_rslora=True), section("lora"), "train"),
    "lora.use_dora": (section("lora", use_dora=True), section("lora"), "train"),
    "lora.lora_plus_ratio": (section("lora", lora_plus_ratio=2), section("lora"), "train"),
    "lora.lora_bias": (biased(lora_bias="all"), biased(), "train"),
    "lora.merge_lora_interval": (section("lora", merge_lora_interval=2), section("lora"), "train"),
    "lora.reset_optimizer_on_merge": (
        section("lora", merge_lora_interval=2, reset_optimizer_on_merge=True),
        section("lora", merge_lora_interval=2),
        "train",
    ),
    "lora.enable_qlora": (quantized(), section("lora"), "train"),
    "lora.quant_format": (quantized(quant_format="nf4"), quantized(), "train"),
    "lora.quant_group_size": (
        quantized(quant_format="nf4", quant_group_size=32),
        quantized(quant_format="nf4"),
        "train",
    ),
    "lora.exclude_modules": (quantized(exclude_modules=["o_proj"]), quantized(), "train"),
    "lora.enable_aqn": (quantized(enable_aqn=True), quantized(), "train"),
    "lora.aqn_alpha": (
        quantized(enable_aqn=True, aqn_alpha=2),
        quantized(enable_aqn=True),
        "train",
    ),
    "lora.init_adapter_path": (adapter(b"other"), adapter(b"one"), "train"),
    "train.moe_aux_loss_coef": (sparse(moe_aux_loss_coef=0.1), sparse(), "train"),
    "train.moe_global_load_balancing": (
        sparse(moe_aux_loss_coef=0.1, moe_global_load_balancing=True),
        sparse(moe_aux_loss_coef=0.1),
        "train",
    ),
    **{name: (after, before, "train") for name, (after, before) in OPTIMIZED.items()},
    "train.label_smoothing": (section("train", label_smoothing=0.1), PLAIN, "train"),
    "train.indexer_loss_coef": (indexed(indexer_loss_coef=1.0), indexed(), "train"),
    "train.indexer_warmup": (
        indexed(indexer_loss_coef=1.0, indexer_warmup=True),
        indexed(indexer_loss_coef=1.0),
        "train",
    ),
    "train.mtp_loss_weight": (predicting(mtp_loss_weight=0.1), predicting(), "train"),
    "train.z_loss_coef": (section("train", z_loss_coef=1e-4), PLAIN, "train"),
    "train.moe_z_loss_coef": (sparse(moe_z_loss_coef=0.1), sparse(), "train"),
    "train.moe_bias_update_rate": (sparse(moe_bias_update_rate=0.1), sparse(), "train"),
    "train.dropout.hidden": (dropping(), PLAIN, "train"),
    "train.dropout.ffn": (dropping(ffn=0.1), dropping(), "train"),
    "train.dropout.attention": (dropping(attention=0.1), dropping(), "train"),
    "train.dropout.warmup_steps": (dropping(warmup_steps=5), dropping(), "train"),
    "train.dropout.depth_scaling": (dropping(depth_scaling=True), dropping(), "train"),
    "train.enable_fp8_training": (in_float8(), PLAIN, "train"),
    "train.fp8.recipe": (in_float8(recipe="tensorwise"), in_float8(), "train"),
    "train.fp8.format": (in_float8(format="e4m3"), in_float8(), "train"),
    "train.fp8.quantize_input_grad": (in_float8(quantize_input_grad=False), in_float8(), "train"),
    "train.fp8.quantize_weight_grad": (in_float8(quantize_weight_grad=False), in_float8(), "train"),
    "train.fp8.hadamard": (in_float8(hadamard=True), in_float8(), "train"),
    "train.fp8.exclude_modules": (in_float8(exclude_modules=["mlp"]), in_float8(), "train"),
    "train.fp8.hadamard_block_size": (
        in_float8(hadamard=True, hadamard_block_size=16),
        in_float8(hadamard=True),
        "train",
    ),
    "lora.save_lora_only": (section("lora", save_lora_only=True), section("lora"), "export"),
    "export.dtype": (section("export", dtype="float16"), PLAIN, "export"),
    "export.max_shard_size": (section("export", max_shard_size="1MB"), PLAIN, "export"),
    "export.merge_lora": (section("export", merge_lora=False), PLAIN, "export"),
    "export.quantise": (section("export", quantise="fp8"), PLAIN, "export"),
    "export.mtp": (section("export", mtp="drop"), PLAIN, "export"),
    "export.model_card": (section("export", model_card=False), PLAIN, "export"),
    "push.repo_id": (section("push", repo_id="someone/other"), PLAIN, "push"),
    "push.url": (section("push", repo_id=None, url="file:///models"), PLAIN, "push"),
    "push.private": (section("push", private=False), PLAIN, "push"),
    "push.revision": (section("push", revision="mine"), PLAIN, "push"),
    "push.create_pr": (section("push", create_pr=True), PLAIN, "push"),
    "push.dry_run": (section("push", dry_run=True), PLAIN, "push"),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_field_arrives_at_its_stage(field, chats):
    written, over, first = CHANGES[field]
    before, after = keys(chats, over(chats)), keys(chats, written(chats))
    changed = tuple(name for name in ORDER if before[name] != after[name])
    assert changed == ORDER[ORDER.index(first) :]


def test_private_addresses_in_data_are_allowed_by_its_field_which_is_in_the_key(chats):
    written = reading("allow_private_urls", True)(chats)
    model = {"config_path": "builtin:tiny-qwen3"}
    run = loads({"model": model, "train": {"output_dir": "o"}, **written})
    settings = dataset_settings(run, run.data.datasets[0], "train")
    assert settings.model_dump()["allow_private_urls"] is True
    usual = settings.model_copy(update={"allow_private_urls": False})
    assert "allow_private_urls" not in usual.model_dump()  # so that earlier keys stay valid


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_min_pixels", 64),
        ("image_max_pixels", 10**6),
        ("video_fps", 2.0),
        ("video_min_frames", 4),
        ("video_max_frames", 9),
    ],
)
def test_bounds_of_media_arrive_and_are_refused_by_a_model_without_a_processor(chats, name, value):
    written = reading(name, value)(chats)
    model = {"config_path": "builtin:tiny-qwen3"}
    run = loads({"model": model, "train": {"output_dir": "o"}, **written})
    settings = dataset_settings(run, run.data.datasets[0], "train")
    assert getattr(settings.media_bounds, name) == value
    assert settings.model_dump()[name] == value  # part of the key
    assert name not in DatasetSettings(type="chat").model_dump()
    kind = name.partition("_")[0]
    with pytest.raises(ConfigError, match=rf"datasets.0.{name}: .* has no {kind} processor"):
        keys(chats, written)


def test_a_folder_that_could_be_a_hub_id_is_not_streamed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "data").mkdir(parents=True)
    write_chats(tmp_path / "org" / "data" / "chats.jsonl")
    for streaming in (False, True):
        section = {"datasets": [{"path": "org/data", "type": "chat", "streaming": streaming}]}
        if streaming:
            with pytest.raises(ConfigError, match=r"org/data is local, and only a dataset"):
                planned("", {"data": section})
        else:
            planned("", {"data": section})


@pytest.mark.parametrize("field", ["datasets", "test_datasets", "decontaminate_datasets"])
def test_a_source_never_has_files_that_runs_make_of_it(field, tmp_path):
    prepared = tmp_path / "all" / "prepared"
    prepared.mkdir(parents=True)
    write_chats(prepared / "chats.jsonl", salt=" here")
    (tmp_path / "link").symlink_to(tmp_path / "all")
    (tmp_path / "other").mkdir()
    other = str(write_chats(tmp_path / "other" / "chats.jsonl"))

    def made(path, root=prepared, **its):
        source = {"path": str(path), "type": "chat", **its}
        others = {} if field == "datasets" else {"datasets": [{"path": other, "type": "chat"}]}
        data = {"dataset_prepared_path": str(root), **others, field: [source]}
        return planned(other, {"data": data})

    def refuses(path, why, **its):
        told = rf"data\.{field}\[0\]\.path {re.escape(str(path))} {why}"
        with pytest.raises(
            ConfigError, match=rf"{told}.* data\.dataset_prepared_path {prepared}, "
        ):
            made(path, **its)

    for path in (prepared, tmp_path / "all", tmp_path / "link"):
        refuses(path, "is a folder that is read whole")
        made(path, root=tmp_path / "all" / ".prepared")
    first = made(prepared, data_files="chats.jsonl")
    execute_stage(first.step("prepare"), first.run, RebuildOptions(), lambda _: None)
    again = made(prepared, data_files="chats.jsonl")
    assert stage_key(again.step("prepare").stage) == stage_key(first.step("prepare").stage)
    sealed = next((prepared / "prepare").glob("*/data/train/*.arrow"))
    for path in (prepared, f"{prepared}/slices/*.arrow", prepared / "slices", sealed):
        refuses(path, r"has \d+ files \(.* is one\) that runs have written in")
    refuses(prepared, "has", data_files=["chats.jsonl", "slices/*.json"])


def test_results_lie_where_the_paths_say(chats):
    steps = planned(
        chats,
        {
            "data": {"dataset_prepared_path": "here/prepared"},
            "train": {"output_dir": "here/out"},
            "pipeline": {"artifacts_path": "here/artifacts"},
        },
    ).steps
    folders = {
        step.stage.name: step.path.parent if step.stage.name != "train" else step.path
        for step in steps
    }
    assert folders == {
        "prepare": Path("here/prepared/prepare"),
        "pack": Path("here/prepared/pack"),
        "train": Path("here/out"),
        "export": Path("here/artifacts/export"),
        "push": Path("here/artifacts/push"),
    }


def test_how_many_processes_prepare_and_pack_is_what_is_written(chats, monkeypatch):
    monkeypatch.setenv("PENSTOCK_NUM_PROC", "3")
    for written, num_proc in ({"dataset_num_proc": 5}, 5), ({}, 3):
        made = planned(chats, {"data": written})
        for name in ("prepare", "pack"):
            stage = made.step(name).stage
            assert isinstance(stage, Prepare | Pack)
            assert stage.num_proc == num_proc


@pytest.mark.parametrize("method", [None, "fork", "spawn", "forkserver"])
def test_processes_that_pack_are_started_as_is_written(chats, method):
    made = planned(chats, {"data": {"sample_packing_mp_start_method": method}})
    stage = made.step("pack").stage
    assert isinstance(stage, Pack)
    assert stage.start_method == (method or "spawn")


@pytest.mark.parametrize("last", range(1, len(ORDER) + 1))
def test_the_stages_that_are_listed_are_those_that_run(last, chats):
    wanted = list(ORDER[:last])
    steps = planned(chats, {"pipeline": {"stages": wanted}}).steps
    assert [step.stage.name for step in steps] == wanted


@pytest.mark.slow
def test_a_cached_result_is_taken_or_built_again_as_the_config_says(chats, tmp_path):
    statuses = []
    for cache in ("reuse", "reuse", "refresh", "off", "reuse"):
        data = {"dataset_prepared_path": str(tmp_path)}
        made = planned(chats, {"data": data, "pipeline": {"cache": cache}})
        outcome = execute_stage(made.step("prepare"), made.run, RebuildOptions(), lambda _: None)
        statuses.append(outcome.status)
    assert statuses == ["ran", "cached", "ran", "ran", "cached"]


def test_a_result_is_verified_before_it_is_reused_as_the_config_says(chats, tmp_path):
    data = {"dataset_prepared_path": str(tmp_path)}

    def bring(verify):
        made = planned(chats, {"data": data, "pipeline": {"verify": verify}})
        return execute_stage(made.step("prepare"), made.run, RebuildOptions(), lambda _: None)

    made = bring("changed")
    file = next(made.path.glob("data/train/*.arrow"))
    flip(file, random.Random(0))
    for verify in ("changed", "always"):
        with pytest.raises(ArtifactError, match=rf"{file.name}: content differs"):
            bring(verify)
    assert bring("off").status == "cached"


def test_a_push_goes_to_the_url_that_is_written(chats, tmp_path):
    made = planned(chats, {"push": {"repo_id": None, "url": f"file://{tmp_path}/there"}})
    exported = sealed_export(tmp_path / "export", {"hf/config.json": b"{}"})
    stage = made.step("push").stage
    assert isinstance(stage, Push)
    replace(stage, exported=exported).run(tmp_path / "out")
    assert (tmp_path / "there" / "config.json").read_bytes() == b"{}"
