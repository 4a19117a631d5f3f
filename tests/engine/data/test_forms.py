"""What a model's tensors do not allow, told before any work."""

from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema.export import ExportConfig
from penstock.core.errors import CapabilityError, ConfigError
from penstock.machine import check_model
from tests.engine import runs


def check(folder: Path, **sections: Any) -> None:
    runs.write_config(folder / "model", attention_bias=False)
    export = ExportConfig(**sections.pop("export", {}))
    run = runs.run_config(folder / "out", folder / "model", **sections)
    check_model(run.model_copy(update={"export": export}))


def test_layers_that_the_format_of_an_export_does_not_have_are_refused(tmp_path: Path) -> None:
    check(tmp_path, export={"quantise": "fp8"})
    with pytest.raises(CapabilityError, match=r"export\.quantise: .* needs multiples of 128 x 128"):
        check(tmp_path, export={"quantise": "block_fp8"})


def test_biases_of_a_model_that_has_none_are_not_trained(tmp_path: Path) -> None:
    check(tmp_path, lora={"enable_lora": True})
    with pytest.raises(ConfigError, match=r"lora\.lora_bias is all, and this model has no biases"):
        check(tmp_path, lora={"enable_lora": True, "lora_bias": "all"})
