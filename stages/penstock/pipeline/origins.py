"""The sources of a run's model and adapter, pinned to their content. Imports no torch."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from penstock.config.identity import LAYER_VERSIONS
from penstock.config.schema.lora import LoraConfig
from penstock.config.schema.run import RunConfig
from penstock.core.cache.stage import Source
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.extensions import FAMILIES
from penstock.core.remote.urls import redact
from penstock.core.sources.hub import local_folder
from penstock.core.sources.nxd_checkpoint import reject_nxd_checkpoint
from penstock.core.sources.pin import (
    is_checkpoint,
    pin_adapter,
    pin_config,
    pin_model,
    pin_tokenizer,
)
from penstock.engine.model_source import LoraArgs, ModelSource, quantization_args
from penstock.engine.peft.adapter_config import CONFIG, read_peft_config
from penstock.models.builtin import SCHEME
from penstock.models.multimodal import text_name
from penstock.prepare.chat_templates.resolve import resolve_chat_template

ADAPTER_FIELDS = {
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "lora_bias": "bias",
}
"""Fields that `lora.init_adapter_path` decides, and their PEFT names."""

PEFT_DEFAULTS: Mapping[str, Any] = {
    "lora_rank": 8,
    "lora_alpha": 8,
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": "none",
}
"""PEFT's defaults."""

UNSUPPORTED_KEYS = {
    "rank_pattern": "layers of several ranks",
    "alpha_pattern": "layers of several alphas",
    "modules_to_save": "whole modules beside the factors",
    "fan_in_fan_out": "transposed weights",
    "lora_bias": "biases of its own",
}
"""Features of adapters that can be merged but not trained further."""
DOUBLED = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}
"""What PEFT says twice for `gate_up_proj`, which is two matrices of an expert; the file may have
one pair for each."""

OTHER_TARGET_KEYS = (
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
)
"""Keys of a PEFT config that modify its targets beyond `target_modules`."""


def resolve_model_source(run: RunConfig) -> ModelSource:
    """The base model, its tokenizer and adapter, with pins."""
    model, lora = run.model, run.lora
    adapting = LoraArgs(
        alpha=lora.lora_alpha,
        scaling="root" if lora.use_rslora else "rank",
        dropout=lora.lora_dropout,
        bias=lora.lora_bias,
    )
    config = pin_config(
        model.config_source, with_code=model.trust_remote_code, revision=model.code_revision
    )
    return ModelSource(
        config=config,
        config_path=model.config_source,
        weights=pin_model(model.model_path) if model.model_path else None,
        model_path=model.model_path,
        tokenizer=pin_tokenizer(model.tokenizer_source),
        tokenizer_path=model.tokenizer_source,
        chat_template=resolve_chat_template(run.data),
        backend=model.backend,
        runs_code=model.trust_remote_code,
        foundation=model.foundation,
        seed=run.train.seed,
        adapting=adapting if lora.enable_lora else None,
        quantizing=quantization_args(run),
        adapter=pin_adapter(lora.init_adapter_path) if lora.init_adapter_path else None,
        adapter_path=lora.init_adapter_path,
        layer_versions=_layer_versions(_model_type(model.config_source, config)),
    )


def _layer_versions(model_type: str) -> Mapping[str, Any]:
    """Those of a family of ours, or the package of another."""
    if model_type in FAMILIES.names and (record := FAMILIES.record(model_type)):
        return record
    return LAYER_VERSIONS.get(model_type, {})


def _model_type(typed: str, config: Source) -> str:
    """The model type in a config.json; empty for those that come with the code, and for files that
    only a run that is not cached reads, and refuses."""
    if typed.startswith(SCHEME):
        return ""
    folder = local_folder(typed, config, ("config.json",))
    file = folder / "config.json" if folder.is_dir() else folder
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return ""


