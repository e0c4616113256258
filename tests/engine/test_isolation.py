"""Packed documents do not see each other: a packed row is its documents alone.

For every family the plain model says whether it keeps documents apart, with windows, chunks and
selections smaller than a document; the list that packing relies on must say the same. Through the
engine, losses, gradients and the logits at the end of each document are compared, by every
attention that trains here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatrain import load_model
from megatrain.batch import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind
from megatrain.models.documents import TAKES_MASKS
from megatrain.models.isolation import ISOLATES, check_packing
from megatrain.step.settings import StepSettings
from testkit.cases import by_family
from testkit.families import FAMILIES, save_tiny, tiny_config

LENGTHS = (9, 14, 20)
"""The last is longer than the window of 16."""
NEAR = 1e-6
# Its norms make differences of rounding larger than that; in fp64 they are none.
AMPLIFIES = {"gemma4_text"}
# What would not show in rows this short, or in a model this small.
STRAINED: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"attention_chunk_size": 8},
    "doge": {"keep_window_size": 4},
    "deepseek_v32": {"index_topk": 4},
    "axk2": {"index_topk": 4},
}


def _documents() -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in LENGTHS:
        ids = torch.randint(3, 300, (1, length), generator=generator)
        labels = ids.clone()
        labels[:, :3] = -100
        found.append(MicroBatch(input_ids=ids, labels=labels))
    return found


def _packed(documents: list[MicroBatch], *, positions: bool = True) -> MicroBatch:
    """Return the documents as one row; without positions they are one text."""
    places = torch.cat([torch.arange(one.input_ids.shape[1]) for one in documents])[None]
    return MicroBatch(
        input_ids=torch.cat([one.input_ids for one in documents], dim=1),
        labels=torch.cat([one.labels for one in documents], dim=1),
        position_ids=places if positions else None,
    )


def _repeated(packed: MicroBatch, num_rows: int) -> MicroBatch:
    return packed.mapped(lambda tensor: tensor.repeat(num_rows, 1))


def _until(packed: MicroBatch, stop: int) -> MicroBatch:
    """Return the first `stop` tokens of each row."""
    return packed.mapped(lambda tensor: tensor[:, :stop])


def _far(expected: Tensor, found: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return float((expected - found).abs().max() / expected.abs().max().clamp_min(1e-30))


@torch.no_grad()
@pytest.mark.parametrize("family", by_family(FAMILIES))
def test_the_list_of_families_is_right(family: str) -> None:
    config = tiny_config(family)
    for key, value in STRAINED.get(family, {}).items():
        setattr(config, key, value)
    torch.manual_seed(0)
    dtype = torch.float64 if family in AMPLIFIES else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    documents = _documents()
    packed = model(**_packed(documents).inputs, use_cache=False).logits[0]
    alone = torch.cat([model(**one.inputs, use_cache=False).logits[0] for one in documents])
    first = LENGTHS[0]
    if family != "doge":  # which keys it keeps depends on the length of the row
        assert _far(alone[:first], packed[:first]) < 2 * NEAR  # nothing stands before it
    if family in ISOLATES - TAKES_MASKS:
        assert _far(alone, packed) < 2 * NEAR
    else:
        assert _far(alone, packed) > 100 * NEAR


# Flex attention has no backward on a CPU, and compiles for a minute. One row is attended to by
# document, where the family can do that; in two rows masks keep documents apart.
CASES = [
    ("llama", "sdpa", 2),
    ("gpt2", "eager", 2),
    ("gpt_oss", "eager", 2),
    ("afmoe", "sdpa", 2),
    ("deepseek_v32", "eager", 2),
    ("llama", "sdpa", 1),
    ("llama", "eager", 1),
    ("mistral", "sdpa", 1),
    ("mistral", "eager", 1),
    ("gemma2", "eager", 1),
    ("gemma3_text", "sdpa", 1),
    ("cohere2", "sdpa", 1),
    ("gpt2", "sdpa", 1),
    ("gpt2", "eager", 1),
    ("mixtral", "sdpa", 1),
    ("deepseek_v3", "sdpa", 1),
    ("deepseek_v32", "eager", 1),
    # Through the engine only: the forward of these forgets where documents begin.
    ("gpt_oss", "eager", 1),
    ("afmoe", "sdpa", 1),
    ("afmoe", "eager", 1),
]


class World:
    """A tiny model in fp32 behind an engine that does not update."""

    def __init__(
        self, folder: Path, family: str, attention: str, tile_tokens: int | None = None
    ) -> None:
        save_tiny(folder, family, torch.float32)
        self.model = load_model(folder, dtype="fp32", attn=attention)
        settings = StepSettings(tile_tokens=tile_tokens)
        self.engine = Engine(self.model.decoder, self.model.store, settings=settings)

    def gradients(self, batch: list[MicroBatch]) -> tuple[float, dict[str, Tensor]]:
        loss = self.engine.step(batch).loss
        params = self.model.decoder.params
        return loss, {
            p.name: self.model.store.param(p.name, TensorKind.GRAD).clone() for p in params
        }

    def ends(self, documents: list[MicroBatch], packed: MicroBatch) -> float:
        """Return how far the logits at the documents' ends are from those of each alone."""
        stops = torch.tensor(LENGTHS).cumsum(0).tolist()
        cut = [_until(packed, stop) for stop in stops]
        alone, within = self.engine.next_token_logits(documents), self.engine.next_token_logits(cut)
        return max(_far(one, two) for one, two in zip(alone, within, strict=True))


