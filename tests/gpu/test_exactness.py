"""L1 on an accelerator: streamed equals resident, bit for bit, on the same device.

Losses and every gradient of three batches (one micro-batch, three unequal ones with padding, one
flat row of documents) against the resident model under ordinary autograd. fp32 with eager
attention, whose kernels are matrix products alone, and bf16 with what the model takes by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from megatrain import load_model
from megatrain.engine.engine import Engine
from megatrain.memory.kinds import TensorKind
from testkit.engines import make_engine
from testkit.families import save_tiny
from testkit.plain import flat_row, load_plain, make_batch, plain_gradients
from tests.gpu.rigs import HostGpuRig, Rig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ATTENTION = {"fp32": "eager", "bf16": None}
BATCHES = [
    make_batch([(2, 24)], seed=1),
    make_batch([(2, 24), (1, 17), (3, 9)], seed=2, padded=True),
    [flat_row((17, 5, 26), seed=3)],
]
FAST = [("llama", "bf16"), ("gpt2", "fp32")]
ALL = [(family, d) for family in ("llama", "qwen3", "gemma2", "mixtral", "gpt2") for d in DTYPES]
CASES = [*FAST, *(pytest.param(*c, marks=pytest.mark.thorough) for c in ALL if c not in FAST)]


def test_the_packed_batch_takes_the_path_of_flat_rows() -> None:
    flat, two_rows = BATCHES[-1][0], make_batch([(2, 24)], packed=True)[0]
    documents = flat.packed_documents()
    assert documents is not None
    assert documents.lengths == (17, 5, 26)
    assert two_rows.packed_documents() is None, "two packed rows are kept apart by masks"


def differing(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    return [name for name in expected if not torch.equal(expected[name], found[name])]


Precision = Literal["bf16", "fp32"]


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_streamed_equals_resident(rig: Rig, family: str, dtype: Precision, tmp_path: Path) -> None:
    require_equal(rig, family, dtype, tmp_path)


@pytest.mark.hostgpu
@pytest.mark.merge
@pytest.mark.parametrize("timing", [0, 1, 2])
def test_streamed_equals_resident_where_the_device_shares_the_memory_of_the_host(
    timing: int, tmp_path: Path
) -> None:
    """Such a device reads memory that is not pinned as late as it likes."""
    control = pytest.importorskip("testkit.host_gpu.control", exc_type=ImportError)
    with control.integrated():
        require_equal(HostGpuRig(timing), "llama", "bf16", tmp_path)


def require_equal(rig: Rig, family: str, dtype: Precision, tmp_path: Path) -> None:
    save_tiny(tmp_path, family, DTYPES[dtype])
    model = load_model(tmp_path, dtype=dtype, attn=ATTENTION[dtype])
    plain = load_plain(tmp_path, DTYPES[dtype], ATTENTION[dtype], rig.torch_device)
    expected = [plain_gradients(plain, batch) for batch in BATCHES]
    with (
        rig.running(model.store, seed=1) as accelerator,
        make_engine(model.decoder, model.store, device=accelerator, tape="host") as engine,
    ):
        for batch, (losses, gradients) in zip(BATCHES, expected, strict=True):
            result = engine.step(batch)
            found = {
                p.name: model.store.param(p.name, TensorKind.GRAD) for p in model.decoder.params
            }
            assert list(result.micro_losses) == losses
            assert differing(gradients, found) == []


def test_a_difference_would_be_noticed(rig: Rig, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.bfloat16)
    model = load_model(tmp_path, dtype="bf16")
    plain = load_plain(tmp_path, torch.bfloat16, device=rig.torch_device)
    batch = BATCHES[0]
    losses, gradients = plain_gradients(plain, batch)
    one, two = (model.store.block_bytes(block, TensorKind.HI) for block in (1, 2))
    swapped = two.clone()
    two.copy_(one)
    one.copy_(swapped)
    with (
        rig.running(model.store) as accelerator,
        Engine(model.decoder, model.store, device=accelerator) as engine,
    ):
        result = engine.step(batch)
    found = {p.name: model.store.param(p.name, TensorKind.GRAD) for p in model.decoder.params}
    assert list(result.micro_losses) != losses
    assert len(differing(gradients, found)) > 30
