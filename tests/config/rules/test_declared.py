"""What fields declare of one another names settings that there are, and is told at once."""

from operator import attrgetter

import pytest

from penstock.config.loading.load import loads
from penstock.config.loading.schema_tree import sections
from penstock.config.schema.effect import conditions_of
from tests.config.values import faults_of, smallest

DECLARED = [
    (section_name, name, condition)
    for section_name, section in sections().items()
    for name in section.model_fields
    for conditions in conditions_of(section, name)
    for condition in conditions
]


def test_there_are_conditions_of_many_fields() -> None:
    assert len({(section_name, name) for section_name, name, _ in DECLARED}) > 150


@pytest.mark.parametrize("section_name", sorted({section_name for section_name, _, _ in DECLARED}))
def test_a_condition_names_settings_that_there_are(section_name: str) -> None:
    run = loads(smallest())
    kind = sections()[section_name]
    for _, name, condition in (declared for declared in DECLARED if declared[0] == section_name):
        if condition.setting.startswith("."):
            assert condition.name in kind.model_fields, name
        else:
            attrgetter(condition.setting)(run)
        for read in condition.reads:
            section, _, field = read.replace(".0.", "[].").rpartition(".")
            assert field in sections()[section].model_fields, name
        reason = condition.why.format(name="n", value="v", field="f", own="o")
        assert "{" not in reason, name


def test_all_that_a_field_excludes_is_told_at_once() -> None:
    train = {"fuse_optimizer_step": True, "optimizer": "muon", "optimizer_offload": "cpu"}
    faults = faults_of(train=train)
    assert all(fault.startswith("train.fuse_optimizer_step: ") for fault in faults)
    instead = ("max_grad_norm: 0", "optimizer: adamw", "optimizer_offload: none")
    assert all(f"write {words}" in fault for words, fault in zip(instead, faults, strict=True))


def test_a_field_without_effect_is_told_what_it_needs_and_nothing_else() -> None:
    train = {"data_parallel_mode": "ddp", "fsdp_gradient_sync": "micro_batch", "precision": "bf16"}
    (fault,) = faults_of(train=train)
    assert fault.endswith("write data_parallel_mode: fsdp2, or leave fsdp_gradient_sync out")
