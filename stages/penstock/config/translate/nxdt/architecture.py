"""NxDT's Megatron models: the architecture of Hugging Face's that each combination of parts is.

| norms     | rotary | activation | biases     | model_type                   |
|-----------|--------|------------|------------|------------------------------|
| rmsnorm   | whole  | swiglu     | all, none  | llama; mixtral with experts  |
| rmsnorm   | share  | swiglu     | none       | glm4_moe of dense layers     |
| rmsnorm   | whole  | gelu       | all, none  | arcee                        |
| layernorm | whole  | gelu       | all, none  | jais2                        |
| layernorm | share  | gelu       | all, none  | nemotron                     |
| layernorm | any    | swiglu     | none       | stablelm                     |
| layernorm | none   | gelu       | all, none  | opt, with learned positions  |

What is exported is then a model that transformers computes alike.
"""

from dataclasses import dataclass
from typing import Any

from penstock.config.translate.translation import Draft

FOUNDATION = "model.foundation"

NORMS, ACTIVATION, BIASES = "model.normalization", "model.activation", "model.has_bias"
SHARE, EPSILON = "model.rotary_percentage", "model.layernorm_epsilon"
POSITIONS = "model.position_embedding_type"
HEADS = ("model.num_attention_heads", "model.num_kv_heads", "model.kv_channels")

DEFAULTS = {
    NORMS: "layernorm",
    ACTIVATION: "gelu",
    BIASES: True,
    SHARE: 1.0,
    EPSILON: 1e-5,
    POSITIONS: "learned_absolute",
}
"""What NxDT's program takes where a file says nothing."""


@dataclass(frozen=True)
class Architecture:
    """One of Hugging Face's, and the name that it has for a norm's epsilon."""

    model_type: str
    epsilon: str
    biases: tuple[str, ...] = ("attention_bias", "mlp_bias")
    """Its entries for biases; none: it has no biases."""
    activation: str = "hidden_act"
    renamed: tuple[tuple[str, str], ...] = ()
    """Entries of Llama's that are called otherwise, or are none of its."""


OPT = Architecture(
    "opt",
    "",
    ("enable_bias",),
    "activation_function",
    (("intermediate_size", "ffn_dim"), ("initializer_range", "init_std")),
)
"""Its norms add 1e-5, and each query head has keys of its own."""
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
MISTRAL = Architecture("mistral", "rms_norm_eps", ())
"""A llama whose layers may have a window."""


def put_architecture(draft: Draft) -> None:
    """Settle the model's type, its norms, activation, biases and heads."""

    def said(key: str) -> Any:
        return draft.get(key, DEFAULTS.get(key))

    share = float(said(SHARE))
    turned = "whole" if share == 1.0 else "share"
    learned = said(POSITIONS) == "learned_absolute"
    parts = (
        str(said(NORMS)).lower(),
        "not" if learned else turned,
        str(said(ACTIVATION)).lower(),
    )
    has_experts = bool(draft.value(f"{FOUNDATION}.num_local_experts"))
    biased = bool(said(BIASES))
    architecture = _find(draft, parts, biased=biased, has_experts=has_experts)
    if architecture is None or (biased and not architecture.biases):
        _refuse(draft, parts, biased, has_experts)
        return
    draft.put(f"{FOUNDATION}.model_type", architecture.model_type)
    if architecture.epsilon:
        draft.put(f"{FOUNDATION}.{architecture.epsilon}", float(said(EPSILON)))
    for name in architecture.biases:
        draft.put(f"{FOUNDATION}.{name}", biased)
    if architecture.model_type != "mixtral":
        draft.put(
            f"{FOUNDATION}.{architecture.activation}", "gelu" if parts[2] == "gelu" else "silu"
        )
    if architecture.model_type in ("glm4_moe", "nemotron", "stablelm"):
        draft.put(f"{FOUNDATION}.rope_parameters.partial_rotary_factor", share)
    if architecture.model_type == "glm4_moe":
        layers = draft.value(f"{FOUNDATION}.num_hidden_layers")
        draft.put(f"{FOUNDATION}.first_k_dense_replace", layers)
    _put_heads(draft)
    if architecture is OPT:
        _fit_opt(draft, float(said(EPSILON)))
    if architecture.model_type == "nemotron" and draft.get("model.do_layer_norm_weight_decay"):
        key = "model.do_layer_norm_weight_decay"
        draft.set_line(
            key, "approximated", "norms decay towards a factor of 1, and there towards 0"
        )


def _find(
    draft: Draft, parts: tuple[str, str, str], *, biased: bool, has_experts: bool
) -> Architecture | None:
    """The architecture of these parts; a window of attention is refused where it has none."""
    window = f"{FOUNDATION}.sliding_window"
    if has_experts:
        return MIXTRAL if parts == LLAMA else None
    if parts == LLAMA and not biased and draft.has(window):
        return MISTRAL
    draft.drop(window, "models of these parts attend to all that is before a token", "refused")
    return ARCHITECTURES.get(parts)


def _put_heads(draft: Draft) -> None:
    """Sizes of which the file may leave some to be computed of the others."""
    heads, keys, width = (draft.get(key) for key in HEADS)
    hidden = draft.value(f"{FOUNDATION}.hidden_size")
    if not (isinstance(heads, int) and isinstance(hidden, int)):
        return
    draft.put(f"{FOUNDATION}.num_key_value_heads", keys or heads)
    draft.put(f"{FOUNDATION}.head_dim", width or hidden // heads)
    if draft.get("model.ffn_hidden_size") is None:
        draft.put(f"{FOUNDATION}.intermediate_size", 4 * hidden)


def _fit_opt(draft: Draft, epsilon: float) -> None:
    """Call entries as OPT does, and refuse what it does not have."""
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
    for nxdt_name, field in OPT.renamed:
        draft.rename(f"{FOUNDATION}.{nxdt_name}", f"{FOUNDATION}.{field}")
    # What OPT drops where its file says nothing; train.dropout says it here.
    draft.put(f"{FOUNDATION}.dropout", 0.0)


def _refuse(draft: Draft, parts: tuple[str, str, str], biased: bool, has_experts: bool) -> None:
    norms, turned, activation = parts
    positions = {
        "whole": "rotary embedding",
        "share": "rotary embedding over a share of each head",
        "not": "learned positions",
    }[turned]
    described = (
        f"{norms}, {positions}, {activation}{', biases' * biased}{', experts' * has_experts}"
    )
    why = (
        f"no architecture of Hugging Face's has all of: {described}. With"
        f" {_instead(turned, has_experts)} there is one"
    )
    keys = (POSITIONS,) if turned == "not" else (NORMS, ACTIVATION, BIASES, SHARE)
    key = next((k for k in keys if k in draft.written), keys[0])
    draft.set_line(key, "refused", why)


def _instead(turned: str, has_experts: bool) -> str:
    """Parts with which there is an architecture."""
    if has_experts:
        return "position_embedding_type: rope, rmsnorm, swiglu and no biases"
    if turned == "not":
        return "layernorm and gelu, or position_embedding_type: rope,"
    return "has_bias: false, or gelu"
