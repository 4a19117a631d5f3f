"""The workers' loop: what the engine is told of orders that went well, that were refused, and that
broke; on one rank and on two.
"""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from penstock.core.errors import ArtifactError, StageError
from penstock.engine.distributed.broadcast import ControlBroadcast
from penstock.engine.distributed.ranks import init_process_group
from penstock.server.protocol.codec import Codec, PeerLostError
from penstock.server.protocol.requests import Sample, ZeroGrad
from penstock.server.protocol.results import Done, ForwardBackwardResult, ServedModel
from penstock.server.protocol.types import Array, Endpoint, SamplingParams, Secret
from penstock.server.protocol.worker_commands import (
    CheckpointSizes,
    Command,
    CommandFailure,
    ExportCommand,
    GenerateCommand,
    GenerateResult,
    Hello,
    Ready,
    Reply,
    Shutdown,
    ToWorkers,
    UnloadModelCommand,
    WeightSyncCommand,
)
from penstock.server.worker.generate import GenerationHandler as Drawing
from penstock.server.worker.loop import UnrecoverableError, serve
from penstock.server.worker.self_test import self_test
from penstock_kernels.op import Op
from tests.engine import runs
from tests.engine.automodel.tiny_models import write_model as write_stacked
from tests.ranks import on_ranks
from tests.server.workers.orders import (
    answering,
    data,
    done,
    opening,
    operations,
    passing,
    saved,
    saving,
    stepping,
    write_model,
)
from tests.server.workers.standing_in import SERVED

pytestmark = [pytest.mark.slow, pytest.mark.dist]


class Script:
    """An end whose engine says these things one after another, and notes what it is told."""

    def __init__(self, *said):
        self.said, self.told = list(said), []

    def receive(self, timeout=None):
        del timeout
        said = self.said.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    def send(self, message):
        self.told.append(message)


def commands(*orders):
    return [Command(id=str(number), operation=order) for number, order in enumerate(orders)]


def served_by(workers, script):
    """The loop, to its end."""
    served = ServedModel(
        base_model="tiny",
        tokenizer="tiny",
        arch="qwen3",
        max_context=512,
        trains="adapters",
        max_rank=16,
        samples=True,
    )

    def ready():
        return Ready(instance="x", served=served, models=workers.models.names)

    serve(workers, ControlBroadcast(workers.models.substrate.ranks), script, ready)
    return script.told


def test_every_command_is_replied_to_by_its_number_and_a_refused_one_ends_nothing(model, tmp_path):
    orders = commands(
        opening("a"), stepping("b"), passing("a", data(3)), UnloadModelCommand(model="a")
    )
    told = served_by(operations(model, tmp_path), Script(Hello(instance="e"), *orders, Shutdown()))
    ready, opened, refused, passed, closed = told
    assert ready.models == ()
    assert isinstance(opened.result, CheckpointSizes)
    assert (refused.category, refused.code, refused.id) == ("user", "not_found", "1")
    assert not refused.needs_restart
    assert isinstance(passed.result, ForwardBackwardResult)
    assert closed == Reply(id="3", result=Done())


def generating(tokens, count=1, **how):
    prompt = Array.of(tokens, "int32")
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, **how)
    return GenerateCommand(samples=(Sample(prompt=prompt, sampling=sampling, count=count),))


def joined_by(model, out, orders, settings):
    """What rank 0 tells of orders that have all arrived when the first begins; and what comes of
    each alone."""
    workers = operations(model, out, **settings)
    ranks, told = workers.models.substrate.ranks, []
    if ranks.is_main_process:
        told = served_by(workers, Script(*commands(*orders), Shutdown()))
    else:
        serve(workers, ControlBroadcast(ranks))
    return told, done(model, out, [order for order in orders if order != REFUSED], **settings)


REFUSED = generating([5, runs.VOCAB])


