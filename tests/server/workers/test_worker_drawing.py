"""What workers draw: from what, to which end, and what is told of it; on one rank and on two."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

from penstock.core.cache.folder_digests import DIGESTS
from penstock.core.errors import ArtifactError
from penstock.engine.distributed.ranks import init_process_group
from penstock.engine.multi_lora.model_store import SAMPLER
from penstock.server.protocol.requests import Sample
from penstock.server.protocol.types import Array, SamplingParams
from penstock.server.protocol.worker_commands import (
    CreateModelCommand,
    ExportCommand,
    GenerateCommand,
    GenerateResult,
)
from penstock.server.worker import generate
from tests.damaging import flip_bit
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

pytestmark = [pytest.mark.slow, pytest.mark.dist]


def test_answers_come_from_what_was_saved_and_training_goes_on_beside(model, tmp_path):
    learnt = [opening("a"), passing("a", data(4)), stepping("a", 0.1)]
    export = ExportCommand(model="a", folder=str(tmp_path / "sampler"), dtype="float32")
    on = [passing("a", data(4, seed=1)), stepping("a", 0.1)]
    drawn = [answering(), answering(str(tmp_path / "sampler"))]
    prompt = [*learnt, export, *drawn, *on, answering(str(tmp_path / "sampler"))]
    results = done(model, tmp_path, [*prompt, saving("a", tmp_path / "drawn")])
    done(model, tmp_path, [*learnt, *on, saving("a", tmp_path / "plain")])
    before, then, again = (each for each in results if isinstance(each, GenerateResult))
    assert before != then
    assert then == again
    drawn_beside, plain = saved(tmp_path / "drawn"), saved(tmp_path / "plain")
    assert all(tensor.equal(plain[name]) for name, tensor in drawn_beside.items())


def test_answers_of_an_adapter_are_foretold_as_its_model_does(model, tmp_path):
    learnt = [opening("a", 8), passing("a", data(4)), stepping("a", 0.1)]
    export = ExportCommand(model="a", folder=str(tmp_path / "sampler"))
    workers = operations(model, tmp_path)
    for order in (*learnt, export):
        workers.do(order)
    generated = workers.do(answering(str(tmp_path / "sampler")))
    [sequence] = generated.results[0].sequences
    ids = [5, 6, 7, *sequence.tokens.numpy().tolist()]
    datum = type(data(1)[0])(
        tokens=Array.of(ids[:-1], "int32"), inputs={"target_tokens": Array.of(ids[1:], "int64")}
    )
    looked = workers.do(passing("a", (datum,), forward_only=True)).outputs[0]["logprobs"].numpy()
    assert sequence.logprobs.numpy() == pytest.approx(looked[2:], abs=2e-5)


def test_answers_end_where_the_model_ends_a_text_unless_that_is_not_wanted(tmp_path):
    prompt = Array.of([5, 6, 7], "int32")

    def asking(**more):
        how = SamplingParams(max_tokens=40, temperature=0.0, **more)
        return GenerateCommand(samples=(Sample(prompt=prompt, sampling=how),))

    plain = write_model(tmp_path / "plain")
    [whole] = drawn(plain, tmp_path, [asking(ignore_eos=True)])
    # The last of them to come for the first time.
    before = max(whole.index(token) for token in whole)
    end = whole[before]
    assert before < 39
    ending = write_model(tmp_path / "ending", eos_token_id=[end, 319])
    found = drawn(ending, tmp_path, [asking(), asking(ignore_eos=True), asking(stop_tokens=(1,))])
    assert found == [whole[: before + 1], whole, whole[: before + 1]]


def drawn(model, out, orders):
    """The first answer to each order."""
    return [
        each.results[0].sequences[0].tokens.numpy().tolist() for each in done(model, out, orders)
    ]


def test_the_likeliest_tokens_of_answers_and_prompts_are_told_where_they_are_asked_for(
    model, tmp_path
):
    prompts = [Array.of(ids, "int32") for ids in ([5, 6, 7], [9, 8])]
    how = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    samples = (
        Sample(prompt=prompts[0], sampling=how, count=2, topk_sample_logprobs=3),
        Sample(prompt=prompts[1], sampling=how, topk_prompt_logprobs=2),
    )
    order = GenerateCommand(samples=samples)
    [generated] = done(model, tmp_path, [order])
    asked, other = generated.results
    for sequence in asked.sequences:
        assert sequence.topk_tokens.shape == sequence.topk_logprobs.shape == (4, 3)
        assert (sequence.topk_tokens.numpy()[:, 0] == sequence.tokens.numpy()).all()
        best = sequence.topk_logprobs.numpy()
        assert best[:, 0] == pytest.approx(sequence.logprobs.numpy(), abs=1e-5)
        assert (best[:, :-1] >= best[:, 1:]).all()
    assert asked.topk_prompt_tokens is None
    assert other.sequences[0].topk_tokens is None
    assert other.topk_prompt_tokens.shape == other.topk_prompt_logprobs.shape == (2, 2)


ELSEWHERE = {
    "an adapter of rank 16, and this server has lora_rank 4": {"lora": {"lora_rank": 4}},
    "an adapter on lm_head": {"lora": {"lora_target_modules": ["q_proj"]}},
    "is an adapter, and this server samples from whole models": {"lora": {"enable_lora": False}},
}


def test_what_another_kind_of_server_saved_is_refused_and_nothing_breaks(model, tmp_path):
    folder = tmp_path / "sampler"
    done(model, tmp_path, [opening("a"), ExportCommand(model="a", folder=str(folder))])
    for said, settings in ELSEWHERE.items():
        with pytest.raises(ArtifactError, match=said):
            done(model, tmp_path, [answering(str(folder))], **settings)
    whole = tmp_path / "whole"
    settings = {"lora": {"enable_lora": False}}
    orders = [CreateModelCommand(model="a", lora=None), ExportCommand(model="a", folder=str(whole))]
    done(model, tmp_path, orders, **settings)
    with pytest.raises(ArtifactError, match="is a whole model, and this server samples from adap"):
        done(model, tmp_path, [answering(str(whole))])


def test_nothing_is_drawn_from_a_folder_of_which_a_file_is_damaged(model, tmp_path):
    folder = tmp_path / "sampler"
    done(model, tmp_path, [opening("a"), ExportCommand(model="a", folder=str(folder))])
    for file in (*folder.glob("*.safetensors"), folder / SAMPLER, folder / DIGESTS):
        good = file.read_bytes()
        flip_bit(file)
        with pytest.raises(ArtifactError, match=rf"^sampler is damaged: {file.name} .*\n  Save it"):
            done(model, tmp_path, [answering(str(folder))])
        file.write_bytes(good)
    done(model, tmp_path, [answering(str(folder))])
    (folder / DIGESTS).unlink()
    with pytest.raises(ArtifactError, match=f"{DIGESTS} is missing"):
        done(model, tmp_path, [answering(str(folder))])


def read_on_a_rank(model, out, folder):
    """What is said of a folder that one rank finds, and the other does not; and what comes then."""
    workers = operations(model, out, data_parallel_mode="fsdp2", data_parallel_shard_size=2)
    there = folder if init_process_group(60).is_main_process else folder.with_name("deleted")
    with pytest.raises(ArtifactError, match="nothing to sample from"):
        workers.do(answering(str(there)))
    return workers.do(answering())


def test_a_folder_that_is_deleted_meanwhile_fails_on_all_ranks_alike(model, tmp_path):
    folder = tmp_path / "sampler"
    done(model, tmp_path, [opening("a"), ExportCommand(model="a", folder=str(folder))])
    [one, other] = on_ranks(2, read_on_a_rank, model, tmp_path, folder)
    assert one == other


def read_without_memory(model, out, folder):
    """What is told of drawing where rank 1 has no memory for an adapter, and what is drawn then."""
    workers = operations(model, out, data_parallel_mode="fsdp2", data_parallel_shard_size=2)
    fault = torch.OutOfMemoryError("no memory is left")
    is_second = workers.models.substrate.ranks.rank == 1
    failing = patch.object(generate.GenerationHandler, "_read_adapter", side_effect=fault)
    with failing if is_second else nullcontext(), pytest.raises(ArtifactError) as caught:
        workers.do(answering(str(folder)))
    return str(caught.value), workers.do(answering(str(folder)))


def test_a_rank_without_memory_for_an_adapter_is_a_fault_of_the_draw_on_all(model, tmp_path):
    folder = tmp_path / "sampler"
    done(model, tmp_path, [opening("a"), ExportCommand(model="a", folder=str(folder))])
    (one, drawn), (other, _) = on_ranks(2, read_without_memory, model, tmp_path, folder)
    assert one == other
    assert one.startswith("sampler cannot be sampled from, as rank 1 met OutOfMemoryError: no mem")
    assert drawn.results[0].sequences


def test_a_whole_model_is_read_once_for_all_that_is_drawn_from_it_in_a_row(model, tmp_path):
    settings = {"lora": {"enable_lora": False}}
    folder = tmp_path / "whole"
    workers = operations(model, tmp_path, **settings)
    learnt = [CreateModelCommand(model="a", lora=None), passing("a", data(4)), stepping("a", 0.1)]
    for order in (*learnt, ExportCommand(model="a", folder=str(folder), dtype="float32")):
        workers.do(order)
    first = workers.do(answering(str(folder)))
    kept = {path: path.read_bytes() for path in folder.glob("*.safetensors")}
    for path in kept:
        path.write_bytes(b"")
    assert workers.do(answering(str(folder))) == first
    for path, written in kept.items():
        path.write_bytes(written)
    trained = workers.do(passing("a", data(4), forward_only=True))
    base = workers.do(answering())
    assert base != first
    assert workers.do(answering(str(folder))) == first
    assert workers.do(passing("a", data(4), forward_only=True)).outputs == trained.outputs


def test_where_a_model_has_all_of_the_base_answers_are_drawn_and_it_comes_back(model, tmp_path):
    settings = {"lora": {"enable_lora": False}, "optimizer": "muon", "muon_lr": 0.01}
    learnt = [CreateModelCommand(model="a", lora=None), passing("a", data(4)), stepping("a", 0.01)]
    export = ExportCommand(model="a", folder=str(tmp_path / "whole"), dtype="float32")
    on = [passing("a", data(4, seed=1)), stepping("a", 0.01)]
    drawn = [answering(), answering(str(tmp_path / "whole"))]
    orders = [answering(), *learnt, export, *drawn, *on, saving("a", tmp_path / "drawn")]
    results = done(model, tmp_path, orders, **settings)
    done(model, tmp_path, [*learnt, *on, saving("a", tmp_path / "plain")], **settings)
    first, base, its = (each for each in results if isinstance(each, GenerateResult))
    assert first == base
    assert base != its
    drawn_beside, plain = saved(tmp_path / "drawn"), saved(tmp_path / "plain")
    assert all(tensor.equal(plain[name]) for name, tensor in drawn_beside.items())
