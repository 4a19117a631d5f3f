"""Which backend computes a model's attention, and what is said about it."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.core.errors import CapabilityError
from penstock.engine.backends.select_attention import choose_attention
from penstock.estimate.machine import check_attention, require_prefix_sharing_attention
from penstock.models.registry import get_family
from penstock_kernels.attention import attention
from penstock_kernels.flash_packages import PACKAGES
from tests.config.values import loads, smallest
from tests.engine import runs

HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)


@pytest.fixture
def choose(monkeypatch):
    """The backend that is chosen, and what is said; on a GPU where a capability is given."""

    def chosen(
        written=None,
        capability=None,
        packages=(),
        model=None,
        ring=1,
        mixed=True,
        data=None,
        **more,
    ):
        for name in PACKAGES:
            missing = (
                None
                if name in packages
                else PACKAGES[name].missing_reason() or "its package is not"
            )
            monkeypatch.setitem(
                attention.fast, name, replace(attention.fast[name], missing_reason=missing)
            )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        train = {"enable_mixed_precision": mixed, "ringattn_parallel_size": ring}
        if data:
            train["objective"] = "preference"
        model_of = {"attn_implementation": written}
        run = loads(smallest(model=model_of, train=train, data=data or {}))
        hf_config = {**runs.TINY, "head_dim": 64, **(model or {})}
        config = get_family(hf_config).read(hf_config)
        said = []
        device = torch.device("cuda", 0) if capability else torch.device("cpu")
        with FakeTensorMode():
            name = choose_attention(run, config, device, said.append, **more)
        [line] = said
        return name, line

    return chosen


THREE = "flash_attention_3"


@pytest.mark.parametrize(
    ("settings", "name", "says"),
    [
        ({}, "sdpa", "attention: sdpa (flash_attention_3, native: its tensors are on cpu"),
        ({"capability": HOPPER}, "native", "(flash_attention_3: its package is not"),
        ({"capability": HOPPER, "packages": [THREE]}, THREE, "attention: flash_attention_3"),
        ({"capability": AMPERE, "packages": [THREE]}, "native", "the GPU has capability 8.0"),
        ({"capability": HOPPER, "packages": [THREE], "mixed": False}, "sdpa", "are torch.float32"),
        (
            {"capability": HOPPER, "packages": [THREE], "ring": 2},
            THREE,
            "native for what comes over the ring",
        ),
        # Only by name.
        ({"capability": BLACKWELL, "packages": ["flash_attention_4"]}, "native", "capability 10.0"),
        ({"written": "eager"}, "eager", "attention: eager (configured)"),
        (
            {"written": "flash_attention_2", "capability": AMPERE, "packages": PACKAGES},
            "flash_attention_2",
            "attention: flash_attention_2 (configured)",
        ),
    ],
)
def test_the_best_that_serves_is_chosen_and_said_once_with_the_reason(choose, settings, name, says):
    chosen, line = choose(**settings)
    assert chosen == name
    assert says in line


GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
}


def test_a_model_with_sinks_goes_where_they_are_computed(choose):
    chosen, line = choose(capability=HOPPER, packages=PACKAGES, model=GPT_OSS)
    assert chosen == "native"
    assert "flash_attention_3: heads have sinks, and it has none" in line
    chosen, _ = choose("flash_attention_4", BLACKWELL, PACKAGES, GPT_OSS)
    assert chosen == "flash_attention_4"


GEMMA2 = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}


def test_a_model_with_soft_caps_goes_where_they_are_computed(choose):
    assert choose(capability=HOPPER, packages=PACKAGES, model=GEMMA2)[0] == THREE
    chosen, line = choose(capability=HOPPER, model=GEMMA2)
    assert chosen == "native"
    chosen, line = choose(capability=HOPPER, model=GEMMA2, ring=2)
    assert chosen == "eager"
    assert "native: scores are capped at 50.0, and its blocks do not cap them" in line


PAIRS = {"datasets": [{"path": "x", "type": "preference"}]}


def test_answers_that_share_a_prompt_go_where_one_is_hidden_from_the_other(choose):
    here = {"capability": HOPPER, "packages": PACKAGES}
    chosen, line = choose(data=PAIRS, **here)
    assert chosen == "native"
    assert "flash_attention_3: start rows hide some of a document's past" in line
    assert choose(data={**PAIRS, "share_prompts": False}, **here)[0] == THREE
    # Its blocks are what a ring is made of.
    assert choose(data=PAIRS, ring=2, **here)[0] == "sdpa"
    assert choose(data={**PAIRS, "share_prompts": False}, ring=2, **here)[0] == THREE
    with pytest.raises(CapabilityError, match=r"is flash_attention_3, which .* start rows"):
        choose(THREE, data=PAIRS, **here)


def test_images_whose_tokens_are_bidirectional_go_where_later_ones_are_seen(choose):
    here = {"capability": HOPPER, "packages": PACKAGES, "bidirectional": True}
    chosen, line = choose(**here)
    assert chosen == "native"
    assert "flash_attention_3: runs of tokens are bidirectional" in line
    assert choose(ring=2, **here)[0] == "sdpa"
    assert choose(bidirectional=True)[0] == "sdpa"
    with pytest.raises(CapabilityError, match=r"is flash_attention_3, which .* runs of tokens"):
        choose(THREE, **here)


@pytest.mark.parametrize(("written", "ring"), [(THREE, 1), ("native", 2)])
def test_attention_that_shows_the_other_answer_is_refused_before_any_work(written, ring):
    train = {"ringattn_parallel_size": ring, "objective": "preference"}
    model = {"attn_implementation": written}
    together = loads(smallest(model=model, train=train, data=PAIRS))
    with pytest.raises(CapabilityError, match=f"{written}, which cannot hide parts") as refused:
        require_prefix_sharing_attention(together)
    assert "data.share_prompts: false" in str(refused.value)
    apart = {**PAIRS, "share_prompts": False}
    require_prefix_sharing_attention(loads(smallest(model=model, train=train, data=apart)))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"written": THREE, "capability": HOPPER, "packages": PACKAGES, "model": GPT_OSS}, "sinks"),
        (
            {"written": "flash_attention_4", "capability": AMPERE, "packages": PACKAGES},
            "capability 8.0, and it has kernels for 9.x to 11.x",
        ),
        ({"written": "native", "capability": HOPPER, "mixed": False}, "torch.float32"),
        ({"written": "native"}, "its tensors are on cpu"),
    ],
)
def test_what_cannot_compute_the_model_is_refused_with_what_can(choose, settings, says):
    with pytest.raises(CapabilityError) as refused:
        choose(**settings)
    written, served = str(refused.value).splitlines()
    assert f"model.attn_implementation is {settings['written']}" in written
    assert says in written
    assert served.startswith("  Write ")
    assert "sdpa or eager" in served


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_not_installed_is_refused_before_any_work(name):
    with pytest.raises(CapabilityError, match="needs a CUDA device, and there is none"):
        check_attention(name, 0)
    if PACKAGES[name].missing_reason() is None:
        check_attention(name, 8)
        return
    with pytest.raises(CapabilityError, match=f"{name}, and its package .* `pip install"):
        check_attention(name, 8)