def _differences(world: World, packed: MicroBatch) -> tuple[float, float, float]:
    """Return how far loss, gradients and logits are from those of the documents alone."""
    documents = _documents()
    with world.engine:
        loss, alone = world.gradients(documents)
        other, together = world.gradients([packed])
        largest = max(float(one.abs().max()) for one in alone.values())
        gradient = max(float((alone[n] - together[n]).abs().max()) for n in alone) / largest
        return abs(loss - other) / loss, gradient, world.ends(documents, packed)


@pytest.mark.few(6)
@pytest.mark.parametrize(("family", "attention", "num_rows"), CASES)
def test_a_packed_row_is_its_documents_alone(
    family: str, attention: str, num_rows: int, tmp_path: Path
) -> None:
    """Rows are all the same: the mean over their tokens is that over one."""
    world = World(tmp_path, family, attention)
    found = _differences(world, _repeated(_packed(_documents()), num_rows))
    assert max(found) < 2 * NEAR, found


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "attention"), [("mistral", "sdpa"), ("gemma2", "eager")])
def test_so_it_is_over_tiles(family: str, attention: str, tmp_path: Path) -> None:
    """A document of 14 tokens ends in the third tile of 8 and begins in the second."""
    found = _differences(World(tmp_path, family, attention, 8), _packed(_documents()))
    assert max(found) < 2 * NEAR, found


@pytest.mark.parametrize("wrong", ["one text", "one too far", "a document begins late"])
def test_documents_that_see_each_other_would_be_noticed(wrong: str, tmp_path: Path) -> None:
    packed = _packed(_documents())
    if wrong == "one text":
        packed = _packed(_documents(), positions=False)
    else:
        assert packed.position_ids is not None
        places = packed.position_ids.clone()
        if wrong == "one too far":  # the second document goes on where the first ends
            places[0, LENGTHS[0] : sum(LENGTHS[:2])] += LENGTHS[0]
        else:
            places[0, LENGTHS[0]] = LENGTHS[0]
        packed = MicroBatch(input_ids=packed.input_ids, labels=packed.labels, position_ids=places)
    found = _differences(World(tmp_path, "llama", "sdpa"), packed)
    assert min(found) > 100 * NEAR, found


@pytest.mark.parametrize("family", ["mamba", "qwen3_next", "opt", "lfm2", "unheard_of"])
def test_families_that_are_not_known_to_isolate_are_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.packing: {family} is not known to keep"):
        check_packing(family)
    check_packing("llama")
