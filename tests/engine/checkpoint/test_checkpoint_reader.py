"""Reading checkpoints without the model, the optimizer or the layout that wrote them."""

import pickle

import pytest
import torch

from penstock.core.errors import ArtifactError
from penstock.engine.checkpoint.model_reader import CheckpointReader
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


class _Harm:
    def __reduce__(self):
        return (print, ("code of the file ran",))


@pytest.mark.parametrize("content", [pickle.dumps(_Harm()), b"", b"\x80\x04half", pickle.dumps(1)])
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
