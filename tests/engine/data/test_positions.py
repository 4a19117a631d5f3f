"""What a model that learns its positions allows, told before any work."""

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import CapabilityError, ConfigError
from penstock.estimate.machine import check_model
from tests.engine import runs

OPT = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "ffn_dim": 48, "dropout": 0.0}
LEARNED = runs.TINY["max_position_embeddings"]


def check(folder: Path, **sections: Any) -> None:
    runs.write_config(folder / "opt", **OPT)
    check_model(runs.run_config(folder / "out", folder / "opt", **sections))


@pytest.mark.parametrize(
    "more", [{}, {"isolate_samples": False}, {"sample_packing_method": "wrapped"}]
)
def test_rows_that_may_hold_documents_beyond_the_positions_are_refused(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    check(tmp_path, data={"sample_packing_sequence_len": LEARNED, **more})
    with pytest.raises(
        ConfigError, match=f"learns {LEARNED} positions(.|\n)*Write {LEARNED} or less"
    ):
        check(tmp_path, data={"sample_packing_sequence_len": LEARNED + 1, **more})


def test_adapters_of_a_model_whose_layers_are_called_otherwise_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="layers of this model cannot have adapters"):
        check(tmp_path, model={"backend": "native"}, lora={"enable_lora": True})
