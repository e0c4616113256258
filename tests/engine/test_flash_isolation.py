"""Flash attention keeps packed documents apart, for any number of rows in a micro-batch.

Its kernels are replaced by stand-ins (flash_stand_ins.py): what is tested is which kernel is called
and with which lengths. The documents alone are computed by sdpa.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    modeling_flash_attention_utils,
)
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.gptj import modeling_gptj

from megatrain import load_model
from megatrain.batch import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.losses.head import IGNORED
from megatrain.memory.kinds import TensorKind
from megatrain.models.documents import JOINT_BY_DOCUMENT
from megatrain.models.isolation import DROPS_LENGTHS, ISOLATES, check_packing
from testkit.families import save_tiny, tiny_config
from tests.engine.flash_stand_ins import FlashKernels, use_flash_stand_ins

ROWS = ((9, 14, 17), (20, 1, 19), (40,))
"""The lengths of the documents of each row. The last row is a single document."""
NEAR = 1e-6
FLASH = "flash_attention_2"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> FlashKernels:
    return use_flash_stand_ins(monkeypatch)


def _documents() -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in (length for row in ROWS for length in row):
        ids = torch.randint(3, 300, (1, length), generator=generator)
        labels = ids.clone()
        labels[:, :3] = IGNORED
        found.append(MicroBatch(input_ids=ids, labels=labels))
    return found


def _stacked() -> MicroBatch:
    """Return the documents as packed rows of equal length, in one micro-batch."""
    documents, shape = _documents(), (len(ROWS), sum(ROWS[0]))
    places = [torch.arange(one.input_ids.shape[1]) for one in documents]
    return MicroBatch(
        input_ids=torch.cat([one.input_ids for one in documents], dim=1).view(shape),
        labels=torch.cat([one.labels for one in documents], dim=1).view(shape),
        position_ids=torch.cat(places).view(shape),
    )


def _padded() -> MicroBatch:
    """Return the documents as rows of their own, padded on the right."""
    documents = _documents()
    shape = (len(documents), max(one.input_ids.shape[1] for one in documents))
    ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED)
    mask = torch.zeros(shape, dtype=torch.long)
    for row, one in enumerate(documents):
        length = one.input_ids.shape[1]
        ids[row, :length], labels[row, :length] = one.input_ids[0], one.labels[0]
        mask[row, :length] = 1
    return MicroBatch(input_ids=ids, labels=labels, attention_mask=mask)


def _gradients(
    folder: Path, attention: str, batch: list[MicroBatch]
) -> tuple[float, dict[str, Tensor]]:
    model = load_model(folder, dtype="fp32", attn=attention)
    with Engine(model.decoder, model.store) as engine:
        loss = engine.step(batch).loss
        params = model.decoder.params
        return loss, {p.name: model.store.param(p.name, TensorKind.GRAD).clone() for p in params}


def _difference(folder: Path, batch: MicroBatch) -> float:
    """Return how far flash attention on `batch` is from the documents alone."""
    loss, alone = _gradients(folder, "sdpa", _documents())
    other, together = _gradients(folder, FLASH, [batch])
    largest = max(float(one.abs().max()) for one in alone.values())
    gradient = max(float((alone[n] - together[n]).abs().max()) for n in alone) / largest
    return max(abs(loss - other) / loss, gradient)


@pytest.mark.few(4)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "mixtral", "deepseek_v3"])
def test_packed_rows_in_one_micro_batch_are_their_documents_alone(
    family: str, kernels: FlashKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any) -> bool:
        raise AssertionError("a layer asked the device whether its row is packed")

    monkeypatch.setattr(modeling_flash_attention_utils, "_is_packed_sequence", asked)
    assert _difference(save_tiny(tmp_path, family, torch.float32), _stacked()) < 2 * NEAR
    assert kernels.plain_calls == 0
    ends = torch.tensor([0, *(length for row in ROWS for length in row)]).cumsum(0).tolist()
    assert all(call == ends for call in kernels.document_calls)


def test_rows_without_lengths_leak_and_the_test_notices(
    kernels: FlashKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MicroBatch, "document_lengths", lambda micro: {})
    assert _difference(save_tiny(tmp_path, "llama", torch.float32), _stacked()) > 100 * NEAR
    assert kernels.plain_calls > 0


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_padded_rows_are_their_documents_alone(
    family: str, kernels: FlashKernels, tmp_path: Path
) -> None:
    assert _difference(save_tiny(tmp_path, family, torch.float32), _padded()) < 2 * NEAR
    assert kernels.plain_calls == 0


@pytest.mark.few(51)
@torch.no_grad()
@pytest.mark.parametrize("family", sorted(ISOLATES - JOINT_BY_DOCUMENT))
def test_every_layer_of_a_family_gets_the_lengths_of_documents(
    family: str, kernels: FlashKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (modeling_gpt_neo, modeling_gptj):  # imported only where flash-attn is installed
        forward = modeling_flash_attention_utils._flash_attention_forward
        monkeypatch.setattr(module, "_flash_attention_forward", forward, raising=False)
    config = tiny_config(family)
    if not MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_flash_attn:
        return
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=FLASH
    )
    stacked = _stacked()
    model.eval()(**stacked.inputs, **stacked.document_lengths(), use_cache=False)
    num_calls = kernels.plain_calls + len(kernels.document_calls)
    assert num_calls >= config.num_hidden_layers
    assert kernels.plain_calls == (num_calls if family in DROPS_LENGTHS else 0)


@pytest.mark.parametrize("family", sorted(DROPS_LENGTHS))
def test_families_that_drop_the_lengths_are_refused_with_flash(family: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.attn flash_attention_2, {family} does not"):
        check_packing(family, FLASH)
    check_packing(family, "sdpa")
