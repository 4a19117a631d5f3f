"""NxDT: models by a config.json with changes (`hf`), or built of numbers (`megatron`).

The latter are of the architecture of Hugging Face's that computes the same
(`nxdt_architecture.py`).
"""

from collections.abc import Mapping
from typing import Any

from penstock.config.translate.dialect import (
    Rule,
    approximated,
    decides,
    if_on,
    no_effect,
    only,
    put,
    sets,
    when,
)
from penstock.config.translate.nxdt import architecture
from penstock.config.translate.nxdt.architecture import (
    ARCHITECTURES,
    FOUNDATION,
    POSITIONS,
    put_architecture,
)
from penstock.config.translate.shared import BEST_HERE
from penstock.config.translate.translation import Draft, Entry

LLAMA = "builtin:tiny-llama"
"""A Llama's config.json; every number of it is written over."""

VOCABULARIES = {"GPT2BPETokenizer": 50_257}
LLAMAS_VOCABULARY = 32_000

EPSILONS = sorted({architecture.epsilon for architecture in ARCHITECTURES.values()} - {""})

NONE = (None, "None", "none", "")


def is_megatron(draft: Draft) -> bool:
    """Whether the model is built of the numbers in the file."""
    return draft.get("model_source") == "megatron"


def _number(name: str) -> Rule:
    """The rule of an entry of config.json."""

    return when(
        lambda entry: entry.value not in (-1, *NONE),
        put(f"{FOUNDATION}.{name}"),
        "what config.json says stays",
    )


def _folder_of(path: Any) -> Any:
    """Theirs is config.json itself, ours the folder that holds it."""
    return path.removesuffix("/config.json") if isinstance(path, str) else path


def _if_megatron(rule: Rule, otherwise: str | Rule) -> Rule:
    return when(lambda entry: is_megatron(entry.draft), rule, otherwise)


def _of_megatron(rule: Rule) -> Rule:
    """The rule of a key that models of Hugging Face's have in config.json."""
    return _if_megatron(rule, "config.json says it where model_source is hf")


def _one_of(*values: str) -> Rule:
    """The rule of a part of the architecture, which is settled of all parts together."""
    return _of_megatron(
        when(
            lambda entry: str(entry.value).lower() in values,
            decides(f"{FOUNDATION}.model_type"),
            lambda entry: entry.refuse(f"it takes {' and '.join(values)}"),
        )
    )


def _epsilon(entry: Entry) -> None:
    if is_megatron(entry.draft):
        entry.decides(*(f"{FOUNDATION}.{name}" for name in EPSILONS))
    elif not entry.is_assumed:
        entry.put(f"{FOUNDATION}.rms_norm_eps", entry.value)


def _positions(entry: Entry) -> None:
    if entry.value == "rope":
        entry.decides(f"{FOUNDATION}.model_type")
    elif entry.value == "learned_absolute":
        entry.decides(f"{FOUNDATION}.model_type", f"{FOUNDATION}.max_position_embeddings")
    else:
        entry.refuse("it takes learned_absolute and rope")


def _share_of_heads(entry: Entry) -> None:
    if entry.get(POSITIONS) == "learned_absolute":
        entry.no_effect("positions are learned, and nothing is turned")
    elif not 0 < float(entry.value) <= 1:
        entry.refuse("it is a share of each head, above 0 and at most 1")
    elif float(entry.value) == 1.0:
        entry.no_effect("whole heads are turned")
    else:
        entry.decides(f"{FOUNDATION}.model_type", f"{FOUNDATION}.rope_parameters")


def _dropout(name: str) -> Rule:
    def rule(entry: Entry) -> None:
        if entry.is_assumed and not is_megatron(entry.draft):
            return
        entry.put(f"train.dropout.{name}", float(entry.value))

    return rule


def _as_in_mixtral(is_so: str, *allowed: Any) -> Rule:
    """The rule of what Mixtral does in one way: weights that are read were trained so, and others
    may as well be."""

    def rule(entry: Entry) -> None:
        if entry.value in (*allowed, *NONE):
            entry.no_effect(is_so)
        elif is_megatron(entry.draft):
            entry.approximated(is_so)
        else:
            entry.refuse(f"{is_so}: it takes {', '.join(map(str, allowed))}")

    return rule


