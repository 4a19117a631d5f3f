"""No setting of a training server is accepted and ignored: for each, tests that would miss it."""

import ast
from functools import cache
from pathlib import Path

import pytest

from penstock.config.dialects.server import SAME
from penstock.config.server import ServerConfig
from tests.register.serving import ASSEMBLED, OF_SERVER
from tests.test_fields import registered

HERE = Path(__file__).parent


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((HERE / file).read_text())


def exists(test: str) -> bool:
    """Whether `file::test` or `file::test[case]` is there, told from the file's text alone."""
    file, _, rest = test.partition("::")
    name, _, case = rest.partition("[")
    if not (HERE / file).is_file():
        return False
    functions = {n.name for n in ast.walk(parsed(file)) if isinstance(n, ast.FunctionDef)}
    texts = {n.value for n in ast.walk(parsed(file)) if isinstance(n, ast.Constant)}
    return name in functions and (not case or case.removesuffix("]") in texts)


def test_every_setting_has_a_test_that_would_miss_it():
    assert ServerConfig.model_fields.keys() - {*ASSEMBLED, *OF_SERVER} == set()


def test_no_setting_is_named_that_is_gone():
    assert {*ASSEMBLED, *OF_SERVER} - ServerConfig.model_fields.keys() == set()


@pytest.mark.parametrize("field", OF_SERVER)
def test_the_tests_that_would_miss_it_exist(field):
    assert OF_SERVER[field]
    assert [test for test in OF_SERVER[field] if not exists(test)] == []


def test_what_a_model_is_assembled_by_has_tests_of_runs_that_would_miss_it():
    assert len(set(ASSEMBLED)) == len(ASSEMBLED)
    assert [field for field in ASSEMBLED if not registered().get(SAME[field])] == []
    mapped = "test_what_a_file_says_of_training_is_what_workers_are_told"
    assert exists(f"test_config.py::{mapped}")
