"""What is computed twice, gathered, cast, read and collected: settings that change no result.

The layouts' own test says that they change none; here each must be seen to do its work.
"""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.core.errors import CapabilityError
from penstock.engine import device
from penstock.engine.distributed.ranks import ProcessInfo, destroy_process_group
from penstock.pipeline.plan import check_machine
from penstock.rows.reader import PackedRows
from penstock.train.dataloader import Loader, LoaderConfig
from tests.engine import runs
from tests.engine.loops import calls_of, decoder_of, each, loop_of, parameters_of, step
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = pytest.mark.dist

job = runs.short_job


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    runs.write_rows(folder / "packed", 8)
    runs.write_config(folder / "model")
    return folder


def held(job):
    """The share of the model's numbers that this rank holds, and by which means."""
    loop = loop_of(job)
    parameters = list(decoder_of(loop).parameters())
    mine = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters)
    kinds = type(decoder_of(loop)).__name__, type(loop.built.engine.model.sync).__name__
    return mine / sum(p.numel() for p in parameters), *kinds


def test_the_mode_decides_what_a_rank_holds(folder):
    jobs = {mode: job(folder, mode, data_parallel_mode=mode) for mode in ("ddp", "fsdp2")}
    for found in on_ranks(2, each, held, jobs):
        assert found == {
            "ddp": (1.0, "Decoder", "ReplicatedSync"),
            "fsdp2": (0.5, "FSDPDecoder", "FSDPSync"),
        }
    alone = {"none": job(folder, "none")}
    assert on_ranks(1, each, held, alone) == [{"none": (1.0, "Decoder", "ReplicatedSync")}]


def dtypes(job):
    """Of a layer's input in the forward pass, and of its weights and gradients at rest."""
    loop = loop_of(job)
    layer = decoder_of(loop).model.layers["1"]
    inputs = calls_of(layer, lambda arguments: str(arguments[0].dtype))
    outputs = []
    narrowing = layer.get_submodule("mlp.down_proj")
    narrowing.register_forward_hook(lambda *a: outputs.append(str(a[2].dtype)))
    step(loop)
    weights = {str(p.dtype) for p in decoder_of(loop).parameters()}
    states = [s["exp_avg"] for s in loop.built.engine.optimizer.state.values()]
    return set(inputs), set(outputs), weights, {str(state.dtype) for state in states}


def test_mixed_precision_computes_in_bf16_and_keeps_fp32(folder):
    jobs = {
        f"{mode} {mixed}": job(
            folder, mode, data_parallel_mode=mode, enable_mixed_precision=mixed == "mixed"
        )
        for mode in ("none", "ddp", "fsdp2")
        for mixed in ("mixed", "full")
    }
    [found] = on_ranks(1, each, dtypes, jobs)
    for name, seen in found.items():
        computed = "torch.bfloat16" if "mixed" in name else "torch.float32"
        assert seen == ({computed}, {computed}, {"torch.float32"}, {"torch.float32"}), name


def forward_calls(job):
    """Calls of a layer and its parts in one step, and whether the first recorded a graph."""
    loop = loop_of(job)
    layer = decoder_of(loop).model.layers["0"]
    parts = {"layer": layer, "self_attn": layer.self_attn, "mlp": layer.mlp}
    seen = {name: calls_of(m, lambda _: torch.is_grad_enabled()) for name, m in parts.items()}
    step(loop)
    return {name: len(calls) for name, calls in seen.items()}, seen["mlp"][0]


RECOMPUTED = {
    "nothing": ({"enable_gradient_checkpointing": False}, (1, 1, 1), True),
    "layers": ({}, (2, 2, 2), True),
    "layers, reentrant": ({"enable_reentrant": True}, (2, 2, 2), False),
    "attention": ({"recompute_modules": ["self_attn"]}, (1, 2, 1), True),
    "feed-forward": ({"recompute_modules": ["mlp"]}, (1, 1, 2), True),
    "both": ({"recompute_modules": ["mlp", "self_attn"]}, (1, 2, 2), True),
}


def test_what_is_recomputed_runs_twice_and_nothing_else(folder):
    jobs = {
        what: job(folder, what, micro_batch_size=4, **train)
        for what, (train, _, _) in RECOMPUTED.items()
    }
    [found] = on_ranks(1, each, forward_calls, jobs)
    for what, (_, times, records) in RECOMPUTED.items():
        calls, recorded = found[what]
        assert tuple(calls.values()) == times, what
        # The reentrant kind alone runs without a graph first.
        assert recorded is records, what


def saved_by_attention(job):
    """Numbers that autograd keeps of a step's forward passes, and the gradients."""
    loop = loop_of(job)
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    # Outside of what is recomputed, whose own saved tensors are not kept.
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step(loop)
    return sum(kept), parameters_of(loop)


