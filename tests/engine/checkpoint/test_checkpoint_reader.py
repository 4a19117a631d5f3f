"""Reading checkpoints without the model, the optimizer or the layout that wrote them."""

import base64
import json
import pickle
import zlib
from pathlib import PosixPath

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    TensorProperties,
    TensorStorageMetadata,
)

from penstock.core.errors import ArtifactError
from penstock.engine.checkpoint.model_reader import CheckpointReader
from penstock.engine.checkpoint.safe_dcp_reader import CheckpointFiles
from tests.conftest import ROOT
from tests.stages.checkpoints import FOLDER, trained_artifact

PARAMETERS = {
    "model.embed_tokens.weight": torch.randn(6, 4),
    "model.norm.weight": torch.randn(4, dtype=torch.bfloat16),
}


def test_reads_the_asked_parameters_and_no_optimizer_state(tmp_path):
    trained = trained_artifact(tmp_path, PARAMETERS, epoch=2)
    reader = CheckpointReader(trained.path / FOLDER)
    assert reader.state["epoch"] == 2
    assert reader.shapes() == {n: (tuple(t.shape), t.dtype) for n, t in PARAMETERS.items()}
    for name, tensor in PARAMETERS.items():
        found = reader.read([name])
        assert list(found) == [name]
        torch.testing.assert_close(found[name], tensor, atol=0, rtol=0)


def test_a_missing_parameter_is_named(tmp_path):
    reader = CheckpointReader(trained_artifact(tmp_path, PARAMETERS).path / FOLDER)
    with pytest.raises(ArtifactError, match=r"lacks 1 of 2 parameters, first lm_head\.weight"):
        reader.read(["model.norm.weight", "lm_head.weight"])


RECORDED = json.loads((ROOT / "tests/golden/dcp_metadata.json").read_text())
"""By Python version: zlib in base64 of the `.metadata` that `dcp.save({"model.weight":
torch.arange(6.0).reshape(2, 3)})` wrote under it. What they pickle otherwise than 3.11.7:
3.11.2 enum members, 3.13.0 paths."""


@pytest.mark.parametrize("version", RECORDED)
def test_metadata_that_another_python_wrote_is_read(tmp_path, version):
    (tmp_path / ".metadata").write_bytes(zlib.decompress(base64.b64decode(RECORDED[version])))
    metadata = CheckpointFiles(tmp_path).read_metadata()
    entry = metadata.state_dict_metadata["model.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.size == (2, 3)
    assert entry.properties == TensorProperties(torch.float32)
    assert metadata.storage_meta is not None
    assert isinstance(metadata.storage_meta.checkpoint_id, PosixPath)


class _Harm:
    def __init__(self, function=print, words=("code of the file ran",)):
        self.call = function, words

    def __reduce__(self):
        return self.call


ATTRIBUTES = [(PosixPath, "home"), (_MEM_FORMAT_ENCODING, "mro"), (torch.Size, "numel")]


@pytest.mark.parametrize(
    "content",
    [
        *(pickle.dumps(_Harm(getattr, words)) for words in ATTRIBUTES),
        *(pickle.dumps(_Harm()), b"", b"\x80\x04half", pickle.dumps(1)),
    ],
)
def test_metadata_that_is_not_metadata_is_refused_and_never_run(tmp_path, content, capsys):
    folder = trained_artifact(tmp_path, PARAMETERS).path / FOLDER
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"is damaged: \.metadata "):
        CheckpointReader(folder).shapes()
    assert capsys.readouterr().out == ""


def test_metadata_may_not_lead_out_of_the_folder(tmp_path):
    folder = trained_artifact(tmp_path / "run", PARAMETERS).path / FOLDER
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    first = next(iter(metadata.storage_data.values()))
    first.relative_path = "../../../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ArtifactError, match=r"\.\./\.\./\.\./secret"):
        CheckpointReader(folder).read(["model.norm.weight"])
