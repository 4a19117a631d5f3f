"""A tiny model of every causal language model type of transformers, from its own config class."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.core.files import read_json
from penstock.models.automodel.build import language_config
from penstock.models.automodel.family import auto_family
from penstock.models.automodel.tiny_config import shrink

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""As the installed transformers lists them."""

_DECODER = {"is_decoder": True}
OVERRIDES: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
        ),
        _DECODER,
    ),
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 500_000}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "nemotron": {"num_key_value_heads": 2},
    "xlm": {"causal": True},
}
"""What the default config of a type lacks to be a decoder, or to be built at all."""

NOT_BUILT: Mapping[str, str] = {
    "blt": "it reads bytes in patches that a model of its own cuts; no tiny config fits together",
    "cohere_compass_text": "transformers cannot build it from its default config",
    "cpmant": "tokens see later ones: its prompt is read in both directions",
    "dots3_note": "its sizes must agree across layers of several kinds; no tiny config fits",
    "dots3_note_text": "its sizes must agree across layers of several kinds; no tiny config fits",
    "emu3": "its language model is saved with a type that transformers cannot load again",
    "gemma4_assistant": "it drafts tokens from the hidden states of another model",
    "gemma4_unified_assistant": "it drafts tokens from the hidden states of another model",
    "mllama": "its language model is saved with a type that transformers cannot load again",
    "musicgen": "it is a decoder of audio codes, several per step",
    "musicgen_melody": "it is a decoder of audio codes, several per step",
    "qwen4_exp": "its indexer has no default sizes; no tiny config fits",
    "qwen4_exp_text": "its indexer has no default sizes; no tiny config fits",
    "reformer": "its attention hashes at random: the same tokens give other results",
    "xlm": "its attention keeps keys of the first pass, so layers cannot be recomputed",
    "xlnet": "it is trained on permutations, where tokens see later ones",
    "zamba": "its shared layers have names that a tiny config does not give them",
    "zamba2": "its shared layers have sizes that a tiny config does not give them",
}
"""Types that are not examined, and why."""

NO_DROPOUT = ("dropout", "pdrop", "layerdrop")


def tiny_config(model_type: str) -> Any:
    """The default config of this type, made small and without dropout."""
    own = OVERRIDES.get(model_type, {})
    config = language_config(transformers.CONFIG_MAPPING[model_type](**own))
    values = shrink(config.to_dict())
    return type(config).from_dict(without_dropout(values))


def without_dropout(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config with all rates of dropout 0."""
    return {
        name: without_dropout(value)
        if isinstance(value, Mapping)
        else 0.0
        if isinstance(value, float) and any(part in name for part in NO_DROPOUT)
        else value
        for name, value in values.items()
    }


def write_model(
    folder: Path, model_type: str, *, seed: int = 0, noise: float = 0.02, **changes: Any
) -> Any:
    """Save a tiny model with random weights, of which no tensor is ones or zeros. `changes` are
    values of its config."""
    torch.manual_seed(seed)
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def write_described(folder: Path, model_type: str, **changes: Any) -> None:
    """The same, described here once: ranks that begin at once would each take those seconds."""
    write_model(folder, model_type, **changes)
    auto_family(read_json(folder / "config.json"))
