"""Joint models trained on text have the bits of transformers' joint class; the rest its bytes.

Some families; `python -m proofs.joint` plays them all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.batch import MicroBatch
from megatrain.disk.hf.model import HostModel
from megatrain.models.documents import JOINT_BY_DOCUMENT, PackedDocuments, attending
from testkit.cases import at_a_push
from testkit.joint_families import JOINT_FAMILIES, tiny_joint_model
from testkit.joint_training import joint_faults


@pytest.mark.few(1)
@pytest.mark.parametrize("family", at_a_push(JOINT_FAMILIES, 3))
def test_text_is_trained_as_by_the_plain_joint_model(family: str, tmp_path: Path) -> None:
    assert joint_faults(family, "bf16", tmp_path) == []


def test_so_it_would_be_noticed(tmp_path: Path) -> None:
    def swap(model: HostModel) -> None:
        source = model.beside[0].source
        names = [tensor.name for tensor in model.beside if "k_proj.weight" in tensor.name][:2]
        tensors = dict(source._tensors)
        tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]
        source._tensors = tensors

    faults = joint_faults("llava", "bf16", tmp_path, swap)
    assert len([fault for fault in faults if "is carried and has changed" in fault]) == 2
    assert len([fault for fault in faults if "loads otherwise" in fault]) == 2


@torch.no_grad()
@pytest.mark.parametrize("family", at_a_push(sorted(JOINT_BY_DOCUMENT), 3))
def test_packed_documents_are_apart_by_document_and_by_masks(family: str) -> None:
    model = tiny_joint_model(family, torch.float32).eval()
    lengths = (9, 14, 20)  # the last is longer than the window of 16
    ids = torch.randint(3, 300, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    parts = ids.split_with_sizes(lengths, dim=1)
    alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], dim=1)
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = MicroBatch(input_ids=ids, labels=ids, position_ids=places).inputs
    bounds = torch.tensor([0, 9, 23, 43], dtype=torch.int32)

    def far(documents: PackedDocuments | None, inputs: dict[str, torch.Tensor]) -> float:
        with attending(documents):
            found = model(**inputs, use_cache=False).logits
        return float((found - alone).abs().max() / alone.abs().max())

    assert far(None, dict(packed)) < 2e-6
    assert far(PackedDocuments(lengths=lengths, bounds=bounds), dict(packed)) < 2e-6
    assert far(None, {"input_ids": ids}) > 1e-4  # one text
