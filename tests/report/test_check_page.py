"""The page of gpu-check: every check and what to try, and nothing that runs."""

from __future__ import annotations

import re
from typing import Any

from megatrain.doctor.gpu_check.check import GpuCheck
from megatrain.doctor.gpu_check.findings import CAUSES, Check
from megatrain.report.check_page import PAGE_SIGNS, check_page
from tests.report.reading import read

EVIL = '</td><script>alert(1)</script><img src=x onerror="a()">'
CHECKS = (
    Check(group="machine", name="accelerator", state="ok", found=EVIL),
    Check(group="right", name="lanes", state="wrong", found="3 differ", causes=("bits",)),
    Check(group="right", name="cap", state="left out", found="not tried"),
    Check(group="fast", name="copies", state="slow", found="3 GB/s", causes=("slow link",)),
)
RATES = {
    "copy_in_bytes_per_s": 3e9, "copy_out_bytes_per_s": 6e9, "copy_both_bytes_per_s": 4e9,
    "pinning_bytes_per_s": None, "product_flops": [[1024, 256, 5e13], [1024, 4096, 1e14]],
    "update_params_per_s": 2e9,
}  # fmt: skip
STEP = {
    "params": 10**9, "layers": 13, "tokens": 16384, "dtype": "bf16", "step_s": 2.0, "bound_s": 1.5,
    "predicted_s": 1.9, "tokens_per_s": 8192.0, "of_bound": 0.75, "peak_device_bytes": 2 << 30,
    "lanes_s": {"compute": 1.5, "in": 0.5, "out": 0.25, "host": 0.1},
    "split_s": {"compute": 1.5, "fetch": 0.5, "drain": 0.0},
    "settings": {"slots": 2},
    "spans": [["in", "FETCH", "FETCH(1)", 0.0, 0.5], ["compute", "wait", "wait", 0.0, 0.5]],
}  # fmt: skip


def page_of(**changes: Any) -> str:
    fields: dict[str, Any] = {
        "device": "cuda:0", "when": "2026-01-01", "seconds": 100.0, "checks": CHECKS,
        "facts": {"device_name": "RTX 4090", "ram_bytes": 1 << 37}, "rates": RATES, "step": STEP,
        "profile": {},
    }  # fmt: skip
    return check_page(GpuCheck(**fields | changes).to_json())


def test_every_check_is_on_it_with_what_to_try() -> None:
    html = page_of()
    page = read(html)
    assert all(sign in html.encode() for sign in PAGE_SIGNS)
    for check in CHECKS:
        assert {check.state, check.name, check.found} <= {
            part for part in (check.state, check.name, check.found) if part in page.text
        }
    for cause in ("bits", "slow link"):
        assert CAUSES[cause].means in page.text
        assert all(text.replace("`", "") in page.text for text in CAUSES[cause].tries)
    assert "<code>dcgmi diag -r 2</code>" in html
    assert "`" not in page.text
    for text in ("2 s", "75 %", "compute alone", "FETCH", "128.0 GiB", "100 TFLOP/s"):
        assert text in page.text, text


def test_nothing_becomes_markup_and_nothing_runs() -> None:
    html = page_of(device=EVIL)
    assert "script" not in read(html).tags
    assert "img" not in read(html).tags
    assert "default-src 'none'" in html.replace("&#x27;", "'")
    for svg in re.findall(r"<svg[^>]*>.{7}", html):
        assert svg.endswith("<title>") or 'aria-hidden="true"' in svg


def test_what_was_not_measured_is_left_out() -> None:
    page = read(page_of(rates={}, step={}, checks=CHECKS[:1]))
    assert "Time of a step" not in page.text
    assert "Copies" not in page.text
    assert "What to try" not in page.text
