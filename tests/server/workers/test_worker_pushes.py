"""Weights of a client's model on their way to inference servers, judged by PEFT's merge."""

import peft
import pytest
import torch
import transformers

from penstock.server.protocol.worker_commands import ExportCommand, WeightSyncCommand
from tests.ranks import on_ranks
from tests.server.sync.receiver import receiving
from tests.server.workers.orders import data, done, opening, passing, stepping, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]


def pushed(model, out, endpoint):
    """What is told of a push of a model that has learnt something, beside another one."""
    push = WeightSyncCommand(
        model="a",
        endpoints=(endpoint,),
        master_address="",
        master_port=0,
        group_name="weight_sync_group",
        buffer_size_mb=1,
        flush_cache=True,
        pause_mode="retract",
        weight_version="1",
        quantization=None,
    )
    learnt = [passing("a", data(4)), stepping("a", 0.05)]
    export = ExportCommand(model="a", folder=str(out / "sampler"), dtype="float32")
    orders = [opening("a", 8, alpha=24), *learnt, export, opening("b", 16), push]
    return done(model, out, orders)[-1].num_parameters


def test_a_model_arrives_merged_with_the_strength_and_rank_that_it_has(tmp_path):
    its = write_model(tmp_path / "model")
    with receiving(tmp_path) as receiver:
        [told] = on_ranks(1, pushed, its, tmp_path, receiver.endpoint)
        got = receiver.tensors()
    base = transformers.AutoModelForCausalLM.from_pretrained(its, dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "sampler")
    want = tuned.merge_and_unload().state_dict()
    assert got.keys() == want.keys()
    assert told == len(got)
    for name, tensor in want.items():
        # One rounding to bf16 of sums in another order.
        torch.testing.assert_close(got[name].float(), tensor, atol=1e-6, rtol=2**-8)
    start = transformers.AutoModelForCausalLM.from_pretrained(its).state_dict()
    assert not torch.equal(want["lm_head.weight"], start["lm_head.weight"])
