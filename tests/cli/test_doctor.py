from importlib.metadata import PackageNotFoundError

import pytest

from penstock.cli.doctor import (
    OPTIONAL,
    REQUIRED,
    check_gpu_stack,
    check_optional,
    check_required,
    measure_speed,
)
from penstock.config.loading.load import load
from penstock.core.machine import linux
from penstock.core.machine.gpus import gpu_names
from penstock.estimate.costs.device_speed import detect_machine, remember
from penstock.pipeline.plan import plan
from tests.cli.command import small_run

GOOD = {
    "torch": "2.13.0+cpu",
    "transformers": "5.23.0",
    "datasets": "5.2.0",
    "pyarrow": "26.0.0",
    "pydantic": "2.14.0",
    "prefect": "3.8.8",
    "fastapi": "0.150.2",
    "sqlalchemy": "2.0.45",
}


def standing(versions):
    def version_of(package):
        if package not in versions:
            raise PackageNotFoundError(package)
        return versions[package]

    return {finding.subject: finding for finding in check_required(version_of)}


def test_good_versions_are_all_right():
    assert {each.standing for each in standing(GOOD).values()} == {"ok"}
    assert set(GOOD) == set(REQUIRED)


def test_a_finding_has_these_keys_in_json():
    [finding] = check_required(GOOD.__getitem__)[:1]
    assert finding.as_json() == {
        "what": "torch",
        "standing": "ok",
        "seen": "2.13.0+cpu",
        "mend": "",
    }


@pytest.mark.parametrize(
    ("package", "have"),
    [
        ("fastapi", "0.155.0"),
        ("fastapi", "0.151"),
        ("sqlalchemy", "2.1.0"),
        ("torch", "2.9.1"),
        ("pydantic", "3.0"),
    ],
)
def test_a_version_that_breaks_things_is_found_with_its_mend(package, have):
    findings = standing({**GOOD, package: have})
    assert [name for name, each in findings.items() if each.standing == "wrong"] == [package]
    assert findings[package].finding == have
    oldest, _ = REQUIRED[package]
    assert f"pip install '{package}>={oldest}" in findings[package].mend


def test_a_missing_package_is_wrong_when_needed_and_absent_when_not():
    assert standing({k: v for k, v in GOOD.items() if k != "datasets"})["datasets"].finding == (
        "not installed"
    )

    def nothing(package):
        raise PackageNotFoundError(package)

    assert {each.subject: each.standing for each in check_optional(nothing)} == dict.fromkeys(
        OPTIONAL, "absent"
    )


def test_this_environment_fits():
    assert [each for each in check_required() if each.standing != "ok"] == []


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_measured_machine_is_remembered_by_what_computes(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_CACHE_HOME", str(tmp_path))
    assert not detect_machine(1).speeds
    [finding] = measure_speed()
    assert finding.standing == "ok"
    machine, half = detect_machine(1), detect_machine(2)
    assert finding.finding.startswith(machine.name)
    assert machine.source == "measured"
    assert machine.bandwidth
    # Anything that runs this multiplies more than a hundred million numbers a second.
    assert all(speed > 1e8 for speed in machine.speeds.values())
    assert half.speeds["fp32"] == machine.speeds["fp32"] / 2


@pytest.mark.parametrize(
    ("bf16", "mixed", "said"), [(1e9, True, True), (1e9, False, False), (3e9, True, False)]
)
def test_a_run_in_bfloat16_where_that_was_measured_to_be_slower_is_told_so_once(
    bf16, mixed, said, monkeypatch, tmp_path
):
    monkeypatch.setenv("PENSTOCK_CACHE_HOME", str(tmp_path / "cache"))
    config = small_run(tmp_path, train={"enable_mixed_precision": mixed})
    (tmp_path / "cpuinfo").write_text("model name: any\nflags : avx2 fma\n")
    monkeypatch.setattr(linux, "PROC", tmp_path)
    unmeasured = [note for note in plan(load(config)).notes if "no units for it" in note]
    assert len(unmeasured) == (mixed and not gpu_names())
    remember({"name": None, "fp32": 2e9, "bf16": bf16, "bandwidth": 1e9})
    told = [note for note in plan(load(config)).notes if "2 x slower than float32" in note]
    assert len(told) == (said and not gpu_names())


def test_a_driver_that_is_too_old_is_wrong_and_a_build_without_cuda_is_said():
    def standing_of(cuda, driver):
        return [(one.subject, one.standing) for one in check_gpu_stack(cuda, [], [], driver)]

    assert standing_of("13.0", "570.10") == [("driver", "wrong")]
    assert standing_of("13.0", "580.65.06") == [("driver, CUDA, Triton", "ok")]
    assert standing_of(None, "580.65.06") == [("CUDA in PyTorch", "absent")]
