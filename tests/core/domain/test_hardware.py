from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.hardware import (
    CPU,
    GIB,
    GPU_KINDS,
    GpuLink,
    GpuSet,
    Hardware,
    UnknownGpu,
    find_kind,
    from_nvml,
    parse_gpus,
)
from core.domain.records import Confidence
from tests.doubles.each import each


@each(
    ("nvml", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-ADA"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX-3090"),
    ],
)
def test_gpus_are_recognised_by_nvml_names(nvml: str, kind: str) -> None:
    assert find_kind(nvml) == GPU_KINDS[kind]


@pytest.mark.parametrize("text", ["4xH100", "4 x h100", "4*H100-SXM5", "4×H100"])
def test_counts_may_be_written_in_several_ways(text: str) -> None:
    gpus = parse_gpus(text)
    assert (gpus.kind.name, gpus.count, str(gpus)) == ("H100-SXM", 4, "4xH100-SXM")


def test_one_gpu_and_no_gpu() -> None:
    assert parse_gpus("H200").count == 1
    assert parse_gpus("cpu").is_cpu
    assert parse_gpus("2xcpu").kind == CPU


def test_several_nodes_are_counted_before_their_gpus() -> None:
    two = parse_gpus("2x8xH100")
    assert (two.count, two.nodes, two.per_node, str(two)) == (16, 2, 8, "2x8xH100-SXM")
    assert parse_gpus(str(two)) == two
    assert [two.take(count).nodes for count in (1, 8, 16)] == [1, 1, 2]
    assert str(two.in_nodes(1)) == "8xH100-SXM"
    assert parse_gpus("2x2xH100-NVL").link is GpuLink.NVLINK_PAIR
    with pytest.raises(ValueError, match="cannot be as many"):
        GpuSet(kind=two.kind, count=15, nodes=2)


@each("text", ["", "4x", "x", "4xGTX1080", "0xH100", "9999xH100", "4"])
def test_unknown_gpu_is_rejected_with_the_known_kinds(text: str) -> None:
    with pytest.raises(UnknownGpu, match=r"4xH100"):
        parse_gpus(text)


@given(st.text(max_size=40))
def test_any_text_is_gpus_or_an_error(text: str) -> None:
    with contextlib.suppress(UnknownGpu):
        assert parse_gpus(text).count >= 1


def test_links_depend_on_the_number_of_gpus() -> None:
    assert parse_gpus("1xH100").link is GpuLink.NONE
    assert parse_gpus("8xH100").link is GpuLink.NVLINK
    assert parse_gpus("2xH100-NVL").link is GpuLink.NVLINK_PAIR
    assert parse_gpus("4xH100-NVL").link is GpuLink.PCIE
    assert parse_gpus("4xRTX-4090").link is GpuLink.PCIE


def test_measured_known_gpu_keeps_its_peaks_and_at_most_its_memory() -> None:
    kind = from_nvml("NVIDIA H100 80GB HBM3", 85_520_809_984, (9, 0), nvlink=True)
    assert kind.bf16_flops == 989e12
    assert kind.confidence is Confidence.CONFIG
    assert kind.memory_bytes <= GPU_KINDS["H100-SXM"].memory_bytes
    assert from_nvml("NVIDIA H100 80GB HBM3", 85_520_809_984, (9, 0), nvlink=False).link is GpuLink.PCIE


def test_a_slice_of_a_gpu_has_a_share_of_its_peaks() -> None:
    kind = from_nvml("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 * GIB, (9, 0))
    assert kind.memory_bytes < 10 * GIB
    assert kind.bf16_flops < 989e12 / 6
    assert "SLICE" in kind.name


@pytest.mark.parametrize(
    ("capability", "fp8"), [((10, 0), True), ((9, 0), True), ((8, 0), False), ((1, 0), False)]
)
def test_an_unknown_gpu_counts_as_a_slow_one_of_its_generation(
    capability: tuple[int, int], fp8: bool
) -> None:
    kind = from_nvml("Frobnicator 9000", 48 * GIB, capability)
    assert kind.confidence is Confidence.GUESS
    assert kind.has_fp8 is fp8
    assert kind.bf16_flops <= 500e12
    assert kind.has_bf16 is (capability >= (8, 0))


@given(st.text(max_size=60), st.integers(0, 2**45), st.tuples(st.integers(0, 20), st.integers(0, 9)))
def test_any_answer_of_nvml_yields_a_kind(name: str, total: int, capability: tuple[int, int]) -> None:
    assert from_nvml(name, total, capability).memory_bytes > 0


def test_every_kind_is_known_by_its_own_name_and_its_peaks_are_dense() -> None:
    for kind in GPU_KINDS.values():
        assert parse_gpus(f"4x{kind.name}") == GpuSet(kind=kind, count=4)
        assert kind.fp8_flops is None or kind.fp8_flops == pytest.approx(2 * kind.bf16_flops, rel=0.02)
    assert (
        GPU_KINDS["H100-PCIE"].bf16_flops
        < GPU_KINDS["H100-NVL"].bf16_flops
        < GPU_KINDS["H100-SXM"].bf16_flops
    )


@pytest.mark.parametrize("cores", [None, 0])
def test_a_host_has_at_least_one_core(cores: int | None) -> None:
    host = Hardware.model_validate({"gpus": parse_gpus("H100"), "cpu_cores": cores})
    assert host.cpu_cores == 1
