"""GPU kinds and sets of GPUs: memory, peak FLOP/s, links; and their host."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Self

from pydantic import Field, field_validator, model_validator

from core.domain.errors import GodMinerError
from core.domain.records import Confidence, Record

GIB = 2**30
#: That one set of GPUs may have.
MOST_GPUS = 1024


class UnknownGpu(GodMinerError):
    """A GPU description that names no known kind."""

    code = "unknown_gpu"


class Device(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"


class GpuLink(StrEnum):
    """The link between the chosen GPUs."""

    NONE = "none"  # a single one
    PCIE = "pcie"
    NVLINK_PAIR = "nvlink-pair"  # bridges join two GPUs; beyond a pair it is PCIe
    NVLINK = "nvlink"  # all to all (SXM boards with NVSwitch)


class GpuKind(Record):
    """One kind of GPU."""

    #: Our name for it: "H100-SXM", "A100-SXM-40GB", "cpu".
    name: str
    device: Device = Device.CUDA
    #: What CUDA can hand out at most (`torch.cuda.mem_get_info` total), not what the box says.
    memory_bytes: int = Field(ge=1)
    #: Dense peak, FLOP/s. Marketing sheets print twice that ("with sparsity").
    bf16_flops: float = Field(gt=0)
    #: None where the tensor cores have no fp8 (before Ada and Hopper).
    fp8_flops: float | None = None
    #: Memory bandwidth, bytes/s.
    bandwidth: float = Field(gt=0)
    link: GpuLink = GpuLink.PCIE
    #: What one GPU sends to the others while it also receives, bytes/s.
    link_bandwidth: float = Field(gt=0)
    compute_capability: tuple[int, int] = (0, 0)
    #: TABLE for a known GPU, CONFIG when measured, GUESS when estimated from NVML's answers.
    confidence: Confidence = Confidence.TABLE

    @property
    def has_fp8(self) -> bool:
        return self.fp8_flops is not None

    @property
    def has_bf16(self) -> bool:
        return self.device is Device.CPU or self.compute_capability >= (8, 0)


class GpuSet(Record):
    """GPUs of one kind, as many in each node: all of them, or those that a plan uses."""

    kind: GpuKind
    #: Of all nodes together.
    count: int = Field(ge=1, le=MOST_GPUS)
    nodes: int = Field(default=1, ge=1, le=64)

    @model_validator(mode="after")
    def nodes_are_alike(self) -> Self:
        if self.count % self.nodes:
            raise ValueError(f"{self.count} GPUs cannot be as many on each of {self.nodes} nodes")
        return self

    @property
    def per_node(self) -> int:
        return self.count // self.nodes

    @property
    def link(self) -> GpuLink:
        """Between the GPUs of a node."""
        if self.per_node == 1:
            return GpuLink.NONE
        if self.kind.link is GpuLink.NVLINK_PAIR and self.per_node > 2:
            return GpuLink.PCIE
        return self.kind.link

    @property
    def memory_bytes(self) -> int:
        """Memory of one GPU. Nothing here ever adds GPUs up: without FSDP no tensor is spread over two."""
        return self.kind.memory_bytes

    @property
    def is_cpu(self) -> bool:
        return self.kind.device is Device.CPU

    def take(self, count: int) -> GpuSet:
        """Take `count` of them, from as few nodes as possible; several nodes are taken whole."""
        return GpuSet(kind=self.kind, count=count, nodes=-(-count // self.per_node))

    def in_nodes(self, most: int) -> GpuSet:
        """The GPUs of so many of the nodes at most."""
        nodes = min(self.nodes, most)
        return GpuSet(kind=self.kind, count=nodes * self.per_node, nodes=nodes)

    def __str__(self) -> str:
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.per_node}x{self.kind.name}"


class Hardware(Record):
    """A host, or each of several nodes, as far as plans need it. Rates are assumptions until the daemon has
    measured its own."""

    gpus: GpuSet
    #: All GPUs of the host, if `gpus` are those of one job; None if `gpus` are all.
    host_gpus: int | None = Field(default=None, ge=1)
    cpu_cores: int = Field(default=32, ge=1)
    #: The physical cores, each with the numbers of its hardware threads. Empty: unknown; cores count from 0.
    cores: tuple[tuple[int, ...], ...] = ()
    #: The cores near each GPU of the host, as docker's cpuset; "": unknown. Empty: unknown for all.
    near_cores: tuple[str, ...] = ()
    #: Indices in `near_cores` of one job's GPUs. Empty: the first ones.
    gpu_places: tuple[int, ...] = ()
    memory_bytes: int = Field(default=256 * 10**9, ge=1)
    #: Free space where checkpoints go, or None if not known: then it is not checked.
    disk_free_bytes: int | None = Field(default=None, ge=0)
    #: From the hub to this host and back, bytes/s.
    download_rate: float = Field(default=200e6, gt=0)
    upload_rate: float = Field(default=50e6, gt=0)
    #: Reading weights into GPU memory, bytes/s.
    disk_rate: float = Field(default=1.5e9, gt=0)

    @field_validator("cpu_cores", mode="before")
    @classmethod
    def never_zero_cores(cls, value: object) -> object:
        """`os.cpu_count()` may return None in odd containers; there is always one core."""
        return 1 if value in (None, 0) else value


_T = 1e12
_GB = 1e9
#: Between GPUs without NVLink, bytes/s each way.
PCIE_BANDWIDTH = 28 * _GB


def _gpu(
    name: str,
    gib: float,
    bf16: float,
    fp8: float | None,
    bandwidth: float,
    link: GpuLink,
    link_gb: float,
    capability: tuple[int, int],
) -> GpuKind:
    return GpuKind(
        name=name,
        memory_bytes=round(gib * GIB),
        bf16_flops=bf16 * _T,
        fp8_flops=None if fp8 is None else fp8 * _T,
        bandwidth=bandwidth * _GB,
        link=link,
        link_bandwidth=link_gb * _GB,
        compute_capability=capability,
    )


#: Dense peaks in TFLOP/s and rates in GB/s from NVIDIA's data sheets (sparsity figures halved); usable GiB
#: is what CUDA reports as total on such a GPU. NVLink is given per direction: 900 GB/s "total" is 450.
#: Before each the pattern for its names, however NVML, sellers and people spell them: over letters and digits
#: alone, and the first match counts.
_KINDS: tuple[tuple[str, GpuKind], ...] = (
    (r"b200", _gpu("B200", 178.3, 2250, 4500, 8000, GpuLink.NVLINK, 900, (10, 0))),
    (r"h200", _gpu("H200", 139.8, 989, 1979, 4800, GpuLink.NVLINK, 450, (9, 0))),
    (r"h100.*nvl", _gpu("H100-NVL", 93.0, 835, 1671, 3900, GpuLink.NVLINK_PAIR, 300, (9, 0))),
    (r"h100.*pcie", _gpu("H100-PCIE", 79.1, 756, 1513, 2000, GpuLink.NVLINK_PAIR, 300, (9, 0))),
    (r"h100", _gpu("H100-SXM", 79.1, 989, 1979, 3350, GpuLink.NVLINK, 450, (9, 0))),
    (
        r"a100.*pcie.*40|a100.*40.*pcie",
        _gpu("A100-PCIE-40GB", 39.4, 312, None, 1555, GpuLink.NVLINK_PAIR, 300, (8, 0)),
    ),
    (r"a100.*pcie", _gpu("A100-PCIE-80GB", 79.1, 312, None, 1935, GpuLink.NVLINK_PAIR, 300, (8, 0))),
    (r"a100.*40", _gpu("A100-SXM-40GB", 39.4, 312, None, 1555, GpuLink.NVLINK, 300, (8, 0))),
    (r"a100", _gpu("A100-SXM-80GB", 79.1, 312, None, 2039, GpuLink.NVLINK, 300, (8, 0))),
    (r"l40s", _gpu("L40S", 44.4, 362, 733, 864, GpuLink.PCIE, 28, (8, 9))),
    (r"l40", _gpu("L40", 44.4, 181, 362, 864, GpuLink.PCIE, 28, (8, 9))),
    (r"l4(?!\d)", _gpu("L4", 22.0, 121, 242, 300, GpuLink.PCIE, 28, (8, 9))),
    (r"6000ada|ada6000", _gpu("RTX-6000-ADA", 47.4, 364, 728, 960, GpuLink.PCIE, 28, (8, 9))),
    (r"a6000", _gpu("A6000", 47.4, 155, None, 768, GpuLink.NVLINK_PAIR, 56, (8, 6))),
    (r"a40(?!\d)", _gpu("A40", 44.4, 150, None, 696, GpuLink.NVLINK_PAIR, 56, (8, 6))),
    (r"5090(?!d)", _gpu("RTX-5090", 31.3, 210, 419, 1792, GpuLink.PCIE, 55, (12, 0))),
    (r"4090(?!d)", _gpu("RTX-4090", 23.6, 165, 330, 1008, GpuLink.PCIE, 28, (8, 9))),
    (r"3090", _gpu("RTX-3090", 23.6, 71, None, 936, GpuLink.NVLINK_PAIR, 56, (8, 6))),
)
GPU_KINDS: dict[str, GpuKind] = {kind.name: kind for _, kind in _KINDS}

#: The pretended GPU of a host without any: enough for the demo and for tests, never chosen automatically. Two
#: server CPUs took about 0.6 and 1.25 times as long for a step as these speeds say.
CPU = GpuKind(
    name="cpu",
    device=Device.CPU,
    memory_bytes=8 * 10**9,
    bf16_flops=1.5e11,
    bandwidth=60e9,
    link_bandwidth=5e9,
    confidence=Confidence.GUESS,
)

_COUNTED = re.compile(r"(?:(?:(\d{1,2})\s*[x*×]\s*)?(\d{1,4})\s*[x*×]\s*)?(\S.*)", re.IGNORECASE)
#: NVML's total holds what the driver keeps for itself; CUDA hands out about this much less.
_DRIVER_KEEPS = 600 * 2**20
#: (least capability, dense bf16 TFLOP/s, fp8?, GB/s): what every GPU of that generation reaches.
_BY_GENERATION: tuple[tuple[tuple[int, int], float, bool, float], ...] = (
    ((10, 0), 500, True, 2000),
    ((9, 0), 400, True, 1500),
    ((8, 9), 100, True, 400),
    ((8, 0), 60, False, 400),
    ((7, 0), 30, False, 300),
    ((0, 0), 8, False, 200),
)


def find_kind(name: str) -> GpuKind | None:
    """The kind that a name means, however it is spelled; None for an unknown GPU."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    if letters == "cpu":
        return CPU
    return next((kind for pattern, kind in _KINDS if re.search(pattern, letters)), None)


