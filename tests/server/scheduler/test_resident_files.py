"""Models of clients on disk, and those that have all of the base: what is saved, read and refused.

PEFT and transformers read what is exported; a model that was never saved judges one that was.
"""

import json
import resource
import shutil
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import peft
import pytest
import torch
import transformers

from penstock.core.errors import ArtifactError, ConfigError, StageError
from penstock.engine.checkpoint.train_state import TrainState
from penstock.engine.hf.save_model import save_tensors
from penstock.engine.multi_lora.model_pool import UnknownModelError
from penstock.engine.multi_lora.model_store import BESIDE, SAMPLER, TOKENIZER
from penstock.engine.multi_lora.shared_base import SharedBase
from penstock.server.protocol.types import LoraConfig, OptimizerConfig
from penstock.server.protocol.worker_commands import (
    CreateModelCommand,
    ExportCommand,
    LoadCheckpointCommand,
    UnloadModelCommand,
)
from penstock.server.worker.errors import CommandError
from tests.damaging import flip_bit, overwrite_beginning, remove_digests
from tests.ranks import on_ranks
from tests.server.workers.orders import (
    MIXTURE,
    apart,
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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]


@pytest.mark.parametrize("optimizer", [None, "sgd", "anyprecision_adamw"])
def test_a_model_goes_on_from_where_it_was_saved_as_if_nothing_had_been(model, tmp_path, optimizer):
    first = [passing("a", data(4, seed=1)), stepping("a"), passing("a", data(4, seed=2))]
    second = [stepping("a"), passing("a", data(4, seed=3)), stepping("a")]
    opened = CreateModelCommand(
        model="a",
        lora=LoraConfig(rank=8, alpha=12.0),
        optimizer_config=OptimizerConfig(
            kind=optimizer, kwargs={"momentum": 0.9} if optimizer == "sgd" else {}
        ),
    )
    done(
        model,
        tmp_path,
        [opened, *first, *second, saving("a", tmp_path / "uninterrupted")],
    )
    done(model, tmp_path, [opened, *first[:2], saving("a", tmp_path / "between")])
    load = LoadCheckpointCommand(model="a", folder=str(tmp_path / "between"), optimizer=True)
    results = done(
        model,
        tmp_path,
        [opened, load, first[2], *second, saving("a", tmp_path / "resumed")],
    )
    assert apart(saved(tmp_path / "uninterrupted"), saved(tmp_path / "resumed")) == 0
    assert results[-2].metrics["step"] == 3


def test_a_model_goes_on_under_another_layout(model, tmp_path):
    # An eps that no rounding shows beside.
    first = [opening("a", 8), passing("a", data(4, seed=1)), stepping("a", eps=0.1)]
    second = [passing("a", data(4, seed=3)), stepping("a", eps=0.1)]
    done(model, tmp_path, [*first, *second, saving("a", tmp_path / "uninterrupted")])
    between, moved = tmp_path / "between", tmp_path / "moved"
    save = [*first, saving("a", between)]
    go_on = [
        opening("a", 8),
        LoadCheckpointCommand(model="a", folder=str(between), optimizer=True),
        *second,
        saving("a", moved),
    ]
    shard = {"data_parallel_mode": "fsdp2", "data_parallel_shard_size": 2}
    tensor = {"tensor_parallel_size": 2}
    on_ranks(2, moved_on, model, tmp_path, [(save, shard), (go_on, tensor)])
    assert apart(saved(tmp_path / "uninterrupted"), saved(moved)) < 1e-5


def moved_on(model, out, scripts):
    """Scripts with the settings of each, one after another."""
    for orders, settings in scripts:
        done(model, out, orders, **settings)


def test_a_model_that_is_loaded_without_its_optimizer_steps_as_a_new_one(model, tmp_path):
    workers = operations(model, tmp_path)
    orders = [opening("a"), passing("a", data(4)), stepping("a"), saving("a", tmp_path / "kept")]
    for order in orders:
        workers.do(order)
    workers.do(LoadCheckpointCommand(model="a", folder=str(tmp_path / "kept"), optimizer=False))
    assert not workers.models.get("a").optimizer.state
    workers.do(passing("a", data(4)))
    assert workers.do(stepping("a")).metrics["step"] == 1


