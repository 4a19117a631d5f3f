"""A learning rate that nobody wrote, with adapters that need another one."""

from penstock.config.loading.load import loads
from penstock.config.rules.notices import iter_notices
from tests.config.values import smallest


def notices(**sections) -> list[str]:
    return [line for line in iter_notices(loads(smallest(**sections))) if "train.lr:" in line]


def test_lora_without_a_learning_rate_is_told_a_usual_one():
    lora = {"enable_lora": True}
    [line] = notices(lora=lora)
    assert "is 5e-05, the default" in line
    assert "write train.lr: 2e-4" in line
    assert not notices(lora=lora, train={"lr": 5e-5})
    assert not notices()
