"""Activations that wait in host memory: nothing changes, little stays, it is back in time."""

import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.core.errors import CapabilityError
from penstock.engine.activations.checkpointing import apply_activation_checkpointing
from penstock.engine.activations.offload import (
    ActivationOffloader,
    StreamCopier,
    SyncCopier,
    offload,
)
from penstock.models.decoder import Decoder
from penstock.models.registry import get_family
from penstock.pipeline.plan import check_machine
from penstock_kernels.attention import VarlenMetadata
from tests.engine import runs
from tests.engine.loops import calls_of, each, loop_of, step
from tests.ranks import on_ranks

CPU = torch.device("cpu")
LAYERS, LENGTHS = 4, (40, 24)
TOKENS, WIDTH = sum(LENGTHS), runs.TINY["hidden_size"]
INPUT = TOKENS * WIDTH * 4
"""Bytes of what a layer is given."""
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


class Watched(SyncCopier):
    """Copies that are remembered: what left, where it was, and what is in host memory."""

    def __init__(self):
        self.left, self.sources, self.in_host, self.events = [], [], [], []

    def to_host(self, data):
        self.left.append(data.clone())
        self.sources.append(weakref.ref(data.untyped_storage()))
        copy, copied = super().to_host(data)
        self.in_host.append(weakref.ref(copy))
        return copy, copied

    def to_device(self, data):
        if data.nbytes == INPUT:
            self.events.append("back")
        return super().to_device(data)

    def still_here(self):
        """The numbers of those that left whose memory is not given away."""
        return [at for at, source in enumerate(self.sources) if source() is not None]


def decoder(**changes):
    torch.manual_seed(0)
    hf = {**runs.TINY, "num_hidden_layers": LAYERS, **changes}
    model = Decoder(get_family(hf).read(hf), merge_qkv=True)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def loss_of(model, seed=0):
    ids = torch.randint(runs.VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return model(ids, positions, VarlenMetadata.of(LENGTHS)).float().square().mean()


def gradients(model):
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        assert torch.equal(gradient, other[name]), name


def stored(model, capacity=0):
    """A store into which a model's layers keep, and the copies it makes."""
    copies = Watched()
    store = ActivationOffloader(CPU, copies, capacity=capacity)
    offload([model], store)
    return store, copies


WAYS = {
    "all kept": (None, {}),
    "layers": (("plain", None), {}),
    "layers, reentrant": (("reentrant", None), {}),
    "layers, once": (("once", None), {}),
    "attention": (("plain", ["self_attn"]), {}),
    "feed-forward, reentrant": (("reentrant", ["mlp"]), {}),
    "experts, all kept": (None, EXPERTS),
    "experts, gates": (("plain", None, "gates"), EXPERTS),
    "experts, gates and attention once": (("once", ["self_attn", "mlp"], "gates"), EXPERTS),
}


@pytest.mark.parametrize(
    ("way", "casting"),
    [*((way, "fp32") for way in WAYS), ("all kept", "bf16"), ("experts, gates", "bf16")],
)
def test_gradients_are_the_same_bits_and_what_early_layers_kept_is_nowhere_on_the_device(
    way, casting
):
    again, changes = WAYS[way]
    model = decoder(**changes)
    if again:
        kind, modules, *moe_recompute = again
        apply_activation_checkpointing(
            model, modules, kind, **({"moe_recompute": moe_recompute[0]} if moe_recompute else {})
        )
    before = model.run_layer
    cast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=casting == "bf16")
    with cast():
        loss = loss_of(model)
    loss.backward()
    want, model.run_layer = gradients(model), before
    store, copies = stored(model)
    run, begins = model.run_layer, []

    def noted(*args):
        begins.append(len(copies.left))
        return run(*args)

    model.run_layer = noted
    with cast():
        loss = loss_of(model)
    # Of what left before the last but one layer began, nothing.
    assert copies.still_here() == [at for at in copies.still_here() if at >= begins[LAYERS - 2]]
    assert any(copy() is not None for copy in copies.in_host)
    if way.startswith("layers"):
        # The input of each, and angles, which are the same for all.
        assert sum(data.nbytes == INPUT for data in copies.left) in (LAYERS, 0)
        assert len(copies.left) == LAYERS + 2
    loss.backward()
    assert_same(gradients(model), want)
    assert all(copy() is None for copy in copies.in_host), "what came back stays in host memory"
    del loss
    assert not copies.still_here()
    assert not store._resident
    # Neither weights nor what autocast makes of them.
    for parameter in model.parameters():
        for weight in (parameter.detach(), parameter.detach().bfloat16()):
            as_bytes = weight.contiguous().view(torch.uint8).flatten()
            assert not any(torch.equal(data, as_bytes) for data in copies.left)


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(256, 600), min_size=1, max_size=12), share=st.floats(0, 1.1))
def test_as_much_stays_as_there_is_room_for_and_it_is_the_newest(sizes, share):
    copies = Watched()
    capacity = int(share * sum(sizes) * 4)
    store = ActivationOffloader(CPU, copies, capacity=capacity)
    tensors = [torch.full((size,), float(at)) for at, size in enumerate(sizes)]
    kept = [store.pack(store.start_group("layer"), tensor) for tensor in tensors]
    away = [int(data.view(torch.float32)[0]) for data in copies.left]
    assert away == list(range(len(away)))
    stays = 4 * sum(sizes[len(away) :])
    assert stays <= capacity
    assert not away or stays + 4 * sizes[away[-1]] > capacity, "one more would have fitted"
    for back, tensor in zip(reversed(kept), reversed(tensors), strict=True):
        assert torch.equal(back(), tensor)


