"""Small runs to hold the plan against: a model, a batch, and how to run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import LlamaConfig

from benchmarks.step import build_store
from megatrain.batch import MicroBatch
from megatrain.config.sections import LoraSettings
from megatrain.devices.device import CpuDevice
from megatrain.engine.engine import Engine
from megatrain.memory.kinds import kinds_on_disk, store_kinds
from megatrain.models.adapters.lora import LoraConfig
from megatrain.models.build import build_decoder
from megatrain.optim.adamw import AdamW
from megatrain.optim.states import STATES
from megatrain.planning.machine.profile import MachineProfile, unmeasured
from megatrain.planning.model.partly_trained import with_adapters
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.model.skeleton import shape_of
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings
from testkit.engines import make_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A model, a batch, and how to run it."""

    hidden: int
    inner: int
    layers: int
    vocab: int = 8192
    num_micro: int = 1
    rows: int = 1
    length: int = 256
    update: Literal["in_backward", "late"] = "late"
    device: Literal["views", "copies"] = "views"
    tape: Literal["device", "host"] = "device"
    slots: int = 2
    chunk_tokens: int = 4096
    tied: bool = False
    state: Literal["fp32", "bf16", "8bit"] = "fp32"
    tier: Literal["none", "states"] = "none"
    rank: int | None = None
    """Of adapters, over a frozen base."""

    def __str__(self) -> str:
        size = f"{self.hidden}x{self.layers}"
        batch = f"{self.num_micro}x{self.rows}x{self.length}"
        places = f"{self.device} tape {self.tape} slots {self.slots}"
        tier = "" if self.tier == "none" else f" {self.tier} on disk"
        adapters = "" if self.rank is None else f" adapters of rank {self.rank}"
        return f"{size} {batch} {self.update} {places} states {self.state}{tier}{adapters}"

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=max(1, self.hidden // 128),
            vocab_size=self.vocab,
            tie_word_embeddings=self.tied,
        )

    @property
    def model(self) -> ModelShape:
        found = shape_of(build_decoder(self.config, "bf16"))
        return found if self.rank is None else with_adapters(found, LoraSettings(rank=self.rank))

    @property
    def workload(self) -> Workload:
        tokens = self.num_micro * self.rows * self.length
        return Workload(model=self.model, step_tokens=tokens, sequence=self.length)

    @property
    def settings(self) -> StepSettings:
        return StepSettings(
            micro_batch_tokens=self.rows * self.length,
            slots=self.slots,
            tape=self.tape,
            update=self.update,
            chunk_tokens=self.chunk_tokens,
            state=self.state,
            tier=self.tier,
        )

    def batch(self) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.rows, self.length)
        tokens = [
            torch.randint(0, self.vocab, shape, generator=generator) for _ in range(self.num_micro)
        ]
        return [MicroBatch(input_ids=ids, labels=ids) for ids in tokens]

    def engine(self, **arguments: Any) -> Engine:
        """Return a new engine; what is on disk is in a file without a name, in this folder."""
        late = self.update == "late"
        kinds = store_kinds(STATES["adamw"][self.state], waits=late)
        lora = None if self.rank is None else LoraConfig(rank=self.rank, alpha=2.0 * self.rank)
        on_disk = kinds_on_disk(kinds, self.tier)
        decoder, store = build_store(self.config, kinds, on_disk, lora=lora)
        optimizer = AdamW(learning_rate=1e-5, max_grad_norm=1.0 if late else None, state=self.state)
        return make_engine(
            decoder,
            store,
            optimizer=optimizer,
            device=CpuDevice(copying=self.device == "copies"),
            **self.settings.facts(),
            **arguments,
        )


def plain_profile(base_bytes: int) -> MachineProfile:
    """Return a profile for memory alone: no rate matters."""
    return unmeasured(ram_bytes=1 << 40, base_bytes=base_bytes).changed(cores=2)
