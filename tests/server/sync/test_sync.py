"""Weights on their way to inference servers, judged by an export of the same weights."""

import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.hf.config import read_hf_config
from penstock.engine.hf.export import write_folders
from penstock.engine.model_source import ExportFormat, quantization_args
from penstock.models.registry import get_family
from penstock.pipeline.origins import resolve_model_source
from penstock.server.protocol.types import Endpoint, Secret
from penstock.server.protocol.worker_commands import WeightSyncCommand
from penstock.server.weight_sync.errors import SyncError
from penstock.server.weight_sync.sender import RankModelView, sync_weights
from penstock.server.weight_sync.sglang_client import Limits
from tests.engine import runs
from tests.engine.inputs import write_bases
from tests.engine.loops import loop_of, save, step
from tests.ranks import on_ranks
from tests.server.sync.receiver import Fault, receiving
from tests.turns import over_days

pytestmark = pytest.mark.slow

GROUP = "/init_weights_update_group"
PAUSE = "/pause_generation"
FLUSH = "/flush_cache"
UPDATE = "/update_weights_from_distributed"
DESTROY = "/destroy_weights_update_group"
CONTINUE = "/continue_generation"

LIMITS = Limits(health=5, group=20, pause=5, update=20, tensor=2, report=1, recovery=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sync")
    runs.write_rows(folder / "packed", 64)
    write_bases(folder)
    shape = {
        # Embedding and head each fill more than a bucket, and matrices more than a tile.
        "vocab_size": 10_007,
        "hidden_size": 64,
        "intermediate_size": 144,
        "tie_word_embeddings": False,
    }
    runs.write_model(folder / "dense", **shape)
    return folder


def job_of(folder, out, lora=None, base="dense", **train):
    settings = {"data_parallel_mode": "none", "optimizer": "sgd", "lr": 0.3, **train}
    run = runs.run_config(
        folder / "out" / out,
        folder / base,
        model={"model_path": str(folder / base), "tokenizer_path": "builtin:bytes"},
        lora=lora or {},
        **settings,
    )
    return runs.job_of(run, folder / "packed")


SHARDED = {"data_parallel_mode": "fsdp2", "data_parallel_shard_size": 2}
ADAPTED = {
    "enable_lora": True,
    "lora_rank": 4,
    "lora_alpha": 6,
    "lora_target_modules": ["all-linear", "embed_tokens", "lm_head"],
}


def push_to(*receivers, **changes):
    order = {
        "model": "one",
        "endpoints": tuple(receiver.endpoint for receiver in receivers),
        "master_address": "",
        "master_port": 0,
        "group_name": "weight_sync_group",
        "buffer_size_mb": 1,
        "flush_cache": True,
        "pause_mode": "retract",
        "weight_version": None,
        "quantization": None,
    }
    return WeightSyncCommand(**{**order, **changes})


def live_of(job, loop):
    hf_config = read_hf_config(job.config_path, {})
    family = get_family(hf_config)
    names = family.weight_map(family.read(hf_config))
    quantizing = quantization_args(job.config)
    return RankModelView(
        loop.built.train_state.params,
        names,
        family.roles,
        adapting=resolve_model_source(job.config).adapting,
        formats=BaseModelWeights(names, quantizing, hf_config, family.roles, job.weights).formats,
    )


def trained_and_pushed(job, orders, limits=None):
    """Of each order what was told, or what failed and how soon; each comes after a step."""
    loop = loop_of(job)
    live, told = live_of(job, loop), []
    for order, its_limits in zip(orders, limits or [LIMITS] * len(orders), strict=True):
        assert step(loop)["loss"] > 0
        started = time.monotonic()
        try:
            told.append(sync_weights(order, live, loop.ranks, limits=its_limits))
        except SyncError as error:
            seconds = time.monotonic() - started
            port = error.endpoint.port if error.endpoint else None
            told.append((error.step, port, error.category, str(error), seconds))
    save(loop)
    return told


def exported(job):
    """The weights of the last checkpoint, as a folder for transformers has them in bf16."""
    [checkpoint] = (job.output_dir / "checkpoints").glob("global_step_*")
    out = job.output_dir / "exported"
    write_folders(checkpoint, resolve_model_source(job.config), ExportFormat(dtype="bfloat16"), out)
    return load_file(out / "hf" / "model.safetensors")


def assert_same(got, want):
    assert got.keys() == want.keys()
    differing = [
        name
        for name, tensor in want.items()
        if got[name].dtype != tensor.dtype or not torch.equal(got[name], tensor)
    ]
    assert differing == []


@pytest.mark.dist
def test_every_server_gets_the_bits_of_an_export_in_the_order_of_the_protocol(folder):
    job = job_of(folder, "plain")
    with receiving(folder) as one, receiving(folder, world=2) as two:
        order = push_to(one, two, weight_version="7", pause_mode="abort")
        [[told]] = on_ranks(1, trained_and_pushed, job, [order])
        want = exported(job)
        for receiver in (one, two):
            assert receiver.paths == [GROUP, PAUSE, FLUSH, *[UPDATE] * 3, DESTROY, CONTINUE]
            assert not receiver.paused
            assert receiver.groups() == [[]] * receiver.endpoint.world_size
            for rank in range(receiver.endpoint.world_size):
                assert_same(receiver.tensors(rank), want)
            assert not any(body["flush_cache"] for body in receiver.updates())
            versions = [body.get("weight_version") for body in receiver.updates()]
            assert versions == [None, None, "7"]
            assert receiver.bodies[1] == {"mode": "abort"}
        assert (one.bodies[0]["rank_offset"], two.bodies[0]["rank_offset"]) == (1, 2)
    assert told.num_buckets == 3
    assert told.num_parameters == len(want)
    assert told.total_bytes == sum(tensor.nbytes for tensor in want.values())
    assert told.endpoints == order.endpoints


@pytest.mark.dist
def test_adapters_of_two_ranks_arrive_merged_as_an_export_merges_them(folder):
    job = job_of(folder, "adapters of two", ADAPTED, **SHARDED)
    with receiving(folder) as receiver:
        order = push_to(receiver, flush_cache=False, pause_mode="in_place")
        [[told], [nothing]] = on_ranks(2, trained_and_pushed, job, [order])
        got, want = receiver.tensors(), exported(job)
        assert FLUSH not in receiver.paths
        assert not any(body["flush_cache"] for body in receiver.updates())
        assert not any("weight_version" in body for body in receiver.updates())
    assert nothing is None
    assert told.num_parameters == len(want)
    assert_same(got, want)
    moved = load_file(folder / "dense" / "model.safetensors")
    assert not torch.equal(got["lm_head.weight"], moved["lm_head.weight"].bfloat16())


LAYOUTS = {
    "tensor": ("dense", {}, {"tensor_parallel_size": 2}),
    "pipeline": ("dense", ADAPTED, {"pipeline_parallel_size": 2}),
    "normed": ("dense", {**ADAPTED, "use_dora": True}, {"tensor_parallel_size": 2}),
    "codes": ("dense", {**ADAPTED, "enable_qlora": True, "quant_format": "nf4"}, SHARDED),
    "experts": ("experts", ADAPTED, {**SHARDED, "expert_parallel_size": 2}),
    "experts in one": ("sinks", {"enable_lora": True, "lora_rank": 4}, SHARDED),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", over_days(LAYOUTS, 3))
def test_no_layout_and_no_form_changes_a_bit_of_what_arrives(folder, name):
    base, lora, train = LAYOUTS[name]
    job = job_of(folder, name, lora, base=base, **train)
    with receiving(folder) as receiver:
        on_ranks(2, trained_and_pushed, job, [push_to(receiver)])
        assert_same(receiver.tensors(), exported(job))


@pytest.mark.dist
def test_matrices_arrive_in_fp8_with_a_scale_for_each_tile(folder):
    job = job_of(folder, "fp8")
    asked = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": 128}
    with receiving(folder) as receiver:
        on_ranks(1, trained_and_pushed, job, [push_to(receiver, quantization=asked)])
        got = receiver.tensors()
    [checkpoint] = (job.output_dir / "checkpoints").glob("global_step_*")
    write_folders(
        checkpoint,
        resolve_model_source(job.config),
        ExportFormat(dtype="float32"),
        folder / "as trained",
    )
    trained = load_file(folder / "as trained" / "hf" / "model.safetensors")
    want = {}
    for name, tensor in trained.items():
        if "_proj" in name:
            want[name], want[f"{name}_scale_inv"] = fp8_by_hand(tensor)
        else:
            want[name] = tensor.bfloat16()
    assert_same({n: bits(t) for n, t in got.items()}, {n: bits(t) for n, t in want.items()})


def bits(tensor):
    # There is no comparison of these numbers.
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def fp8_by_hand(weight):
    """Tile after tile: the largest number becomes the largest that there is, 448."""
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            at = (
                slice(128 * row, 128 * row + 128),
                slice(128 * column, 128 * column + 128),
            )
            scales[row, column] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[row, column]).to(torch.float8_e4m3fn)
    return codes, scales


FAULTS = [
    ("group", Fault(GROUP, "refuses")),
    ("group", Fault(GROUP, "dies")),
    ("pause", Fault(PAUSE, "says no")),
    ("pause", Fault(PAUSE, "redirects")),
    ("flush", Fault(FLUSH, "takes nothing")),
    ("update", Fault(UPDATE, "takes nothing", nth=2)),
    ("update", Fault(UPDATE, "dies midway", nth=2)),
    ("update", Fault(UPDATE, "dies", nth=3)),
    ("update", Fault(UPDATE, "is silent", nth=2)),
]
"""At which step, and what happens from which request on."""


@pytest.mark.dist
@pytest.mark.exhaustive
def test_a_fault_of_one_server_is_told_and_leaves_training_and_the_others_as_they_were(folder):
    job = job_of(folder, "faults", **SHARDED)
    with ExitStack() as opened:
        sound = opened.enter_context(receiving(folder))
        broken = [opened.enter_context(receiving(folder)) for _ in FAULTS]
        orders = []
        for number, (receiver, (_, fault)) in enumerate(zip(broken, FAULTS, strict=True)):
            receiver.fault = fault
            receiver.elsewhere = f"http://127.0.0.1:{sound.endpoint.port}/elsewhere"
            # Whoever is first is not the one to blame for it.
            both = (receiver, sound) if number % 2 else (sound, receiver)
            orders.append(push_to(*both))
        limits = [replace(LIMITS, update=2) if f.how == "is silent" else LIMITS for _, f in FAULTS]
        orders.append(push_to(sound))
        [told, others] = on_ranks(2, trained_and_pushed, job, orders, [*limits, LIMITS])
        assert others == [None] * len(others)
        for (at, fault), receiver, failed in zip(FAULTS, broken, told[:-1], strict=True):
            assert (failed[0], failed[2]) == (at, "server"), (fault, failed)
            assert f"127.0.0.1:{receiver.endpoint.port}" in failed[3]
            assert failed[4] < 15, (fault, failed)
            if "dies" not in fault.how:
                assert receiver.paths.count(CONTINUE) == 1
                assert not receiver.paused
                assert receiver.groups() == [[]]
        assert not sound.paused
        assert sound.groups() == [[]]
        assert "/elsewhere" not in sound.paths, "a redirect was followed"
        # The one order without a fault, after all that had one.
        assert told[-1].endpoints == (sound.endpoint,)
        assert_same(sound.tensors(), exported(job))


@pytest.mark.dist
def test_a_server_that_is_not_there_stops_none_that_is(folder):
    job = job_of(folder, "absent")
    with receiving(folder) as sound, receiving(folder) as gone:
        absent = gone.endpoint
    with receiving(folder) as sound:
        order = push_to(sound, endpoints=(sound.endpoint, absent))
        [[failed]] = on_ranks(1, trained_and_pushed, job, [order])
        assert failed[:3] == ("health", absent.port, "server")
        assert sound.paths == []


IMPOSSIBLE = [
    ({"endpoints": ()}, "there is no endpoint"),
    ({"endpoints": (Endpoint(host="192.168.0.1", port=1),)}, "no host that is allowed"),
    ({"endpoints": (Endpoint(host="127.0.0.1", port=1),) * 2}, "listed twice"),
    ({"endpoints": (Endpoint(host="127.0.0.1", port=1, world_size=0),)}, "world_size is 0"),
    ({"buffer_size_mb": 0}, "buffer_size_mb is 0"),
    ({"pause_mode": "in_place"}, "flush_cache drops it"),
    ({"quantization": {"quant_method": "awq"}}, "quant_method is 'awq'"),
    ({"quantization": {"quant_method": "fp8", "bits": 8}}, "quantization.bits is not known"),
    ({"master_address": "192.0.2.1"}, "cannot listen at 192.0.2.1:0"),
    ({"master_address": "0"}, "the address is unspecified"),
]


@pytest.mark.dist
def test_what_cannot_be_honoured_is_refused_before_any_server_is_paused(folder):
    with receiving(folder) as receiver:
        orders = [push_to(receiver, **changes) for changes, _ in IMPOSSIBLE]
        [told] = on_ranks(1, trained_and_pushed, job_of(folder, "refused"), orders)
        for (_, fault), failed in zip(IMPOSSIBLE, told, strict=True):
            assert (failed[0], failed[2]) == ("settings", "user")
            assert fault in failed[3]
        assert receiver.paths == []


@pytest.mark.dist
def test_a_server_without_a_route_for_it_flushes_with_the_last_bucket(folder):
    with receiving(folder) as receiver:
        receiver.flushes = False
        on_ranks(1, trained_and_pushed, job_of(folder, "flushed"), [push_to(receiver)])
        assert [body["flush_cache"] for body in receiver.updates()] == [False, False, True]
        assert not receiver.paused


@pytest.mark.dist
def test_a_server_of_another_size_or_key_is_told_before_any_is_paused(folder):
    with receiving(folder) as receiver:
        receiver.key, receiver.info = "tml-of-theirs", {"tp_size": 2, "pp_size": 1, "dp_size": 1}
        wrong = push_to(receiver, api_keys=(Secret(text="tml-of-mine"),))
        right = push_to(receiver, api_keys=(Secret(text="tml-of-theirs"),))
        orders = [push_to(receiver), wrong, right]
        [told] = on_ranks(1, trained_and_pushed, job_of(folder, "sized"), orders)
        faults = {"health": "HTTP 401", "group": "HTTP 401", "settings": "its tp_size is 2"}
        for (step, port, category, said, _), (at, fault) in zip(told, faults.items(), strict=True):
            assert (step, port, category) == (at, receiver.endpoint.port, "user")
            assert fault in said
            assert "tml-of" not in said
        assert receiver.paths == []
        receiver.info = {"tp_size": 1}
        [[synced]] = on_ranks(1, trained_and_pushed, job_of(folder, "sized right"), [right])
        assert synced.endpoints == (receiver.endpoint,)
        assert receiver.paths[-1] == CONTINUE