def test_gradients_from_before_a_load_are_not_stepped_along(model, tmp_path):
    workers = operations(model, tmp_path)
    first = [opening("a", 8), passing("a", data(4)), stepping("a"), saving("a", tmp_path / "kept")]
    for order in [*first, passing("a", data(4, seed=2))]:
        workers.do(order)
    load = LoadCheckpointCommand(model="a", folder=str(tmp_path / "kept"), optimizer=True)
    workers.do(load)
    with pytest.raises(ConfigError, match="no gradients"):
        workers.do(stepping("a"))
    # What is learnt next is what a model learns that was loaded and did nothing before.
    second = [passing("a", data(4, seed=3)), stepping("a")]
    for order in [*second, saving("a", tmp_path / "loaded")]:
        workers.do(order)
    done(model, tmp_path, [opening("a", 8), load, *second, saving("a", tmp_path / "new")])
    assert apart(saved(tmp_path / "loaded"), saved(tmp_path / "new")) == 0


def test_only_what_is_asked_for_learns(model, tmp_path):
    workers = operations(model, tmp_path)
    orders = [opening("a", 8, train_mlp=False, train_unembed=False), passing("a", data(4))]
    for order in [*orders, stepping("a"), saving("a", tmp_path / "kept")]:
        workers.do(order)
    assert {name.split(".")[3] for name in saved(tmp_path / "kept")} == {"self_attn"}
    workers.do(ExportCommand(model="a", folder=str(tmp_path / "sampler")))
    said = json.loads((tmp_path / "sampler" / "adapter_config.json").read_text())
    assert said["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    workers.do(opening("b", 8))
    with pytest.raises(ArtifactError, match="train the same layers"):
        workers.do(LoadCheckpointCommand(model="b", folder=str(tmp_path / "kept"), optimizer=True))


def test_an_export_is_read_by_peft_and_counts_as_strongly_as_here(model, tmp_path):
    workers = operations(model, tmp_path)
    orders = [opening("a", 8, alpha=40), passing("a", data(4)), stepping("a", 0.05)]
    for order in orders:
        workers.do(order)
    workers.do(ExportCommand(model="a", folder=str(tmp_path / "sampler"), dtype="float32"))
    assert json.loads((tmp_path / "sampler" / SAMPLER).read_text())["rank"] == 8
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "sampler")
    [datum] = data(1, seed=7)
    with torch.no_grad():
        logits = tuned(torch.tensor(datum.tokens.numpy().astype("int64"))[None]).logits[0]
    targets = torch.tensor(datum.inputs["target_tokens"].numpy())
    theirs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    looked = workers.do(passing("a", (datum,), forward_only=True))
    mine = torch.tensor(looked.outputs[0]["logprobs"].numpy())
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_is_refused_with_what_to_do(model, tmp_path):
    workers = operations(model, tmp_path, lora={"lora_target_modules": ["q_proj"]})
    refused = {
        "room for 1 to 16": opening("a", 17),
        "train_unembed=False": opening("a", 8, train_unembed=True),
        "nothing would be trained": opening("a", 8, train_attn=False),
        "momentum: adamw takes": CreateModelCommand(
            model="a", lora=None, optimizer_config=OptimizerConfig(kwargs={"momentum": 0.9})
        ),
    }
    for words, order in refused.items():
        with pytest.raises(ConfigError, match=words):
            workers.do(order)
    with pytest.raises(UnknownModelError, match="no model x"):
        workers.do(UnloadModelCommand(model="x"))
    workers.do(opening("a", 8))
    workers.do(saving("a", tmp_path / "kept"))
    workers.do(opening("b", 4))
    with pytest.raises(ArtifactError, match="rank 8"):
        workers.do(LoadCheckpointCommand(model="b", folder=str(tmp_path / "kept"), optimizer=True))
    with pytest.raises(CommandError, match="there is no checkpoint"):
        workers.do(
            LoadCheckpointCommand(model="b", folder=str(tmp_path / "nowhere"), optimizer=True)
        )
    with pytest.raises(ConfigError, match="open already"):
        workers.do(opening("b", 4))