def settle_model(draft: Draft) -> None:
    """What weights start with counts where none are loaded; what is dropped in attention decides
    its kernel; and a model built of numbers needs the size of its vocabulary, which the file does
    not say."""
    if draft.value("train.init_checkpoint_path"):
        draft.drop(f"{FOUNDATION}.initializer_range", "all weights are loaded")
    if draft.value("train.dropout.attention"):
        draft.drop("model.attn_implementation", "what attention drops is written out, plainly")
    if not is_megatron(draft):
        return
    size = VOCABULARIES.get(str(draft.get("data.tokenizer.type")), LLAMAS_VOCABULARY)
    multiple = draft.get("model.make_vocab_size_divisible_by", 128)
    unit = multiple * (draft.get("distributed_strategy.tensor_model_parallel_size") or 1)
    draft.put(f"{FOUNDATION}.vocab_size", -(-size // unit) * unit)
    put_architecture(draft)
    key = "model.make_vocab_size_divisible_by"
    why = f"a vocabulary of {size}, which is the tokenizer's to say, in whole {unit}"
    draft.set_line(key, "approximated" if key in draft.written else "assumed", why)
    draft.lines[key].names = [f"{FOUNDATION}.vocab_size"]


SAME: Mapping[str, str] = {"model.fuse_qkv": "model.merge_qkv"}

COMPUTED: Mapping[str, Rule] = {
    "model_source": when(
        lambda entry: entry.value == "megatron",
        sets({"model.config_path": LLAMA}, "a model of the numbers in this file"),
        when(
            lambda entry: entry.value != "hf",
            lambda entry: entry.refuse("it takes hf and megatron"),
            "model.model_config says where config.json is",
        ),
    ),
    "model.model_config": _if_megatron(
        no_effect("model_source: megatron builds the model of the numbers in this file"),
        put("model.config_path", _folder_of),
    ),
    **{
        f"model.{nxdt_name}": _number(hf_name)
        for nxdt_name, hf_name in {
            "max_position_embeddings": "max_position_embeddings",
            "num_layers": "num_hidden_layers",
            "hidden_size": "hidden_size",
            "ffn_hidden_size": "intermediate_size",
            "num_attention_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "kv_channels": "head_dim",
            "init_method_std": "initializer_range",
            "share_embeddings_and_output_weights": "tie_word_embeddings",
            "sliding_window": "sliding_window",
            "sliding_window_size": "sliding_window",
            "moe.num_experts": "num_local_experts",
            "moe.top_k": "num_experts_per_tok",
            "moe.output_router_logits": "output_router_logits",
        }.items()
    },
    "model.rope_theta": _if_megatron(
        put(f"{FOUNDATION}.rope_parameters.rope_theta"), put(f"{FOUNDATION}.rope_theta")
    ),
    "model.layernorm_epsilon": _epsilon,
    "model.normalization": _one_of("rmsnorm", "layernorm"),
    "model.activation": _one_of("swiglu", "gelu"),
    "model.position_embedding_type": _of_megatron(_positions),
    "model.rotary_percentage": _of_megatron(_share_of_heads),
    "model.has_bias": _of_megatron(
        decides(f"{FOUNDATION}.attention_bias", f"{FOUNDATION}.mlp_bias")
    ),
    "model.use_scaled_init_method": if_on(
        approximated(
            "all matrices start as wide as init_method_std says; there those that lead out of a"
            " layer start narrower by sqrt(2 x num_layers)"
        ),
        "all matrices start alike here",
    ),
    "model.transformer_block_type": only("pre_ln"),
    "model.make_vocab_size_divisible_by": _if_megatron(
        decides(f"{FOUNDATION}.vocab_size"),
        "the vocabulary of config.json is split over any number of ranks as it is",
    ),
    "model.fusions.flash_attention": when(
        lambda entry: not entry.value, sets({"model.attn_implementation": "sdpa"}), BEST_HERE
    ),
    "model.use_cpu_initialization": when(
        lambda entry: entry.value and entry.get("distributed_strategy.zero1") is False,
        sets({"train.init_device": "cpu"}),
        "weights are made shard by shard where they will lie",
    ),
    "model.hidden_dropout": _dropout("hidden"),
    "model.ffn_dropout": _dropout("ffn"),
    "model.attention_dropout": _dropout("attention"),
    "model.moe.frequency": _as_in_mixtral("every layer has experts", 1),
    "model.moe.routing_algorithm": _as_in_mixtral("tokens choose experts", "top_k", "topk"),
    "model.moe.router_activation": _as_in_mixtral("experts are weighed by softmax", "softmax"),
    "model.moe.normalize_top_k_affinities": _as_in_mixtral("weights of experts add up to 1", True),
    "model.moe.dropout": only(0, *NONE),
    "model.moe.dropless": when(
        lambda entry: entry.value not in (True, *NONE),
        approximated("no token is dropped, however full an expert is"),
        "no token is dropped",
    ),
    "model.moe.capacity_factor": when(
        lambda entry: not entry.get("model.moe.dropless") and entry.value not in NONE,
        approximated("experts have room for every token that chooses them"),
        "no token is dropped",
    ),
    "model.moe.router_aux_loss_coef": when(
        lambda entry: entry.value not in NONE, put("train.moe_aux_loss_coef", float), "is off"
    ),
}

DEFAULTS: Mapping[str, Any] = {"model.hidden_dropout": 0.1, **architecture.DEFAULTS}
