"""Trial steps of a small model: the real cost of blocks on this CPU, or of issuing them.

Products, attention and element-wise work measured apart add up to a block only roughly. Here the
gradients of a small Llama are computed by the engine at a few widths and numbers of tokens,
and the rates are chosen so that its ops cost what they took (doctor/fit.py). Nothing is updated:
what updates take from compute is the simulator's part.

A device is known by its products and copies, measured apart. Of it the steps show how long the host
takes to issue a layer: a device that computes faster than that waits for the host.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from transformers import LlamaConfig

from megatrain.batch import MicroBatch
from megatrain.devices.device import CpuDevice, Device
from megatrain.doctor.fit import fitted, merged_profiles
from megatrain.engine.engine import Engine
from megatrain.lanes.trace import Span
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.model.skeleton import shape_of
from megatrain.planning.workload import Workload
from megatrain.step.ops import OpKind, Role
from megatrain.step.settings import StepSettings

SHAPES = ((1024, 512), (1024, 128), (512, 512), (512, 128), (256, 512), (256, 128))
"""Width and tokens. Of the first, which is nearest to a real model, all figures are kept; of the
others the rates of products."""
QUICK_SHAPES = ((512, 128), (256, 512))
"""The same where a few seconds have to do: each is a sixteenth of the work of the first above."""
LAYERS = 4
"""More than caches hold, of the widest."""
TRIAL_VOCABULARY = 8192
STEPS = 3
ISSUED = (256, 128)
"""Width and tokens of a model that a device does faster than a host can issue it."""


def calibrated(profile: MachineProfile, shapes: Sequence[tuple[int, int]]) -> MachineProfile:
    """Return the profile with the rates that trial steps of these shapes show."""
    return merged_profiles([_fitted(profile, width, tokens) for width, tokens in shapes])


def with_issue_times(profile: MachineProfile, device: Device) -> MachineProfile:
    """Return the profile with the time that this host takes to issue a layer to the device."""
    spans, _ = _trial(*ISSUED, device)

    def usual(kind: OpKind) -> float:
        times = [
            span.issued_ns[1] - span.issued_ns[0]
            for span in spans
            if span.issued_ns is not None and (span.op.kind, span.op.role) == (kind, Role.LAYER)
        ]
        return statistics.median(times) / 1e9

    return profile.changed(
        forward_issue_s=usual(OpKind.FORWARD), backward_issue_s=usual(OpKind.BACKWARD)
    )


def _fitted(profile: MachineProfile, width: int, tokens: int) -> MachineProfile:
    spans, decoder = _trial(width, tokens, CpuDevice())
    workload = Workload(model=shape_of(decoder), step_tokens=tokens, sequence=tokens)
    return fitted(profile, workload, StepSettings(micro_batch_tokens=tokens), spans)


def _trial(width: int, tokens: int, device: Device) -> tuple[list[Span], Decoder]:
    """Return what the lanes did in steps of a small model, and the model."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        vocab_size=TRIAL_VOCABULARY,
    )
    decoder = build_decoder(config, "bf16")
    store = Store(build_layout(decoder.blocks, (TensorKind.HI, TensorKind.GRAD)))
    for param in decoder.params:
        weight = store.param(param.name, TensorKind.HI)
        weight.normal_(0.0, 0.02) if weight.dim() > 1 else weight.fill_(1.0)
    ids = torch.arange(tokens).view(1, tokens) % TRIAL_VOCABULARY
    batch = [MicroBatch(input_ids=ids, labels=ids)]
    with Engine(decoder, store, device=device, trace=True) as engine:
        for _ in range(1 + STEPS):
            engine.step(batch)
    assert engine.trace is not None
    return [span for span in engine.trace.spans if span.step > 0], decoder
