"""No setting is accepted and ignored: for each, the tests that fail when it does nothing."""

from pathlib import Path

import pytest

from penstock.config.loading.schema_tree import is_section, sections
from tests.config.values import faults_of
from tests.register.adapters import OF_ADAPTERS
from tests.register.chain import OF_CHAIN
from tests.register.data import OF_DATA
from tests.register.preference import OF_PREFERENCE
from tests.register.tests_there import exists
from tests.register.training import OF_TRAINING

HERE = Path(__file__).parent

REGISTER = {**OF_TRAINING, **OF_ADAPTERS, **OF_DATA, **OF_CHAIN, **OF_PREFERENCE}


def all_fields() -> set[str]:
    return {
        f"{place}.{name}"
        for place, section in sections().items()
        for name, field in section.model_fields.items()
        if not is_section(field.annotation)
    }


def registered() -> dict[str, tuple[str, ...]]:
    return {
        f"{place}.{name}": tests
        for place, fields in REGISTER.items()
        for name, tests in fields.items()
    }


def test_every_field_has_a_test_that_would_miss_it():
    assert all_fields() - registered().keys() == set()


def test_the_register_names_no_field_that_is_gone():
    assert registered().keys() - all_fields() == set()


@pytest.mark.parametrize("field", registered())
def test_the_named_tests_exist(field):
    tests = registered()[field]
    assert tests
    assert [test for test in tests if not exists(HERE, test)] == []


@pytest.mark.parametrize("field", ["train.ckpt_manager", "export.format"])
def test_a_field_with_one_value_takes_no_other(field):
    place, _, name = field.partition(".")
    [line] = faults_of(**{place: {name: "other"}})
    assert line.startswith(f"{field}: ")