def from_nvml(
    name: str, total_bytes: int, capability: tuple[int, int], nvlink: bool | None = None
) -> GpuKind:
    """A kind from what NVML reports. A slice (MIG) of a known GPU gets its share of the peaks."""
    usable = max(total_bytes - _DRIVER_KEEPS, 2**28)
    known = find_kind(name)
    if known is None:
        return _unknown(name, usable, capability, bool(nvlink))
    share = min(usable / known.memory_bytes, 1.0)
    if share > 0.9:
        link = known.link if nvlink is not False else GpuLink.PCIE
        slower = known.link_bandwidth if link is known.link else min(known.link_bandwidth, PCIE_BANDWIDTH)
        return known.model_copy(
            update={
                "memory_bytes": min(known.memory_bytes, usable),
                "link": link,
                "link_bandwidth": slower,
                "confidence": Confidence.CONFIG,
            }
        )
    return known.model_copy(
        update={
            "name": f"{known.name}-{round(total_bytes / 1e9)}GB-SLICE",
            "memory_bytes": usable,
            "bf16_flops": known.bf16_flops * share,
            "fp8_flops": known.fp8_flops and known.fp8_flops * share,
            "bandwidth": known.bandwidth * share,
            "link": GpuLink.PCIE,
            "link_bandwidth": min(known.link_bandwidth, PCIE_BANDWIDTH),
            "confidence": Confidence.NAME,
        }
    )


