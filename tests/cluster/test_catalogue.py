"""The catalogue of devices: figures within bounds, names without doubt, and machines as people write them."""

import pytest

from bireme.cluster.catalogue import (
    FORMATS,
    CatalogueDevice,
    catalogue,
    catalogued,
    catalogued_as,
    device_named,
    namesake,
)
from bireme.cluster.cluster import ASSUMED_LINK, Cluster
from bireme.cluster.named_machines import UNIFIED_SHARE, machines_of
from bireme.errors import BiremeError

ORDER = ("float32", "tf32", "bfloat16", "float16")
DEVICES = sorted(catalogue().values(), key=lambda one: one.word)


def strange(one: CatalogueDevice) -> bool:
    rates, slowest = one.flops_per_s, one.flops_per_s["float32"]
    # A device does 10 to 1,000 operations with a byte of its memory, in its fastest format.
    intensity = max(rates.values()) / one.memory_bytes_per_s
    return not (
        (one.memory_bytes == 0 or 4 * 2**30 <= one.memory_bytes <= 288 * 10**9)
        and 40e9 <= one.memory_bytes_per_s <= 8e12
        and 0.5e12 <= slowest <= 200e12
        and max(rates.values()) <= 32 * slowest
        # Fewer bits are never slower.
        and sorted(rates.values()) == [rates[dtype] for dtype in ORDER if dtype in rates]
        and 10 <= intensity <= 1000
        and (one.watts == 0 or 15 <= one.watts <= 1200)
        and 0.1 <= one.attained[0] <= one.attained[1] <= 0.7
        and one.source
        and one.attained_source
        and set(one.derived) <= {*FORMATS, "watts"}
    )


def test_figures_are_within_the_bounds_of_devices_that_exist() -> None:
    assert len(DEVICES) > 100
    assert [one.word for one in DEVICES if strange(one)] == []


def test_no_two_devices_share_a_name_or_a_word() -> None:
    assert len({one.name for one in DEVICES}) == len(DEVICES)
    assert len({one.word.replace("-", "") for one in DEVICES}) == len(DEVICES)
    assert [one.word for one in DEVICES if catalogued_as(one.name) is not one] == []


@pytest.mark.parametrize(
    ("word", "gib", "gb_per_s", "dtype", "tflops"),
    [
        ("h100", 80, 3350, "bfloat16", 989),
        ("a100-40gb", 40, 1555, "tf32", 156),
        ("v100", 16, 900, "float16", 125),
        ("rtx3090", 24, 936, "bfloat16", 71),
        ("rtx-a6000", 48, 768, "bfloat16", 154.8),
        ("m1-max", 0, 400, "float32", 10.4),
    ],
)
def test_known_figures_are_those_of_data_sheets(
    word: str, gib: int, gb_per_s: float, dtype: str, tflops: float
) -> None:
    one = catalogue()[word]
    assert one.memory_bytes == gib * 2**30
    assert one.memory_bytes_per_s == gb_per_s * 1e9
    assert one.flops_per_s[dtype] == pytest.approx(tflops * 1e12)


def test_a_format_without_hardware_is_computed_in_float32() -> None:
    assert catalogue()["t4"].rate("bfloat16") == catalogue()["t4"].rate("float32") == 8.1e12
    assert catalogue()["t4"].rate("float16") == 65e12
    assert device_named("t4").bfloat16_flops_per_s == 65e12, "one rate for both formats of sixteen bits"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 80GB HBM2e", None),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "rtx4060-laptop"),
        ("NVIDIA GeForce RTX 4060", "rtx4060"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("AMD Radeon RX 7900 XTX", "rx7900xtx"),
    ],
)
def test_a_driver_s_name_leads_to_its_device_or_to_none(name: str, word: str | None) -> None:
    found = catalogued_as(name)
    assert (None if found is None else found.word) == word
    assert namesake(name) == (None if found is None else found.device)


