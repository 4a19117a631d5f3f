"""Check settings against the model: positions, RoPE scaling by document length, and MoE limits.

No torch here: checked before any process starts.
"""

from penstock.config.schema.data import DataConfig
from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig
from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.moe.balancing_settings import has_experts, require_routers
from penstock.engine.native_config import native_config
from penstock.models.decoder_config import DecoderConfig
from penstock.models.hf_config import HfConfig
from penstock.models.multimodal import language_config


def uses_context_parallel(train: TrainConfig) -> bool:
    """Whether ranks share the tokens of each packed sequence."""
    return max(train.ringattn_parallel_size, train.ulysses_parallel_size) > 1


def require_whole_documents(train: TrainConfig, hf: HfConfig) -> None:
    """Raise CapabilityError if context parallelism splits documents that RoPE needs whole: its
    type in this config.json may depend on the document length.
    """
    config = native_config(hf)
    kind = None if config is None else config.length_dependent_rope
    if kind is None or not uses_context_parallel(train):
        return
    fields = ("ringattn_parallel_size", "ulysses_parallel_size")
    names = [f"train.{name}" for name in fields if getattr(train, name) > 1]
    raise CapabilityError(
        f"{' and '.join(names)} share the tokens of a document out, and the model's rotary "
        f"embedding is of the kind {kind!r} (rope_parameters in config.json), which goes by the "
        "lengths of whole documents.\n"
        "  Write 1, or tensor_parallel_size with sequence_parallel to save memory."
    )


def require_prompts_apart(data: DataConfig, hf: HfConfig) -> None:
    """Raise CapabilityError if completions share a prompt, and the model of this config.json needs
    one answer in a document: for chunks, linear attention, an indexer, or its RoPE type."""
    config = native_config(hf)
    if config is None or not data.shares_prompts:
        return
    why = None
    if config.chunked_layers:
        why = (
            f"this model attends in chunks of {config.attention_chunk} tokens of a document "
            "(attention_chunk_size in config.json)"
        )
    elif config.linear_layers:
        why = "the model has layers of linear attention, whose states have all tokens before"
    elif config.indexer:
        why = "the model's tokens attend to those that an indexer selects from all before"
    elif kind := config.length_dependent_rope:
        why = (
            f"the model's rotary embedding is of the kind {kind!r} (rope_parameters in "
            "config.json), which goes by the lengths of documents"
        )
    if why:
        raise CapabilityError(
            f"data.share_prompts lays both answers to a prompt into one document, and {why}.\n"
            "  Write data.share_prompts: false."
        )


def require_rows_within_positions(run: RunConfig, config: DecoderConfig) -> None:
    """Raise ConfigError if documents may have more tokens than a learned position table.

    Sequences whose length follows from the data are checked when they reach the model.
    """
    data, limit = run.data, config.max_position_embeddings
    row = data.sample_packing_sequence_len
    if config.learned_positions is None or row is None:
        return
    joins = data.sample_packing_method == "wrapped" or not data.isolate_samples
    limits = [source.max_seq_len or row for source in data.read_datasets]
    longest = row if joins else max(limits, default=row)
    if longest > limit:
        raise ConfigError(
            f"data.sample_packing_sequence_len is {row}, and the model learns {limit} positions "
            "(max_position_embeddings): later tokens of a document would have none.\n"
            f"  Write {limit} or less"
            + ("." if joins else f", or max_seq_len: {limit} in each source.")
        )


def validate_model(run: RunConfig, hf: HfConfig) -> None:
    """Raise ConfigError or CapabilityError for the first invalid setting."""
    # By the whole config.json, which gives the family; the others read the language model's part.
    require_mtp(run.train, hf)
    hf = language_config(hf)
    require_routers(run, hf)
    require_dense_networks(run.train, hf)
    require_whole_documents(run.train, hf)
    require_prompts_apart(run.data, hf)
    require_fused_projections(run, hf)
    require_unnormalized_queries(run.train, hf)
    require_dense_attention(run.train, hf)


