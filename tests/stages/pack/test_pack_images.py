"""Images from prepared samples to micro-batches."""

import shutil

import numpy as np
import pytest
import torch

from penstock.core.errors import ArtifactError, ConfigError
from penstock.media.decode import decode
from penstock.media.reference import image_digest
from penstock.pack.settings import PackSettings
from penstock.pack.stage import Pack
from penstock.rows.collate import collate
from penstock.rows.pixel_table import concatenate
from penstock.rows.prepared import PreparedSamples
from penstock.rows.reader import PackedRows
from penstock.train.dataloader import Loader, LoaderConfig
from tests.media.tiny_processors import load_processor, write_processor
from tests.stages.prepare.media.test_images import CHAT, PICTURES, asking, write_data
from tests.stages.prepared import contents, prepare, run

CONVERSATIONS = [
    asking("0.jpg"),
    asking(),
    asking("1.jpg", "0.jpg", "3.jpg"),
    *(asking(f"{n % 6}.jpg") for n in range(5)),
]


@pytest.fixture(scope="module", params=["qwen3_vl", "llava_next", "gemma3"])
def made(request, tmp_path_factory):
    """(model, prepared artifact, packed artifact)."""
    tmp_path = tmp_path_factory.mktemp("packed")
    model = write_processor(request.param, tmp_path / "model")
    data = write_data(tmp_path / "data", CONVERSATIONS)
    stage = prepare((data, CHAT), tokenizer=str(model), shuffle_merged_datasets=False)
    prepared, _ = run(stage, tmp_path / "prepared")
    settings = PackSettings(sample_packing_sequence_len=110)
    facts = Pack(settings, prepared).run(tmp_path / "packed")
    assert facts["images"] == {"train": 9, "validation": 0}
    shutil.rmtree(tmp_path / "prepared.slices")
    return model, prepared, tmp_path / "packed"


def expected_tensors(model, prepared, samples):
    """The tensors of the images of some samples, each image processed by itself."""
    processor = load_processor(model)
    by_digest = {
        digest: content for content in PICTURES.values() for digest in [image_digest(content)]
    }
    found = [
        processor.process(decode(by_digest[digest]))
        for sample in samples
        for digest in PreparedSamples(prepared.path, "train").images(sample)[0]
    ]
    names = found[0].keys() - processor.unused
    return {name: concatenate([each[name] for each in found]) for name in names}


def test_a_micro_batch_has_the_tensors_of_its_images_in_the_order_of_their_tokens(made):
    model, prepared, packed = made
    rows = PackedRows(packed / "data" / "train")
    assert len(rows) > 2
    token = load_processor(model).token_id
    step = collate([[rows.row(at) for at in range(len(rows))], []], pad_to_multiple_of=64)
    first, padding = step.micro_batches()
    assert padding.images is None
    assert first.images is not None
    order = PreparedSamples(prepared.path, "train").epochs()[0].tolist()
    wanted = expected_tensors(model, prepared, order)
    # An image that several samples have is there once.
    assert sorted({*(first.images.order or ())}) == [*range(5)]
    tensors = first.images.repeat(first.images.to_device(torch.device("cpu")))
    assert tensors.keys() == wanted.keys()
    for name, values in wanted.items():
        found = tensors[name]
        assert torch.equal(found, torch.from_numpy(values))
        assert found.dtype == torch.from_numpy(values).dtype
    counts = [n for s in order for n in PreparedSamples(prepared.path, "train").images(s)[1]]
    assert first.images.token_counts == tuple(counts)
    assert len(first.images) == 9
    images = [n for s in order for n in PreparedSamples(prepared.path, "train").images(s)[0]]
    places = {digest: [n for n, one in enumerate(images) if one == digest] for digest in images}
    features = np.split(first.images.feature_order(), np.cumsum(counts)[:-1])
    for same in places.values():
        assert all(np.array_equal(features[at], features[same[0]]) for at in same)
    assert len(np.unique(np.concatenate(features))) == sum(counts[s[0]] for s in places.values())
    assert sum(counts) == int((first.input_ids_T == token).sum())
    assert int((first.labels_T == token).sum()) == 0


def test_workers_give_the_same_images(made):
    rows = PackedRows(made[2] / "data" / "train")
    steps = [[[0], [1]], [[2]]]
    reading = LoaderConfig(0, 2, pin_memory=False, pad_to_multiple_of=16, pad_to="own")
    here = [*Loader(rows, iter(steps), reading)]
    there = Loader(rows, iter(steps), LoaderConfig(1, 2, False, 16, "own"))
    for one, other in zip(here, there, strict=True):
        for mine, its in zip(one, other, strict=True):
            assert mine.images is not None
            assert its.images is not None
            assert mine.images.token_counts == its.images.token_counts
            mine, its = (each.images.to_device(torch.device("cpu")) for each in (mine, its))
            assert mine.keys() == its.keys()
            assert all(torch.equal(value, its[name]) for name, value in mine.items())
    there.close()


def test_the_packed_artifact_is_complete_and_says_when_it_is_not(made, tmp_path):
    packed = tmp_path / "copy"
    shutil.copytree(made[2], packed)
    assert contents(packed) == contents(made[2])
    rows = PackedRows(packed / "data" / "train")
    assert sum(len(rows.row(at).images) for at in range(len(rows))) == 9
    shutil.rmtree(packed / "media")
    with pytest.raises(ArtifactError, match=r"tensors of image .* are missing"):
        PackedRows(packed / "data" / "train").row(0)


def test_samples_with_images_are_not_wrapped(made, tmp_path):
    settings = PackSettings(sample_packing_method="wrapped")
    with pytest.raises(ConfigError, match="samples with images cannot be cut"):
        Pack(settings, made[1]).run(tmp_path)
    assert not [*tmp_path.rglob("*.arrow")]
