"""A flat row of documents equals each document alone, on the same device.

The other side is the resident model, which gets one document at a time and knows of no packing:
log-probabilities and every gradient. In bf16 a device takes torch's attention kernel for documents
of different lengths, the one of testkit/host_gpu too; in fp32 and on the simulator, whose tensors
are the host's, attention runs once for each document.

Sums over the tokens of a row have another order than sums over documents, so gradients are close
and not equal: within 1e-5 of their norm in fp32, and 2e-2 in bf16.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from megatrain import load_model
from megatrain.batch import MicroBatch
from megatrain.doctor.gpu_check.laws import kernel_counted
from megatrain.memory.kinds import TensorKind
from megatrain.models.documents import PackedDocuments
from testkit.engines import make_engine
from testkit.families import save_tiny
from testkit.plain import flat_row, load_plain, plain_gradients, plain_logprobs
from tests.gpu.rigs import Rig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
ROW = flat_row((19, 5, 1, 24, 9))
"""Of five documents: one longer than the window of the families with one, one of a single token."""
FAST = [("llama", "bf16"), ("cohere2", "bf16")]
ALL = [(family, d) for family in ("llama", "cohere2", "gemma2", "mistral") for d in DTYPES]
CASES = [*FAST, *(pytest.param(*c, marks=pytest.mark.thorough) for c in ALL if c not in FAST)]
Precision = Literal["bf16", "fp32"]


def distances(rig: Rig, folder: Path, family: str, dtype: Precision) -> dict[str, float]:
    """Return how far the row is from its documents alone, as shares of the norm, by name."""
    save_tiny(folder, family, DTYPES[dtype])
    model = load_model(folder, dtype=dtype)
    plain = load_plain(folder, DTYPES[dtype], device=rig.torch_device)
    groups = model.decoder.text_config
    assert groups.num_attention_heads > groups.num_key_value_heads, "queries share keys"
    documents = [replace(one, position_ids=None) for one in ROW.documents()]
    _, gradients = plain_gradients(plain, [one for one in documents if one.num_valid_tokens])
    with torch.no_grad():
        placed = [one.mapped(lambda t: t.to(rig.torch_device)) for one in documents]
        alone = torch.cat([plain_logprobs(plain, one) for one in placed], dim=1).cpu()
    with (
        rig.running(model.store, seed=1) as accelerator,
        make_engine(model.decoder, model.store, device=accelerator, tape="host") as engine,
    ):
        (together,) = engine.logprobs([ROW])
        engine.step([ROW])
    trained = ROW.labels[:, 1:] != -100
    pairs = {
        name: (model.store.param(name, TensorKind.GRAD), gradient)
        for name, gradient in gradients.items()
    }
    pairs["log-probabilities"] = (
        centered(together[:, :-1][trained]),
        centered(alone[:, :-1][trained]),
    )
    return {name: distance(*pair) for name, pair in pairs.items()}


def centered(values: Tensor) -> Tensor:
    """Return what values differ by: tokens of a random model are all about as likely."""
    return values - values.mean()


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def over(found: dict[str, float], dtype: Precision) -> list[str]:
    return [name for name, value in found.items() if not value <= TOLERANCE[dtype]]


@pytest.mark.few(2)
@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_a_flat_row_equals_each_document_alone(
    rig: Rig, family: str, dtype: Precision, tmp_path: Path
) -> None:
    with kernel_counted() as calls:
        found = distances(rig, tmp_path, family, dtype)
    assert over(found, dtype) == [], found
    capped = family == "gemma2"  # its soft cap is code of its own, for each document
    takes_kernel = rig.torch_device.type != "cpu" and dtype == "bf16" and not capped
    assert bool(calls) == takes_kernel


def _one_token_late(micro: MicroBatch) -> PackedDocuments | None:
    bounds = micro.bounds()
    if bounds is None:
        return None  # a document alone
    bounds[1] += 1
    return PackedDocuments(lengths=tuple(bounds.diff().tolist()), bounds=bounds)


def _not_apart(micro: MicroBatch) -> PackedDocuments | None:
    if micro.bounds() is None:
        return None
    count = micro.input_ids.numel()
    return PackedDocuments(lengths=(count,), bounds=torch.tensor([0, count], dtype=torch.int32))


@pytest.mark.few(2)
@pytest.mark.parametrize("wrong", [_one_token_late, _not_apart])
def test_wrong_bounds_would_be_noticed(
    rig: Rig, wrong: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MicroBatch, "packed_documents", wrong)
    found = distances(rig, tmp_path, "llama", "bf16")
    assert min(found.values()) > 4 * TOLERANCE["bf16"], "every gradient shows it"
