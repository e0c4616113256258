"""The index of a long check: every part and its tables, and nothing that runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatrain.doctor.gpu_check.long.parts import PARTS
from megatrain.doctor.gpu_check.long.running import new_result
from megatrain.report.long_page import FILES, LONG_SIGNS, long_page
from tests.report.reading import read

EVIL = "</td><script>alert(1)</script>"
FOUND = {
    "lead": "92 % of the peak",
    "figures": {"step_s": 1.5, "settings": {"slots": 2}},
    "tables": {"Ops": [{"op": "forward", "measured_s": 0.25}, {"op": EVIL, "left_out": "why"}]},
}


def page_of(state: Any = "done", why: str = "", **found: Any) -> str:
    results = [asdict(new_result(PARTS[0], "here", state, why)) | {"found": found or FOUND}]
    return long_page("RTX 4090", results, ["matrix"])


def test_parts_tables_and_files_are_on_it() -> None:
    html = page_of()
    page = read(html)
    assert all(sign in html.encode() for sign in LONG_SIGNS)
    for text in (PARTS[0].asks, "92 % of the peak", "250 ms", "measured s", "settings, slots"):
        assert text in page.text, text
    assert all(name in page.text for name in FILES)
    assert "matrix" in page.text
    assert "it did not run, or not yet" in page.text


def test_what_failed_says_why() -> None:
    page = read(page_of("failed", "it was killed", lead=""))
    assert "failed" in page.text
    assert "it was killed" in page.text


def test_nothing_becomes_markup() -> None:
    html = page_of(why=EVIL)
    assert "<script" not in html
    assert "alert(1)" in read(html).text
