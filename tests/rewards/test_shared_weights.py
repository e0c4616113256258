"""Laws of shared_weights.py: read by the worker file of vLLM's side."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.disk.hf.weights_file import NamedTensor
from megatrain.errors import DoesNotFit
from megatrain.rewards import shared_weights
from megatrain.rewards.shared_weights import SharedWeights, digest_of
from testkit.vllm_on_loopback import worker_file

WORKER = worker_file()


def named(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> NamedTensor:
    torch.manual_seed(len(name))
    values = torch.randn(shape).to(dtype).view(-1)
    return NamedTensor(name=name, shape=shape, values=values)


@pytest.fixture
def tensors() -> list[NamedTensor]:
    return [named("one", 7, 3), named("fifteen", 5, dtype=torch.float32), named("three.w", 2, 2, 9)]


@pytest.fixture
def shared(tensors: list[NamedTensor]) -> Iterator[SharedWeights]:
    made = SharedWeights(tensors)
    yield made
    made.close()


def opened(shared: SharedWeights, **changes: Any) -> Any:
    return WORKER.TrainersMemory(**{**shared.address, **changes})


def test_a_reader_finds_all_bits_of_the_version(
    shared: SharedWeights, tensors: list[NamedTensor]
) -> None:
    for version in (1, 2):
        for tensor in tensors:
            tensor.values.mul_(-0.75)
        shared.write(tensors, torch.float32)
        found = opened(shared)
        found.require(version)
        assert list(found.tensors) == [tensor.name for tensor in tensors]
        for tensor in tensors:
            read = found.tensors[tensor.name]
            assert (read.dtype, tuple(read.shape)) == (tensor.dtype, tensor.shape)
            assert torch.equal(read.reshape(-1), tensor.values)
        with pytest.raises(WORKER.Refused, match=f"weights are of version {version}"):
            found.require(version + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadly(NamedTensor):
    """A tensor in whose middle the writer is killed."""

    def pieces(self) -> Iterator[Tensor]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield self.memory


@pytest.mark.parametrize("versions", [0, 1])
def test_a_copy_whose_writer_died_is_no_version(
    shared: SharedWeights, tensors: list[NamedTensor], versions: int
) -> None:
    torch.set_num_threads(1)
    for _ in range(versions):
        shared.write(tensors, torch.float32)
    deadly = Deadly(name="fifteen", shape=(5,), values=tensors[1].values)
    child = os.fork()
    if child == 0:
        shared.write([tensors[0], deadly, tensors[2]], torch.float32)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    for version in range(3):
        with pytest.raises(WORKER.Refused, match="weights are being written"):
            opened(shared).require(version)


def test_other_memory_is_refused(shared: SharedWeights, tensors: list[NamedTensor]) -> None:
    shared.write(tensors, torch.float32)
    other = SharedWeights(tensors)
    with pytest.raises(WORKER.Refused, match="is not the memory of this trainer's weights"):
        opened(shared, descriptor=other.address["descriptor"])
    other.close()
    with pytest.raises(WORKER.Refused, match="must be on one host"):
        opened(shared, descriptor=other.address["descriptor"])
    with pytest.raises(WORKER.Refused, match="cannot read the trainer's memory"):
        opened(shared, process=1 << 30)


def test_every_number_counts_in_a_digest(shared: SharedWeights, tensors: list[NamedTensor]) -> None:
    first = shared.write(tensors, torch.float32)
    assert first == {tensor.name: digest_of(tensor, torch.float32) for tensor in tensors}
    tensor = tensors[2]
    for number in range(tensor.values.numel()):
        before = tensor.values[number].clone()
        tensor.values.view(torch.int16)[number] ^= 1
        changed = shared.write(tensors, torch.float32)
        assert {name for name in first if first[name] != changed[name]} == {tensor.name}
        tensor.values[number] = before
    tensor.values[0] = 0.0
    zero = digest_of(tensor, torch.float32)
    tensor.values[0] = -0.0
    assert digest_of(tensor, torch.float32) == zero
    assert digest_of(tensor, torch.bfloat16) != zero


def test_memory_that_is_not_free_is_refused(
    tensors: list[NamedTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_weights, "free_bytes", lambda: 100)
    with pytest.raises(DoesNotFit, match=r"weights for vLLM"):
        SharedWeights(tensors)