def test_a_processor_s_name_gives_no_figures_as_a_machine_may_have_few_of_its_cores() -> None:
    name = "AMD EPYC 7763 64-Core Processor"
    assert catalogued_as(name) is catalogue()["epyc-7763"]
    assert namesake(name) is None


def test_words_are_found_whatever_the_case_and_the_hyphens() -> None:
    assert catalogued("RTX 4060 Laptop").word == catalogued("rtx4060-laptop").word == "rtx4060-laptop"


# Machines.


def cluster_of(text: str) -> Cluster:
    machines = machines_of(text)
    return machines.cluster({one.device.word: (0.5, 0.25) for one in machines.machines})


def test_machines_become_servers_with_the_catalogue_s_figures_and_the_given_link() -> None:
    cluster = cluster_of("2x rtx3090+64GB, RTX4060-laptop:6GB, rtx3090 @ 100Mbit/s 20ms")
    assert [server.name for server in cluster.servers] == ["rtx3090", "rtx4060-laptop", "rtx3090-2"]
    first, second, _ = cluster.servers
    assert len(first.devices) == 2
    assert first.host_memory_bytes == 64 * 10**9
    assert second.devices[0].memory_bytes == 6 * 10**9
    assert (second.devices[0].speed, second.devices[0].update_speed) == (0.5, 0.25)
    assert cluster.bandwidth(0, 2) == 12.5e6
    assert cluster.latency(0, 2) == pytest.approx(0.02)
    assert cluster.bandwidth(0, 1) > 1e9, "within a machine"


def test_without_a_link_machines_have_the_assumed_one() -> None:
    assert cluster_of("rtx3090, rtx3090").bandwidth(0, 1) == ASSUMED_LINK.bytes_per_s
    assert cluster_of("rtx3090").servers[0].cards == ()


@pytest.mark.parametrize(
    ("link", "rate"), [("1Gbit/s", 1.25e8), ("10gbps", 1.25e9), ("1.25GB/s", 1.25e9), ("10Gb/s", 1.25e9)]
)
def test_links_are_read_in_bits_and_bytes(link: str, rate: float) -> None:
    found = machines_of(f"rtx3090 @ {link}").link
    assert found is not None
    assert found.bytes_per_s == pytest.approx(rate)


def test_a_gpu_that_shares_the_memory_of_an_apple_machine_gets_a_part_of_it() -> None:
    (machine,) = machines_of("m3-max:64GB").machines
    assert machine.memory_bytes == UNIFIED_SHARE * 64 * 10**9


def test_gpus_with_nvlink_reach_each_other_over_it() -> None:
    assert cluster_of("8x a100").bandwidth(0, 7) == 300e9


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rtx3091", "There is no device 'rtx3091' in the catalogue. Did you mean 'rtx309"),
        ("m3-max", "Apple M3 Max is sold with several sizes of memory. Give the size, such as m3-max:32GB."),
        ("rtx3090, ", "'' is no machine. Write it as rtx3090, 2x rtx3090 or m3-max:64GB."),
        ("rtx4070 rtx3060", "'rtx4070 rtx3060' are 2 machines. Write a comma between two machines."),
        ("rtx3090:lots", "The memory of rtx3090 is 'lots'; write bytes as 6GB, 24GiB or 5e9."),
        ("rtx3090:0", "The memory of rtx3090 is 0; it must be 1 MiB to 1 EiB."),
        ("rtx3090+1e30GB", "The host memory of rtx3090 is 1e30GB; it must be 1 MiB to 1 EiB."),
        ("65x rtx3090", "65x rtx3090 has 65 devices; it must have 1 to 64."),
        ("rtx3090 @ fast", "'fast' is no link. Write it as 1Gbit/s, 100Mbit/s 20ms or 1.25GB/s."),
        ("rtx3090 @ 0Gbit/s", "'0Gbit/s' is no link."),
        (",".join(["rtx3090"] * 65), "There are 65 machines; the most is 64."),
    ],
)
def test_what_is_no_machine_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(BiremeError) as refused:
        machines_of(text)
    assert sentence in str(refused.value)
