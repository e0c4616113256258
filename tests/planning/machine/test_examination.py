"""What doctor found: kept, found again, and told in lines that fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.catalog.reference_machines import GIB
from megatrain.planning.machine.examination import Examination, kept_examination, measured_profile
from megatrain.planning.machine.facts import host_facts, profile_path


def examination(gpu: str = "4090", ram_gib: int = 128) -> Examination:
    profile = find_machine(gpu)[0].profile(ram_bytes=ram_gib * GIB)
    return Examination(
        facts=host_facts(),
        profile=profile.changed(base_bytes=0),
        kernel="native (avx512)",
        folder="/data/runs",
        when="2026-01-02 03:04 UTC",
        seconds=12.5,
    )


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path))


def _keep(text: str) -> None:
    path = profile_path(host_facts())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_what_was_kept_is_what_is_found() -> None:
    assert measured_profile() is None
    found = examination()
    _keep(found.to_json())
    assert kept_examination() == found
    assert measured_profile() == found.profile


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"facts": 3}', "null"])
def test_a_damaged_file_is_none(text: str) -> None:
    _keep(text)
    assert kept_examination() is None


def test_every_cut_of_a_file_is_none() -> None:
    whole = examination().to_json()
    for end in range(0, len(whole) - 1, 97):
        _keep(whole[:end])
        assert kept_examination() is None


def test_the_profile_of_another_machine_is_none() -> None:
    found = examination()
    other = replace(found, facts=replace(found.facts, processor="another"))
    _keep(other.to_json())
    assert kept_examination() is None


def test_the_verdict_says_how_large_and_how_fast() -> None:
    told = examination(ram_gib=140).verdict()
    # 140 GiB / 14 bytes; 160.2 TFLOP/s over 8 FLOPs a param; F/B; 14 F/M
    assert "up to about 10.7B parameters" in told
    assert "(12.5B without clipping, 18.7B with moments in 8 bits)" in told
    assert "at most 1.4k to 2.5k tok/s on RTX 4090, predicted" in told
    assert "from 6,677 tokens per step" in told
    assert "updates from 36.2k" in told


def test_without_an_accelerator_the_verdict_says_so() -> None:
    found = examination()
    told = replace(found, profile=found.profile.changed(unified=True, device="")).verdict()
    assert (
        "on the processor, predicted. Without an accelerator this machine is only for trials."
        in told
    )


def test_the_page_fits_80_columns_and_has_every_figure() -> None:
    page = replace(examination(), folder="/very" * 40).text()
    assert max(map(len, page.splitlines())) <= 80
    for word in (
        "processor", "NUMA", "host memory", "control group limit", "pinning limit", "copies in",
        "both at once", "products, width 4096", "optimizer", "disk read / write", "torch",
    ):  # fmt: skip
        assert word in page, word


def test_a_busy_machine_is_told() -> None:
    found = examination()
    assert "Other programs ran" not in found.text()
    busy = replace(found, load=20.5, facts=replace(found.facts, cores=2)).text()
    assert "Other programs ran: 20.5 processes on 2 cores." in busy
    assert max(map(len, busy.splitlines())) <= 80


@pytest.mark.parametrize(
    ("corrected", "uncorrected", "text"),
    [
        (None, None, "no counters: no ECC, or no EDAC driver"),
        (0, 0, "0 corrected, 0 uncorrected since the start"),
        (12, 0, "12 corrected, 0 uncorrected: test the modules"),
    ],
)
def test_errors_of_memory_are_told(
    corrected: int | None, uncorrected: int | None, text: str
) -> None:
    found = examination()
    facts = replace(found.facts, corrected_errors=corrected, uncorrected_errors=uncorrected)
    assert f"memory errors           {text}" in replace(found, facts=facts).text()
