"""The smallest run that saves: a few tensors in two blocks, no model, no engine.

It goes through the code that trainers go through: the run folder's lines, the snapshot, the save,
the delete of old checkpoints. Its tensors are a function of the step, so what a checkpoint must
hold is known without a second copy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatrain.disk.checkpoint.parts import Parts
from megatrain.disk.checkpoint.restore import restore, verify
from megatrain.disk.checkpoint.retention import finished, prune
from megatrain.disk.checkpoint.save import write_checkpoint
from megatrain.disk.hf.weights_file import NamedTensor, WeightsFile
from megatrain.engine.snapshot import Gate, Snapshot
from megatrain.errors import CheckpointCorrupted
from megatrain.ranks.ownership import SOLE, Owner
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.folder import FOLDER, RunFolder

NUM_BLOCKS = 2
SMALL = {
    "model/config.json": b'{"model_type": "llama"}\n',
    "model/tokenizer.json": json.dumps({"words": list(range(900))}).encode(),
}


class TinyRun:
    """A run in a folder: `step` changes the tensors and appends a line, `save` saves."""

    def __init__(self, folder: Path, num_elements: int = 700, owner: Owner = SOLE) -> None:
        """A rank other than the first has its part of the tensors, and writes no lines."""
        self.folder = RunFolder(folder, dry=not owner.leads)
        self.checkpoints = folder / FOLDER
        self.step = 0
        self._newest: Path | None = None
        self.parts = Parts(
            blocks=[_files(block, num_elements, owner) for block in range(NUM_BLOCKS)],
            small=dict(SMALL),
            model="tiny",
        )

    def take_step(self) -> None:
        """Change every tensor, and write the step's lines."""
        self.step += 1
        self.fill(self.step)
        for name in ("metrics.jsonl", "samples.jsonl"):
            self.folder.append(name, {"step": self.step, "loss": 1 / self.step})

    def fill(self, step: int) -> None:
        """Give the tensors the bytes they have after `step`."""
        for number, tensor in enumerate(self.tensors()):
            generator = torch.Generator().manual_seed(step * 100 + number)
            whole = torch.empty(tensor.num_bytes, dtype=torch.uint8).random_(generator=generator)
            tensor.memory.copy_(whole[tensor.here.start : tensor.here.stop])

    def tensors(self) -> list[NamedTensor]:
        return [t for files in self.parts.blocks for file in files for t in file.tensors]

    def save(self, *, ranks: Ranks = ALONE, **facts: Any) -> Path:
        """Save, with some facts in the manifest, and return the folder: it is acknowledged."""
        gate = Gate(range(NUM_BLOCKS))
        snapshot = Snapshot(gate, range(NUM_BLOCKS), self.step, dict.fromkeys(range(NUM_BLOCKS), 0))
        training = {"lines": self.folder.lengths(), **facts} if ranks.owner.leads else {}
        self._newest = write_checkpoint(
            self.checkpoints, self.parts, snapshot, training, ranks=ranks
        )
        return self._newest

    def prune(self, keep: int = 1) -> list[str]:
        return prune(self.checkpoints, keep, keep_best=False, newest=self._newest)

    def take_up(self) -> int:
        """Go on from the newest checkpoint that is whole; return its step, 0 if there is none."""
        lines: Mapping[str, int] = {}
        self.step = 0
        for path in finished(self.checkpoints):
            try:
                manifest = verify(path)
                restore(path, manifest, self.parts)
            except CheckpointCorrupted:
                continue
            self.step, lines = manifest.step, manifest.training["lines"]
            break
        self.folder.cut(lines)
        return self.step

    def holds(self, step: int) -> bool:
        """Return whether each tensor has the bytes of a step."""
        found = [tensor.memory.clone() for tensor in self.tensors()]
        self.fill(step)
        now = self.tensors()
        return all(torch.equal(a, b.memory) for a, b in zip(found, now, strict=True))


def newest_whole(parent: Path) -> tuple[int, list[str]]:
    """Return the step a resume would take, 0 for none, and what is wrong with damaged folders."""
    steps = [0]
    damaged: list[str] = []
    for path in finished(parent):
        try:
            steps.append(verify(path).step)
        except CheckpointCorrupted as error:
            damaged.append(str(error))
    return max(steps), damaged


def _files(block: int, num_elements: int, owner: Owner) -> list[WeightsFile]:
    ends = [num_elements * rank // owner.size for rank in range(owner.size + 1)]
    parts = tuple(map(range, ends, ends[1:]))
    here = parts[owner.rank]

    def tensor(name: str, dtype: torch.dtype) -> NamedTensor:
        return NamedTensor(
            name=f"{name}.{block}",
            shape=(num_elements,),
            values=torch.zeros(len(here), dtype=dtype),
            first=here.start,
            parts=() if owner.is_alone else parts,
        )

    state = [tensor("m", torch.float32), tensor("v", torch.float32), tensor("lo", torch.int16)]
    return [
        WeightsFile(
            name=f"model/model-{block + 1:05}-of-{NUM_BLOCKS:05}.safetensors",
            tensors=[tensor("hi", torch.bfloat16)],
        ),
        WeightsFile(name=f"state/block-{block:05}.safetensors", tensors=state),
    ]