def test_states_of_an_optimizer_are_of_the_type_that_a_client_says(model, tmp_path):
    workers, written = operations(model, tmp_path), {}
    for dtype in ("bf16", "fp32"):
        config = OptimizerConfig(kind="anyprecision_adamw", dtype=dtype)
        opened = CreateModelCommand(model=dtype, lora=LoraConfig(rank=8), optimizer_config=config)
        learnt = passing(dtype, data(2)), stepping(dtype)
        for order in (opened, *learnt, saving(dtype, tmp_path / dtype)):
            workers.do(order)
        files = [path for path in (tmp_path / dtype).rglob("*") if path.is_file()]
        written[dtype] = sum(path.stat().st_size for path in files)
    # Two states of about 10,000 numbers; what else is written is the same.
    assert written["fp32"] - written["bf16"] > 2 * 2 * 9_000


def test_what_cannot_be_loaded_leaves_a_model_as_it_was(model, tmp_path):
    workers = operations(model, tmp_path)
    by_sgd = CreateModelCommand(
        model="b", lora=LoraConfig(rank=8), optimizer_config=OptimizerConfig(kind="sgd")
    )
    for order in (by_sgd, passing("b", data(2)), stepping("b"), saving("b", tmp_path / "by sgd")):
        workers.do(order)
    learnt = [opening("a", 8), passing("a", data(4)), stepping("a"), passing("a", data(4, seed=2))]
    for order in learnt:
        workers.do(order)
    workers.do(saving("a", tmp_path / "whole"))
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "whole", damaged)
    remove_digests(damaged)
    overwrite_beginning(largest_in(damaged))
    shutil.copytree(tmp_path / "whole", tmp_path / "flipped")
    flip_bit(largest_in(tmp_path / "flipped"))
    refused = {
        "by sgd": "was trained with sgd",
        "damaged": "cannot be read",
        "flipped": "^The checkpoint flipped is damaged: __0_0.distcp differs from its digest",
    }
    for name, words in refused.items():
        with pytest.raises(ArtifactError, match=words):
            workers.do(
                LoadCheckpointCommand(model="a", folder=str(tmp_path / name), optimizer=True)
            )
    # The gradients, the optimizer and the weights are those of the model that never tried.
    workers.do(stepping("a"))
    workers.do(saving("a", tmp_path / "tried"))
    done(model, tmp_path, [*learnt, stepping("a"), saving("a", tmp_path / "never tried")])
    assert apart(saved(tmp_path / "tried"), saved(tmp_path / "never tried")) == 0
    assert workers.models.get("a").step == 2


def largest_in(folder):
    """The file with most of the tensors of a checkpoint."""
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def tried(model, out):
    """Losses before and after a load from files of which one rank's are damaged, and the refusal
    on this rank."""
    workers = operations(model, out, data_parallel_mode="fsdp2", data_parallel_shard_size=2)
    learnt = [opening("a", 8), passing("a", data(4)), stepping("a")]
    for order in [*learnt, saving("a", out / "kept")]:
        workers.do(order)
    if workers.models.substrate.ranks.is_main_process:
        remove_digests(out / "kept")
        overwrite_beginning(out / "kept" / "__1_0.distcp")
    return refused(workers, out / "kept", ArtifactError)


def refused(workers, folder, kind):
    """Losses before and after a load that raises this kind of error, and what it says."""
    look = passing("a", data(2, seed=3), forward_only=True)
    before = workers.do(look).metrics["loss:sum"]
    with pytest.raises(kind) as caught:
        workers.do(LoadCheckpointCommand(model="a", folder=str(folder), optimizer=True))
    return before, workers.do(look).metrics["loss:sum"], str(caught.value)


def test_what_one_rank_cannot_read_is_loaded_on_none(model, tmp_path):
    for before, after, refusal in on_ranks(2, tried, model, tmp_path):
        assert before == after
        assert "cannot be read" in refusal