def resolve_init_checkpoint(run: RunConfig) -> RunConfig:
    """The run with `train.init_checkpoint_path` as the model's weights, if it is a Hugging Face
    folder; config and tokenizer are not changed."""
    path, model = run.train.init_checkpoint_path, run.model
    if path is not None:
        reject_nxd_checkpoint(path, "train.init_checkpoint_path")
    if path is None or is_checkpoint(path):
        return run
    return run.with_fields(
        "model",
        model_path=path,
        config_path=model.config_source,
        tokenizer_path=model.tokenizer_source,
    )


def with_adapter(run: RunConfig) -> RunConfig:
    """The run with the LoRA settings of the adapter at `lora.init_adapter_path`, if any.

    Raises ConfigError if the config sets other values, and CapabilityError for an adapter with
    features that cannot be trained further.
    """
    path = run.lora.init_adapter_path
    if path is None:
        return run
    peft_config = read_peft_config(local_folder(path, pin_adapter(path), (CONFIG,)))
    for key, reason in UNSUPPORTED_KEYS.items():
        value, single = peft_config.get(key), peft_config.get(DOUBLED.get(key, "")) or 0
        if value and value != {"gate_up_proj": 2 * single}:
            raise CapabilityError(
                f"lora.init_adapter_path: {redact(path)} has {reason} ({key}), which are not "
                "trained on.\n"
                "  Merge it with penstock merge, and start from the merged model."
            )
    peft_fields = {
        name: _resolve_field(run, name, peft_config, key) for name, key in ADAPTER_FIELDS.items()
    }
    if run.lora.lora_target_modules is None:
        peft_fields["lora_target_modules"] = _resolve_targets(path, peft_config)
    try:
        lora = LoraConfig.model_validate({**run.lora.model_dump(exclude_unset=True), **peft_fields})
    except ValidationError as error:
        [first, *_] = error.errors()
        raise ConfigError(
            f"lora.init_adapter_path: {CONFIG} of {redact(path)} is not supported: "
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}.\n"
            "  Name the folder of another adapter."
        ) from None
    return run.model_copy(update={"lora": lora})


def adapter_notes(before: RunConfig, run: RunConfig) -> tuple[str, ...]:
    """A line with the settings that `with_adapter` took from the adapter, if any differ.

    A value that is set to the default looks like an unset one, so it is reported too.
    """
    pairs = ((name, getattr(before.lora, name), getattr(run.lora, name)) for name in ADAPTER_FIELDS)
    differing = [
        f"{name}: {json.dumps(published)} instead of {json.dumps(configured)}"
        for name, configured, published in pairs
        if configured != published
    ]
    if not differing:
        return ()
    path = redact(str(run.lora.init_adapter_path))
    return (f"lora.init_adapter_path: the adapter {path} has {', '.join(differing)}",)


def _resolve_field(run: RunConfig, name: str, peft_config: Mapping[str, Any], key: str) -> Any:
    """The adapter's value. Raises ConfigError if the config sets another one."""
    configured, published = getattr(run.lora, name), peft_config.get(key)
    # Files of earlier versions of PEFT lack some fields.
    if published is None:
        published = PEFT_DEFAULTS[name]
    if run.lora.is_non_default(name) and configured != published:
        path = redact(str(run.lora.init_adapter_path))
        raise ConfigError(
            f"lora.{name} is {json.dumps(configured)}, and the adapter {path} has "
            f"{json.dumps(published)} ({key}).\n  Leave {name} out to use the adapter's, or leave "
            "out init_adapter_path."
        )
    return published


def _resolve_targets(path: str, peft_config: Mapping[str, Any]) -> list[str] | str:
    targets: Any = peft_config.get("target_modules")
    elsewhere = [key for key in OTHER_TARGET_KEYS if peft_config.get(key)]
    if elsewhere or not targets or not (isinstance(targets, list) or targets == "all-linear"):
        why = elsewhere[0] if elsewhere else f"target_modules: {targets}"
        raise ConfigError(
            f"lora.init_adapter_path: {redact(path)} selects its layers in a way that "
            f"Penstock does not support ({why}).\n"
            "  Write lora.lora_target_modules: the same layers by names or patterns."
        )
    # PEFT names layers of the whole model, where the language model is only a part of it.
    return targets if isinstance(targets, str) else [text_name(target) for target in targets]
