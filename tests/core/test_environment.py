"""Variables that are set for what is made within, and no longer."""

import os

import pytest

from penstock.core import env
from penstock.core.errors import ConfigError


def test_variables_are_what_they_were_once_it_is_over(monkeypatch):
    monkeypatch.setenv("PENSTOCK_TEST_SET", "before")
    monkeypatch.delenv("PENSTOCK_TEST_UNSET", raising=False)
    with env.meanwhile({"PENSTOCK_TEST_SET": "1", "PENSTOCK_TEST_UNSET": "2"}):
        assert os.environ["PENSTOCK_TEST_SET"] == "1"
        assert os.environ["PENSTOCK_TEST_UNSET"] == "2"
    assert os.environ["PENSTOCK_TEST_SET"] == "before"
    assert "PENSTOCK_TEST_UNSET" not in os.environ


def test_the_number_of_processes_is_read_from_either_variable(monkeypatch):
    monkeypatch.delenv("PENSTOCK_NUM_PROC", raising=False)
    monkeypatch.setenv("XORL_DATASET_NUM_PROC", "3")
    assert env.num_processors() == 3
    monkeypatch.setenv("PENSTOCK_NUM_PROC", "5")
    assert env.num_processors() == 5
    monkeypatch.setenv("PENSTOCK_NUM_PROC", "many")
    with pytest.raises(ConfigError, match="PENSTOCK_NUM_PROC is 'many'"):
        env.num_processors()