def without_memory(model, out):
    """The same where one rank has no memory for the optimizer's states, and then for the weights;
    and the step that a load takes the model to after all."""
    workers = operations(model, out, data_parallel_mode="fsdp2", data_parallel_shard_size=2)
    learnt = [opening("a", 8), passing("a", data(4)), stepping("a")]
    for order in [*learnt, saving("a", out / "kept"), passing("a", data(4)), stepping("a")]:
        workers.do(order)
    fault = torch.OutOfMemoryError("no memory is left")
    is_second = workers.models.substrate.ranks.rank == 1
    told = []
    for its, name in ((TrainState, "restore"), (SharedBase, "copy_params")):
        with patch.object(its, name, side_effect=fault) if is_second else nullcontext():
            told.append(refused(workers, out / "kept", StageError))
    workers.do(LoadCheckpointCommand(model="a", folder=str(out / "kept"), optimizer=True))
    return told, workers.models.get("a").step


def test_a_rank_without_memory_is_a_fault_of_the_load_on_all(model, tmp_path):
    for told, step in on_ranks(2, without_memory, model, tmp_path):
        for before, after, fault in told:
            assert before == after
            assert fault.startswith("kept cannot be loaded, as rank 1 met OutOfMemoryError: no mem")
        assert step == 1


def test_a_whole_model_whose_checkpoint_is_damaged_begins_anew(model, tmp_path):
    workers = operations(model, tmp_path, lora={"enable_lora": False})
    learnt = [CreateModelCommand(model="a", lora=None), passing("a", data(4)), stepping("a", 0.001)]
    for order in [*learnt, saving("a", tmp_path / "kept")]:
        workers.do(order)
    load = LoadCheckpointCommand(model="a", folder=str(tmp_path / "kept"), optimizer=True)
    overwrite_beginning(largest_in(tmp_path / "kept"))
    with pytest.raises(ArtifactError, match=r"is damaged: .* differs from its digest"):
        workers.do(load)
    # That is seen before anything has changed.
    assert workers.models.get("a").step == 1
    remove_digests(tmp_path / "kept")
    with pytest.raises(ArtifactError, match="cannot be read"):
        workers.do(load)
    assert workers.models.get("a").step == 0
    workers.do(saving("a", tmp_path / "anew"))
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert apart(saved(tmp_path / "anew"), base.state_dict()) == 0


def test_what_begins_from_a_checkpoint_counts_as_strongly_as_it_did(model, tmp_path):
    workers = operations(model, tmp_path)
    orders = [opening("a", 8, alpha=40), passing("a", data(4)), stepping("a", 0.05)]
    look = passing("a", data(2, seed=3), forward_only=True)
    *_, looked = (workers.do(order) for order in [*orders, saving("a", tmp_path / "kept"), look])
    workers = replace(operations(model, tmp_path), init_checkpoint=tmp_path / "kept")
    workers.do(opening("a", 8))
    assert workers.do(look).outputs == looked.outputs


def test_adapters_of_experts_are_loaded_where_they_were_saved(tmp_path):
    its = write_model(tmp_path / "model", **MIXTURE)
    orders = [opening("a", 4), passing("a", data(4)), stepping("a", 0.05)]
    look = passing("a", data(2, seed=3), forward_only=True)
    *_, looked = done(its, tmp_path, [*orders, saving("a", tmp_path / "kept"), look])
    load = LoadCheckpointCommand(model="a", folder=str(tmp_path / "kept"), optimizer=True)
    *_, again = done(its, tmp_path, [opening("a", 4, seed=8), load, look])
    assert again.outputs == looked.outputs


@contextmanager
def room_for(size):
    """Files may have so many bytes, and no more."""
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))


def test_an_export_that_finds_no_room_is_told_and_leaves_nothing(model, tmp_path):
    workers = operations(model, tmp_path, lora={"enable_lora": False})
    workers.do(CreateModelCommand(model="a", lora=None))
    (tmp_path / "out").mkdir()
    export = ExportCommand(model="a", folder=str(tmp_path / "out" / "sampler"), dtype="float32")
    with room_for(1 << 14), pytest.raises(StageError, match="could not be written"):
        workers.do(export)
    assert not list((tmp_path / "out").iterdir())
    workers.do(export)


