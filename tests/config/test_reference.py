"""The generated page and schema are those of the code, and the schema judges as the code does."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from penstock.config import generate_docs
from penstock.config.loading import yaml12
from penstock.config.loading.load import loads
from penstock.config.loading.schema_tree import sections
from penstock.config.server.config import ServerConfig
from penstock.config.server.load import load_server
from penstock.core.errors import ConfigError
from tests.config.test_load import AVAILABLE
from tests.config.values import smallest

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json.loads((CONFIGS / generate_docs.SCHEMA).read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize("name", generate_docs.texts())
def test_generated_file_is_fresh(name: str) -> None:
    stale = f"{name} is stale: run python -m penstock.config.generate_docs"
    there, now = (CONFIGS / name).read_text(), generate_docs.texts()[name]
    if name.endswith(".json"):
        # The order of keys depends on what was imported before.
        assert json.loads(there) == json.loads(now), stale
    else:
        assert there == now, stale


@pytest.mark.slow
def test_check_finds_a_stale_file_and_writing_mends_it(tmp_path: Path) -> None:
    assert generate_docs.main([str(tmp_path), "--check"]) == 1
    assert generate_docs.main([str(tmp_path)]) == 0
    assert generate_docs.main([str(tmp_path), "--check"]) == 0
    (tmp_path / generate_docs.PAGE).write_text("old")
    assert generate_docs.main([str(tmp_path), "--check"]) == 1


def test_page_has_a_heading_for_every_field() -> None:
    text = generate_docs.page()
    for place, section in sections().items():
        _, _, part = text.partition(f"\n## {place}\n")
        entries = part.split("\n## ")[0]
        for name in section.model_fields:
            if f"{place}.{name}" not in sections():
                assert f"\n### `{place}.{name}`\n" in entries


def test_servers_page_has_a_heading_for_every_field() -> None:
    text = generate_docs.server_page()
    for name in ServerConfig.model_fields:
        assert text.count(f"\n### `{name}`\n") == 1


def test_editor_schema_of_servers_judges_as_loading_does() -> None:
    schema = json.loads((CONFIGS / generate_docs.SERVER_SCHEMA).read_text())
    Draft202012Validator.check_schema(schema)
    judge = Draft202012Validator(schema)
    for file in sorted((CONFIGS / "server").glob("*.yaml")):
        judge.validate(yaml12.parse(file.read_text()).value)
        load_server(file)
    for wrong in ({}, {"model_path": "m", "lorra_rank": 1}, {"model_path": "m", "lora_rank": 0}):
        assert not judge.is_valid(wrong)
        with pytest.raises(ValueError, match="validation error"):
            ServerConfig.model_validate(wrong)


def test_editor_schema_accepts_what_loads(validator: Draft202012Validator) -> None:
    validator.validate(yaml12.parse(AVAILABLE).value)
    validator.validate(smallest())


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("train", {"lrr": 1}),
        ("train", {"lr": "1e-5"}),
        ("train", {"seed": True}),
        ("train", {"micro_batch_size": 0}),
        ("train", {"optimizer": "adam"}),
        ("data", {"datasets": [{"type": "chat"}]}),
        ("export", {"dtype": "int8"}),
        ("launch", {"nproc_per_node": "all"}),
        ("launch", {"env": {"A": 1}}),
    ],
)
def test_editor_schema_refuses_what_does_not_load(
    validator: Draft202012Validator, section: str, fields: dict[str, Any]
) -> None:
    values = smallest(**{section: fields})
    assert not validator.is_valid(values)
    with pytest.raises(ConfigError):
        loads(values)
