"""Weights of a client's model on their way to inference servers, judged by PEFT's merge."""

import peft
import pytest
import torch
import transformers
from msgspec import structs

from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.server.protocol.worker_commands import (
    CreateModelCommand,
    ExportCommand,
    WeightSyncCommand,
)
from penstock.server.weight_sync.errors import SyncError
from tests.models.images import image_model
from tests.ranks import on_ranks
from tests.server.sync.receiver import receiving
from tests.server.workers.orders import (
    data,
    done,
    opening,
    operations,
    passing,
    stepping,
    write_model,
)

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


def pushed_language(model, out, endpoint):
    """The same of all weights of a vision-language model."""
    push = WeightSyncCommand(model="a", endpoints=(endpoint,), buffer_size_mb=1)
    export = ExportCommand(model="a", folder=str(out / "full"), dtype="float32")
    opened = CreateModelCommand(model="a", lora=None)
    workers = operations(model, out, lora={"enable_lora": False})
    for order in (opened, passing("a", data(4)), stepping("a", 0.05), export, push):
        workers.do(order)
    fp8 = {"quant_method": "fp8", "weight_block_size": (128, 128)}
    with pytest.raises(SyncError, match="is not sent in FP8"):
        workers.do(structs.replace(push, quantization=fp8))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_of_a_vision_language_model_the_language_model_arrives_by_its_names_in_files(
    tmp_path, model_type
):
    image_model(model_type).save_pretrained(tmp_path / "model")
    with receiving(tmp_path) as receiver:
        on_ranks(1, pushed_language, tmp_path / "model", tmp_path, receiver.endpoint)
        got = receiver.tensors()
    with SafetensorsFolder(tmp_path / "full") as folder:
        want = {name: folder[name] for name in folder.names() if "visual" not in name}
    with SafetensorsFolder(tmp_path / "model") as folder:
        changed = [name for name, one in want.items() if not torch.equal(one, folder[name])]
    assert changed
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name].float(), tensor, atol=1e-6, rtol=2**-8)
