"""NxDT: models by a config.json with changes (`hf`), or built of numbers (`megatron`).

The latter have the architecture of Hugging Face's that computes the same, so that what is exported
is a model that transformers computes alike:

| norms     | rotary | activation | biases     | model_type                   |
|-----------|--------|------------|------------|------------------------------|
| rmsnorm   | whole  | swiglu     | all, none  | llama; mixtral with experts  |
| rmsnorm   | share  | swiglu     | none       | glm4_moe of dense layers     |
| rmsnorm   | whole  | gelu       | all, none  | arcee                        |
| layernorm | whole  | gelu       | all, none  | jais2                        |
| layernorm | share  | gelu       | all, none  | nemotron                     |
| layernorm | any    | swiglu     | none       | stablelm                     |
| layernorm | none   | gelu       | all, none  | opt, with learned positions  |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.translate import rule
from penstock.config.translate.dialect import same_names
from penstock.config.translate.shared import BEST_HERE
from penstock.config.translate.translation import Draft, Entry, Rule

# A Llama's config.json; every number of it is written over.
TINY_LLAMA = "builtin:tiny-llama"

FOUNDATION = "model.foundation"

NORMS, ACTIVATION, BIASES = "model.normalization", "model.activation", "model.has_bias"
SHARE, EPSILON = "model.rotary_percentage", "model.layernorm_epsilon"
POSITIONS = "model.position_embedding_type"
HEADS = ("model.num_attention_heads", "model.num_kv_heads", "model.kv_channels")

# What NxDT's program takes where a file says nothing.
OF_PARTS = {
    NORMS: "layernorm",
    ACTIVATION: "gelu",
    BIASES: True,
    SHARE: 1.0,
    EPSILON: 1e-5,
    POSITIONS: "learned_absolute",
}


@dataclass(frozen=True)
class Architecture:
    """One of Hugging Face's, and the entries of its config.json."""

    model_type: str
    # The name of a norm's epsilon; none: it is `EPSILON_OF_OPT`.
    epsilon: str
    # Entries for biases; none: it has no biases.
    biases: tuple[str, ...] = ("attention_bias", "mlp_bias")
    activation: str = "hidden_act"


# Its norms add 1e-5, and each query head has keys of its own.
OPT = Architecture("opt", "", ("enable_bias",), "activation_function")
EPSILON_OF_OPT = 1e-5

LLAMA = ("rmsnorm", "whole", "swiglu")

ARCHITECTURES = {
    LLAMA: Architecture("llama", "rms_norm_eps"),
    ("rmsnorm", "share", "swiglu"): Architecture("glm4_moe", "rms_norm_eps", ()),
    ("rmsnorm", "whole", "gelu"): Architecture("arcee", "rms_norm_eps"),
    ("layernorm", "whole", "gelu"): Architecture("jais2", "layer_norm_eps"),
    ("layernorm", "share", "gelu"): Architecture("nemotron", "norm_eps"),
    ("layernorm", "whole", "swiglu"): Architecture("stablelm", "layer_norm_eps", ()),
    ("layernorm", "share", "swiglu"): Architecture("stablelm", "layer_norm_eps", ()),
    ("layernorm", "not", "gelu"): OPT,
}

MIXTRAL = Architecture("mixtral", "rms_norm_eps", ())
# A llama whose layers may have a window.
MISTRAL = Architecture("mistral", "rms_norm_eps", ())


def put_architecture(draft: Draft) -> None:
    """Settle the model's type, its norms, activation, biases and heads."""

    def get(key: str) -> Any:
        return draft.get(key, OF_PARTS.get(key))

    share, biased, epsilon = float(get(SHARE)), bool(get(BIASES)), float(get(EPSILON))
    turned = "whole" if share == 1.0 else "share"
    learned = get(POSITIONS) == "learned_absolute"
    activation = str(get(ACTIVATION)).lower()
    parts = (str(get(NORMS)).lower(), "not" if learned else turned, activation)
    has_experts = bool(draft.value(f"{FOUNDATION}.num_local_experts"))
    architecture = _find(draft, parts, biased=biased, has_experts=has_experts)
    if architecture is None or (biased and not architecture.biases):
        _refuse(draft, parts, biased, has_experts)
        return
    model_type = architecture.model_type
    entries: dict[str, Any] = {"model_type": model_type}
    if architecture.epsilon:
        entries[architecture.epsilon] = epsilon
    entries |= dict.fromkeys(architecture.biases, biased)
    if model_type != "mixtral":
        entries[architecture.activation] = "gelu" if activation == "gelu" else "silu"
    if model_type in ("glm4_moe", "nemotron", "stablelm"):
        entries["rope_parameters.partial_rotary_factor"] = share
    if model_type == "glm4_moe":
        # Its layers have experts from this one on, so none has.
        entries["first_k_dense_replace"] = draft.value(f"{FOUNDATION}.num_hidden_layers")
    for name, value in entries.items():
        draft.put(f"{FOUNDATION}.{name}", value)
    _put_heads(draft)
    if architecture is OPT:
        _fit_opt(draft, epsilon)
    key = "model.do_layer_norm_weight_decay"
    if model_type == "nemotron" and draft.get(key):
        why = "norms decay towards a factor of 1, and there towards 0"
        draft.set_line(key, "approximated", why)


