"""Memory and speed of adapters over quantized weights: `python -m tests.bench.gpu.qlora [--dry]`.

Whole models, rows of 8192, layers recomputed: tokens a second and the peak of memory of a step.
Qwen3-8B in NF4 and in NVFP4; gpt-oss-20B with its experts in bf16, as no format takes them, and
the rest in NF4.
"""

import argparse
from dataclasses import replace
from typing import Any

from penstock.engine.distributed.ranks import destroy_process_group, init_process_group
from tests.bench import train_cuda
from tests.bench.bench_gpu import ON_ONE
from tests.bench.gpu.experts import DRY as DRY_EXPERTS
from tests.bench.gpu.experts import GPT_OSS_20B
from tests.bench.timing import machine, verdict
from tests.bench.train_cuda import QWEN3_8B, Case
from tests.engine import runs


def qlora(name: str, shape: dict[str, Any], **lora: Any) -> Case:
    lora = {"enable_lora": True, "lora_rank": 16, "enable_qlora": True, **lora}
    return Case(name, shape, train=ON_ONE, lora=lora)


CASES = (
    (qlora("Qwen3-8B, nf4", QWEN3_8B, quant_format="nf4"), 16.0, {}),
    (qlora("Qwen3-8B, nvfp4", QWEN3_8B, quant_format="nvfp4"), 16.0, {}),
    (
        qlora(
            "gpt-oss-20B, nf4 but for experts",
            {**GPT_OSS_20B, "num_hidden_layers": 24},
            quant_format="nf4",
            exclude_modules=["experts"],
        ),
        56.0,
        DRY_EXPERTS["gpt-oss-20B"],
    ),
)
"""Cases, the most GiB that a step may take, and changes of their models for `--dry`."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true")
    dry = parser.parse_args().dry
    print(machine())
    ranks = init_process_group(600)
    for case, most, changes in CASES:
        if dry:
            shape = {**case.shape, **changes} if changes else dict(runs.TINY)
            case = replace(case, shape=shape, row=64, document=20)
        found = train_cuda.measure_if_it_fits(
            case.name, lambda folder, case=case: train_cuda.measure(case, folder, ranks)
        )
        if found is None:
            continue
        print(f"{case.name}: {found.tokens_per_second:,.0f} tokens/s")
        print(
            verdict(f"{case.name}: peak", found.peak_bytes / 2**30, most, at_most=True, unit="GiB")
        )
    destroy_process_group()


if __name__ == "__main__":
    main()
