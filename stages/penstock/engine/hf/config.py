"""Hugging Face config of the base model, from a folder or built in."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.files import require_regular
from penstock.models.automodel.remote_code import CODE, trusted
from penstock.models.builtin import SCHEME, builtin_config
from penstock.models.foundation import apply_overrides
from penstock.models.validate_config import validate_config


def read_hf_config(
    config_path: str, foundation: Mapping[str, Any], *, runs_code: bool = False
) -> dict[str, Any]:
    """Read the config in the folder `config_path` (or `builtin:<name>`), with `foundation`
    overrides. `runs_code`: with the code beside it (`models/automodel/remote_code.py`).

    Raises ConfigError if there is no config.json of a model, or no code.
    """
    if config_path.startswith(SCHEME):
        config = builtin_config(config_path)
    else:
        file = Path(config_path).expanduser()
        file = file / "config.json" if file.is_dir() else file
        try:
            require_regular(file)
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"model.config_path: {file} cannot be read as JSON ({error}).\n"
                "  Name a folder that holds a Hugging Face config.json."
            ) from error
        config = validate_config(config, f"model.config_path: {file}")
    config = apply_overrides(config, foundation)
    config.pop(CODE, None)
    if runs_code:
        folder = Path(config_path).expanduser()
        return trusted(config, folder if folder.is_dir() else folder.parent)
    return config