def _find(
    draft: Draft, parts: tuple[str, str, str], *, biased: bool, has_experts: bool
) -> Architecture | None:
    # The architecture of these parts; a window of attention is refused where it has none.
    window = f"{FOUNDATION}.sliding_window"
    if has_experts:
        return MIXTRAL if parts == LLAMA else None
    if parts == LLAMA and not biased and draft.has(window):
        return MISTRAL
    draft.drop(window, "models of these parts attend to all that is before a token", "refused")
    return ARCHITECTURES.get(parts)


def _put_heads(draft: Draft) -> None:
    # Sizes of which the file may leave some to be computed of the others.
    heads, keys, width = (draft.get(key) for key in HEADS)
    hidden = draft.value(f"{FOUNDATION}.hidden_size")
    if not (isinstance(heads, int) and isinstance(hidden, int)):
        return
    draft.put(f"{FOUNDATION}.num_key_value_heads", keys or heads)
    draft.put(f"{FOUNDATION}.head_dim", width or hidden // heads)
    if draft.get("model.ffn_hidden_size") is None:
        draft.put(f"{FOUNDATION}.intermediate_size", 4 * hidden)


def _fit_opt(draft: Draft, epsilon: float) -> None:
    # Call entries as OPT does, and refuse what it does not have.
    heads, keys, width = (draft.get(key) for key in HEADS)
    hidden = draft.value(f"{FOUNDATION}.hidden_size")
    for name in ("num_key_value_heads", "head_dim"):
        draft.drop(f"{FOUNDATION}.{name}", "follows from num_attention_heads")
    draft.drop(f"{FOUNDATION}.rope_parameters", "positions are learned")
    for key, differs, instead in (
        (EPSILON, epsilon != EPSILON_OF_OPT, f"write {EPSILON_OF_OPT:g}"),
        (HEADS[1], keys not in (None, heads), f"write {heads}, as many as {HEADS[0]}"),
        (HEADS[2], bool(width) and width * heads != hidden, "leave it out"),
    ):
        if differs:
            why = "with learned positions there is OPT's architecture, which has another"
            draft.set_line(key, "refused", f"{why}: {instead}, or position_embedding_type: rope")
    draft.rename(f"{FOUNDATION}.intermediate_size", f"{FOUNDATION}.ffn_dim")
    draft.rename(f"{FOUNDATION}.initializer_range", f"{FOUNDATION}.init_std")
    # What OPT drops where its file says nothing; train.dropout says it here.
    draft.put(f"{FOUNDATION}.dropout", 0.0)


def _refuse(draft: Draft, parts: tuple[str, str, str], biased: bool, has_experts: bool) -> None:
    norms, turned, activation = parts
    positions = {
        "whole": "rotary embedding",
        "share": "rotary embedding over a share of each head",
        "not": "learned positions",
    }[turned]
    if has_experts:
        instead = "position_embedding_type: rope, rmsnorm, swiglu and no biases"
    elif turned == "not":
        instead = "layernorm and gelu, or position_embedding_type: rope,"
    else:
        instead = "has_bias: false, or gelu"
    keys = (POSITIONS,) if turned == "not" else (NORMS, ACTIVATION, BIASES, SHARE)
    draft.set_line(
        next((key for key in keys if key in draft.written), keys[0]),
        "refused",
        f"no architecture of Hugging Face's has all of: {norms}, {positions}, {activation}"
        f"{', biases' * biased}{', experts' * has_experts}. With {instead} there is one",
    )


VOCABULARIES = {"GPT2BPETokenizer": 50_257}
LLAMAS_VOCABULARY = 32_000

EPSILONS = sorted({architecture.epsilon for architecture in ARCHITECTURES.values()} - {""})

NONE = (None, "None", "none", "")


def is_megatron(draft: Draft) -> bool:
    """Whether the model is built of the numbers in the file."""
    return draft.get("model_source") == "megatron"


def _number(name: str) -> Rule:
    # The rule of an entry of config.json.
    return rule.when(
        lambda entry: entry.value not in (-1, *NONE),
        rule.put(f"{FOUNDATION}.{name}"),
        "what config.json says stays",
    )


def _folder_of(path: Any) -> Any:
    # Theirs is config.json itself, ours the folder that holds it.
    return path.removesuffix("/config.json") if isinstance(path, str) else path


def _if_megatron(apply: Rule, otherwise: str | Rule) -> Rule:
    return rule.when(lambda entry: is_megatron(entry.draft), apply, otherwise)


def _of_megatron(apply: Rule) -> Rule:
    # The rule of a key that models of Hugging Face's have in config.json.
    return _if_megatron(apply, "config.json says it where model_source is hf")


def _one_of(*values: str) -> Rule:
    # The rule of a part of the architecture, which is settled of all parts together.
    return _of_megatron(
        rule.when(
            lambda entry: str(entry.value).lower() in values,
            rule.decides(f"{FOUNDATION}.model_type"),
            rule.refuses(f"it takes {' and '.join(values)}"),
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


def _dropout(entry: Entry) -> None:
    if is_megatron(entry.draft) or not entry.is_assumed:
        part = entry.key.removeprefix("model.").removesuffix("_dropout")
        entry.put(f"train.dropout.{part}", float(entry.value))


def _as_in_mixtral(is_so: str, *allowed: Any) -> Rule:
    # The rule of what Mixtral does in one way: weights that are read were trained so, and others
    # may as well be.
    def apply(entry: Entry) -> None:
        if entry.value in (*allowed, *NONE):
            entry.no_effect(is_so)
        elif is_megatron(entry.draft):
            entry.approximated(is_so)
        else:
            entry.refuse(f"{is_so}: it takes {', '.join(map(str, allowed))}")

    return apply


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
    "model_source": rule.when(
        lambda entry: entry.value == "megatron",
        rule.sets({"model.config_path": TINY_LLAMA}, "a model of the numbers in this file"),
        rule.when(
            lambda entry: entry.value != "hf",
            rule.refuses("it takes hf and megatron"),
            "model.model_config says where config.json is",
        ),
    ),
    "model.model_config": _if_megatron(
        rule.no_effect("model_source: megatron builds the model of the numbers in this file"),
        rule.put("model.config_path", _folder_of),
    ),
    **{
        f"model.{nxdt_name}": _number(hf_name)
        for nxdt_name, hf_name in {
            **same_names(
                "", "max_position_embeddings hidden_size num_attention_heads sliding_window"
            ),
            "num_layers": "num_hidden_layers",
            "ffn_hidden_size": "intermediate_size",
            "num_kv_heads": "num_key_value_heads",
            "kv_channels": "head_dim",
            "init_method_std": "initializer_range",
            "share_embeddings_and_output_weights": "tie_word_embeddings",
            "sliding_window_size": "sliding_window",
            "moe.num_experts": "num_local_experts",
            "moe.top_k": "num_experts_per_tok",
            "moe.output_router_logits": "output_router_logits",
        }.items()
    },
    "model.rope_theta": _if_megatron(
        rule.put(f"{FOUNDATION}.rope_parameters.rope_theta"), rule.put(f"{FOUNDATION}.rope_theta")
    ),
    "model.layernorm_epsilon": _epsilon,
    "model.normalization": _one_of("rmsnorm", "layernorm"),
    "model.activation": _one_of("swiglu", "gelu"),
    "model.position_embedding_type": _of_megatron(_positions),
    "model.rotary_percentage": _of_megatron(_share_of_heads),
    "model.has_bias": _of_megatron(
        rule.decides(f"{FOUNDATION}.attention_bias", f"{FOUNDATION}.mlp_bias")
    ),
    "model.use_scaled_init_method": rule.if_on(
        rule.approximated(
            "all matrices start as wide as init_method_std says; there those that lead out of a"
            " layer start narrower by sqrt(2 x num_layers)"
        ),
        "all matrices start alike here",
    ),
    "model.transformer_block_type": rule.only("pre_ln"),
    "model.make_vocab_size_divisible_by": _if_megatron(
        rule.decides(f"{FOUNDATION}.vocab_size"),
        "the vocabulary of config.json is split over any number of ranks as it is",
    ),
    "model.fusions.flash_attention": rule.if_on(
        rule.no_effect(BEST_HERE), rule.sets({"model.attn_implementation": "sdpa"})
    ),
    "model.use_cpu_initialization": rule.when(
        lambda entry: entry.value and entry.get("distributed_strategy.zero1") is False,
        rule.sets({"train.init_device": "cpu"}),
        "weights are made shard by shard where they will lie",
    ),
    **{f"model.{part}_dropout": _dropout for part in ("hidden", "ffn", "attention")},
    "model.moe.frequency": _as_in_mixtral("every layer has experts", 1),
    "model.moe.routing_algorithm": _as_in_mixtral("tokens choose experts", "top_k", "topk"),
    "model.moe.router_activation": _as_in_mixtral("experts are weighed by softmax", "softmax"),
    "model.moe.normalize_top_k_affinities": _as_in_mixtral("weights of experts add up to 1", True),
    "model.moe.dropout": rule.only(0, *NONE),
    "model.moe.dropless": rule.when(
        lambda entry: entry.value not in (True, *NONE),
        rule.approximated("no token is dropped, however full an expert is"),
        "no token is dropped",
    ),
    "model.moe.capacity_factor": rule.when(
        lambda entry: not entry.get("model.moe.dropless") and entry.value not in NONE,
        rule.approximated("experts have room for every token that chooses them"),
        "no token is dropped",
    ),
    "model.moe.router_aux_loss_coef": rule.when(
        lambda entry: entry.value not in NONE, rule.put("train.moe_aux_loss_coef", float), "is off"
    ),
}

DEFAULTS: Mapping[str, Any] = {"model.hidden_dropout": 0.1, **OF_PARTS}