def _unknown(name: str, usable: int, capability: tuple[int, int], nvlink: bool) -> GpuKind:
    """Deliberately slow: a plan that ends early costs less than one that ends late."""
    _, bf16, fp8, bandwidth = next(row for row in _BY_GENERATION if capability >= row[0])
    return GpuKind(
        name=re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:60] or "unknown",
        memory_bytes=usable,
        bf16_flops=bf16 * _T,
        fp8_flops=2 * bf16 * _T if fp8 else None,
        bandwidth=bandwidth * _GB,
        link=GpuLink.NVLINK if nvlink else GpuLink.PCIE,
        link_bandwidth=(100 if nvlink else 20) * _GB,
        compute_capability=capability,
        confidence=Confidence.GUESS,
    )


def parse_gpus(text: str) -> GpuSet:
    """`4xH100`, `H200`, `2 x A100-PCIE-40GB`, `cpu`; `2x8xH100` is two nodes with eight each. Plain H100 and
    A100 mean the SXM boards with 80 GB."""
    match = _COUNTED.fullmatch(text.strip())
    kind = find_kind(match[3]) if match else None
    if match is None or kind is None:
        known = ", ".join([*GPU_KINDS, "cpu"])
        raise UnknownGpu(f"GPUs {text!r} name no known kind; write COUNTxKIND like 4xH100, of {known}")
    nodes, each = int(match[1] or 1), int(match[2] or 1)
    count = nodes * each
    if not 1 <= count <= MOST_GPUS:
        raise UnknownGpu(f"GPUs {text!r} count {count}; 1 to {MOST_GPUS} is meant, like 4xH100")
    if nodes > 64:
        raise UnknownGpu(f"GPUs {text!r} name {nodes} nodes; 1 to 64 is meant, like 2x8xH100")
    return GpuSet(kind=kind, count=count, nodes=nodes)
