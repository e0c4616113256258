"""Known machines as profiles: one GPU and the host it usually sits in.

For plans for other machines. machines.toml has a table for each: the figures of the vendor's data
sheet, and beside its peak the efficiency that training reaches; what it does not say of its host is
that of the `host` it names. The machine at hand is measured instead (`megatrain doctor`).

    peak        bf16 products with fp32 accumulation, dense (sheets often print the sparse rate,
                twice as high, and for GeForce the rate with fp16 accumulation, twice as high too)
    efficiency  the share of the peak that large products reach in training, with its reason; those
                of the 4090, H100 SXM, A6000, 3090 and GH200 are held to published runs
                (`python -m benchmarks.published`), the others follow by chip and power
    bf16        false: no units for bf16 (NVIDIA before Ampere). torch computes such products on the
                fp32 units, so that their rate is the peak, and has no fused attention for them
    fp8         rate of fp8 products with fp32 sums over the peak, by the same sheet: 2 from Ada
                and Hopper on. CDNA 3 has formats of 8 bits that torch calls by other names
    link        bytes/s each way alone. PCIe 4 x16 is 32 GB/s on paper, of which packets leave 25 to
                26; PCIe 5 x16 twice that; both ways at once each keeps about 85 % of it
    DRAM        reads and writes mixed, as the optimizer makes them: 70 to 80 % of the channels'
                sum. Desktops have two channels, servers eight or twelve
    nvlink      bytes/s each way from one card to the others of its host, 80 % of the sheet's: 300
                for NVLink 3, 450 for NVLink 4, 900 for NVLink 5, 448 for Infinity Fabric
    sockets     boards of eight cards are in hosts of two processors
    disk        one drive. A Samsung 980 Pro of 1 TB writes at 4 GB/s until 113 GB fill its cache,
                at 1.5 from then on (TechPowerUp); a server's PM9A3 is rated for 6.5 and 3.5
    rent        typical US dollars an hour of a rented one, and the host memory it comes with

Laws (tests/planning/catalog/test_reference_machines.py)
    1. No sustained rate is above the sheet's peak.
    2. A profile has the memory that the system leaves of what is installed.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.memory.kinds import update_traffic
from megatrain.optim.states import ADAMW
from megatrain.planning.machine.network import Network
from megatrain.planning.machine.profile import (
    EXPERT_WAIT_S,
    USUAL_DISK_BYTES,
    FlopRate,
    MachineProfile,
)
from megatrain.planning.machine.reserve import left_by_system

GIB = 1 << 30
_USABLE = 0.97
"""Usable share of device memory: the context takes the rest, and libraries have their own line
(reserve.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceMachine:
    """One row. Rates in units of 10^12 FLOP/s and 10^9 bytes/s, as data sheets print them."""

    name: str
    aliases: tuple[str, ...]
    source: str
    memory_gib: int
    """Memory of the card; 0: there is none, and the host's cores compute."""
    peak: float
    efficiency: float
    """The sustained rate over the peak."""
    memory_rate: float
    link_in: float
    link_out: float
    duplex_share: float = 0.85
    host: str = ""
    """Its kind of host, a key of `host` in machines.toml."""
    dram_rate: float
    ram_gib: int
    """Memory installed; of an integrated GPU, what the system reports."""
    cores: int
    disk_read: float = 5.0
    """One NVMe drive of PCIe 4."""
    disk_write: float = 1.5
    """The rate of a consumer's drive whose cache is full, as a tier's writes keep it."""
    bf16: bool = True
    """It has units for products in bf16."""
    fp8: float = 1.0
    """1: it has no units for products in fp8."""
    integrated: bool = False
    """Host and device are one memory of `ram_gib`, all of it usable by either."""
    grouped: bool = False
    """Torch has a kernel for products of experts: on NVIDIA's sm90 and sm100."""
    nvlink: float = 0.0
    """The rate of direct links to other cards of the host; 0: it has none."""
    sockets: int = 1
    """Processors of a host with many such cards, each with the memory channels of `dram_rate`."""
    rent: float = 0.0
    """US dollars an hour, typically; 0: not known."""
    rent_ram_gib: int = 0
    """Host memory that this price includes."""
    rent_source: str = "RunPod, March 2026"

    @property
    def sustained(self) -> float:
        """The rate of large products in training."""
        return self.peak * self.efficiency

    @property
    def on_host(self) -> bool:
        """Whether the host's cores compute."""
        return not self.memory_gib

    def profile(self, *, ram_bytes: int | None = None, per_host: int = 1) -> MachineProfile:
        """Return it as a profile, with so much free host memory or what such a host usually has.

        It is the host of `per_host` such cards.
        """
        sockets = min(self.sockets, per_host)
        installed = self.ram_gib * GIB * sockets
        ram_bytes = ram_bytes or (installed if self.integrated else left_by_system(installed))
        flops, dram = self.sustained * 1e12, self.dram_rate * 1e9 * sockets
        return MachineProfile(
            name=self.name,
            source=self.source,
            ram_bytes=ram_bytes,
            dram_bytes_per_s=dram,
            update_params_per_s=dram / update_traffic(ADAMW),
            cores=self.cores * sockets,
            disk_read_bytes_per_s=self.disk_read * 1e9,
            disk_write_bytes_per_s=self.disk_write * 1e9,
            disk_bytes=USUAL_DISK_BYTES,
            device=self.name,
            device_bytes=ram_bytes if self.integrated else self.usable(self.memory_gib * GIB),
            integrated=self.integrated,
            unified=self.on_host or self.integrated,
            compute_cores=float(self.cores) if self.on_host else 0.0,
            update_cores=float(self.cores) if self.on_host else 1.0,
            forward_flops=tuple(
                FlopRate(width, tokens, flops * share) for width, tokens, share in _SHAPES
            ),
            fp32_efficiency=0.5 if self.bf16 else 1.0,
            fp8_gain=self.fp8,
            device_bytes_per_s=self.memory_rate * 1e9 * 0.85,
            expert_wait_s=0.0 if self.grouped or self.on_host else EXPERT_WAIT_S,
            copy_in_bytes_per_s=self.link_in * 1e9,
            copy_out_bytes_per_s=self.link_out * 1e9,
            duplex_share=self.duplex_share,
            network=self._network if per_host > 1 else None,
        )

    @property
    def _network(self) -> Network | None:
        """The network between such cards in one host; None: nothing but host memory."""
        if not self.nvlink:
            return None
        return Network(
            name="direct links",
            peer_bytes_per_s=self.nvlink * 1e9,
            peer_latency_s=1e-5,
            own_links=True,
        )

    @staticmethod
    def usable(device_bytes: int) -> int:
        """Return what of so much device memory a run can have."""
        return int(device_bytes * _USABLE)


_SHAPES = (
    (1024, 256, 0.25),
    (1024, 1024, 0.5),
    (1024, 4096, 0.75),
    (4096, 256, 0.5),
    (4096, 1024, 0.85),
    (4096, 4096, 1.0),
)
"""Width, rows, share of the sustained rate: tiles of 128 x 256 must fill 80 to 140 processors, and
few rows or narrow matrices leave some of them idle."""


def _machines() -> tuple[ReferenceMachine, ...]:
    catalog = tomllib.loads((Path(__file__).parent / "machines.toml").read_text())
    return tuple(_machine(table, catalog["host"]) for table in catalog["machine"])


def _machine(table: dict[str, Any], hosts: dict[str, dict[str, Any]]) -> ReferenceMachine:
    fields = hosts.get(table.get("host", ""), {}) | table
    return ReferenceMachine(**fields | {"aliases": tuple(table["aliases"])})


MACHINES = _machines()
