"""No setting of a training server is accepted and ignored: for each, tests that would miss it."""

from pathlib import Path

import pytest

from penstock.config.server.config import ServerConfig
from penstock.config.server.run_fields import SAME
from tests.register.serving import ASSEMBLED, OF_SERVER
from tests.register.tests_there import exists
from tests.test_fields import registered

HERE = Path(__file__).parents[1]


def test_every_setting_has_a_test_that_would_miss_it():
    assert ServerConfig.model_fields.keys() - {*ASSEMBLED, *OF_SERVER} == set()


def test_no_setting_is_named_that_is_gone():
    assert {*ASSEMBLED, *OF_SERVER} - ServerConfig.model_fields.keys() == set()


@pytest.mark.parametrize("field", OF_SERVER)
def test_the_tests_that_would_miss_it_exist(field):
    assert OF_SERVER[field]
    assert [test for test in OF_SERVER[field] if not exists(HERE, test)] == []


def test_what_a_model_is_assembled_by_has_tests_of_runs_that_would_miss_it():
    assert len(set(ASSEMBLED)) == len(ASSEMBLED)
    assert [field for field in ASSEMBLED if not registered().get(SAME[field])] == []
    mapped = "test_what_a_file_says_of_training_is_what_workers_are_told"
    assert exists(HERE, f"settings/test_config.py::{mapped}")
