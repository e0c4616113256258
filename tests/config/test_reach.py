"""What each key of a config may reach. None runs a program that the config names."""

from __future__ import annotations

from pathlib import Path

from megatrain.config.sections import (
    DataSource,
    GroupSettings,
    RopeSettings,
    Section,
)
from megatrain.config.settings import SECTIONS

READS, WRITES, ASKS = "reads a file or folder", "writes a folder", "asks the Hub or a bucket"
SENDS = "talks to a server or a tracker"
STARTS = "starts a program of this environment, whose name the config cannot change"
_SOURCE = ("path", "name", "split", "revision", "media")
REACH: dict[str, tuple[str, ...]] = {
    "model.name_or_path": (READS, ASKS),
    "model.revision": (ASKS,),
    **{
        f"data.{part}.{key}": (READS,) if key == "media" else (READS, ASKS)
        for part in ("train", "eval")
        for key in _SOURCE
    },
    "data.chat_template": (READS,),
    "lora.path": (READS, ASKS),
    "loss.teacher": (READS, ASKS),
    "loss.teacher_revision": (ASKS,),
    "rollouts.engine": (STARTS,),  # vLLM
    "rollouts.server": (SENDS,),
    "rollouts.weights_folder": (WRITES,),
    "train.compile": (STARTS,),  # torch's compilers
    "train.kernels": (STARTS,),  # Triton's
    "memory.disk": (WRITES,),
    "save.dir": (READS, WRITES, ASKS),
    "log.to": (SENDS, STARTS),
    "log.project": (SENDS,),
}
_NOTHING = """
model: dtype attn base frozen media add_tokens
model.rope: type factor theta original_max_position_embeddings
data: max_length overlong train_on template_kwargs max_bad max_dropped max_lost_thoughts
data: processor_kwargs packing shuffle seed
data.train: format columns roles rows weight share dtype eos
data.eval: format columns roles rows weight share dtype eos
lora: rank alpha dropout targets experts rank_pattern alpha_pattern rslora modules_to_save dora
lora: dtype
loss: name beta label_smoothing gamma sft desirable_weight undesirable_weight clip clip_high kl
loss: temperature divergence top_k
rollouts: samples max_new_tokens temperature iterations mask_truncated
train: epochs steps batch_tokens batch_rows micro_batch_tokens max_grad_norm router_aux_loss seed
train: on_nonfinite on_spike products deterministic rank_deadline
optim: name learning_rate betas eps momentum weight_decay state schedule warmup decay
optim: final_fraction
optim.groups: params learning_rate times weight_decay
memory: device vram ram slots expert_pages tape chunk_tokens tile_tokens kept_layers
eval: every samples max_rows patience
save: every notice keep best
log: every
"""
"""Keys that reach nothing outside of the process."""
_PARTS: dict[str, type[Section]] = {
    "model.rope": RopeSettings,
    "data.train": DataSource,
    "data.eval": DataSource,
    "optim.groups": GroupSettings,
}


def _keys() -> set[str]:
    found = {
        f"{section}.{key}"
        for section, settings in SECTIONS.items()
        for key in settings.model_fields
    } - _PARTS.keys()
    return found | {f"{place}.{key}" for place, part in _PARTS.items() for key in part.model_fields}


def test_each_key_has_an_entry_that_says_what_it_may_reach() -> None:
    """A new key needs one: here, and in SECURITY.md if it starts anything."""
    lines = [line.split(": ") for line in _NOTHING.strip().splitlines()]
    nothing = [f"{place}.{key}" for place, keys in lines for key in keys.split()]
    assert len({*nothing}) == len(nothing)
    assert not REACH.keys() & {*nothing}
    assert REACH.keys() | {*nothing} == _keys()


def test_what_a_config_starts_is_named_in_security() -> None:
    text = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    for key, acts in REACH.items():
        assert (f"`{key}`" in text) == (STARTS in acts), key
