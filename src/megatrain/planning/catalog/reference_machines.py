"""Known machines as profiles: one GPU and the host it usually sits in.

For plans without the machine at hand. Each row gives what the vendor's data sheet says and what is
sustained of it; a machine that is at hand is measured instead (`megatrain doctor`).

    peak        bf16 products with fp32 accumulation, dense (sheets often print the sparse rate,
                twice as high, and for GeForce the rate with fp16 accumulation, twice as high too)
    sustained   what large products reach in training, and why, beside each row
    link        bytes/s each way alone. PCIe 4 x16 is 32 GB/s on paper, of which packets leave 25 to
                26; PCIe 5 x16 twice that; both ways at once each keeps about 85 % of it
    DRAM        reads and writes mixed, as the optimizer makes them: 70 to 80 % of the channels'
                sum. Desktops have two channels, servers eight or twelve

Law (tests/planning/catalog/test_reference_machines.py): no sustained figure is above the card's own
limit, the sheet's peak at the clock it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.planning.machine.profile import FlopRate, MachineProfile

GIB = 1 << 30
_USABLE = 0.94
"""Of device memory: the context, the libraries' workspaces and fragments take the rest."""
_UPDATE_BYTES = 26
"""What the optimizer's kernel moves per param at the speed of DRAM: it reads the gradient (2), and
reads and writes weights (2), the rest of the master (2) and two moments (4 each)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceMachine:
    """One row. Rates in units of 10^12 FLOP/s and 10^9 bytes/s, as data sheets print them."""

    name: str
    aliases: tuple[str, ...]
    source: str
    memory_gib: int
    peak: float
    sustained: float
    memory_rate: float
    link_in: float
    link_out: float
    duplex_share: float = 0.85
    dram_rate: float
    ram_gib: int
    cores: int
    disk_read: float = 5.0
    """One NVMe drive of PCIe 4."""
    disk_write: float = 3.0
    clock_share: float = 1.0
    """Clock held in training over the boost clock of the sheet, where it is known to be higher."""
    unified: bool = False

    def profile(self, *, ram_bytes: int | None = None) -> MachineProfile:
        """Return it as a profile, with so much host memory or what such a host usually has."""
        flops, dram = self.sustained * 1e12, self.dram_rate * 1e9
        return MachineProfile(
            name=self.name,
            source=self.source,
            ram_bytes=ram_bytes or self.ram_gib * GIB,
            dram_bytes_per_s=dram,
            update_params_per_s=dram / _UPDATE_BYTES,
            cores=self.cores,
            disk_read_bytes_per_s=self.disk_read * 1e9,
            disk_write_bytes_per_s=self.disk_write * 1e9,
            device=self.name,
            device_bytes=0 if self.unified else self.usable(self.memory_gib * GIB),
            unified=self.unified,
            forward_flops=tuple(
                FlopRate(width, tokens, flops * share) for width, tokens, share in _SHAPES
            ),
            device_bytes_per_s=self.memory_rate * 1e9 * 0.85,
            copy_in_bytes_per_s=self.link_in * 1e9,
            copy_out_bytes_per_s=self.link_out * 1e9,
            duplex_share=self.duplex_share,
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

MACHINES = (
    ReferenceMachine(
        name="RTX 3060 12GB",
        aliases=("3060",),
        source="NVIDIA Ampere GA10x whitepaper; host: 2 channels of DDR4-3200",
        memory_gib=12,
        peak=25.6,
        sustained=22.0,  # 86 %: as the 3090 below
        memory_rate=360,
        link_in=25,
        link_out=25,
        dram_rate=40,
        ram_gib=64,
        cores=8,
    ),
    ReferenceMachine(
        name="RTX 3080 10GB",
        aliases=("3080",),
        source="NVIDIA Ampere GA102 whitepaper; host: 2 channels of DDR4-3200",
        memory_gib=10,
        peak=59.5,
        sustained=50.0,  # 84 %: as the 3090 below
        memory_rate=760,
        link_in=25,
        link_out=25,
        dram_rate=40,
        ram_gib=64,
        cores=8,
    ),
    ReferenceMachine(
        name="RTX 3090",
        aliases=("3090",),
        source="NVIDIA Ampere GA102 whitepaper; host: 2 channels of DDR4-3200",
        memory_gib=24,
        peak=71.2,
        sustained=60.0,  # 84 %: at 350 W the clock falls below boost under full tensor load
        memory_rate=936,
        link_in=24,
        link_out=24,
        dram_rate=40,
        ram_gib=128,
        cores=12,
    ),
    ReferenceMachine(
        name="RTX 4090",
        aliases=("4090",),
        source="NVIDIA Ada whitepaper; host: 2 channels of DDR5-5600",
        memory_gib=24,
        peak=165.2,
        # Cards hold 2.65 to 2.75 GHz where the sheet's rate is for 2.52: products with fp32
        # accumulation run at half the tensor rate and do not reach the power limit. 91 % of that.
        sustained=160.0,
        clock_share=1.07,
        memory_rate=1008,
        link_in=24,
        link_out=24,
        dram_rate=62,
        ram_gib=128,
        cores=16,
    ),
    ReferenceMachine(
        name="RTX 5060",
        aliases=("5060",),
        source="published figures as remembered, not checked; host: 2 channels of DDR5-5600",
        memory_gib=8,
        peak=38.4,
        sustained=35.0,  # 91 %: as the 5090 below; 8 lanes of PCIe 5
        memory_rate=448,
        link_in=25,
        link_out=25,
        dram_rate=62,
        ram_gib=64,
        cores=8,
    ),
    ReferenceMachine(
        name="RTX 5060 Ti 16GB",
        aliases=("5060ti",),
        source="published figures as remembered, not checked; host: 2 channels of DDR5-5600",
        memory_gib=16,
        peak=47.4,
        sustained=43.0,  # 91 %: as the 5090 below; 8 lanes of PCIe 5
        memory_rate=448,
        link_in=25,
        link_out=25,
        dram_rate=62,
        ram_gib=64,
        cores=8,
    ),
    ReferenceMachine(
        name="RTX 5070",
        aliases=("5070",),
        source="NVIDIA RTX Blackwell whitepaper; host: 2 channels of DDR5-5600",
        memory_gib=12,
        peak=61.7,
        sustained=57.0,  # 92 %: as the 5090 below
        memory_rate=672,
        link_in=50,
        link_out=50,
        dram_rate=62,
        ram_gib=64,
        cores=12,
    ),
    ReferenceMachine(
        name="RTX 5070 Ti",
        aliases=("5070ti",),
        source="NVIDIA RTX Blackwell whitepaper; host: 2 channels of DDR5-5600",
        memory_gib=16,
        peak=87.9,
        sustained=81.0,  # 92 %: as the 5090 below
        memory_rate=896,
        link_in=50,
        link_out=50,
        dram_rate=62,
        ram_gib=96,
        cores=12,
    ),
    ReferenceMachine(
        name="RTX 5080",
        aliases=("5080",),
        source="NVIDIA RTX Blackwell whitepaper; host: 2 channels of DDR5-5600",
        memory_gib=16,
        peak=112.6,
        sustained=104.0,  # 92 %: as the 5090 below
        memory_rate=960,
        link_in=50,
        link_out=50,
        dram_rate=62,
        ram_gib=128,
        cores=16,
    ),
    ReferenceMachine(
        name="RTX 5090",
        aliases=("5090",),
        source="NVIDIA RTX Blackwell whitepaper; host: 2 channels of DDR5-5600",
        memory_gib=32,
        peak=209.5,
        sustained=200.0,  # 95 %: as the 4090, with a clock nearer to the sheet's 2.41 GHz
        clock_share=1.07,
        memory_rate=1792,
        link_in=50,
        link_out=50,
        dram_rate=62,
        ram_gib=192,
        cores=16,
    ),
    ReferenceMachine(
        name="RTX A6000",
        aliases=("a6000", "rtxa6000"),
        source="NVIDIA RTX A6000 data sheet; host: 8 channels of DDR4-3200",
        memory_gib=48,
        peak=154.8,
        sustained=110.0,  # 71 %: full tensor rate in 300 W: the clock falls to about 1.4 of 1.8 GHz
        memory_rate=768,
        link_in=25,
        link_out=25,
        dram_rate=140,
        ram_gib=512,
        cores=32,
    ),
    ReferenceMachine(
        name="L40S",
        aliases=("l40s",),
        source="NVIDIA L40S data sheet; host: 12 channels of DDR5-4800",
        memory_gib=48,
        peak=362.0,
        sustained=235.0,  # 65 %: 350 W for the full tensor rate of the chip that is in a 4090
        memory_rate=864,
        link_in=25,
        link_out=25,
        dram_rate=300,
        ram_gib=768,
        cores=48,
    ),
    ReferenceMachine(
        name="A100 80GB",
        aliases=("a100", "a10080gb"),
        source="NVIDIA A100 data sheet (SXM); host: 8 channels of DDR4-3200",
        memory_gib=80,
        peak=312.0,
        sustained=240.0,  # 77 %: the best shapes reach 85 to 87 %, a block's mix of them less
        memory_rate=2039,
        link_in=25,
        link_out=25,
        dram_rate=167,
        ram_gib=1024,
        cores=64,
    ),
    ReferenceMachine(
        name="H100 PCIe",
        aliases=("h100pcie",),
        source="NVIDIA H100 data sheet (PCIe); host: 8 channels of DDR5-4800",
        memory_gib=80,
        peak=756.0,
        sustained=450.0,  # 60 %: 350 W for what the SXM card has 700 W for
        memory_rate=2000,
        link_in=52,
        link_out=52,
        dram_rate=250,
        ram_gib=1024,
        cores=56,
    ),
    ReferenceMachine(
        name="H100 SXM",
        aliases=("h100sxm", "h100sxm5"),
        source="NVIDIA H100 data sheet (SXM); host: 8 channels of DDR5-4800",
        memory_gib=80,
        peak=989.0,
        sustained=650.0,  # 66 %: the best shapes reach 75 to 80 % within 700 W, a block's mix less
        memory_rate=3350,
        link_in=52,
        link_out=52,
        dram_rate=250,
        ram_gib=1024,
        cores=56,
    ),
    ReferenceMachine(
        name="H200",
        aliases=("h200", "h200sxm"),
        source="NVIDIA H200 data sheet (SXM); host: 8 channels of DDR5-5600",
        memory_gib=141,
        peak=989.0,
        sustained=650.0,  # as the H100 SXM: the same chip with more memory
        memory_rate=4800,
        link_in=52,
        link_out=52,
        dram_rate=280,
        ram_gib=1536,
        cores=56,
    ),
    ReferenceMachine(
        name="B200",
        aliases=(
            "b200",
            "b200sxm",
            "hgxb200",
        ),
        source="NVIDIA HGX B200 data sheet; host: 8 channels of DDR5-5600",
        memory_gib=179,
        peak=2250.0,
        sustained=1350.0,  # 60 %: the H100's share, less a little: 1000 W for 2.3 times its rate
        memory_rate=8000,
        link_in=52,
        link_out=52,
        dram_rate=280,
        ram_gib=2048,
        cores=56,
    ),
    ReferenceMachine(
        name="GH200",
        aliases=("gh200",),
        source="NVIDIA GH200 data sheet: NVLink-C2C 450 GB/s each way, 480 GB of LPDDR5X",
        memory_gib=96,
        peak=989.0,
        sustained=650.0,  # as the H100 SXM: the same chip
        memory_rate=4000,
        # 80 % of 450 on paper in, less out; copies of both ways and the optimizer share the DRAM.
        link_in=360,
        link_out=300,
        dram_rate=450,
        ram_gib=480,
        cores=72,
    ),
    ReferenceMachine(
        name="DGX Spark",
        aliases=("dgxspark", "spark", "gb10"),
        source="NVIDIA DGX Spark data sheet: 1 PFLOP/s of sparse FP4, 128 GB of LPDDR5X",
        memory_gib=128,
        peak=125.0,
        sustained=75.0,  # 60 %: 140 W for chip and memory together
        memory_rate=273,
        link_in=200,  # nothing is copied: host and device are one memory
        link_out=200,
        dram_rate=220,
        ram_gib=119,
        cores=20,
        unified=True,
    ),
    ReferenceMachine(
        name="MI300X",
        aliases=("mi300x", "mi300"),
        source="AMD Instinct MI300X data sheet; host: 12 channels of DDR5-4800",
        memory_gib=192,
        peak=1307.0,
        sustained=650.0,  # 50 %: the best shapes reach 55 to 60 % within 750 W
        memory_rate=5300,
        link_in=52,
        link_out=52,
        dram_rate=300,
        ram_gib=1536,
        cores=64,
    ),
)
