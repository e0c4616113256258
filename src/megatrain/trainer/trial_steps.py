"""A few steps of a small model, one op at a time: what blocks really cost on this processor.

Products, attention and element-wise work measured apart add up to a block only roughly. Here a
Llama of two layers is trained by the reference player at a few widths and numbers of tokens, and
the rates are chosen so that its ops cost what they took (planning/fit.py). On a processor alone: a
device works behind the host's back, and a trace of the host shows nothing of it.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig

from megatrain.memory.layout import Kind, build_layout
from megatrain.memory.store import WITH_CLIP, Store
from megatrain.models.decoder import build_decoder
from megatrain.optim.adamw import AdamW
from megatrain.pipeline.batch import MicroBatch
from megatrain.pipeline.engine import Engine
from megatrain.pipeline.trace import Span
from megatrain.planning.fit import fitted, merged
from megatrain.planning.profile import MachineProfile
from megatrain.planning.settings import Settings
from megatrain.planning.workload import Workload, shape_of

SHAPES = ((1024, 512), (1024, 128), (256, 512), (256, 128))
"""Width and tokens. Of the first, which is nearest to a real model, all figures are kept; of the
others the rates of products."""
VOCABULARY = 8192
STEPS = 2


def calibrated(profile: MachineProfile) -> MachineProfile:
    """Return the profile with the rates that trial steps show, and its own of the optimizer.

    The optimizer's rate over a small model would be that of the cache.
    """
    found = merged([_fitted(profile, width, tokens) for width, tokens in SHAPES])
    return found.changed(update_params_per_s=profile.update_params_per_s)


def _fitted(profile: MachineProfile, width: int, tokens: int) -> MachineProfile:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=2,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        vocab_size=VOCABULARY,
    )
    decoder = build_decoder(config, "bf16")
    workload = Workload(model=shape_of(decoder), step_tokens=tokens, sequence=tokens)
    settings = Settings(micro_tokens=tokens)
    store = Store(build_layout(decoder.blocks), WITH_CLIP)
    for param in decoder.params:
        weight = store.param(param.name, Kind.HI)
        weight.normal_(0.0, 0.02) if weight.dim() > 1 else weight.fill_(1.0)
    optimizer = AdamW(store, learning_rate=1e-5, num_threads=int(profile.update_cores))
    ids = torch.arange(tokens).view(1, tokens) % VOCABULARY
    batch = [MicroBatch(input_ids=ids, labels=ids)]
    arguments = {"optimizer": optimizer, "update": "late", "reference": True, "trace": True}
    with Engine(decoder, store, **arguments) as engine:  # type: ignore[arg-type]
        for _ in range(1 + STEPS):
            engine.step(batch)
    assert engine.trace is not None
    spans: list[Span] = [span for span in engine.trace.spans if span.step > 0]
    return fitted(profile, workload, settings, spans)
