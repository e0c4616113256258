"""Facts of a host: read from its files, patient with what is missing, and a key that names it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.planning.machine.facts import HostFacts, host_facts, profile_path

GIB = 1 << 30


def _root(folder: Path, *, limit: str = "max", gpus: tuple[str, ...] = ()) -> Path:
    files = {
        "proc/cpuinfo": "processor : 0\nmodel name\t: Fast  Processor 9\n",
        "proc/meminfo": "MemTotal:       134217728 kB\nMemFree: 1 kB\n",
        "sys/fs/cgroup/memory.max": f"{limit}\n",
        "sys/fs/cgroup/memory.current": "0\n",
    }
    for number, gpu in enumerate(gpus):
        files[f"proc/driver/nvidia/gpus/{number}/information"] = f"Model: \t {gpu}\nIRQ: 7\n"
    for node in ("node0", "node1"):
        (folder / "sys/devices/system/node" / node).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_facts_are_those_of_the_files(tmp_path: Path) -> None:
    facts = host_facts(_root(tmp_path, limit=str(64 * GIB), gpus=("NVIDIA GeForce RTX 4090",)))
    assert facts.processor == "Fast Processor 9"
    assert facts.ram_bytes == 128 * GIB
    assert facts.group_limit_bytes == 64 * GIB
    assert facts.usable_bytes == 64 * GIB
    assert facts.numa_nodes == 2
    assert facts.gpus == ("NVIDIA GeForce RTX 4090",)


@pytest.mark.parametrize("limit", ["max", str((1 << 63) - 4096), "", "many"])
def test_no_limit_is_none(tmp_path: Path, limit: str) -> None:
    facts = host_facts(_root(tmp_path, limit=limit))
    assert facts.group_limit_bytes is None
    assert facts.usable_bytes == facts.ram_bytes


def test_a_system_that_tells_nothing_is_met_with_patience(tmp_path: Path) -> None:
    facts = host_facts(tmp_path)
    assert facts.ram_bytes > 0
    assert facts.cores >= 1
    assert facts.numa_nodes == 1
    assert facts.gpus == ()


def test_the_key_names_the_machine_and_not_its_limits(tmp_path: Path) -> None:
    facts = host_facts(_root(tmp_path))
    limited = replace(facts, group_limit_bytes=GIB, memlock_bytes=0)
    assert limited.key == facts.key
    others: list[HostFacts] = [
        replace(facts, processor="Other"),
        replace(facts, cores=facts.cores + 1),
        replace(facts, gpus=("A",)),
        replace(facts, versions=facts.versions | {"torch": "99"}),
    ]
    assert len({facts.key, *(other.key for other in others)}) == 1 + len(others)


def test_the_profile_is_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = host_facts()
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path))
    assert profile_path(facts) == tmp_path / "megatrain" / f"machine-{facts.key}.json"
    monkeypatch.delenv("MEGATRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert profile_path(facts).parent == tmp_path / "xdg" / "megatrain"


def test_errors_of_ecc_memory_are_counted_over_all_controllers(tmp_path: Path) -> None:
    root = _root(tmp_path)
    assert (host_facts(root).corrected_errors, host_facts(root).uncorrected_errors) == (None, None)
    for number, corrected in enumerate(("3\n", "4\n", "nonsense\n")):
        folder = root / f"sys/devices/system/edac/mc/mc{number}"
        folder.mkdir(parents=True)
        (folder / "ce_count").write_text(corrected)
        (folder / "ue_count").write_text("0\n")
    facts = host_facts(root)
    assert (facts.corrected_errors, facts.uncorrected_errors) == (7, 0)
    assert facts.key == replace(facts, corrected_errors=None, uncorrected_errors=None).key