def require_dense_attention(train: TrainConfig, hf: HfConfig) -> None:
    """Raise CapabilityError for what sparse attention does not do."""
    config = native_config(hf)
    if config is None or config.indexer is None:
        if train.indexer_loss_coef:
            raise CapabilityError(
                f"train.indexer_loss_coef is {train.indexer_loss_coef:g}, and a "
                f"{hf['model_type']} has no indexers.\n  Leave indexer_loss_coef out."
            )
        return
    selects = f"and the tokens of a {hf['model_type']} attend to those that an indexer selects"
    if train.dropout.attention:
        raise CapabilityError(
            f"train.dropout.attention is {train.dropout.attention:g}, {selects}, whose weights are "
            "not dropped.\n  Write train.dropout.hidden instead."
        )
    if train.qk_clip_threshold is not None:
        raise CapabilityError(
            f"train.qk_clip_threshold is {train.qk_clip_threshold:g}, {selects}: logits of the "
            "others would count as well.\n  Leave qk_clip_threshold out."
        )


def require_mtp(train: TrainConfig, hf: HfConfig) -> None:
    """Raise an error if layers that predict further tokens are to be trained, and there are none,
    or they cannot be."""
    from penstock.models.registry import get_family  # noqa: PLC0415

    if not train.mtp_loss_weight:
        return
    family = get_family(hf, "native")
    setting = f"train.mtp_loss_weight is {train.mtp_loss_weight:g}"
    if family.mtp is None:
        raise CapabilityError(
            f"{setting}, and layers of a {family.model_type} that predict further tokens are not "
            "trained here; exports have those of the base model.\n  Leave mtp_loss_weight out."
        )
    text = language_config(hf)
    count = family.mtp.num_layers(text)
    if not count:
        raise ConfigError(
            f"{setting}, and the model has no layers that predict further tokens: "
            f"{family.mtp.count} in config.json is {text.get(family.mtp.count)}.\n"
            "  Leave mtp_loss_weight out."
        )
    if count > 1 and family.mtp.shares_projection:
        raise CapabilityError(
            f"{setting}, and {family.mtp.count} is {count}: one layer is trained in a "
            f"{family.model_type}.\n  Leave mtp_loss_weight out."
        )


def require_unnormalized_queries(train: TrainConfig, hf: HfConfig) -> None:
    """Raise CapabilityError for QK-clip of a model with QK norm."""
    if train.qk_clip_threshold is None:
        return
    config = native_config(hf)
    if config is not None and (config.qk_norm or config.qk_unit_norm):
        raise CapabilityError(
            f"train.qk_clip_threshold is {train.qk_clip_threshold:g}, and this "
            f"{hf['model_type']} normalizes queries and keys (QK norm): scaling the weights before "
            "the norms changes no attention logit, and the norms bound them.\n"
            "  Leave qk_clip_threshold out."
        )


def require_fused_projections(run: RunConfig, hf: HfConfig) -> None:
    """Raise CapabilityError if a layer of the checkpoint would be split."""
    from penstock.models.registry import get_family  # noqa: PLC0415

    if not run.model.merge_qkv and get_family(hf, "native").read(hf).fused_qkv:
        raise CapabilityError(
            f"model.merge_qkv is false, and q, k and v of a {hf.get('model_type')} are one layer "
            "in its checkpoints.\n  Leave merge_qkv out."
        )


def require_dense_networks(train: TrainConfig, hf: HfConfig) -> None:
    """Raise ConfigError for dropout inside the feed-forward networks of an MoE model."""
    if train.dropout.ffn and has_experts(hf):
        raise ConfigError(
            f"train.dropout.ffn is {train.dropout.ffn:g}, and this {hf.get('model_type')} has "
            "experts, within which nothing is dropped.\n"
            "  Write train.dropout.hidden instead: it drops from what experts make of a token too."
        )
