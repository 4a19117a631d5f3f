"""Checkpoints: the same whatever layout wrote them, read by any other, whole or not at all."""

import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.core.errors import ArtifactError, StageError
from penstock.core.files import regular_files
from penstock.engine.checkpoint import checkpoint_manager
from penstock.engine.checkpoint.async_staging import StagingBuffers
from penstock.engine.checkpoint.checkpoint_manager import CheckpointManager
from penstock.engine.checkpoint.dcp_io import read_boxes, whole_box
from penstock.engine.checkpoint.folders import complete_checkpoints
from penstock.engine.checkpoint.model_reader import CheckpointReader
from penstock.engine.checkpoint.safe_dcp_reader import CheckpointFiles
from penstock.engine.checkpoint.train_state import TrainState
from penstock.engine.distributed.param_shards import full_shard, local, make_local_param
from penstock.engine.distributed.ranks import init_process_group
from penstock.engine.hf.load_weights import load_weights
from penstock.engine.hf.save_model import write_weights
from penstock.engine.hf.state_dict import in_checkpoint
from penstock.models.initialize import generator_for, initialize
from penstock.models.weights import WeightMap
from tests.engine.holdings import CONFIG, LAYOUTS, cut, holding
from tests.ranks import on_ranks
from tests.turns import one_day_in

NAMES = WeightMap(CONFIG)


def start(name, shape):
    return initialize(name, shape, 3, CONFIG)


def made(layout, *, merge_qkv):
    """A model in this layout at its start, and its optimizer."""
    held = holding(layout, merge_qkv=merge_qkv)
    load_weights(held, None, start, readers="all_ranks", ranks=init_process_group(60))
    optimizer = torch.optim.AdamW([one.parameter for one in held], lr=0.1)
    return TrainState(held, optimizer, only_trained=False)


def step(trained, number):
    """An update by gradients that are the same numbers in every layout."""
    for one in trained.params:
        gradient = torch.zeros_like(one.parameter)
        for piece in one.shards:
            generator = generator_for(f"{number}:{piece.tensor}", 0)
            whole = torch.randn(piece.full_shape, generator=generator)
            piece.view(local(gradient)).copy_(cut(whole, piece))
        one.parameter.grad = gradient
    trained.pre_update_hooks.run()
    trained.optimizer.step()


def saved(trained, root, number, **options):
    checkpoints = CheckpointManager(root, trained, init_process_group(60), **options)
    checkpoints.save(number, {"step": number})
    checkpoints.finish()


def crossed(root):
    """Each layout saves after two steps; each reads what the next one saved, and makes a third."""
    for number, layout in enumerate(LAYOUTS):
        trained = made(layout, merge_qkv=bool(number % 2))
        step(trained, 1)
        step(trained, 2)
        for name in ("once", "twice") if layout == "hybrid" else ("once",):
            saved(trained, root / layout / name, 2)
    for number, layout in enumerate(LAYOUTS):
        trained = made(layout, merge_qkv=not number % 2)
        other = LAYOUTS[(number + 1) % len(LAYOUTS)]
        checkpoints = CheckpointManager(root / layout / "more", trained, init_process_group(60))
        assert checkpoints.load(root / other / "once" / "global_step_2")["step"] == 2
        step(trained, 3)
        checkpoints.save(3, {"step": 3})


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in regular_files(folder)
    }


