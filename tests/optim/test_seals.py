"""Laws of seals: one value everywhere, and another one for bytes of which one word differs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.memory.layout import kind_dtype
from megatrain.optim.kernel import CHUNK, AdamWScalars, Kernel, Watch, chunks_of
from megatrain.optim.native import LIBRARY, NativeKernel
from megatrain.optim.rounding import Rounding
from megatrain.optim.states import SHARED, STATES
from megatrain.optim.torch_kernel import BLOCK, TorchKernel

SIZES = (0, 1, 7, 8, 9, 255, 4096, 65536 + 24, 3 * 65536 + 13, 8 * BLOCK + 40)
SCALARS = AdamWScalars.at(2, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
ROUNDING = Rounding(seed=1, update=2, first=0)


def random_bytes(size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def kernels() -> list[Kernel]:
    if not LIBRARY.exists():
        pytest.skip("the library was not built")
    sets = NativeKernel().instruction_sets
    return [NativeKernel(instruction_set=name) for name in sets]


def test_every_kernel_gives_the_seals_of_torch() -> None:
    for start in (0, 4):  # in memory of any alignment
        parts = [random_bytes(start + size, size)[start:] for size in SIZES]
        expected = TorchKernel().seals(parts, num_threads=1)
        for kernel in kernels():
            for threads in (1, 2):
                assert torch.equal(kernel.seals(parts, num_threads=threads), expected)


def test_each_flipped_bit_changes_the_seal() -> None:
    kernel = kernels()[-1]
    data = random_bytes(8 * 40 + 5)
    (before,) = kernel.seals([data], num_threads=1)
    for byte in range(len(data)):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert kernel.seals([data], num_threads=1)[0, 0] != before[0]
            data[byte] ^= 1 << bit


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_two_bits_that_leave_the_sum_change_the_products(bit: int) -> None:
    """Words in the same column of memory modules tend to fail together."""
    words = random_bytes(8 * 4096).view(torch.int64)
    mask = torch.tensor(1).bitwise_left_shift(bit)
    words[7::64] &= ~mask
    words[9::64] |= mask
    kernel = kernels()[-1]
    (before,) = kernel.seals([words], num_threads=1)
    for other in range(9, 4096, 64):
        changed = words.clone()
        changed[7] ^= mask
        changed[other] ^= mask
        (after,) = kernel.seals([changed], num_threads=1)
        assert after[0] == before[0]
        assert after[1] != before[1]


def test_words_in_another_order_have_another_seal() -> None:
    words = random_bytes(8 * 64).view(torch.int64)
    found = TorchKernel().seals([words, words.flip(0)], num_threads=1)
    assert found[0, 0] == found[1, 0]
    assert found[0, 1] != found[1, 1]


@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_a_watched_update_has_its_bits_and_the_seals_of_its_arrays(state: str) -> None:
    """Of several chunks, of which the last is short and has an odd number of scales."""
    count = 2 * CHUNK + 3 * SHARED
    for kernel in (*kernels(), TorchKernel()):
        plain, watched = (_arrays(state, count) for _ in range(2))
        watch = Watch(watched[:-1], watched[-1:], count)
        first = kernel.seals(chunks_of(watch.parts, count), num_threads=1)
        for arrays, given in ((plain, None), (watched, watch)):
            weight, lo, *states, grad = arrays
            kernel.adamw(weight, lo, states, grad, SCALARS, ROUNDING, num_threads=2, watch=given)
        assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
        last = kernel.seals(chunks_of(watched[:-1], count), num_threads=1)
        assert torch.equal(watch.before, first.view(watch.before.shape))
        assert torch.equal(watch.after, last.view(watch.after.shape))


def _arrays(state: str, count: int) -> list[Tensor]:
    """Return weights, remainders, states and a gradient."""
    generator = torch.Generator().manual_seed(1)
    weight, grad = (torch.randn(count, generator=generator).bfloat16() for _ in range(2))
    states = [
        torch.zeros(count // kind.elements_per_number, dtype=kind_dtype(kind, torch.bfloat16))
        for kind in STATES["adamw"][state]
    ]
    return [weight, torch.zeros(count, dtype=torch.int16), *states, grad]
