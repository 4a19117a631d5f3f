"""What may be laid over a run: functions from the path of its chats to sections of a config."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.engine.inputs import MODELS, SHAPE
from tests.engine.runs import TINY

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = {"path": "org/data", "revision": COMMIT}
"""A hub data set at a commit: its key needs no network."""


def dataset(**values):
    return lambda chats: {"data": {"datasets": [{"path": chats, "type": "chat", **values}]}}


def beside(datasets, **values):
    return lambda chats: {"data": {**datasets(chats)["data"], **values}}


def hub(**values):
    return lambda _: {"data": {"datasets": [{**HUB, **values}]}}


def section(name, **values):
    return lambda _: {name: values}


def biased(**lora):
    """A model with biases, and adapters."""
    model = {"foundation": {"attention_bias": True}}
    return lambda _: {"model": model, "lora": {"enable_lora": True, **lora}}


def dropping(**more):
    """A run that drops some of its hidden states."""
    return section("train", dropout={"hidden": 0.1, **more})


def judged(**train):
    """A run that evaluations decide about."""
    return lambda _: {"data": {"val_set_size": 2}, "train": {"eval_steps": 2, **train}}


def sparse(**train):
    """A model with experts that a bias chooses."""
    model = {"foundation": {"model_type": "glm4_moe"}}
    return lambda _: {"model": model, "train": train, "lora": {"enable_lora": False}}


def on_experts(**lora):
    """A model with experts, and adapters of these."""
    model = {"foundation": {"model_type": "glm4_moe"}}
    targets = ["gate_proj", "up_proj", "down_proj"]
    lora = {"enable_lora": True, "lora_target_modules": targets, **lora}
    return lambda _: {"model": model, "lora": lora}


def predicting(**train):
    """A model with a layer that predicts further tokens."""

    def sections(chats):
        folder = Path(chats).parent / "predicting"
        folder.mkdir(exist_ok=True)
        said = {**TINY, "model_type": "glm4_moe", "num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(said))
        model = {"config_path": str(folder), "tokenizer_path": "builtin:bytes"}
        return {"model": model, "train": train, "lora": {"enable_lora": False}}

    return sections


def indexed(**train):
    """A model whose tokens attend to those that an indexer selects."""

    def sections(chats):
        folder = Path(chats).parent / "indexed"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(
            json.dumps({**TINY, **SHAPE, **MODELS["sparse attention"]})
        )
        model = {"config_path": str(folder), "tokenizer_path": "builtin:bytes"}
        return {"model": model, "train": train, "lora": {"enable_lora": False}}

    return sections


def in_float8(**fp8):
    return section("train", enable_fp8_training=True, fp8=fp8)


def quantized(**lora):
    """Adapters beside quantized weights."""
    return section("lora", enable_qlora=True, **lora)


def preferring(**data):
    """A run that learns from pairs."""
    return lambda chats: {
        "data": {"datasets": [{"path": chats, "type": "preference"}], **data},
        "train": {"objective": "preference"},
    }


def scored(**its):
    """A run that learns from pairs with scores in some columns."""
    named = {"field_chosen_score": "good", "field_rejected_score": "bad", **its}
    return lambda chats: {
        "data": {"datasets": [{"path": chats, "type": "preference", **named}]},
        "train": {"objective": "preference"},
    }


def adapter(weights):
    """A folder whose adapter is of these bytes; keys need no more of it."""

    def sections(chats):
        folder = Path(chats).parent / "adapter"
        folder.mkdir(exist_ok=True)
        said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(said))
        tensor = np.frombuffer(weights, np.uint8)
        save_file({"weights": tensor}, folder / "adapter_model.safetensors")
        return {"lora": {"init_adapter_path": str(folder)}}

    return sections


PURE, HALF = {"precision": "bf16"}, {"precision": "fp16_mixed"}
MIXED = {"enable_mixed_precision": True}
DECAYING = {"lr_decay_style": "cosine"}
OPTIMIZED = {
    f"train.{name}": (section("train", **(over or {}), **written), section("train", **(over or {})))
    for name, written, over in (
        ("optimizer_kwargs", {"optimizer_kwargs": {"eps": 1e-6}}, None),
        ("lr_warmup_steps", {"lr_warmup_steps": 3}, None),
        ("lr_schedule_kwargs.hold_steps", {"lr_schedule_kwargs": {"hold_steps": 1}}, DECAYING),
        ("layerwise_lr_decay_bound", {"layerwise_lr_decay_bound": 0.5}, None),
        ("vision_lr", {"vision_lr": 1e-6}, None),
        ("projector_lr", {"projector_lr": 1e-3}, None),
        ("precision", PURE, None),
        ("master_weights", {"master_weights": False}, None),
        ("stochastic_rounding", {"stochastic_rounding": True}, PURE),
        ("grad_accum_dtype", {"grad_accum_dtype": "bf16"}, None),
        ("loss_scale_init", {"loss_scale_init": 8.0}, HALF),
        ("save_optimizer", {"save_optimizer": False}, None),
        ("load_optimizer", {"load_optimizer": False}, {"load_checkpoint_path": "auto"}),
        ("ckpt_weights", {"ckpt_weights": "compute"}, MIXED),
        ("ckpt_quant", {"ckpt_quant": "int8"}, None),
    )
}
"""Settings of optimizers, of what is kept of them and of precision, and what each is laid over."""


def saved(weights):
    """A run that starts from the weights of a checkpoint, whose file is of these bytes."""

    def sections(chats):
        folder = Path(chats).parent / "saved"
        folder.mkdir(exist_ok=True)
        for name, content in (("0.distcp", weights), ("state.json", b"{}"), ("COMPLETE", b"")):
            (folder / name).write_bytes(content)
        return {"train": {"init_checkpoint_path": str(folder)}}

    return sections
