"""Settings of checkpoints: what cannot be honoured, and what no folder can be called."""

from typing import Any

import pytest

from penstock.config.loading.load import loads
from tests.config.values import faults_of, refused_and_mended, smallest

# Sections, where the fault is told, words of the reason, and what mends it.
COMBINATIONS: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (
        {"train": {"load_optimizer": False}},
        "train.load_optimizer",
        "false is an option of load_checkpoint_path",
        {"train": {"load_checkpoint_path": "auto"}},
    ),
    (
        {"train": {"require_checkpoint": True}},
        "train.require_checkpoint",
        "no checkpoint is loaded",
        {"train": {"load_checkpoint_path": "auto"}},
    ),
    (
        {"train": {"require_checkpoint": True, "load_checkpoint_path": "a/folder"}},
        "train.require_checkpoint",
        "a named checkpoint is required anyway",
        {"train": {"require_checkpoint": False}},
    ),
    (
        {"train": {"init_checkpoint_path": "a/model", "load_checkpoint_path": "a/folder"}},
        "train.init_checkpoint_path",
        "load_checkpoint_path names another checkpoint",
        {"train": {"load_checkpoint_path": "auto"}},
    ),
    (
        {"train": {"ckpt_quant": "int8", "save_optimizer": False}},
        "train.ckpt_quant",
        "quantizes optimizer states",
        {"train": {"save_optimizer": True}},
    ),
    (
        {"train": {"ckpt_quant": "int4", "optimizer": "muon"}},
        "train.ckpt_quant",
        "quantizes the moments of adamw and anyprecision_adamw",
        {"train": {"optimizer": "anyprecision_adamw"}},
    ),
]


@pytest.mark.parametrize(("sections", "where", "reason", "mended"), COMBINATIONS)
def test_what_cannot_be_honoured_is_refused_with_what_can(
    sections: dict[str, Any], where: str, reason: str, mended: dict[str, Any]
) -> None:
    refused_and_mended(sections, where, reason, mended)


@pytest.mark.parametrize(
    "name",
    [
        "../up-{step}",
        "a/{step}",
        "..{step}",
        "{step}.part",
        "a b {step}",
        "{step}\n",
        "last",
        "{step}{step}",
        "{step}{consumed_samples}",
        "{step:03}",
        "{step.__class__}",
        "{0}-{step}",
        "{epoch}-{step}",
        "global_step_1{step}",
        "{step",
        "",
    ],
)
def test_what_is_no_folders_name_of_its_own_for_every_step_is_refused(name: str) -> None:
    [line] = faults_of(train={"ckpt_name": name})
    assert line.startswith("train.ckpt_name: ")


@pytest.mark.parametrize("name", [None, "{step}", "llama-8B--{step}-{consumed_samples}"])
def test_a_folders_name_with_the_step_in_it_is_taken(name: str | None) -> None:
    assert loads(smallest(train={"ckpt_name": name})).train.ckpt_name == name