@pytest.mark.parametrize(("world", "mode"), [(1, "none"), (2, "ddp")])
def test_commands_to_generate_join_the_one_that_runs_up_to_the_first_of_another_kind(
    model, tmp_path, world, mode
):
    orders = [
        generating([5, 6, 7], max_tokens=20),
        generating([8, 9], count=2, max_tokens=3),
        REFUSED,
        opening("a"),
        generating([5, 6], max_tokens=2),
    ]
    settings = {"data_parallel_mode": mode}
    [(told, alone), *_] = on_ranks(world, joined_by, model, tmp_path, orders, settings)
    refused, short, long, opened, last = told
    assert (refused.id, short.id, long.id, opened.id, last.id) == ("2", "1", "0", "3", "4")
    assert (refused.code, refused.needs_restart) == ("invalid", False)
    results = [reply.result for reply in (long, short, opened, last)]
    assert [tokens_of(result) for result in results] == [tokens_of(result) for result in alone]


def tokens_of(result):
    """Of each completion; None for another result."""
    if not isinstance(result, GenerateResult):
        return None
    return [
        sequence.tokens.numpy().tolist()
        for sampled in result.results
        for sequence in sampled.sequences
    ]


def test_clients_get_the_same_from_either_model_code(model, tmp_path):
    orders = [opening("a"), opening("b"), passing("a", data(3)), stepping("a")]
    orders += [passing("b", data(3, seed=1)), stepping("b"), passing("a", data(3))]
    found = {
        backend: done(
            model, tmp_path / backend, [*orders, *_sampled(tmp_path)], model={"backend": backend}
        )
        for backend in ("native", "transformers")
    }
    for ours, others in zip(*found.values(), strict=True):
        if isinstance(ours, ForwardBackwardResult):
            for output, other in zip(ours.outputs, others.outputs, strict=True):
                logprobs = (one["logprobs"].numpy() for one in (output, other))
                assert np.allclose(*logprobs, rtol=1e-5)
    ours, others = (
        results[-1].results[0].sequences[0].tokens.numpy() for results in found.values()
    )
    assert np.array_equal(ours, others)


def test_adapters_of_stacked_experts_have_the_rank_and_alpha_of_their_client(tmp_path):
    write_stacked(tmp_path / "model", "gpt_oss", noise=0.1)
    orders = [opening("a", 4), passing("a", data(3)), stepping("a"), passing("a", data(3))]
    logprobs = []
    for backend in ("native", "transformers"):
        *_, after = done(tmp_path / "model", tmp_path / backend, orders, model={"backend": backend})
        logprobs.append(np.concatenate([out["logprobs"].numpy() for out in after.outputs]))
    assert np.allclose(*logprobs, rtol=1e-4)


def _sampled(folder):
    """What saves the adapter of a model, and answers with it."""
    kept = str(folder / "sampler")
    return [ExportCommand(model="a", folder=kept), answering(kept)]


def test_what_a_model_will_take_on_disk_is_told_and_holds(model, tmp_path):
    orders = [opening("a", 8), passing("a", data(3)), stepping("a"), saving("a", tmp_path / "kept")]
    export = ExportCommand(model="a", folder=str(tmp_path / "sampler"))
    opened, *_ = done(model, tmp_path, [*orders, export])
    for folder, told in (("kept", opened.state_bytes), ("sampler", opened.export_bytes)):
        size = sum(path.stat().st_size for path in (tmp_path / folder).iterdir())
        assert 0 < size <= told


def test_models_stay_when_the_engine_is_lost_and_the_next_one_hears_of_them(model, tmp_path):
    [command] = commands(opening("a"))
    script = Script(
        Hello(instance="e"), command, PeerLostError("gone"), Hello(instance="f"), Shutdown()
    )
    told = served_by(operations(model, tmp_path), script)
    assert [each.models for each in told if isinstance(each, Ready)] == [(), ("a",)]


