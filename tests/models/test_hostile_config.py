"""Configs that no model has are refused by name."""

import json

import pytest

from penstock.core.errors import ConfigError, DamagedFileError
from penstock.core.files import read_json
from penstock.engine.hf.config import read_hf_config
from penstock.models.hf_config import config_require


def test_json_that_is_nested_too_deeply_is_refused_with_its_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a":' * 50_000 + "1" + "}" * 50_000)
    with pytest.raises(ConfigError, match=r"config.json cannot be read as JSON"):
        read_hf_config(str(tmp_path), {}, runs_code=False)
    with pytest.raises(DamagedFileError, match=r"config.json cannot be read"):
        read_json(path)


@pytest.mark.parametrize("name", ["num_attention_heads", "hidden_size", "vocab_size"])
def test_a_size_of_zero_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"has {name}: 0"):
        config_require(json.loads(f'{{"{name}": 0}}'), name)