def everything(folder):
    """All tensors of a checkpoint, the optimizer's too."""
    files = CheckpointFiles(folder)
    found = {
        name: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
        for name, entry in files.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    read_boxes({name: [whole_box(tensor)] for name, tensor in found.items()}, files)
    return found


def stepped(*starts):
    """What a model that nothing is done to but training ends as, by torch alone: with an optimizer
    that is new at each of these starts, which are lists of steps."""
    tensors = {
        name: start(name, shape).requires_grad_() for name, shape in NAMES.hf_shapes().items()
    }
    state = {}
    for numbers in starts:
        optimizer = torch.optim.AdamW(tensors.values(), lr=0.1)
        for number in numbers:
            for name, tensor in tensors.items():
                generator = generator_for(f"{number}:{name}", 0)
                tensor.grad = torch.randn(tensor.shape, generator=generator)
            optimizer.step()
        state = optimizer.state
    return tensors, state


@pytest.mark.dist
@one_day_in(3, of=0)
def test_any_layout_goes_on_from_what_any_other_saved_to_the_same_bits(tmp_path):
    on_ranks(4, crossed, tmp_path)
    tensors, state = stepped([1, 2, 3])
    want = {f"model.{name}": tensor.detach() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        want |= {f"optimizer.{name}.{key}": value for key, value in state[tensor].items()}
    exports = set()
    for layout in LAYOUTS:
        got = everything(tmp_path / layout / "more" / "global_step_3")
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), (layout, name)
        once = tmp_path / layout / "once" / "global_step_2"
        weights = in_checkpoint(CheckpointReader(once), NAMES)
        out = tmp_path / "hf" / layout
        write_weights(weights, out, dtype=torch.bfloat16, max_shard_size=500)
        exports.add(tuple(sorted(contents(out).items())))
    assert len(exports) == 1
    once, twice = (tmp_path / "hybrid" / name / "global_step_2" for name in ("once", "twice"))
    assert contents(once) == contents(twice)
    # Copies are written by one rank each, and all ranks write about as much.
    numbers = Counter()
    metadata = CheckpointFiles(tmp_path / "copies" / "once" / "global_step_2").read_metadata()
    for index, info in metadata.storage_data.items():
        numbers[info.relative_path] += want[index.fqn].numel()
    assert len(numbers) == 4
    assert max(numbers.values()) - min(numbers.values()) <= max(t.numel() for t in want.values())


def behind(root):
    """Saves behind training, the first written only when training has gone on, and three that fail.
    Copies are made so late that training would be faster."""
    ranks = init_process_group(60)
    write, go = checkpoint_manager.write_boxes, threading.Event()
    copy = StagingBuffers._copy
    writer: Any = FileSystemWriter
    write_data = writer.write_data
    trained = made("sharded", merge_qkv=True)
    step(trained, 1)
    saved(trained, root / "at_once", 1)

    def late(*given):
        go.wait(30)
        return write(*given)

    def slow(self, boxes):
        time.sleep(0.2)
        return copy(self, boxes)

    checkpoint_manager.write_boxes, StagingBuffers._copy = late, slow
    checkpoints = CheckpointManager(root / "behind", trained, ranks, writes="behind")
    checkpoints.save(1, {"step": 1})
    step(trained, 2)
    early = complete_checkpoints(root / "behind")
    go.set()
    checkpoints.save(2, {"step": 2})
    complete = [path.name for path in complete_checkpoints(root / "behind")]
    step(trained, 3)
    checkpoints.finish()
    saved(made("sharded", merge_qkv=True), root / "other", 1)

    def full(boxes, folder, group):
        if dist.get_rank() == 1:
            writer.write_data = no_room
        return write(boxes, folder, group)

    def crowded(self, boxes):
        if dist.get_rank() == 1:
            raise MemoryError("the host is full")
        return copy(self, boxes)

    checkpoint_manager.write_boxes = full
    told = []
    for again in (lambda: checkpoints.save(4, {"step": 4}), checkpoints.finish):
        checkpoints.save(3, {"step": 3})
        told.append(fault_of(again))
    StagingBuffers._copy = crowded
    checkpoints.save(3, {"step": 3})
    step(trained, 4)
    crowd = fault_of(checkpoints.finish)
    checkpoint_manager.write_boxes, writer.write_data, StagingBuffers._copy = (
        write,
        write_data,
        copy,
    )
    return early, complete, told, crowd


def fault_of(act):
    with pytest.raises(StageError) as caught:
        act()
    return str(caught.value)


def no_room(*_):
    raise OSError(28, "No space left on device")


def anew(root):
    """Goes on in another layout from a checkpoint that the optimizer's states were left out of."""
    ranks = init_process_group(60)
    first = replace(made("sharded", merge_qkv=True), states="left out")
    step(first, 1)
    saved(first, root / "without", 1)
    second = made("hybrid", merge_qkv=False)
    state = CheckpointManager(root, second, ranks).load(root / "without" / "global_step_1")
    step(second, 2)
    saved(second, root / "with", 2)
    kept = CheckpointManager(root, made("copies", merge_qkv=False), ranks)
    return [state["lacks_optimizer"], kept.load(root / "with" / "global_step_2")["lacks_optimizer"]]


def limited(root):
    """Which checkpoints are there after each of some saves, by a run and by one that goes on."""
    ranks, seen = init_process_group(60), []
    trained = made("sharded", merge_qkv=False)
    step(trained, 1)
    first = CheckpointManager(root, trained, ranks, limit=2)
    for number in (1, 2, 3):
        first.save(number, {"step": number})
        seen.append([path.name[-1] for path in complete_checkpoints(root)])
    again = CheckpointManager(root, trained, ranks, limit=1, writes="behind")
    again.load(root / "global_step_2")
    for number in (4, 5):
        again.save(number, {"step": number})
        again.finish()
        seen.append([path.name[-1] for path in complete_checkpoints(root)])
    other = TrainState(
        trained.params, torch.optim.SGD([trained.params[0].parameter]), only_trained=False
    )
    with pytest.raises(ArtifactError, match="trained with adamw, and this run's optimizer is sgd"):
        CheckpointManager(root, other, ranks).load(root / "global_step_2")
    return seen


def broken_behind(root):
    """Saves behind training that end by a fault of the program, and one more that does not."""
    ranks, parameter = init_process_group(60), torch.nn.Parameter(torch.ones(3, 2))
    params = [make_local_param("head", parameter, [full_shard("head", (3, 2))])]
    trained = TrainState(params, torch.optim.AdamW([parameter]), only_trained=False)
    checkpoints = CheckpointManager(root, trained, ranks, writes="behind")
    write = checkpoint_manager.write_boxes

    def broken(*_):
        raise ZeroDivisionError("a fault of the program")

    checkpoint_manager.write_boxes = broken
    for told in (lambda: checkpoints.save(2, {"step": 2}), checkpoints.finish):
        checkpoints.save(1, {"step": 1})
        with pytest.raises(ZeroDivisionError, match="a fault of the program"):
            told()
    checkpoint_manager.write_boxes = write
    checkpoints.save(3, {"step": 3})
    checkpoints.finish()
    return [path.name for path in complete_checkpoints(root)]


@pytest.mark.dist
def test_whatever_ends_a_save_behind_training_is_raised_where_training_waits_for_it(tmp_path):
    assert on_ranks(1, broken_behind, tmp_path) == [["global_step_3"]]


def all_three(root):
    return behind(root), limited(root / "limited"), anew(root / "anew")


@pytest.mark.dist
@one_day_in(3, of=0)
def test_saves_behind_training_are_of_their_step_their_failures_are_told_and_old_ones_go(tmp_path):
    for (early, complete, told, crowd), seen, lacks in on_ranks(4, all_three, tmp_path):
        assert lacks == [True, False]
        assert early == []
        assert "global_step_1" in complete
        assert len(told) == 2
        assert all("step 3 could not be written" in each for each in told)
        assert all(f"the disk of {tmp_path / 'behind'} is full (" in each for each in told)
        assert all(" MB are left there)" in each for each in told)
        assert "step 3 could not be copied to the host's memory: the host is full" in crowd
        # The one that a run started from stays.
        assert seen == [["1"], ["1", "2"], ["2", "3"], ["2", "4"], ["2", "5"]]
    assert not list((tmp_path / "limited").glob("*.part"))
    root = tmp_path / "behind"
    assert contents(root / "global_step_1") == contents(tmp_path / "at_once" / "global_step_1")
    assert contents(root / "global_step_1") != contents(tmp_path / "other" / "global_step_1")
    assert [path.name for path in complete_checkpoints(root)] == ["global_step_1", "global_step_2"]
    # What there was of the third takes no room.
    assert not list(root.glob("*.part"))
    without, kept = (
        tmp_path / "anew" / name for name in ("without/global_step_1", "with/global_step_2")
    )
    tensors, state = stepped([1], [2])
    got = everything(kept)
    assert all(name.startswith("model.") for name in everything(without))
    for name, tensor in tensors.items():
        assert torch.equal(got[f"model.{name}"], tensor), name
        assert all(
            torch.equal(got[f"optimizer.{name}.{key}"], value)
            for key, value in state[tensor].items()
        ), name
