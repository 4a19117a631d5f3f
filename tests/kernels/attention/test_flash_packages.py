"""What FlashAttention's packages are called with, and what is made of their answers. They run on
GPUs alone: functions with the same parameters stand in for them."""

import sys
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock_kernels.attention import VarlenMetadata, attention, packages
from penstock_kernels.flash_packages import PACKAGES
from penstock_kernels.op import UnsupportedError
from tests.kernels.attention.attention_cases import drawn

RUN = {
    "flash_attention_2": packages.flash_attention_2,
    "flash_attention_3": packages.flash_attention_3,
    "flash_attention_4": packages.flash_attention_4,
}
FILES = {
    "flash_attention_2": ("flash_attn/__init__.py", "flash_attn/flash_attn_interface.py", "two"),
    "flash_attention_3": ("flash_attn_interface.py", "flash_attn_interface.py", "three"),
    "flash_attention_4": ("flash_attn/cute/__init__.py", "flash_attn/cute/interface.py", "four"),
}
"""Of each package: where its function is imported from, what tells that it is there, and what
stands in for it."""


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Puts stand-ins where the packages would be."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def installed(name, stand_in=None):
        door, sign, function = FILES[name]
        for file in (sign, door):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        (tmp_path / door).write_text(
            "from tests.kernels.attention.flash_stand_ins import "
            f"{stand_in or function} as flash_attn_varlen_func\n"
        )

    yield installed
    for name in [name for name in sys.modules if name.split(".")[0].startswith("flash_attn")]:
        del sys.modules[name]


def check_cases(name, seeds):
    """Random cases, forward and backward, against the reference. fp64, and sinks that bf16 holds:
    what differs is what was asked for."""
    package = PACKAGES[name]
    for seed in seeds:
        case = drawn(seed, sinks=package.sinks, soft_caps=package.soft_cap, masks=False)
        want = case.with_gradients(attention.backend("eager"))
        got = case.with_gradients(RUN[name])
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11, msg=str(case))


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 34), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RUN)
def test_each_package_is_asked_for_what_the_reference_computes(install, name, seeds):
    install(name)
    check_cases(name, seeds)


def test_releases_that_give_more_than_the_output_are_understood(install):
    install("flash_attention_3", "three_at_first")
    check_cases("flash_attention_3", range(2))


def test_results_are_the_same_each_time_where_that_is_asked_for(install):
    # The stand-ins assert it.
    install("flash_attention_2")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        check_cases("flash_attention_2", range(1))
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_package_is_there_if_its_own_files_are(install):
    assert all(package.missing_reason() for package in PACKAGES.values())
    install("flash_attention_4")
    # In a folder that it shares with the second.
    assert PACKAGES["flash_attention_4"].missing_reason() is None
    assert "pip install flash-attn " in str(PACKAGES["flash_attention_2"].missing_reason())
    install("flash_attention_2")
    install("flash_attention_3")
    assert not any(package.missing_reason() for package in PACKAGES.values())
    assert "flash_attn" not in sys.modules, "looking must not import"


@pytest.mark.parametrize("name", RUN)
def test_a_package_that_is_missing_is_refused_by_name_with_how_to_install_it(name):
    if PACKAGES[name].missing_reason() is None:
        pytest.skip("it is installed here")
    with pytest.raises(UnsupportedError, match="is not installed; install it with `pip install"):
        attention.backend(name)


def refusal(name, capability, monkeypatch, *, width=64, dtype=torch.bfloat16, **settings):
    """Why the package refuses tensors on a GPU of this capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        q, k = (torch.empty(9, heads, width, dtype=dtype, device="cuda") for heads in (4, 2))
        masks = {
            name: settings.pop(name) for name in ("start_rows", "bidirectional") if name in settings
        }
        documents = VarlenMetadata.of([9], "cpu", **masks)
        if settings.pop("sinks", False):
            settings["sinks_N"] = torch.empty(4, device="cuda")
        return packages.unsupported_reason(name, q, k, k, documents, 0.1, **settings)


TWO, THREE, FOUR = RUN


@pytest.mark.parametrize(
    ("name", "capability", "settings", "says"),
    [
        (TWO, (8, 0), {}, None),
        (TWO, (9, 0), {"window": 4, "soft_cap": 30.0, "width": 256}, None),
        (TWO, (7, 5), {}, "capability 7.5, and it has kernels for 8.x to 12.x"),
        (TWO, (9, 0), {"sinks": True}, "heads have sinks, and it has none"),
        (TWO, (9, 0), {"start_rows": [9] * 8 + [10]}, None),
        (TWO, (9, 0), {"start_rows": [2] + [9] * 8}, "start rows hide some"),
        (THREE, (9, 0), {"bidirectional": [(2, 5)]}, "runs of tokens are bidirectional"),
        (THREE, (9, 0), {"window": 4, "soft_cap": 30.0}, None),
        (THREE, (10, 0), {}, "capability 10.0, and it has kernels for 9.x to 9.x"),
        (THREE, (9, 0), {"dtype": torch.float32}, "float32, and it takes bfloat16 and float16"),
        (THREE, (9, 0), {"sinks": True}, "heads have sinks, and it has none"),
        (FOUR, (10, 0), {"window": 4, "sinks": True}, None),
        (FOUR, (9, 0), {"sinks": True}, None),
        (FOUR, (9, 0), {"window": 4}, "on Hopper its backward pass has none"),
        (FOUR, (10, 0), {"soft_cap": 30.0}, "capped at 30.0, and its backward pass does not"),
        (FOUR, (10, 0), {"width": 192}, "heads are 192 wide, and it takes up to 128"),
        (FOUR, (8, 0), {}, "capability 8.0, and it has kernels for 9.x to 11.x"),
    ],
)
def test_what_a_package_has_no_kernels_for_is_refused(
    name, capability, settings, says, monkeypatch
):
    reason = refusal(name, capability, monkeypatch, **settings)
    assert reason is None if says is None else says in reason


def test_on_cpu_they_are_refused(monkeypatch):
    fast = replace(attention.fast["flash_attention_3"], missing_reason=None)
    monkeypatch.setitem(attention.fast, "flash_attention_3", fast)
    q = torch.zeros(4, 2, 8)
    with pytest.raises(UnsupportedError, match="its tensors are on cpu, and it needs cuda"):
        attention.backend("flash_attention_3")(q, q, q, VarlenMetadata.of([4]), 0.1)
