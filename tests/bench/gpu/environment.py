"""What there is: the GPU, the driver, packages, and what memory and a square product reach."""

import argparse
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from penstock_kernels.op import INTERPRETED
from tests.bench import peers
from tests.bench.figures import record
from tests.bench.timing import CUDA, copying, machine, medians, peak

PACKAGES = ("torch", "triton", "transformers", "peft", "flash-attn", "torchao", "bitsandbytes")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true")
    dry = parser.parse_args().dry
    print(f"{machine()}; CUDA of the build: {torch.version.cuda}; interpreted: {INTERPRETED}")
    for name in PACKAGES:
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} is not installed")
    peers.say_missing(*peers.PACKAGES)
    if CUDA:
        device = torch.cuda.get_device_properties(0)
        print(f"sm_{device.major}{device.minor}, {device.multi_processor_count} multiprocessors")
        record("memory of the device", device.total_memory / 2**30, "GiB")
    if shutil.which("nvidia-smi"):
        query = (
            "--query-gpu=name,driver_version,memory.total,clocks.sm,power.limit,mig.mode.current"
        )
        shown = subprocess.run(
            ["nvidia-smi", query, "--format=csv"], capture_output=True, text=True, check=False
        )
        print(shown.stdout.strip() or shown.stderr.strip())
    num_bytes = 2**20 if dry else 2**33
    spent = medians({"copy": copying(num_bytes)})["copy"]
    print(f"copying {num_bytes / 2**30:g} GiB: {num_bytes / spent / 1e9:.0f} GB/s")
    record("copying", num_bytes / spent / 1e9, "GB/s")
    peak(64 if dry else 8192)


if __name__ == "__main__":
    main()
