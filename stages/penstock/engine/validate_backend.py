"""Settings that the transformers backend cannot honour, refused before any process starts.

The model's own code computes: it is sharded over data-parallel ranks, but not split. No torch.
"""

from collections.abc import Iterator, Mapping

from penstock.config.loading.schema_tree import sections
from penstock.config.schema.base import ConfigSection
from penstock.config.schema.effect import NativeOnly
from penstock.config.schema.run import RunConfig
from penstock.core.errors import CapabilityError
from penstock.models.automodel.family import AutoFamily
from penstock.models.automodel.outline import AutoModelConfig
from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family

UNSUPPORTED: Mapping[str, NativeOnly] = {
    f"{section}.{name}": declared
    for section, kind in sections().items()
    for name, field in kind.model_fields.items()
    for declared in field.metadata
    if isinstance(declared, NativeOnly)
}
"""Settings that are declared for the native backend only."""

BALANCING = ("moe_aux_loss_coef", "moe_z_loss_coef", "moe_global_load_balancing")
"""Settings of `train` that need routers which are observed."""


def require_backend(run: RunConfig, family: Family, config: DecoderConfig) -> None:
    """Raise CapabilityError for every setting that the transformers backend cannot honour; nothing
    for a native family."""
    if not isinstance(family, AutoFamily):
        return
    if faults := [*_faults(run, family, config)]:
        reason = "; ".join(family.not_native) or f"no native family is called {family.model_type}"
        if run.model.backend == "transformers":
            reason = "it is what model.backend says"
        lines = "\n  ".join(faults)
        raise CapabilityError(
            f"{family.architecture} is trained through transformers' own code ({reason}), which "
            f"cannot have:\n  {lines}"
        )


def describe_backend(family: AutoFamily) -> str:
    """How a model of the transformers backend is run, in one line."""
    traits = family.outline.traits
    packing = "documents packed"
    if not traits.packing:
        packing = f"one document a row of a padded batch ({traits.why})"
    head = "" if traits.head else "; logits of all tokens at once: its head is not apart"
    attention = "" if traits.attention == "varlen" else f" with its {traits.attention} attention"
    reasons = "; ".join(family.not_native)
    why = f"; not native: {reasons}" if reasons else ""
    return f"model: {family.architecture} of transformers{attention}, {packing}{head}{why}"


def _faults(run: RunConfig, family: AutoFamily, config: DecoderConfig) -> Iterator[str]:
    for field, declared in UNSUPPORTED.items():
        section, name = field.split(".")
        settings: ConfigSection = getattr(run, section)
        # A setting of routers, which a server writes, changes nothing for a model without any.
        no_routers = run.lora.enable_lora or not family.outline.num_experts
        if settings.is_non_default(name) and not (name == "freeze_router" and no_routers):
            write = f"write {declared.write}" if declared.write else "leave it out"
            yield f"{field}: {_shown(getattr(settings, name))} ({declared.why}); {write}"
    outline, traits = family.outline, family.outline.traits
    if not outline.routers:
        why = traits.routers_why or "it has no experts"
        for name in BALANCING:
            if value := getattr(run.train, name):
                yield f"train.{name}: {_shown(value)} ({why}); leave it out"
        if outline.aux_loss_coef and run.train.moe_aux_loss_coef is None:
            write = "write train.moe_aux_loss_coef: 0"
            yield f"output_router_logits: true in config.json ({why}); {write}"
    for name in ("attn_implementation", "attention_cast_bf16"):
        value = getattr(run.model, name)
        if traits.attention not in ("varlen", value) and run.model.is_non_default(name):
            yield (
                f"model.{name}: {_shown(value)} (this model needs transformers' "
                f"{traits.attention} attention); leave it out"
            )
    longest = run.data.sample_packing_sequence_len or 0
    if isinstance(config, AutoModelConfig) and longest > config.rope_limit:
        yield (
            f"data.sample_packing_sequence_len: {longest} (beyond {config.rope_limit} tokens its "
            "rotary embedding depends on the longest document of a batch); write "
            f"{config.rope_limit} or less"
        )
    if run.data.shares_prompts:
        yield "data.share_prompts: true (documents are causal); leave it out, or write false"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
