"""Fields of one value. That no other field is ignored is shown by `tests/mutate`."""

import pytest

from tests.config.values import faults_of


@pytest.mark.parametrize("field", ["train.ckpt_manager", "export.format"])
def test_a_field_with_one_value_takes_no_other(field):
    place, _, name = field.partition(".")
    [line] = faults_of(**{place: {name: "other"}})
    assert line.startswith(f"{field}: ")
