"""Laws of sampling.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from megatrain import load_model
from megatrain.batch import MicroBatch
from megatrain.choices import why_not_compiled
from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.engine.compute.drawing import GREEDY, SamplingParams
from megatrain.engine.engine import Engine
from megatrain.engine.sampling import continuations, continue_texts
from megatrain.media import TextMedia
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder
from megatrain.models.key_values import TextCache
from testkit.engines import make_engine
from testkit.families import FAMILIES, tiny_config, tiny_model
from testkit.joint_media import (
    MEDIA_FAMILIES,
    media_batch,
    media_documents,
    plain_inputs,
    save_media_model,
)
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    initializer_range=0.3,
    pad_token_id=0,
    eos_token_id=None,
    bos_token_id=1,
)
PROMPTS = ([5, 6, 7, 8], [9, 10], [11, 12, 13], [14, 15])
NO_END: frozenset[int] = frozenset()
CACHED = ("llama", "mistral", "gemma3_text", "gemma4_text", "gemma2", "mixtral", "qwen3_moe",
          "gpt_oss", "bloom", "deepseek_v3", "gpt2")  # fmt: skip
"""Windows, soft-caps, experts, latent attention, positions learned and by bias, shared keys."""
READ_WHOLE = ("mamba", "qwen3_next", "recurrent_gemma", "openai-gpt")
"""What they keep of a text is not, or not only, keys and values."""


@functools.cache
def model() -> PreTrainedModel:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()


def filled(config: PreTrainedConfig, plain: PreTrainedModel, kinds: tuple[TensorKind, ...]) -> Any:
    decoder = build_decoder(config, "fp32")
    store = Store(build_layout(decoder.blocks, kinds))
    for param in decoder.params:
        store.param(param.name, TensorKind.HI).copy_(plain.get_parameter(param.name).detach())
    for name, buffer in decoder.persistent_buffers().items():
        buffer.copy_(plain.get_buffer(name))
    return decoder, store


def engine(**settings: Any) -> Engine:
    return make_engine(*filled(CONFIG, model(), (TensorKind.HI,)), **settings)


def generated(
    prompt: Sequence[int], num_tokens: int, plain: PreTrainedModel | None = None
) -> list[int]:
    plain = plain or model()
    whole = plain.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    return [int(token) for token in whole[0, len(prompt) :]]


class Counting(Engine):
    """Notes how many tokens are read in each pass."""

    def sample_next(self, batch: Sequence[MicroBatch], *rest: Any) -> list[tuple[Tensor, Tensor]]:
        self.num_read = [*getattr(self, "num_read", []), sum(m.num_tokens for m in batch)]
        return super().sample_next(batch, *rest)


def test_greedy_text_is_that_of_transformers() -> None:
    with engine() as ours:
        found = continue_texts(ours, PROMPTS, 8, NO_END)
    assert found == [generated(prompt, 8) for prompt in PROMPTS]


def lively(family: str) -> PreTrainedModel:
    """A random model whose next token depends on what it has read."""
    return _enlivened(tiny_model(family, torch.float32).eval())


def _enlivened(plain: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in plain.parameters():
            if param.dim() > 1:
                param.copy_(0.2 * torch.randn(param.shape, generator=generator))
    return plain


@pytest.mark.few(5)
@pytest.mark.parametrize("family", [*CACHED, *READ_WHOLE])
def test_greedy_text_is_that_of_transformers_in_every_kind_of_family(family: str) -> None:
    """The first prompt is longer than a sliding window, which is 16 tokens."""
    plain = lively(family)
    prompts = ([5, 6, 7, 8] * 5, [9, 10, 11], [12, 13, 14])
    with Counting(*filled(tiny_config(family), plain, (TensorKind.HI,))) as ours:
        found = continue_texts(ours, prompts, 6, NO_END)
        later = ours.num_read[1:]
    assert found == [generated(prompt, 6, plain) for prompt in prompts]
    assert len({tuple(text) for text in found}) == 3
    assert (later == [3] * 5) == (family in CACHED)


NOT_GENERATED = ("bailing_hybrid", "bamba", "granitemoehybrid", "jamba")
"""Tiny ones without an attention layer: transformers cannot generate with those."""


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(NOT_GENERATED)))
def test_greedy_text_is_that_of_transformers_in_every_family(family: str) -> None:
    plain = lively(family)
    prompts = ([5, 6, 7, 8] * 5, [9, 10, 11], [12, 13, 14])
    with Counting(*filled(tiny_config(family), plain, (TensorKind.HI,))) as ours:
        found = continue_texts(ours, prompts, 6, NO_END)
    assert found == [generated(prompt, 6, plain) for prompt in prompts]


def test_a_pass_reads_one_token_of_each_prompt() -> None:
    with Counting(*filled(CONFIG, model(), (TensorKind.HI,))) as ours:
        continue_texts(ours, PROMPTS, 4, NO_END)
    assert ours.num_read == [11, 4, 4, 4]


def test_a_cache_that_lost_a_token_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(Counting):
        def sample_next(self, batch: Sequence[MicroBatch], drawing: Any, caches: Any = None) -> Any:
            found = super().sample_next(batch, drawing, caches)
            if len(self.num_read) == 3:
                caches[0].crop(-1)
            return found

    with Forgetful(*filled(CONFIG, model(), (TensorKind.HI,))) as ours:
        found = continue_texts(ours, PROMPTS, 8, NO_END)
    assert found != [generated(prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("room", [0, 11, 12, 20, 30])
def test_texts_whose_keys_do_not_fit_are_written_in_turn_or_read_whole(room: int) -> None:
    with Counting(*filled(CONFIG, model(), (TensorKind.HI,))) as ours:
        ours.__dict__["cached_tokens"] = room
        found = continue_texts(ours, PROMPTS, 8, NO_END)
    assert found == [generated(prompt, 8) for prompt in PROMPTS]
    whole = [11 + 4 * place for place in range(8)]
    assert (ours.num_read == whole) == (room < 12)


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["early", "late", "random"])
def test_a_device_with_memory_of_its_own_writes_the_same(policy: Any) -> None:
    """Weights are streamed to it from a store that has no place for gradients."""
    simulator = Simulator(policy=policy)
    with watched(simulator), engine(device=AcceleratorDevice(simulator)) as ours:
        found = continue_texts(ours, PROMPTS, 5, NO_END)
    assert found == [generated(prompt, 5) for prompt in PROMPTS]
    assert simulator.races == []
    assert simulator.failures == []


def test_a_model_that_is_only_read_takes_no_memory_for_gradients() -> None:
    def peak(kinds: tuple[TensorKind, ...]) -> int:
        simulator = Simulator(policy="early")
        device = AcceleratorDevice(simulator)
        with watched(simulator), Engine(*filled(CONFIG, model(), kinds), device=device):
            return device.peak_bytes

    assert peak((TensorKind.HI,)) < 0.6 * peak((TensorKind.HI, TensorKind.GRAD))


@pytest.mark.skipif(why_not_compiled() != "", reason=why_not_compiled())
def test_compiled_layers_write_the_same() -> None:
    with engine(compile=True) as ours:
        found = continue_texts(ours, PROMPTS, 4, NO_END)
    assert found == [generated(prompt, 4) for prompt in PROMPTS]


def test_a_row_that_has_ended_stays_and_the_others_go_on() -> None:
    whole = [generated(prompt, 8) for prompt in PROMPTS]
    ends = frozenset({whole[0][2], whole[1][4]})
    with engine() as ours:
        found = continue_texts(ours, PROMPTS, 8, ends)
    for row, text in zip(found, whole, strict=True):
        until = next((n + 1 for n, token in enumerate(text) if token in ends), 8)
        assert row == text[:until]


@pytest.mark.parametrize("drawing", [GREEDY, SamplingParams(temperature=1.5, top_p=0.9, seed=3)])
def test_log_probabilities_are_those_of_the_model(drawing: SamplingParams) -> None:
    with engine() as ours:
        found = continuations(ours, PROMPTS, 6, NO_END, drawing)
        for prompt, made in zip(PROMPTS, found, strict=True):
            ids = torch.tensor([[*prompt, *made.tokens]])
            micro = MicroBatch(input_ids=ids, labels=ids)
            (exact,) = ours.logprobs([micro], temperature=drawing.temperature or 1.0)
            torch.testing.assert_close(
                torch.tensor(made.logprobs), exact[0, len(prompt) - 1 : -1], rtol=1e-4, atol=1e-5
            )


def test_a_text_that_has_ended_makes_room_for_another() -> None:
    """Ten texts, of which two can be read at a time; some end early."""
    prompts = [[first, first + 1, *[7] * (first % 3)] for first in range(5, 15)]
    whole = [generated(prompt, 8) for prompt in prompts]
    ends = frozenset({whole[0][1], whole[3][2]})
    cut = [text[: next((n + 1 for n, t in enumerate(text) if t in ends), 8)] for text in whole]
    with Counting(*filled(CONFIG, model(), (TensorKind.HI,))) as ours:
        ours.__dict__["cached_tokens"] = 2 * (4 + 8)
        found = continue_texts(ours, prompts, 8, ends)
    assert found == cut
    assert len(ours.num_read) < sum(map(len, cut)) / 2 + 4
    assert sum(ours.num_read) == sum(map(len, prompts)) + sum(len(text) - 1 for text in cut)


def test_drawn_text_does_not_depend_on_texts_beside_it() -> None:
    drawing = SamplingParams(temperature=1.5, top_p=0.95, seed=3)
    with engine() as ours:
        together = continue_texts(ours, PROMPTS, 6, NO_END, drawing)
        ours.__dict__["cached_tokens"] = 12
        assert continue_texts(ours, PROMPTS, 6, NO_END, drawing) == together
        changed = [*PROMPTS[:3], [20, 21, 22]]
        assert continue_texts(ours, changed, 6, NO_END, drawing)[:3] == together[:3]


@pytest.mark.parametrize("seed", [0, 1])
def test_drawn_text_is_the_same_for_the_same_seed(seed: int) -> None:
    with engine() as ours:
        first, second, other = (
            continue_texts(ours, PROMPTS, 6, NO_END, SamplingParams(temperature=1.5, seed=number))
            for number in (seed, seed, seed + 7)
        )
    assert first == second != other


class Joint:
    """A tiny joint model, and prompts with several media, with one and with none."""

    def __init__(self, folder: Path, family: str) -> None:
        source = save_media_model(folder, family, torch.float32)
        found = AutoModelForMultimodalLM.from_pretrained(source, dtype=torch.float32)
        self.plain = _enlivened(found.eval())
        self.plain.save_pretrained(source)
        self.documents = media_documents(family, [2, 1, 0, 0, 1], seed=5)
        self.media = [
            TextMedia(items=items, token_types=types.tolist()) if items else None
            for _, types, items in self.documents
        ]
        self.model = load_model(source, dtype="fp32", media="all")

    def generated(self) -> list[list[int]]:
        found = []
        for ids, types, items in self.documents:
            micro = media_batch([(ids, types, items)], packed=False)
            given = plain_inputs(self.plain, micro) if items else {"input_ids": ids[None]}
            whole = self.plain.generate(
                **given, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            found.append(whole[0, len(ids) :].tolist())
        return found

    def continued(self, media: Sequence[TextMedia | None]) -> list[list[int]]:
        with make_engine(self.model.decoder, self.model.store) as ours:
            prompts = [ids.tolist() for ids, _, _ in self.documents]
            return continue_texts(ours, prompts, 6, NO_END, media=media)


@pytest.mark.parametrize(
    "family",
    [
        family if family == "qwen2_5_vl" else pytest.param(family, marks=pytest.mark.merge)
        for family in MEDIA_FAMILIES
    ],
)
def test_greedy_text_after_media_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    """Prompts of text alone are beside them, two of them in one micro-batch."""
    joint = Joint(tmp_path, family)
    assert joint.continued(joint.media) == joint.generated()


@pytest.mark.merge
def test_another_picture_and_a_lost_shift_of_positions_give_other_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = Joint(tmp_path, "qwen2_5_vl")
    wanted = joint.continued(joint.media)
    first = joint.media[0]
    assert first is not None
    turned = [
        replace(item, tensors={n: t.flip(0) if t.dtype.is_floating_point else t
                               for n, t in item.tensors.items()})
        for item in first.items
    ]  # fmt: skip
    other = joint.continued([replace(first, items=turned), *joint.media[1:]])
    assert other[0] != wanted[0]
    assert other[1:] == wanted[1:]
    monkeypatch.setattr(TextCache, "read_at", lambda self, positions: None)
    lost = joint.continued(joint.media)
    assert lost != wanted
    assert lost[2:4] == wanted[2:4]
