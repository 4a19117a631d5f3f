"""What a dry run reports of operations that sync, copy, or would fail on a GPU."""

import json
import subprocess
import sys
from typing import Any

import pytest

EXPECTED: dict[str, dict[str, list[str]]] = {
    "host tensor in all-reduce": {"faults": ["host tensor in allreduce"]},
    "non-contiguous all-reduce": {"faults": ["non-contiguous tensor in allreduce"]},
    "empty all-reduce": {"faults": ["empty tensor in allreduce"]},
    "mixed devices": {"faults": ["aten::add_ mixes host and device tensors"]},
    "item": {"syncs": ["item"], "kernels": ["sum"]},
    "branch on a value": {"syncs": ["item"], "kernels": ["sum", "gt"]},
    "nonzero": {"syncs": ["nonzero"]},
    "boolean index": {"syncs": ["mask as index"], "kernels": ["gt", "index"]},
    "tolist": {"syncs": ["tolist"], "kernels": ["sum"]},
    "blocking copy to the host": {
        "syncs": ["blocking copy to host"],
        "copies": ["copy to host"],
    },
    "copy to the host": {"copies": ["copy to host"]},
    "blocking copy from the host": {
        "syncs": ["blocking copy from pageable host memory"],
        "copies": ["copy from pageable host memory"],
    },
    "copy from the host": {"copies": ["copy from host"]},
    "copy from pageable memory": {
        "syncs": ["blocking copy from pageable host memory"],
        "copies": ["copy from pageable host memory"],
    },
    "tensor of a list": {
        "syncs": ["blocking copy from pageable host memory"],
        "copies": ["copy from pageable host memory"],
    },
    "repeat_interleave": {"syncs": ["repeat_interleave without output_size"]},
    "synchronize": {"syncs": ["torch.cuda.synchronize"]},
    "backward": {"kernels": ["pow", "sum", "ones_like", "pow", "mul", "mul"]},
    "nothing": {"kernels": ["add"]},
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.dryrun.planted"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_planted_is_found(found: dict[str, Any], name: str) -> None:
    one = found[name]
    for kind in ("faults", "syncs", "copies"):
        assert one[kind] == EXPECTED[name].get(kind, []), kind
    if kernels := EXPECTED[name].get("kernels"):
        assert one["kernels"] == kernels
    assert bool(one["raised"]) == (name == "mixed devices")


def test_every_plant_is_expected(found: dict[str, Any]) -> None:
    assert found.keys() == EXPECTED.keys()
