"""A profile: the figures of one machine that a prediction needs, measured or looked up.

Plain numbers and no torch: an estimate for another machine answers at once. Rates are what a
program sustains, not those that a data sheet promises. `source` names their origin.

Laws (tests/planning/machine/test_profile.py)
    1. A profile written as JSON and read back is equal to itself.
    2. Between measured points rates are interpolated, beyond them they stay what they were.
    3. A profile with a rate that is not a positive number is a ConfigError naming the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

from megatrain.errors import ConfigError
from megatrain.planning.machine.network import Network

USUAL_DISK_BYTES = 2 * 10**12
"""Free on the drive of a machine that names a disk and not its size."""
EXPERT_WAIT_S = 1e-4
"""Assumed where experts have no kernel: the queue runs empty, and is filled again."""
MEASURED = "measured"
"""The source of a profile of this machine."""
NOT_MEASURED = "not measured"
"""The source of a profile whose rates mean nothing."""


class FlopRate(NamedTuple):
    """Sustained FLOP/s of the products of one block: `tokens` rows, matrices `width` wide."""

    width: int
    tokens: int
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """One host and one device."""

    name: str
    source: str
    """The origin of the figures: `measured`, or a data sheet and assumptions."""

    ram_bytes: int
    """Host memory that a run may use."""
    dram_bytes_per_s: float
    """Host memory traffic that all cores together sustain, reads and writes added."""
    update_params_per_s: float
    """The optimizer's kernel alone, on the cores it is given."""
    cores: float
    disk_read_bytes_per_s: float = 2e9
    disk_write_bytes_per_s: float = 1e9
    disk_bytes: int = 0
    """Disk that a run may use as a tier of its memory; 0: none."""
    base_bytes: int = 700 << 20
    """Host bytes of Python and libraries before a model is loaded."""

    device: str = ""
    """Name of the device, as people know it."""
    device_bytes: int
    """Device memory that a run may use; 0 if it is the host's."""
    reserved_bytes: int = 0
    """Share of the device's memory that libraries take beside the ledger's lines (reserve.py)."""
    reserved_pinned_share: float = 0.0
    """Share of pinned host memory that the driver's tables of it take on the device."""
    unified: bool = False
    """True: compute reads weights in host memory, on a CPU or an integrated device; nothing is
    fetched."""
    integrated: bool = False
    """True: the device shares its memory with the host: what it takes, the host lacks."""
    forward_flops: tuple[FlopRate, ...]
    """Products of forward, in bf16. One entry: the same for all shapes."""
    backward_flops: tuple[FlopRate, ...] = ()
    """Products of backward; empty: like forward."""
    fp32_efficiency: float = 0.5
    """FLOP/s with fp32 weights, as a share of that with bf16."""
    fp8_gain: float = 1.0
    """FLOP/s of products in fp8 over that in bf16; 1: it has no units for them."""
    attention_efficiency: float = 0.5
    """FLOP/s of attention as a share of that of products."""
    head_efficiency: float = 1.0
    """Speed of the head as a share of that of its products and element-wise work."""
    device_bytes_per_s: float
    """Element-wise work: bytes read and written in device memory."""
    op_overhead_s: float = 2e-4
    """Fixed cost of one op of a lane."""
    forward_issue_s: float = 0.0
    """Host time to issue the forward of a layer to the device, which cannot be done sooner; 0: not
    known, or the host computes."""
    backward_issue_s: float = 0.0
    """The same of its backward, recompute included."""
    expert_wait_s: float = 0.0
    """Seconds that a forward of experts waits for the device; 0: their products are one kernel."""

    copy_in_bytes_per_s: float
    """Host to device, alone."""
    copy_out_bytes_per_s: float
    """Device to host, alone."""
    duplex_share: float = 0.9
    """Share of its rate alone that each direction keeps while both are busy."""
    pinned_bytes: int = 0
    """Most host memory that can be pinned; 0: no limit but `ram_bytes`."""
    unpinned_share: float = 0.4
    """Share of the copy rates through a staging ring, where pinning fails."""
    compute_cores: float = 0.0
    """Cores that compute takes from the optimizer's and copies: 0 where the device is its own."""
    update_cores: float = 1.0
    """Cores of the optimizer's kernel."""
    network: Network | None = None
    """Between ranks; None: not known."""

    def __post_init__(self) -> None:
        for name in ("forward_flops", "backward_flops"):
            points = tuple(FlopRate(*point) for point in getattr(self, name))
            object.__setattr__(self, name, points)
        if isinstance(self.network, dict):
            object.__setattr__(self, "network", Network.from_facts(self.network))
        if not self.forward_flops:
            raise ConfigError(f"profile {self.name}: forward_flops is empty")
        for name in _RATES:
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ConfigError(f"profile {self.name}: {name} is {value}, must be positive")
        for point in (*self.forward_flops, *self.backward_flops):
            if not all(math.isfinite(value) and value > 0 for value in point):
                raise ConfigError(f"profile {self.name}: {point} must be positive")

    @property
    def on_host(self) -> bool:
        """Whether the host's cores compute, on the store itself or on copies of it."""
        return not self.device_bytes or (self.unified and not self.integrated)

    def forward_rate(self, width: int, tokens: int) -> float:
        """Return the FLOP/s of forward products of `tokens` rows through matrices so wide."""
        return interpolate(self.forward_flops, width, tokens)

    def backward_rate(self, width: int, tokens: int) -> float:
        """Return the FLOP/s of backward's products alone, without the recompute."""
        return interpolate(self.backward_flops or self.forward_flops, width, tokens)

    def changed(self, **changes: Any) -> MachineProfile:
        """Return the profile with other figures."""
        return replace(self, **changes)

    def to_json(self) -> str:
        """Return the profile as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> MachineProfile:
        """Return the profile that `text` describes. Raises ConfigError."""
        try:
            return cls.from_facts(json.loads(text))
        except json.JSONDecodeError as error:
            raise ConfigError(f"profile: invalid JSON: {error}") from None

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> MachineProfile:
        """Return the profile of a mapping by field. Raises ConfigError."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(facts) - known):
            raise ConfigError(f"profile: unknown keys {', '.join(unknown)}")
        try:
            return cls(**facts)
        except TypeError as error:
            raise ConfigError(f"profile: {error}") from None


