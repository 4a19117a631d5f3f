"""Versions of driver, CUDA, PyTorch and Triton that do not work together are named with a fix."""

import pytest

from penstock.core.machine.gpu_stack import (
    _compare_triton,
    check_architectures,
    check_driver,
    read_driver,
)

NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x)\n"
BUILT = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
ASKS = ["sympy", 'triton==3.7.1; platform_system == "Linux"', 'triton==9; extra == "x"']


def test_the_loaded_drivers_version_is_read(tmp_path):
    (tmp_path / "version").write_text(NVRM)
    assert read_driver(tmp_path / "version") == "580.159.04"
    assert read_driver(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("cuda", "driver", "fits"),
    [
        ("13.0", "580.65.06", True),
        ("13.0", "575.51.02", False),
        ("12.8", "575.51.02", True),
        ("12.8", "470.57.02", False),
        ("13.0", None, True),
    ],
)
def test_a_driver_runs_the_cuda_of_its_time_and_earlier(cuda, driver, fits):
    found = check_driver(cuda, driver)
    assert (found is None) == fits
    if found:
        assert driver is not None
        assert driver in found.finding


@pytest.mark.parametrize(
    ("capability", "built", "fits"),
    [
        ((9, 0), BUILT, True),
        ((8, 9), BUILT, True),
        ((7, 0), BUILT, False),
        ((12, 1), BUILT, True),
        ((13, 0), BUILT, True),
        ((10, 3), ["sm_90a", "sm_120"], False),
    ],
)
def test_a_build_has_kernels_for_a_gpu_or_code_that_becomes_them(capability, built, fits):
    found = check_architectures(built, [(9, 0), capability] if fits else [capability])
    assert (found is None) == fits


def test_triton_is_the_one_that_pytorch_was_built_with():
    assert _compare_triton(ASKS, "3.7.1") is None
    found = _compare_triton(ASKS, "3.9.0")
    assert found is not None
    assert found.fix == "pip install 'triton==3.7.1'"
    # The wheel for CPUs asks for none.
    assert _compare_triton(["sympy"], "3.9.0") is None
