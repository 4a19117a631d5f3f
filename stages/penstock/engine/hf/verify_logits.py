"""Compare the logits of a written folder in transformers with those of the engine's model, in
fp32, with the weights in the dtype of the files. T tokens, V vocabulary."""

from pathlib import Path

import torch

from penstock.core.errors import StageError
from penstock.core.machine.linux import memory_bytes
from penstock.engine.hf.config import read_hf_config
from penstock.engine.hf.state_dict import HFStateDict
from penstock.engine.hf.verify_folder import NotVerifiedError, quiet_transformers
from penstock.models.automodel.build import build_config, model_class
from penstock.models.automodel.causal_lm import AutoCausalLM
from penstock.models.automodel.outline import AutoModelConfig
from penstock.models.decoder import Decoder
from penstock.models.weights import WeightMap
from penstock_kernels.attention import VarlenMetadata

TOKENS = 8

# Largest norm of the difference, as a share of the norm of the logits, by the files' dtype: a
# router's choice among experts with close scores may differ after rounding.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-3, torch.float16: 1e-3}


@torch.no_grad()
def verify_logits(
    weights: HFStateDict, names: WeightMap, folder: Path, dtype: torch.dtype, *, runs_code: bool
) -> None:
    """Compare the logits of a few tokens. `weights` are those that were written to the folder.
    Raises StageError if they differ; NotVerifiedError if both models do not fit in half of this
    machine's memory."""
    # Two models, four bytes a number.
    needed, memory = 2 * 4 * weights.num_parameters, memory_bytes()
    if memory and needed > memory / 2:
        raise NotVerifiedError(
            f"two models in fp32 take {needed / 1e9:.0f} GB, and this machine has "
            f"{memory / 1e9:.0f} GB"
        )
    hf_config = read_hf_config(str(folder), {}, runs_code=runs_code)
    ids_T = torch.arange(TOKENS) * 37 % names.config.vocab_size
    ours_TV = _engine_logits(weights, names, hf_config, ids_T, dtype)
    with quiet_transformers():
        model = model_class(build_config(hf_config)).from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=runs_code, local_files_only=True
        )
        theirs_TV = model.eval()(ids_T[None], use_cache=False).logits[0]
    difference = float((theirs_TV - ours_TV).norm() / ours_TV.norm())
    # Not `>`: NaN must not pass.
    if not difference <= TOLERANCES[dtype]:
        raise StageError(
            f"{folder.name}/ was written, and its logits in transformers differ from those of the "
            f"trained weights by {difference:.1e} of their norm (limit {TOLERANCES[dtype]:.0e}).\n"
            "  export.verify: load checks names and shapes alone."
        )


def _engine_logits(
    weights: HFStateDict,
    names: WeightMap,
    hf_config: dict[str, object],
    ids_T: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The logits [T, V] of the engine's model with these weights, rounded as in the files."""
    config = names.config
    if isinstance(config, AutoModelConfig):
        model = AutoCausalLM(hf_config, config).to_empty(device="cpu")
    else:
        model = Decoder(config)
    for native, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if native not in names.native_names():
            continue
        parts = weights.read(stored := names.hf_names(native))
        rows = [parts[name].to(weights.dtypes.get(name, dtype)).float() for name in stored]
        parameter.copy_(torch.cat([part.reshape(-1) for part in rows]).view(parameter.shape))
    positions_T = torch.arange(TOKENS)
    return model.eval()(ids_T, positions_T, VarlenMetadata.of([TOKENS]))
