"""Trainable parameters of a run, from its settings alone. No torch."""

from penstock.adapters.match_targets import HEAD, TargetLayer, linear_layers, match_targets
from penstock.adapters.names import EMBEDDING
from penstock.config.schema.run import RunConfig
from penstock.models.automodel.outline import AutoModelConfig
from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.flops import FULL_FINETUNING, TrainableParams


def trainable_params(run: RunConfig, family: Family, config: DecoderConfig) -> TrainableParams:
    """The number of trainable parameters, for FLOP counts."""
    if not run.lora.enable_lora:
        return FULL_FINETUNING
    experts = config.outline if isinstance(config, AutoModelConfig) else config.experts
    active = experts.experts_per_token if experts else 0
    factors = head = 0
    for layer in adapted(run, family, config):
        if layer.name == EMBEDDING:
            continue
        factor_params = run.lora.lora_rank * (layer.inputs + layer.outputs)
        factors += factor_params * (active if layer.experts else 1)
        head += factor_params if layer.name == HEAD else 0
    return TrainableParams("frozen", factors, head)


def adapted(run: RunConfig, family: Family, config: DecoderConfig) -> list[TargetLayer]:
    """The layers with adapters."""
    written = run.lora.lora_target_modules
    targets = (written,) if isinstance(written, str) else written
    names = family.weight_map(config, merge_qkv=run.model.merge_qkv)
    return match_targets(targets or family.lora_targets, linear_layers(names))