def unmeasured(*, ram_bytes: int, base_bytes: int, device_bytes: int = 0) -> MachineProfile:
    """Return a machine of which only memory is known; no time that it predicts means anything."""
    return MachineProfile(
        name="this machine",
        source=NOT_MEASURED,
        ram_bytes=ram_bytes,
        dram_bytes_per_s=1e11,
        update_params_per_s=1e9,
        cores=1,
        base_bytes=base_bytes,
        device_bytes=device_bytes,
        unified=not device_bytes,
        forward_flops=(FlopRate(1024, 1024, 1e13),),
        device_bytes_per_s=1e11,
        copy_in_bytes_per_s=1e10,
        copy_out_bytes_per_s=1e10,
    )


_RATES = (
    "ram_bytes",
    "dram_bytes_per_s",
    "update_params_per_s",
    "cores",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
    "fp32_efficiency",
    "fp8_gain",
    "attention_efficiency",
    "head_efficiency",
    "device_bytes_per_s",
    "op_overhead_s",
    "copy_in_bytes_per_s",
    "copy_out_bytes_per_s",
    "duplex_share",
    "unpinned_share",
)


def interpolate(points: Sequence[FlopRate], width: int, tokens: int) -> float:
    """Return the rate at (width, tokens): linear in the logarithms, flat beyond the points."""
    by_width: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        by_width.setdefault(point.width, []).append((math.log(point.tokens), point.flops))
    rates = [
        (math.log(known), _linear(sorted(rows), math.log(max(1, tokens))))
        for known, rows in by_width.items()
    ]
    return _linear(sorted(rates), math.log(max(1, width)))


def _linear(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at `at` of the line through `points`, which are in order."""
    if at <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return points[-1][1]
