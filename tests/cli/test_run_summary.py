"""The commands that the end of a run names."""

import json

import pytest

from penstock.cli.run_summary import serving_commands
from tests.cli.command import penstock, small_run

pytestmark = pytest.mark.usefixtures("warm_ranks")


@pytest.mark.slow
def test_a_run_names_what_can_be_done_with_its_model(tmp_path):
    config = small_run(tmp_path, train={"max_steps": 1}, data={"val_set_size": 2})
    done = penstock("run", config, "--json")
    assert done.code == 0, done.err
    result = done.last["result"]
    assert result["commands"] == [
        f"penstock chat {config}",
        f"penstock eval {config}",
        f"vllm serve {result['model']}",
    ]
    printed = penstock("run", config).out
    assert f"penstock eval {config}" in printed
    assert "nothing was evaluated" not in printed


@pytest.mark.slow
def test_an_adapter_alone_is_served_over_its_base_and_that_nothing_was_evaluated_is_said(tmp_path):
    lora = {"enable_lora": True, "lora_rank": 4, "save_lora_only": True}
    config = small_run(tmp_path, train={"max_steps": 1, "lr": 1e-4}, lora=lora)
    done = penstock("run", config)
    assert done.code == 0, done.err
    assert "nothing was evaluated" in done.out
    assert "penstock eval" not in done.out


@pytest.mark.parametrize(
    ("entries", "command"),
    [
        ({"r": 20}, "vllm serve org/base --enable-lora --max-lora-rank 32 --lora-modules mine={}"),
        ({"r": 1024}, None),
        ({"r": 8, "use_dora": True}, None),
        ({"r": 8, "modules_to_save": ["lm_head"]}, None),
    ],
)
def test_adapters_that_vllm_does_not_read_have_no_command(entries, command, tmp_path):
    config = {"base_model_name_or_path": "org/base", **entries}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert serving_commands(tmp_path) == ([command.format(tmp_path)] if command else [])
