"""Router losses and statistics of transformers' mixtures are those of our decoder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import CapabilityError
from penstock.engine import split_by_length
from penstock.engine.validate_backend import require_backend
from penstock.models.automodel.causal_lm import AutoCausalLM
from penstock.models.automodel.family import auto_family
from tests.engine import loops, runs
from tests.engine.automodel import examine, tiny_models
from tests.ranks import on_ranks

LOSSES = {"moe_aux_loss_coef": 0.5, "moe_z_loss_coef": 0.05}
GLOBAL = {**LOSSES, "moe_global_load_balancing": True}
Found = tuple[dict[str, Any], loops.Arrays]


def _first_step(folder: Path, backend: str, **train: Any) -> Found:
    model = {"model_path": str(folder), "backend": backend}
    job = examine.job_of(folder, backend, model=model, max_grad_norm=0.0, **train)
    loop = loops.loop_of(job)
    gradients = loops.before_each_update(loop, lambda: loops.gradients_of(loop))
    record = loops.step(loop)
    told = {n: record[n] for n in ("loss", "grad_norm", "aux_loss", "z_loss", "routers")}
    return told, {n: g for n, g in gradients[0].items() if "experts" not in n}


def _each(folder: Path) -> dict[str, list[Found]]:
    found = {
        name: [_first_step(folder, backend, **train) for backend in ("native", "transformers")]
        for name, train in {"of rows": LOSSES, "of steps": GLOBAL}.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            AutoCausalLM, "_packed", lambda self, ids, _, them: self._padded(ids, them, None)
        )
        found["of rows"].append(_first_step(folder, "transformers", **LOSSES))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", [pytest.param("qwen3_moe", marks=pytest.mark.exhaustive), "glm4_moe"]
)
def test_router_losses_and_their_gradients_are_those_of_our_decoder(tmp_path, model_type):
    examine.write_rows(tmp_path)
    tiny_models.write_described(tmp_path / "model", model_type, noise=0.1)
    [found, _] = on_ranks(2, _each, tmp_path / "model")
    for (told, gradients), *others in found.values():
        for these, of_these in others:
            for name, value in these.pop("routers").items():
                np.testing.assert_allclose(value, told["routers"][name], rtol=1e-4, err_msg=name)
            assert these == pytest.approx({n: told[n] for n in these}, rel=1e-5)
            assert of_these.keys() == gradients.keys()
            for name, value in gradients.items():
                error = np.linalg.norm(of_these[name] - value)
                assert error <= 2e-5 * np.linalg.norm(value), name


def _in_parts(folder: Path) -> list[Found]:
    found = []
    for most in (1, 8):
        split_by_length.MAX_SUB_BATCHES = most
        found.append(_first_step(folder, "transformers", **GLOBAL))
    return found


@pytest.mark.exhaustive
def test_a_loss_of_the_whole_step_is_the_same_in_parts_of_similar_length(tmp_path):
    examine.write_rows(tmp_path)
    tiny_models.write_described(tmp_path / "model", "jamba", noise=0.1)
    [((told, gradients), (again, others)), _] = on_ranks(2, _in_parts, tmp_path / "model")
    assert again.pop("routers")["counts"] == told.pop("routers")["counts"]
    assert again == pytest.approx(told, rel=1e-5)
    for name, value in gradients.items():
        assert np.linalg.norm(others[name] - value) <= 2e-5 * np.linalg.norm(value), name


@pytest.mark.slow
def test_a_loss_of_routers_that_are_not_observed_is_refused(tmp_path):
    tiny_models.write_model(tmp_path, "phimoe", output_router_logits=True)
    values = json.loads((tmp_path / "config.json").read_text())
    family = auto_family(values)
    run = runs.run_config(tmp_path / "out", tmp_path, moe_aux_loss_coef=0.1)
    config = family.read(values)
    with pytest.raises(CapabilityError, match=r"moe_aux_loss_coef: 0\.1 \(its routers do not"):
        require_backend(run, family, config)
    run = runs.run_config(tmp_path / "out", tmp_path)
    with pytest.raises(CapabilityError, match=r"output_router_logits: true in config\.json"):
        require_backend(run, family, config)