def test_what_breaks_is_told_and_ends_the_workers(model, tmp_path):
    def explodes(tokens):
        raise RuntimeError(f"{len(tokens)} tokens exploded")

    workers = operations(model, tmp_path)
    flawed = replace(workers, sampling=Drawing(workers.models, explodes))
    script = Script(*commands(opening("a"), answering(stop_texts=("x",)), opening("b")), Shutdown())
    with pytest.raises(UnrecoverableError, match="exploded"):
        served_by(flawed, script)
    assert isinstance(script.told[-1], CommandFailure)
    assert (script.told[-1].category, script.told[-1].code) == ("server", "internal")
    assert script.told[-1].needs_restart
    assert "restarted" in script.told[-1].error


def test_the_self_test_passes_where_all_is_well_and_leaves_nothing(model, tmp_path):
    workers = operations(model, tmp_path)
    self_test(workers)
    assert workers.models.names == ()


class Overheard(ControlBroadcast):
    """What is announced to other ranks, of whom none ever fails."""

    def __init__(self):
        self.frames = []

    def broadcast(self, frame=b"", rank=0):
        assert rank == 0
        self.frames.append(frame)
        return frame

    def all_gather_errors(self, error):
        return [error]


class Obeying:
    """Does whatever it is told."""

    def __init__(self):
        self.orders = []

    def do(self, order):
        self.orders.append(order)
        return Done()

    def generating(self, order):
        raise NotImplementedError


def test_keys_of_inference_servers_are_known_to_rank_0_alone():
    order = WeightSyncCommand(
        model="a",
        endpoints=(Endpoint(host="localhost", port=1),),
        master_address="",
        master_port=0,
        group_name="g",
        buffer_size_mb=1,
        flush_cache=False,
        pause_mode="abort",
        weight_version=None,
        quantization=None,
        api_keys=(Secret(text="tml-of-theirs"),),
    )
    script, overheard, obeying = Script(*commands(order), Shutdown()), Overheard(), Obeying()
    ready = Ready(instance="x", served=SERVED, models=())
    serve(obeying, overheard, script, lambda: ready)
    assert obeying.orders == [order]
    assert not any(b"tml-of-theirs" in frame for frame in overheard.frames)
    [told, _] = [Codec(ToWorkers).decode(frame) for frame in overheard.frames]
    assert told.operation.endpoints == order.endpoints


class Flawed:
    """Operations that cannot forget on this rank."""

    def __init__(self, workers, rank):
        self.workers, self.rank, self.models = workers, rank, workers.models
        self.generating = workers.generating

    def do(self, order):
        if isinstance(order, ZeroGrad) and self.rank == 1:
            raise StageError("this rank forgets nothing")
        return self.workers.do(order)


def served_on_a_rank(model, out):
    """What rank 0 tells, where rank 1 alone fails in between."""
    settings = {"data_parallel_mode": "fsdp2", "data_parallel_shard_size": 2}
    workers = operations(model, out, **settings)
    ranks = init_process_group(60)
    flawed = Flawed(workers, ranks.rank)
    orders = commands(
        opening("a", 8),
        ZeroGrad(model="a"),
        passing("a", data(3)),
        stepping("a"),
        answering(),
    )
    if ranks.is_main_process:
        return served_by(flawed, Script(*orders, Shutdown()))
    serve(flawed, ControlBroadcast(ranks))
    return None


def test_a_fault_on_one_rank_is_the_commands_and_the_ranks_go_on_in_step(model, tmp_path):
    [told, _] = on_ranks(2, served_on_a_rank, model, tmp_path)
    kinds = [type(each) for each in told]
    assert kinds == [Reply, CommandFailure, Reply, Reply, Reply]
    assert told[1].error == "this rank forgets nothing"
    assert told[3].result.metrics["step"] == 1


MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
PRECISIONS = {"lm_head_fp32": True, "router_fp32": True, "attention_cast_bf16": False}
"""Fields, and whether they show where all else is computed in bf16, or in fp32."""


