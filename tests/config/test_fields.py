"""The schema holds every documented field and explains it."""

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic.fields import FieldInfo

from penstock.config import generate_docs  # noqa: F401 - it reads the fields' docstrings
from penstock.config.loading.load import loads
from penstock.config.loading.schema_tree import is_section, sections
from penstock.config.schema.run import is_explicitly_set
from penstock.core.errors import ConfigError
from tests.config.values import faults_of, smallest

HERE = Path(__file__).parent
DOCUMENTED = HERE.parents[2] / "shared" / "spec" / "local_fields.yaml"
GOLDEN = json.loads((HERE.parent / "golden" / "local_fields.json").read_text())

# Documented defaults that depend on the machine, the data or other settings: null here, and told by
# config/resolve.py or elsewhere. Written, they mean what they say.
RESOLVED = {
    ("data", "sample_packing_sequence_len"): None,
    ("data", "dataloader_num_workers"): None,
    ("data", "dataloader_prefetch_factor"): None,
    ("data", "dataloader_drop_last"): None,
    ("data.datasets[]", "type"): None,
    ("lora", "quant_group_size"): None,
    ("model", "config_path"): None,
    ("model", "tokenizer_path"): None,
    ("model", "attn_implementation"): None,
    ("data", "dataset_num_proc"): None,
    ("train", "init_device"): None,
    ("train", "use_wandb"): None,
    ("train", "wandb_project"): "penstock",
}


def default_of(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True, validated_data={})


def all_fields() -> list[tuple[str, str, FieldInfo]]:
    return [
        (place, name, field)
        for place, section in sections().items()
        for name, field in section.model_fields.items()
        if not is_section(field.annotation)
    ]


def assert_default(section: str, name: str, default: Any) -> None:
    field = sections()[section].model_fields[name]
    if default == "REQUIRED":
        assert field.is_required()
    else:
        found = default_of(field)
        # Python takes 0 for false.
        assert (found, type(found) is bool) == (default, type(default) is bool)


@pytest.mark.parametrize(
    ("section", "name"), [(place, name) for place, fields in GOLDEN.items() for name in fields]
)
def test_field_has_its_documented_default(section: str, name: str) -> None:
    assert_default(section, name, RESOLVED.get((section, name), GOLDEN[section][name]))


@pytest.mark.skipif(not DOCUMENTED.is_file(), reason="needs ../shared/spec/local_fields.yaml")
def test_documented_fields_are_all_there() -> None:
    rows = yaml.safe_load(DOCUMENTED.read_text())
    assert len(rows) > 130
    for row in rows:
        at = (row["section"], row["field"])
        assert_default(*at, RESOLVED.get(at, row["default"]))


@pytest.mark.parametrize(("place", "name", "field"), all_fields())
def test_field_is_explained_where_it_is_declared(place: str, name: str, field: FieldInfo) -> None:
    assert field.description, f"{place}.{name}"
    assert field.description.strip().endswith(".")


def test_smallest_run_has_every_default() -> None:
    run = loads(smallest())
    for place, name, field in all_fields():
        if not place.endswith(("[]", "{}")) and not is_explicitly_set(run, f"{place}.{name}"):
            assert attrgetter(f"{place}.{name}")(run) == default_of(field)


ROOTS = [
    ("data", "dataset_prepared_path"),
    ("train", "output_dir"),
    ("pipeline", "artifacts_path"),
]


@pytest.mark.parametrize(("section", "name"), ROOTS)
@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://host/x", "cannot be written to https://"),
        ("ftp://host/x", "cannot be written to ftp://"),
        ("s3://", "has no bucket"),
        ("s3://user:hunter2@bucket/x", "set the credentials in the environment"),
    ],
)
def test_results_go_to_folders_and_object_stores_alone(
    section: str, name: str, url: str, says: str
) -> None:
    run = loads(smallest(**{section: {name: "s3://bucket/x/"}}))
    assert getattr(getattr(run, section), name) == "s3://bucket/x"
    (fault,) = faults_of(**{section: {name: url}})
    assert fault.startswith(f"{section}.{name}: ")
    assert says in fault
    assert "hunter2" not in fault


def test_written_tells_a_written_default_from_an_unwritten_one() -> None:
    run = loads(smallest(train={"seed": 42}, data={"datasets": [{"path": "a", "split": None}]}))
    assert is_explicitly_set(run, "train.seed")
    assert is_explicitly_set(run, "data.datasets.0.split")
    assert not is_explicitly_set(run, "train.lr")
    assert not is_explicitly_set(run, "lora.lora_rank")
    with pytest.raises(KeyError):
        is_explicitly_set(run, "train.learning_rate")


@pytest.mark.parametrize(
    ("pipeline", "push", "stages"),
    [
        ({}, {}, ("prepare", "pack", "train", "export")),
        ({}, {"repo_id": "me/m"}, ("prepare", "pack", "train", "export", "push")),
        ({}, {"url": "file:///x"}, ("prepare", "pack", "train", "export", "push")),
        ({"stages": ["prepare", "pack"]}, {"repo_id": "me/m"}, ("prepare", "pack")),
        ({"stages": ["export", "push"]}, {"repo_id": "me/m"}, ("export", "push")),
    ],
)
def test_push_joins_the_default_stages_when_it_has_a_target(
    pipeline: dict[str, Any], push: dict[str, Any], stages: tuple[str, ...]
) -> None:
    assert loads(smallest(pipeline=pipeline, push=push)).stages == stages


@pytest.mark.parametrize(
    ("size", "count"),
    [("5GB", 5_000_000_000), ("4GiB", 4 * 2**30), ("0.5 MB", 500_000), (1234, 1234)],
)
def test_shard_size_counts_decimal_and_binary_units(size: str | int, count: int) -> None:
    assert loads(smallest(export={"max_shard_size": size})).export.max_shard_bytes == count


@pytest.mark.parametrize(
    ("kind", "instead"), [("gguf", r"run its convert_hf_to_gguf\.py"), ("nf4", "int4 or nvfp4")]
)
def test_formats_that_others_make_are_refused_with_what_makes_them(kind: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"export.quantise: {kind} is .*{instead}"):
        loads(smallest(export={"quantise": kind}))


@pytest.mark.parametrize(
    ("spelling", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")]
)
def test_short_names_of_precisions_mean_the_long_ones(spelling: str, dtype: str) -> None:
    assert loads(smallest(export={"dtype": spelling})).export.dtype == dtype


@pytest.mark.parametrize("nothing", [None, 0, 0.0])
def test_validation_size_of_nothing_is_no_validation(nothing: float | None) -> None:
    assert loads(smallest(data={"val_set_size": nothing})).data.val_set_size is None


def test_every_documented_default_that_is_not_taken_has_its_reason_in_the_guide() -> None:
    page = (HERE.parents[1] / "docs" / "guide" / "config.md").read_text()
    table = page.partition("**Nine of xorl's defaults")[2].partition("\n\n**")[0]
    told = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    no_value = {"model.config_path", "model.tokenizer_path", "data.dataset_num_proc"}
    differing = {f"{place}.{name}" for place, name in RESOLVED} - no_value
    assert told == differing - {"data.datasets[].type"}
    assert len(told) == 9
