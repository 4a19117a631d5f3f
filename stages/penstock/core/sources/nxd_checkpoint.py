"""Checkpoints of NeuronX Distributed, which are told from others by their names and never read."""

import re
from pathlib import Path

from penstock.core.errors import ConfigError

SHARD = re.compile(r"dp_rank_\d+_tp_rank_\d+_pp_rank_\d+(\..*)?")
"""What its files and folders of one rank's tensors are called."""

DEPTH = 3
"""Folders below which they lie at most: `<checkpoint>/<tag>/model/<rank>`."""


def refuse_nxd_checkpoint(path: str, field: str) -> None:
    """Raise ConfigError where the folder that `field` names holds a checkpoint of NxD's."""
    folder = Path(path).expanduser()
    patterns = ("/".join(["*"] * depth) for depth in range(1, DEPTH + 1))
    if any(SHARD.fullmatch(file.name) for one in patterns for file in folder.glob(one)):
        raise ConfigError(
            f"{field} {path} is a checkpoint of NeuronX Distributed (pickled tensors of each rank),"
            " which is not read here.\n"
            "  Make a Hugging Face model of it: NxDT's checkpoint_converter.py with"
            " --convert_to_full_state, then save_pretrained of transformers, which writes"
            " safetensors; and name that folder in train.init_checkpoint_path."
        )
