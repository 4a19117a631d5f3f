"""Variables that are set for what is made within, and no longer."""

import os

from penstock.core import env


def test_variables_are_what_they_were_once_it_is_over(monkeypatch):
    monkeypatch.setenv("PENSTOCK_TEST_SET", "before")
    monkeypatch.delenv("PENSTOCK_TEST_UNSET", raising=False)
    with env.meanwhile({"PENSTOCK_TEST_SET": "1", "PENSTOCK_TEST_UNSET": "2"}):
        assert os.environ["PENSTOCK_TEST_SET"] == "1"
        assert os.environ["PENSTOCK_TEST_UNSET"] == "2"
    assert os.environ["PENSTOCK_TEST_SET"] == "before"
    assert "PENSTOCK_TEST_UNSET" not in os.environ
