"""After an exchange each rank has, of what it owns, the sum of all ranks in their order."""

from __future__ import annotations

import pytest
import torch

from megatrain.devices.device import CpuDevice
from megatrain.engine import exchange
from megatrain.engine.exchange import Exchange
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import Ranks
from testkit.rank_threads import Together

SEGMENT = 5000


def gradient(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SEGMENT, generator=generator) * 100.0 ** (rank % 4)


def expected(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rounded sums of all ranks, added in fp32 in their order: plain PyTorch."""
    total = gradient(0).to(dtype).float()
    for rank in range(1, size):
        total = total + gradient(rank).to(dtype)
    return total


@pytest.mark.few(16)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_bytes", [1 << 20, 96], ids=["at once", "in rounds"])
@pytest.mark.parametrize("elements", [range(SEGMENT), range(300, 1700)], ids=["all", "a piece"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_owner_has_the_sum_in_the_order_of_ranks(
    size: int, elements: range, num_bytes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "EXCHANGE_BYTES", num_bytes)
    parts = Owner(0, size).parts(SEGMENT, 256)

    def work(ranks: Ranks) -> tuple[torch.Tensor, int]:
        total = gradient(ranks.owner.rank)[elements.start : elements.stop].clone()
        sends = Exchange(CpuDevice(copying=True), ranks, num_bytes)
        return total, sends.add_up(total, elements, parts, dtype)

    whole = expected(size, dtype)
    for rank, (total, sent_bytes) in enumerate(Together(size).run(work)):
        own = [at for at in parts[rank] if at in elements]
        got = total[[at - elements.start for at in own]]
        assert torch.equal(got, whole[own]), rank
        assert sent_bytes == (len(elements) - len(own)) * dtype.itemsize


def test_another_order_of_ranks_would_be_noticed() -> None:
    total = gradient(3).bfloat16().float()
    for rank in (2, 1, 0):
        total = total + gradient(rank).bfloat16()
    assert not torch.equal(total, expected(4, torch.bfloat16))
