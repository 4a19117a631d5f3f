"""Every Triton kernel compiles for an H100, on machines without one.

In a process of its own: under Triton's interpreter, which other tests need, nothing compiles.
"""

import subprocess
import sys

import pytest

from penstock.core.env import child_environment
from penstock_kernels.op import HAS_TRITON

SHARED_MEMORY = 232_448
"""Bytes that one thread block may use on sm_90."""


def compile_all() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from penstock_kernels.rms_norm import triton as rms_norm
    from penstock_kernels.swiglu import triton as swiglu

    def check(kernel, dtypes, block):
        names = kernel.arg_names
        signature = dict(zip(names, [*dtypes, "constexpr"], strict=True))
        source = ASTSource(kernel, signature, {(names.index("BLOCK"),): block})
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= SHARED_MEMORY

    for data in ("*fp32", "*bf16"):
        check(swiglu._forward, [*[data] * 3, "i32"], 1024)
        check(swiglu._backward, [*[data] * 5, "i32"], 1024)
        for weight in {"*fp32", data}:
            forward = [data, weight, data, "*fp32", "i32", "fp32"]
            check(rms_norm._forward, forward, 4096)
            backward = [data, weight, data, "*fp32", data, "*fp32", "i32", "i32", "i32"]
            check(rms_norm._backward, backward, 4096)


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not published for this system")
@pytest.mark.slow
def test_every_kernel_compiles_for_sm_90(tmp_path):
    environment = child_environment(
        {
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(tmp_path),  # so that something is compiled each time
        }
    )
    code = "from tests.kernels.test_compiles_for_gpus import compile_all; compile_all()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
