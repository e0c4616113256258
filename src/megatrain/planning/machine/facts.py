"""Facts about this host, without measuring and without torch.

Facts name a machine: a measured profile is kept under their key (`profile_path`) and belongs to the
machine as long as none of them changes. Memory limits and errors are facts too, but no part of the
key: they differ from one shell, container or day to the next and change no rate.

Laws (tests/planning/machine/test_facts.py)
    1. The same machine has the same key; another processor, GPU, number of cores or version of
       torch or of this package has another.
    2. A fact that the system does not report is None or empty, never an exception.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import resource
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatrain.cache import cache_folder
from megatrain.memory.host import control_groups, num_cores, read_system_file
from megatrain.version import __version__

_CHANGING = ("group_limit_bytes", "memlock_bytes", "corrected_errors", "uncorrected_errors")
"""Facts that are no part of a machine's key."""
_CORES = num_cores()
"""When the process began: one of several ranks on a host then keeps to its share of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A host, as its system describes it."""

    processor: str
    cores: int
    """Those this process may run on, or could when it began."""
    ram_bytes: int
    group_limit_bytes: int | None
    """Bytes that the control group may hold; None: no limit."""
    memlock_bytes: int | None
    """Bytes that may be pinned; None: no limit."""
    numa_nodes: int
    gpus: tuple[str, ...]
    """NVIDIA's devices, as their driver names them; torch knows the others."""
    versions: dict[str, str]
    corrected_errors: int | None = None
    """Errors of memory that ECC has corrected since the start; None: nobody counts them."""
    uncorrected_errors: int | None = None
    """The same that it could not correct."""

    @property
    def usable_bytes(self) -> int:
        """Host memory a process could have at most."""
        return min(self.ram_bytes, self.group_limit_bytes or self.ram_bytes)

    @property
    def key(self) -> str:
        """A short name of the machine."""
        facts = asdict(self)
        for name in _CHANGING:
            del facts[name]
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def host_facts(root: Path = Path("/")) -> HostFacts:
    """Return the facts of this host, as the files under `root` give them."""
    return HostFacts(
        processor=_processor(root),
        cores=_CORES,
        ram_bytes=_ram(root),
        group_limit_bytes=min((group.limit_bytes for group in control_groups(root)), default=None),
        memlock_bytes=_memlock(),
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1,
        gpus=_gpus(root),
        versions={
            "megatrain": __version__,
            "python": platform.python_version(),
            "torch": _version("torch"),
            "transformers": _version("transformers"),
            "system": f"{platform.system()} {platform.release()}",
        },
        corrected_errors=_memory_errors(root, "ce_count"),
        uncorrected_errors=_memory_errors(root, "ue_count"),
    )


def profile_path(facts: HostFacts) -> Path:
    """Return where the measured profile of this machine is kept."""
    return cache_folder() / f"machine-{facts.key}.json"


def _processor(root: Path) -> str:
    for line in read_system_file(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return " ".join(value.split())
    return platform.processor() or platform.machine()


def _ram(root: Path) -> int:
    for line in read_system_file(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_errors(root: Path, counter: str) -> int | None:
    """Return what the controllers of ECC memory have counted, by the kernel's EDAC drivers."""
    paths = (root / "sys/devices/system/edac/mc").glob(f"mc[0-9]*/{counter}")
    counts = [text for path in paths if (text := read_system_file(path).strip()).isdecimal()]
    return sum(map(int, counts)) if counts else None


def _memlock() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _gpus(root: Path) -> tuple[str, ...]:
    names = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        for line in read_system_file(path).splitlines():
            if line.startswith("Model:"):
                names.append(line.partition(":")[2].strip())
    return tuple(names)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
