"""Detection of NeuronX Distributed checkpoints, which are not supported."""

import re
from pathlib import Path

from penstock.core.errors import ConfigError

SHARD = re.compile(r"dp_rank_\d+_tp_rank_\d+_pp_rank_\d+(\..*)?")
"""File and folder names of one rank's shards."""

DEPTH = 3  # Maximum folder depth of shards: `<checkpoint>/<tag>/model/<rank>`


def reject_nxd_checkpoint(path: str, field: str) -> None:
    """Raise ConfigError if the folder in `field` is an NxD checkpoint."""
    folder = Path(path).expanduser()
    patterns = ("/".join(["*"] * depth) for depth in range(1, DEPTH + 1))
    if any(SHARD.fullmatch(file.name) for pattern in patterns for file in folder.glob(pattern)):
        raise ConfigError(
            f"{field} {path} is a checkpoint of NeuronX Distributed (pickled tensors of each rank),"
            " which is not supported.\n"
            "  Convert it to a Hugging Face model: NxDT's checkpoint_converter.py with"
            " --convert_to_full_state, then save_pretrained of transformers, which writes"
            " safetensors; and name that folder in train.init_checkpoint_path."
        )
