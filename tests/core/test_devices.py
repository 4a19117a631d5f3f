import pytest

from penstock.core.machine.device_specs import find_device, peak_flops

# Of makers' data sheets, in TFLOP/s of dense bf16.
PEAKS = {
    "NVIDIA H200": 989.4,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H20": 148,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA GeForce RTX 4090": 165.2,
    "AMD Instinct MI300X": 1307.4,
}


@pytest.mark.parametrize("name", PEAKS)
def test_a_device_is_known_by_its_whole_name(name):
    assert peak_flops(name, "bf16") == pytest.approx(PEAKS[name] * 1e12)


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H2000", ""]
)
def test_one_that_is_called_alike_is_not_known(name):
    assert find_device(name) is None
    assert peak_flops(name, "bf16") is None


def test_memory_is_the_smaller_of_what_the_name_and_the_table_say():
    sizes = {"A100-SXM4-80GB": 80, "A100-SXM4-40GB": 40, "V100-16GB": 16, "GH200 480GB": 96}
    for name, gigabytes in sizes.items():
        device = find_device(name)
        assert device
        assert device.memory == gigabytes * 1e9


def test_a_device_without_a_precision_has_no_peak_in_it():
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_flops("Tesla V100-SXM2-32GB", "fp16") == 125e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None
