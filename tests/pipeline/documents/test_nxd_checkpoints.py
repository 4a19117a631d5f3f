"""A checkpoint of NeuronX Distributed is refused before any work, with the way to convert it."""

import pytest

from penstock.config.loading.load import loads
from penstock.core.errors import ConfigError
from penstock.pipeline.plan import plan
from tests.config.values import smallest

SHARD = "dp_rank_00_tp_rank_00_pp_rank_00"


@pytest.fixture(params=["step_20/model/{}.pt", "model/{}.pt.tensors/tensor_0.pt", "{}.pt"])
def checkpoint(tmp_path, request):
    file = tmp_path / "nxd" / request.param.format(SHARD)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    return tmp_path / "nxd"


@pytest.mark.parametrize("field", ["init_checkpoint_path", "load_checkpoint_path"])
def test_a_checkpoint_of_nxd_is_refused_with_the_way_to_convert_it(tmp_path, checkpoint, field):
    train = {"output_dir": str(tmp_path / "out"), field: str(checkpoint)}
    run = loads(smallest(train=train, data={"dataset_prepared_path": str(tmp_path / "data")}))
    with pytest.raises(ConfigError, match=rf"train.{field} .* NeuronX(.|\n)*checkpoint_converter"):
        plan(run)
    assert not (tmp_path / "data").exists()
