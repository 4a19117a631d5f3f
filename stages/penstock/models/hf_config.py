"""Reading Hugging Face's config.json: what the families share, and what none of them computes.

No torch here: whether a layout fits a model is judged before anything heavy is imported.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.core.errors import CapabilityError, ConfigError
from penstock.models.shape import DecoderConfig

HfConfig = Mapping[str, Any]

KINDS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding with fixed frequencies. `dynamic` and `longrope` choose them by the
longest sequence in a batch, so a document would be computed otherwise among others than alone."""


def decoder_config(hf: HfConfig, *, faults: Iterable[str] = (), **specific: Any) -> DecoderConfig:
    """The DecoderConfig of a config.json; `specific` is what the family alone knows, and goes
    before what the file says. `faults` are what the family finds that is not computed.

    Raises:
        ConfigError: a needed number is missing.
        CapabilityError: it asks for something that the decoder does not compute.
    """
    refuse_what_is_not_computed(hf, faults)
    heads = required(hf, "num_attention_heads")
    hidden = required(hf, "hidden_size")
    fields = {
        "vocab_size": required(hf, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": required(hf, "intermediate_size"),
        "num_hidden_layers": required(hf, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": given(hf, "num_key_value_heads", heads),
        "head_dim": given(hf, "head_dim", hidden // heads),
        "rms_norm_eps": given(hf, "rms_norm_eps", 1e-6),
        "max_position_embeddings": required(hf, "max_position_embeddings"),
        "tie_word_embeddings": bool(given(hf, "tie_word_embeddings", False)),
        "initializer_range": given(hf, "initializer_range", 0.02),
    }
    if "rope_parameters" not in specific:
        fields["rope_parameters"] = of_whole_heads(rope_parameters(hf))
    return DecoderConfig(**{**fields, **specific})


def required(hf: HfConfig, name: str) -> Any:
    """The field, which the file must have."""
    if hf.get(name) is None:
        raise ConfigError(
            f"the model's config.json has no {name}. "
            "Point model.config_path at a complete config.json of a Hugging Face model."
        )
    return hf[name]


def given(hf: HfConfig, name: str, default: Any) -> Any:
    """The field, or the default where the file leaves it out or null."""
    value = hf.get(name)
    return default if value is None else value


def rope_parameters(
    hf: HfConfig, *, theta: float = 10_000.0, share: float = 1.0
) -> Mapping[str, Any]:
    """Rotary embedding's parameters in transformers 5's form, from either form.

    Transformers 5 writes one `rope_parameters`; before, it was `rope_theta` beside `rope_scaling`,
    whose kind was at first called `type`. `theta`, and the `share` of each head that is turned, are
    the family's where the file has none. A share of 1 is left out.
    """
    parameters = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    kind = parameters.pop("type", "default")
    parameters.setdefault("rope_type", kind)
    parameters.setdefault("rope_theta", float(given(hf, "rope_theta", theta)))
    kind = parameters["rope_type"]
    if kind not in KINDS:
        raise CapabilityError(
            f"the model's rotary embedding is of the kind {kind!r} (rope_parameters in "
            f"config.json); {', '.join(KINDS)} are computed. Use a model with one of these."
        )
    share = parameters.pop("partial_rotary_factor", given(hf, "partial_rotary_factor", share))
    if share != 1.0:
        parameters["partial_rotary_factor"] = share
    if kind in ("llama3", "yarn"):
        parameters.setdefault(
            "original_max_position_embeddings", required(hf, "max_position_embeddings")
        )
    return parameters


def of_whole_heads(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of a family that turns whole heads.

    Raises CapabilityError for a share, which such a family of transformers does not compute either.
    """
    if share := parameters.get("partial_rotary_factor"):
        raise CapabilityError(
            f"the model rotates a share of {share} of each head (partial_rotary_factor in "
            "config.json); this family's whole heads alone are computed. Use a model without it."
        )
    return parameters


def refuse_what_is_not_computed(hf: HfConfig, more: Iterable[str]) -> None:
    """Raise CapabilityError for what no family here computes and for `more`, all of it at once."""
    faults = list(more)
    activation = given(hf, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        faults.append(f"hidden_act is {activation!r}; silu is computed")
    if given(hf, "use_sliding_window", False):
        faults.append("use_sliding_window is true; attention over whole documents is computed")
    elif other := sorted(set(given(hf, "layer_types", [])) - {"full_attention"}):
        faults.append(f"layer_types names {', '.join(other)}; full_attention is computed")
    if dropout := given(hf, "attention_dropout", 0.0):
        faults.append(f"attention_dropout is {dropout}; training without dropout is computed")
    if hf.get("quantization_config"):
        faults.append("quantization_config is set; unquantised weights are read")
    if faults:
        lines = "\n  ".join(faults)
        raise CapabilityError(
            f"the model's config.json asks for what is not computed:\n  {lines}\n"
            "Change these fields in a copy that model.config_path names, or use another model."
        )