def test_what_a_merged_model_in_few_bits_takes_is_told_by_its_numbers(model, tmp_path):
    merged = {"merge_lora_interval": 2, "lora_rank": 8}
    told = [
        done(model, tmp_path, [opening("a", 8)], lora={**merged, **more})[0].export_bytes
        for more in ({}, {"enable_qlora": True, "quant_format": "nf4"})
    ]
    base = transformers.AutoModelForCausalLM.from_pretrained(model).state_dict()
    numbers = sum(tensor.numel() for tensor in base.values())
    assert min(told) >= 4 * numbers + BESIDE + TOKENIZER
    # What lies beside it while it is written is smaller.
    assert told[1] < told[0]


def test_tensors_that_find_no_room_are_told_as_every_file_is(tmp_path):
    with room_for(1 << 14), pytest.raises(OSError, match=r"a\.safetensors"):
        save_tensors({"a": torch.ones(1 << 16)}, tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()


def test_a_checkpoint_of_another_base_is_refused_by_the_name_of_its_own(model, tmp_path):
    done(model, tmp_path, [opening("a", 8), saving("a", tmp_path / "kept")])
    other = write_model(tmp_path / "other", rms_norm_eps=1e-5)
    workers = operations(other, tmp_path)
    workers.do(opening("a", 8))
    with pytest.raises(ArtifactError, match=r"whose config.json is another.\n  Serve tiny"):
        workers.do(LoadCheckpointCommand(model="a", folder=str(tmp_path / "kept"), optimizer=True))


def test_where_all_weights_are_trained_one_model_at_a_time_has_the_base(model, tmp_path):
    workers = operations(model, tmp_path, lora={"enable_lora": False, "lora_rank": 16})
    orders = [CreateModelCommand(model="a", lora=None), passing("a", data(4)), stepping("a", 0.001)]
    for order in orders:
        workers.do(order)
    with pytest.raises(ConfigError, match="one model at a time"):
        workers.do(CreateModelCommand(model="b", lora=None))
    with pytest.raises(CommandError, match="trains all weights"):
        workers.do(opening("b", 4))
    workers.do(ExportCommand(model="a", folder=str(tmp_path / "whole"), dtype="float32"))
    workers.do(saving("a", tmp_path / "kept"))
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs, started = trained.state_dict(), base.state_dict()
    assert apart(saved(tmp_path / "kept"), theirs) == 0
    assert 0 < apart(theirs, started) < 0.1
    workers.do(UnloadModelCommand(model="a"))
    workers.do(CreateModelCommand(model="b", lora=None))
    workers.do(saving("b", tmp_path / "new"))
    assert apart(saved(tmp_path / "new"), started) == 0


def test_adapters_that_are_merged_make_the_base_the_models_own(model, tmp_path):
    merging = {"lora": {"merge_lora_interval": 2, "lora_rank": 8, "reset_optimizer_on_merge": True}}
    workers = operations(model, tmp_path, **merging)
    workers.do(opening("a", 8))
    look = passing("a", data(4, seed=1), forward_only=True)
    *_, before = map(workers.do, (passing("a", data(4)), stepping("a"), look))
    *_, after = map(workers.do, (passing("a", data(4, seed=1)), stepping("a"), look))
    assert after.metrics["loss:sum"] < before.metrics["loss:sum"]
    resident = workers.models.get("a")
    assert not resident.optimizer.state
    workers.do(ExportCommand(model="a", folder=str(tmp_path / "whole"), dtype="float32"))
    [datum] = data(1, seed=7)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    with torch.no_grad():
        logits = merged(torch.tensor(datum.tokens.numpy().astype("int64"))[None]).logits[0]
    targets = torch.tensor(datum.inputs["target_tokens"].numpy())
    theirs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    mine = workers.do(passing("a", (datum,), forward_only=True)).outputs[0]["logprobs"]
    torch.testing.assert_close(torch.tensor(mine.numpy()), theirs, atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="merge_lora_interval"):
        workers.do(opening("b", 8))


def test_where_the_head_is_the_embedding_asking_for_it_changes_nothing(tmp_path):
    tied = write_model(tmp_path / "tied", tie_word_embeddings=True)
    workers = operations(tied, tmp_path)
    for name, asked in {"a": True, "b": False, "c": None}.items():
        workers.do(opening(name, 8, train_unembed=asked))
        assert workers.models.get(name).adapter.kinds == {"attn", "mlp"}