@pytest.mark.parametrize("field", PRECISIONS)
def test_a_precision_that_is_written_changes_what_clients_are_told(tmp_path, field):
    its = write_model(tmp_path / "model", **(MIXTURE if field == "router_fp32" else {}))
    found = []
    for value in (False, True):
        settings = {"enable_mixed_precision": PRECISIONS[field], "model": {field: value}}
        results = done(its, tmp_path, [opening("a"), passing("a", data(3))], **settings)
        found.append(results[-1].outputs)
    assert found[0] != found[1]


PLAIN = {
    "rmsnorm_native": {"rms_norm", "add_rms_norm"},
    "activation_native": {"swiglu"},
    "rope_native": {"rope"},
}


@pytest.mark.parametrize("field", PLAIN)
def test_operations_are_plain_where_that_is_written(model, tmp_path, field):
    workers = operations(model, tmp_path, model={field: True})
    asked, call = set(), Op.__call__

    def counted(op, *arguments, **options):
        asked.add(op.name)
        return call(op, *arguments, **options)

    workers.do(opening("a"))
    with patch.object(Op, "__call__", counted):
        workers.do(passing("a", data(2)))
    others = set().union(*PLAIN.values()) - PLAIN[field]
    assert others <= asked
    assert not PLAIN[field] & asked


def test_routers_are_told_of_with_the_pass_that_they_chose_in(tmp_path):
    its = write_model(tmp_path / "model", **MIXTURE)
    orders = [opening("a"), passing("a", data(3))]
    found = [done(its, tmp_path, orders, log_router_stats=told)[-1] for told in (True, False)]
    names = {name for name in found[0].metrics if name.startswith("routers/0/")}
    assert names == {f"routers/0/{what}:mean" for what in ("entropy", "imbalance", "most", "least")}
    assert found[0].metrics["routers/0/entropy:mean"] > 0
    assert not any(name.startswith("routers/") for name in found[1].metrics)
    assert found[0].outputs == found[1].outputs


@pytest.mark.parametrize("per", ["sum", "token"])
def test_norms_of_types_of_layers_are_told_with_each_pass_where_they_are_asked_for(
    model, tmp_path, per
):
    looks = passing("a", data(1), forward_only=True)
    passes = [passing("a", data(3, seed=number), loss_reduction=per) for number in (1, 2)]
    orders = [opening("a", 8), looks, *passes, stepping("a")]
    plain, told = (
        [each.metrics for each in done(model, tmp_path, orders, log_grad_norm=asked)[1:]]
        for asked in (True, "layers")
    )
    types = {f"grad_norm/{kind}:max" for kind in ("attention", "feed_forward", "lm_head")}
    assert [metrics.keys() - other.keys() for metrics, other in zip(told, plain, strict=True)] == [
        set(),
        types,
        types,
        set(),
    ]
    # Of all that was gathered, as the step takes it.
    together = sum(told[2][name] ** 2 for name in types) ** 0.5
    assert together == pytest.approx(told[-1]["grad_norm"], rel=1e-5)
    assert told[-1].keys() == {"grad_norm", "learning_rate", "step"}


def test_new_models_start_from_the_checkpoint_that_the_file_names(model, tmp_path):
    learnt = [opening("a", 8), passing("a", data(3)), stepping("a", 0.1)]
    done(model, tmp_path, [*learnt, saving("a", tmp_path / "kept")])
    workers = replace(operations(model, tmp_path), init_checkpoint=tmp_path / "kept")
    workers.do(opening("b", 8, seed=9))
    workers.do(saving("b", tmp_path / "begun"))
    begun, kept = saved(tmp_path / "begun"), saved(tmp_path / "kept")
    assert all(tensor.equal(kept[name]) for name, tensor in begun.items())
    with pytest.raises(ArtifactError, match="rank 8"):
        workers.do(opening("c", 4))
    assert workers.models.names == ("b",)