def test_of_core_attention_nothing_is_kept_but_what_goes_in(folder):
    plain = {"enable_gradient_checkpointing": False, "model": {"attn_implementation": "eager"}}
    core = {"recompute_modules": ["core_attn"], "model": {"attn_implementation": "eager"}}
    jobs = {what: job(folder, what, **how) for what, how in {"plain": plain, "core": core}.items()}
    [found] = on_ranks(1, each, saved_by_attention, jobs)
    (all_of_it, wanted), (less, weights) = found["plain"], found["core"]
    # A mask, scores and probabilities of each pair of tokens are not kept.
    assert less < 0.9 * all_of_it
    for name, array in wanted.items():
        assert (weights[name] == array).all(), name


class Gathers(TorchDispatchMode):
    """Notes every all-gather among other events."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if "allgather" in str(function):
            self.events.append("gather")
        return function(*arguments, **(options or {}))


def sharded_step(job):
    """Gathers and entries of layers in one micro-batch, in order, and the names of the units."""
    loop = loop_of(job)
    model, events = decoder_of(loop), []
    for index, layer in enumerate(model.model.layers.values()):
        layer.register_forward_pre_hook(lambda *_, at=index: events.append(f"layer {at}"))
    model.register_forward_hook(lambda *_: events.append("forward ends"))
    with Gathers(events):
        step(loop)
    ended = events.index("forward ends")
    units = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    return events[:ended], events[ended + 1 :], units


SHARDED = {
    "plain": {},
    "resharded": {"reshard_after_forward": True},
    "kept": {"reshard_after_forward": False},
    "one by one": {"enable_forward_prefetch": False},
    "parts by name": {"model": {"basic_modules": ["mlp"]}},
    "parts by class": {"model": {"basic_modules": ["FeedForward"]}},
    "a tied embedding": {"model": {"basic_modules": ["Embedding"]}},
}


def sharded_job(folder, out, **train):
    kept = {"enable_gradient_checkpointing": False, "global_batch_size": 2}
    return job(folder, out, data_parallel_mode="fsdp2", **kept, **train)


@pytest.fixture(scope="module")
def sharded(folder):
    """One step on two ranks for each of SHARDED, as the first rank saw it."""
    jobs = {name: sharded_job(folder, name, **train) for name, train in SHARDED.items()}
    return on_ranks(2, each, sharded_step, jobs)[0]


def test_weights_kept_after_the_forward_pass_are_not_gathered_again(sharded):
    seen = {name: backward.count("gather") for name, (_, backward, _) in sharded.items()}
    # Two layers; the root is kept in any case.
    assert (seen["plain"], seen["resharded"], seen["kept"]) == (2, 2, 0)


def test_prefetching_gathers_the_next_unit_before_this_one_runs(sharded):
    gathers = {
        name: forward[: forward.index("layer 0")].count("gather")
        for name, (forward, _, _) in sharded.items()
    }
    # The root, layer 0, and ahead of time what runs next.
    assert (gathers["plain"], gathers["one by one"]) == (3, 2)


def test_named_modules_are_units_of_their_own_and_gathered_once_each(sharded):
    layers = {"", "model.layers.0", "model.layers.1"}
    apart = {"model.layers.0.mlp", "model.layers.1.mlp"}
    for name, (forward, _, units) in sharded.items():
        assert units == (layers | apart if "parts" in name else layers)
        assert forward.count("gather") == len(units)


def test_a_named_module_that_is_nowhere_is_refused(folder):
    made = sharded_job(folder, "nowhere", model={"basic_modules": ["Experts"]})
    with pytest.raises(AssertionError, match="basic_modules names Experts"):
        on_ranks(1, sharded_step, made)


POISON = 1e6


@pytest.fixture(scope="module")
def weights(folder):
    """A model as transformers saves it, and one of the same shapes that holds only POISON."""
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(**{**runs.TINY, "dtype": "float32"}))
    model.save_pretrained(folder / "weights")
    start = {
        name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(POISON)
    model.save_pretrained(folder / "poison")
    return start


def loaded(jobs, poison):
    """The parameters that each job starts with, when only the first rank has good files."""
    found = {}
    for name, job in jobs.items():
        mine = job if torch.distributed.get_rank() == 0 else replace(job, weights=poison)
        found[name] = parameters_of(loop_of(mine))
    return found


def test_weights_are_those_of_model_path_read_by_one_rank_or_by_all(folder, weights):
    model = {"model_path": str(folder / "weights"), "merge_qkv": False}
    jobs = {
        mode: job(folder, mode, model=model, data_parallel_mode="fsdp2", load_weights_mode=mode)
        for mode in ("broadcast", "all_ranks")
    }
    for found in on_ranks(2, loaded, jobs, folder / "poison"):
        assert found["broadcast"].keys() == weights.keys()
        for name, want in weights.items():
            assert np.array_equal(found["broadcast"][name], want), name
        # Half of each parameter is what the second rank read.
        assert all((value == POISON).any() for value in found["all_ranks"].values())


class Copies(TorchDispatchMode):
    """The devices that values are copied to."""

    def __init__(self):
        super().__init__()
        self.devices = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if "copy_" in str(function):
            self.devices.add(arguments[0].device.type)
        return function(*arguments, **(options or {}))


def filled_on(job):
    """Where weights are first put when the training device is another than the CPU."""
    elsewhere = ProcessInfo(rank=0, local_rank=0, world_size=1, device=torch.device("meta"))
    with Copies() as copies:
        loop = loop_of(job, elsewhere)
    return copies.devices, {p.device.type for p in decoder_of(loop).parameters()}


def test_weights_begin_where_init_device_says_and_end_on_the_training_device(folder):
    jobs = {str(begun): job(folder, "begun", init_device=begun) for begun in (None, "cpu")}
    [found] = on_ranks(1, each, filled_on, jobs)
    assert found == {"None": ({"meta"}, {"meta"}), "cpu": ({"cpu"}, {"meta"})}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is refused")
def test_a_device_that_is_not_there_is_refused(folder):
    with pytest.raises(CapabilityError, match="init_device is cuda, and there is no CUDA"):
        check_machine(job(folder, "no gpu", init_device="cuda").config)


def ends_with_other_bits(job):
    """Whether a rank computes, after a run of its own, what has no deterministic kernel."""
    assert runs.train_here(job)
    try:
        torch.ones(4).put_(torch.tensor([1, 1]), torch.ones(2))
    except RuntimeError as error:
        return str(error)
    return "computed"


def test_what_gives_other_bits_each_time_is_refused_if_that_is_written(folder):
    determined = {"enable_full_determinism": True, "allow_cuda_launch_blocking": True}
    jobs = {"any": job(folder, "any bits"), "same": job(folder, "same bits", **determined)}
    [found] = on_ranks(1, each, ends_with_other_bits, jobs)
    assert found["any"] == "computed"
    assert "put_ does not have a deterministic implementation" in found["same"]
    assert runs.losses(folder / "any bits") == runs.losses(folder / "same bits")


def test_waiting_for_every_kernel_is_refused_unless_it_is_allowed(folder, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(CapabilityError, match=r"write train\.allow_cuda_launch_blocking: true"):
        check_machine(job(folder, "waits").config)
    check_machine(job(folder, "waits", allow_cuda_launch_blocking=True).config)


def collections(job):
    """The steps after which all garbage was collected, and whether Python might do so meanwhile."""
    loop, asked, enabled = loop_of(job), [], []

    def note(phase, details):
        if phase == "start" and details["generation"] == 2:
            asked.append(loop.at.step)

    calls_of(decoder_of(loop), lambda _: enabled.append(gc.isenabled()))
    gc.collect()
    gc.callbacks.append(note)
    loop.run()
    gc.callbacks.remove(note)
    return [at for at in asked if 0 < at < 5], set(enabled), gc.isenabled()


@one_day_in(2, of=1)
def test_garbage_is_collected_at_the_steps_asked_for_or_left_to_python(folder):
    jobs = {str(n): job(folder, f"gc {n}", gc_steps=n, max_steps=5) for n in (0, 2, 3)}
    [found] = on_ranks(1, each, collections, jobs)
    assert found["2"] == ([2, 4], {False}, True)
    assert found["3"] == ([3], {False}, True)
    assert found["0"][1:] == ({True}, True)


@pytest.fixture
def own_group():
    """Leaves the group of ranks that a test in this process has joined."""
    yield
    destroy_process_group()


@pytest.mark.parametrize(("every", "steps"), [(2, [2, 4]), (0, [])])
@pytest.mark.usefixtures("own_group")
def test_cached_memory_is_returned_at_the_steps_asked_for(every, steps, folder, monkeypatch):
    loop, emptied = loop_of(job(folder, f"cache {every}", empty_cache_steps=every, max_steps=5)), []
    monkeypatch.setattr(device, "uses_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(loop.at.step))
    loop.run()
    assert emptied == steps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("pins", [True, False])
def test_rows_are_pinned_for_a_gpu_if_wanted(pins, num_workers, folder):
    data = {"dataloader_pin_memory": pins, "dataloader_num_workers": num_workers}
    made = job(folder, f"pinned {pins} {num_workers}", data=data)
    device = torch.device("cuda")
    rows = PackedRows(made.packed_dir / "data" / "train")
    loader = Loader(rows, iter([[[0], [1]]]), LoaderConfig.of(made.config, device))
    for batch in next(loader):
        assert batch.input_ids_T.is_pinned() is pins
        assert batch.labels_T.is_pinned() is pins
    loader.close()
