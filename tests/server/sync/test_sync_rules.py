"""Whom weights may be sent to, in what form they may be asked for, and which part of an adapter's
memory is sent."""

import pytest
import torch

from penstock.engine.hf.live_state_dict import RankTrimmedTensors
from penstock.server.protocol.types import Endpoint
from penstock.server.weight_sync.allowed_hosts import address_towards, require_allowed
from penstock.server.weight_sync.block_fp8 import tiles, wants_fp8
from penstock.server.weight_sync.errors import SyncError
from penstock.server.weight_sync.sglang_client import EngineParallelism


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("10.1.2.3", ["10.1.2.3"]),
        ("10.1.2.3", ["10.0.0.0/8"]),
        ("Infer-1.internal", ["infer-1.internal"]),
        ("::1", ["::1"]),
        ("127.0.0.1", ["127.0.0.0/8"]),
    ],
)
def test_hosts_that_are_written_are_allowed(host, allowed):
    require_allowed(Endpoint(host=host, port=1), allowed)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("10.1.2.3", ["127.0.0.0/8"]),
        ("169.254.169.254", ["localhost", "127.0.0.0/8", "::1"]),
        ("localhost.evil.example", ["localhost"]),
        # It stands for an address that is allowed, and tomorrow for another.
        ("localhost", ["127.0.0.1"]),
        ("2130706433", ["127.0.0.0/8"]),
        ("127.0.0.1@evil.example", ["127.0.0.0/8"]),
        ("127.0.0.1", []),
    ],
)
def test_all_other_hosts_are_refused(host, allowed):
    with pytest.raises(SyncError, match="no host that is allowed") as caught:
        require_allowed(Endpoint(host=host, port=1), allowed)
    assert (caught.value.step, caught.value.category) == ("settings", "user")


def test_servers_on_this_machine_are_met_on_it_alone():
    endpoints = [Endpoint(host="localhost", port=1), Endpoint(host="127.0.0.1", port=2)]
    assert address_towards(endpoints) in ("127.0.0.1", "::1")


def test_nothing_that_is_not_finite_is_sent_in_fp8():
    weight = torch.randn(130, 20)
    weight[129, 3] = torch.nan
    with pytest.raises(SyncError, match="up_proj") as caught:
        tiles("up_proj", weight)
    assert caught.value.code == "not_finite"


def test_no_quantization_means_none():
    assert not wants_fp8(None)
    assert not wants_fp8({})
    assert wants_fp8({"quant_method": "block_fp8", "activation_scheme": "dynamic"})


def test_the_form_is_said_in_the_words_of_a_checkpoint():
    assert wants_fp8({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": (128, 128)})
    with pytest.raises(SyncError, match="weight_block_size is \\(64, 64\\)"):
        wants_fp8({"quant_method": "fp8", "weight_block_size": (64, 64)})


@pytest.mark.parametrize(
    ("sizes", "fault"),
    [
        (EngineParallelism(4), None),
        # Replicas of attention lie within the ranks of tensor parallelism.
        (EngineParallelism(4, data=2, shares_attention=True), None),
        (EngineParallelism(8), "tp_size is 8, and it was added with a world_size of 4"),
        (EngineParallelism(4, data=2), "dp_size of 2"),
        (EngineParallelism(2, pipeline=2), "pp_size of 2"),
    ],
)
def test_a_server_is_sent_weights_only_where_each_of_its_ranks_can_be_told_apart(sizes, fault):
    found = sizes.fault(4)
    assert found is None if fault is None else fault in found


class Kept:
    """An adapter of two columns in memory for four."""

    folder = "here"

    def __init__(self):
        self.of_name = {
            "q_proj.lora_A.q_proj": torch.arange(12.0).reshape(4, 3),
            "q_proj.lora_B.q_proj": torch.arange(20.0).reshape(5, 4),
            "q_proj.lora_magnitude.q_proj": torch.arange(5.0),
            "mlp.experts.lora_A.up_proj": torch.arange(24.0).reshape(2, 4, 3),
            "q_proj.weight": torch.arange(15.0).reshape(5, 3),
        }

    def shapes(self):
        return {name: (tuple(t.shape), t.dtype) for name, t in self.of_name.items()}

    def read(self, names):
        return {name: self.of_name[name] for name in names}


def test_an_adapter_of_a_lower_rank_is_cut_out_of_its_memory():
    kept = Kept()
    narrow = RankTrimmedTensors(kept, 2)
    shapes = {name: shape for name, (shape, _) in narrow.shapes().items()}
    assert list(shapes.values()) == [(2, 3), (5, 2), (5,), (2, 2, 3), (5, 3)]
    read = narrow.read(shapes)
    assert {name: tuple(tensor.shape) for name, tensor in read.items()} == shapes
    assert torch.equal(read["q_proj.lora_A.q_proj"], kept.of_name["q_proj.lora_A.q_proj"][:2])
    assert torch.equal(read["q_proj.lora_B.q_proj"], kept.of_name["q_proj.lora_B.q_proj"][:, :2])
