"""The counter of benchmarks/fused.py, and what it counts of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from benchmarks import fused
from megatrain.models.probing.dispatch import intercepted

ROWS, WIDTH = 16, 64


def _moved(*, row: Tensor, column: Tensor) -> float:
    counter = fused.Counter()
    with intercepted(counter):
        torch.mm(row, row.T)
        (row + column).view(-1)[3:]
    assert counter.counted.launches == 2
    return counter.counted.num_bytes


def test_each_tensor_counts_once_and_views_products_and_repeats_do_not() -> None:
    row = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="meta")
    column = torch.empty(ROWS, 1, dtype=torch.bfloat16, device="meta")
    expected = 2 * (2 * ROWS * WIDTH + ROWS)
    assert _moved(row=row, column=column) == expected
    assert _moved(row=row, column=column.expand(ROWS, WIDTH)) == expected
    assert _moved(row=row, column=torch.empty_like(row)) > expected


def test_fused_kernels_halve_the_bytes_of_a_layer() -> None:
    found = fused.measure()
    assert found["element_wise_kb"] <= 350 < 674 < found["element_wise_kb_before"]
    assert 3 * found["launches_per_layer"] < found["launches_per_layer_before"]


def test_a_kernel_reads_and_writes_its_tensors_and_one_that_is_not_fused_shows() -> None:
    config = fused.MODELS["Qwen3-8B"]()
    whole = fused.counted_layer(config, fused.standing_in)["forward"]
    norms = sum(2 * 2 * width for width in (4096, 4096, 4096, 1024)) / 1e3
    assert whole["by_kernel_kb"]["norm"] == pytest.approx(norms, rel=0.01)

    @contextmanager
    def without_norms(model: nn.Module, counter: fused.Counter) -> Iterator[None]:
        with fused.standing_in(model, counter):
            for module in model.modules():
                if type(module).__name__.endswith("RMSNorm"):
                    del module.forward
            yield

    partly = fused.counted_layer(config, without_norms)["forward"]
    assert partly["element_wise_kb"] > 3 * whole["element_wise_kb"]