def test_what_the_layer_before_wants_is_on_its_way_while_a_layer_is_computed():
    model = decoder()
    apply_activation_checkpointing(model, None, "plain")
    _, copies = stored(model)
    for number, layer in enumerate(model.model.layers.values()):
        calls_of(layer, lambda _, at=number: copies.events.append(at))
    loss = loss_of(model)
    assert copies.events == list(range(LAYERS))
    copies.events.clear()
    loss.backward()
    # What the last two layers kept had not left the device yet.
    assert copies.events == [3, "back", 2, "back", 1, 0]


@pytest.mark.parametrize("kind", [None, "once"])
def test_micro_batches_in_flight_find_their_own(kind):
    model = decoder()
    if kind:
        apply_activation_checkpointing(model, None, kind)
    losses = [loss_of(model, seed) for seed in range(3)]
    for loss in losses:
        loss.backward()
    want = gradients(model)
    store, copies = stored(model, capacity=3 * INPUT)
    first, second = loss_of(model, 0), loss_of(model, 1)
    first.backward()
    third = loss_of(model, 2)
    second.backward()
    third.backward()
    assert_same(gradients(model), want)
    assert copies.left
    assert not store._resident


def test_a_graph_that_nobody_goes_back_through_leaves_nothing():
    model = decoder()
    store, copies = stored(model, capacity=20 * INPUT)
    loss = loss_of(model)
    assert store._resident
    del loss
    assert not store._resident
    assert store._resident_bytes == 0
    assert all(copy() is None for copy in copies.in_host)
    with torch.no_grad():
        left = len(copies.left)
        loss_of(model)
    assert len(copies.left) == left


def test_what_was_changed_in_place_is_not_given_back():
    store = ActivationOffloader(CPU, SyncCopier(), capacity=1 << 20)
    tensor = torch.ones(1000)
    back = store.pack(store.start_group("pass"), tensor)
    assert torch.equal(back(), tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified in place: it is at version 1"):
        back()


def test_views_of_one_storage_leave_once_and_come_back_as_they_were():
    copies = Watched()
    store = ActivationOffloader(CPU, copies, capacity=0)
    whole = torch.randn(40, 32)
    views = [whole, whole.T, whole[3:7, 1::2], whole.view(torch.int32)[5], whole[0, 0].expand(9, 9)]
    group = store.start_group("pass")
    kept = [store.pack(group, view) for view in views]
    want = [view.clone() for view in views]
    strides = [view.stride() for view in views]
    small = store.pack(group, torch.ones(8))
    for _ in range(3):
        store.start_group("layer")
    del whole, views
    assert not copies.still_here()
    for back, value, stride in zip(kept, want, strides, strict=True):
        assert torch.equal(back(), value)
        assert back().stride() == stride
    assert len(copies.left) == 1
    assert torch.equal(small(), torch.ones(8))


class BytesMoved(TorchDispatchMode):
    """Sums up the flat bytes that are copied: nothing but the store copies any."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if "_to_copy" in str(function) and result.dtype == torch.uint8:
            self.total += result.nbytes
        return result


def moved(job):
    loop = loop_of(job)
    with BytesMoved() as seen:
        step(loop)
    return seen.total


@pytest.mark.dist
def test_layers_keep_on_the_gpu_what_the_limit_says_and_nothing_where_none_is_written(tmp_path):
    runs.write_rows(tmp_path / "packed", 4)
    runs.write_config(tmp_path / "model")

    def job(name, **train):
        settings = {"data_parallel_mode": "none", "max_steps": 1, "micro_batch_size": 4, **train}
        run = runs.run_config(tmp_path / name, tmp_path / "model", **settings)
        return runs.job_of(run, tmp_path / "packed")

    ways = {
        "all on the gpu": {},
        "all away": {"enable_activation_offload": True},
        "some away": {"enable_activation_offload": True, "activation_gpu_limit": 8e-5},
        "room for all": {"enable_activation_offload": True, "activation_gpu_limit": 1.0},
        "more away": {"enable_activation_offload": True, "enable_gradient_checkpointing": False},
    }
    ways["more away, sharded"] = {**ways["more away"], "data_parallel_mode": "fsdp2"}
    jobs = {name: job(name, **train) for name, train in ways.items()}
    [found] = on_ranks(1, each, moved, jobs)
    assert found["all on the gpu"] == found["room for all"] == 0
    assert 0 < found["some away"] < found["all away"] < found["more away"]
    # Gathered weights are weights too.
    assert found["more away, sharded"] == found["more away"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is wanted")
def test_without_a_gpu_there_is_nowhere_to_move_them_from(tmp_path):
    runs.write_config(tmp_path / "model")
    run = runs.run_config(tmp_path, tmp_path / "model", enable_activation_offload=True)
    with pytest.raises(CapabilityError, match=r"enable_activation_offload .*there is no CUDA"):
        check_machine(run)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_copies_beside_the_computation_change_no_bit_and_free_memory():
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    drawn = (torch.randn(4096, 4096, device=device) / 64 for _ in range(12))
    weights = [torch.nn.Parameter(weight, requires_grad=False) for weight in drawn]

    def passed(store):
        y = x.clone().requires_grad_()
        start, z = y, y
        torch.cuda.reset_peak_memory_stats()
        for number, weight in enumerate(weights):
            group = store.start_group("layer" if number else "pass") if store else None
            pack = partial(store.pack, group) if store else lambda t: lambda: t.detach()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept()):
                z = torch.tanh(z @ weight)
        z.square().sum().backward()
        return start.grad, torch.cuda.max_memory_allocated()

    want, all_kept = passed(None)
    assert want is not None
    for _ in range(3):
        got, peak = passed(ActivationOffloader(device, StreamCopier(device), capacity=0))
        assert got is not None
        assert torch.equal(got, want)
        assert peak < all_kept - 6 * x.nbytes
