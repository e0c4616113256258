"""Liger's own package over the families it knows: kernels as written, run by Triton's interpreter.

    python -m proofs.liger [--json] [--steps 20] [--families llama qwen3]

The package is no dependency of the tests: run this in an environment of its own.

    pip install torch==2.13.0                                  # the build for CPUs is enough
    pip install -e . pytest hypothesis && pip install --no-deps liger-kernel==0.8.5 triton==3.9.0

Every family is trained twice through the engine on the CPU, from the same weights, in fp32: with
the model's own code, and with `train.kernels: liger`. The losses of all steps must agree within
RELATIVE, the tolerance of Liger's own tests of convergence in fp32 (1e-4 for some families there),
and the norms of gradients likewise; packed (one flat row of documents, each attended to alone) and
not (rows that are padded). The result also tells which modules have kernels.

The kernels' own source runs by Triton's interpreter in the first COMPARED steps of each run, and
every launch is compared there with the same sums in torch (liger_interpreted.py), which stand in
for the kernels in later steps: the interpreter takes a second for a step of a few tokens. Two
things of a GPU it does not have: the inverse root and the hyperbolic tangent of the device's
library, which are Triton's own here, and numbers with a point as arguments of a kernel. It
cannot show what compiled kernels do: registers, launches, bf16 (its bf16 is not a card's), speed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined

import torch
from torch import Tensor, nn
from transformers.utils import logging

from megatrain import load_model
from megatrain.batch import MicroBatch
from megatrain.devices.device import CpuDevice
from megatrain.engine.compute.fused import use_liger
from megatrain.errors import ConfigError
from megatrain.models.documents import BY_DOCUMENT
from megatrain.optim.adamw import AdamW
from megatrain.planning.from_config import LIGER_FAMILIES
from proofs import liger_interpreted
from proofs.liger_interpreted import Launches
from testkit.engines import make_engine
from testkit.families import EXTRA, FAMILIES, save_tiny, tiny_model
from testkit.plain import flat_row

RELATIVE = 1e-5
"""Of a loss, and of a gradient's norm: the strictest of Liger's own tests of convergence."""
SMALLER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "sliding_window": 3,
}  # fmt: skip
LENGTHS = (4, 2)
COMPARED = 1
"""Steps whose launches the interpreter runs."""


class _Interpreted(CpuDevice):
    """The CPU, with Triton by its interpreter."""

    has_triton = True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m proofs.liger", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--families", nargs="*", default=())
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    launches = liger_interpreted.prepare()
    known = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    families = options.families or sorted(set(known) & set(FAMILIES))
    began, found = time.monotonic(), {}
    for family in families:
        found[family] = _family(family, options.steps, launches)
        print(f"{family}: {json.dumps(found[family])}", file=sys.stderr, flush=True)
    shown = {family for family, facts in found.items() if facts.get("within")}
    wrong = sorted(set(families) & LIGER_FAMILIES - shown)
    result = {
        "families": found,
        "steps": options.steps,
        "tolerance": RELATIVE,
        "compared_kernels": launches.compared,
        "interpreted_only": sorted(launches.alone),
        "shown": sorted(shown),
        "listed_and_not_shown": wrong,
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(result, indent=1) if options.json else f"shown: {' '.join(result['shown'])}")
    sys.exit(bool(wrong))


def _family(family: str, num_steps: int, launches: Launches) -> dict[str, Any]:
    """Return what the kernels of a family are, and how far its losses are from the eager ones."""
    own = {"head_dim", "num_key_value_heads"} & set(EXTRA.get(family, {}))
    kept = ("num_attention_heads", "num_key_value_heads") if own else ()
    changes = {k: v for k, v in SMALLER.items() if k not in kept and _takes(family, k)}
    try:
        facts: dict[str, Any] = {"modules": _patched(family, changes)}
        with tempfile.TemporaryDirectory() as folder:
            save_tiny(Path(folder), family, torch.float32, **changes)
            forms = ("packed", "padded") if family in BY_DOCUMENT else ("padded",)
            for form in forms:
                eager, fused = (
                    _trained(Path(folder), form, kernels, num_steps, launches)
                    for kernels in ("none", "liger")
                )
                facts[form] = {
                    "loss": _furthest(eager[0], fused[0]),
                    "norm": _furthest(eager[1], fused[1]),
                    "first_and_last_loss": [eager[0][0], eager[0][-1]],
                }
    except ConfigError as error:
        return {"refused": str(error)}
    except Exception as error:  # of the package, or of the interpreter
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    far = [facts[form][figure] for form in forms for figure in ("loss", "norm")]
    facts["within"] = max(far) < RELATIVE
    return facts


def _takes(family: str, key: str) -> bool:
    return hasattr(tiny_model(family, torch.float32).config, key)


def _patched(family: str, changes: dict[str, Any]) -> dict[str, int]:
    """Return how many modules of each kind have a forward that is not their own."""
    model = tiny_model(family, torch.float32, **changes)
    use_liger(model, _Interpreted())
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        if "forward" in vars(module):
            kind = f"{type(module).__name__} as {name.rpartition('.')[2]}"
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def _trained(
    folder: Path, form: str, kernels: str, num_steps: int, launches: Launches
) -> tuple[list[float], list[float]]:
    """Return the losses and the norms of gradients of some steps on new rows each."""
    home = load_model(folder, dtype="fp32")
    optimizer = AdamW(learning_rate=1e-3, max_grad_norm=1.0)
    losses, norms = [], []
    with (
        closing(home.store),
        warnings.catch_warnings(),
        make_engine(
            home.decoder, home.store, optimizer=optimizer, device=_Interpreted(),
            kernels=kernels,
        ) as engine,
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        for step in range(num_steps):
            launches.compares = step < COMPARED
            result = engine.step([_batch(form, step)])
            assert result.loss is not None
            assert result.grad_norm is not None
            losses.append(result.loss)
            norms.append(result.grad_norm)
    return losses, norms


def _batch(form: str, step: int) -> MicroBatch:
    row = flat_row(LENGTHS, seed=step)
    if form == "packed":
        return row
    parts = [part[0] for part in torch.split(row.input_ids, list(LENGTHS), dim=1)]
    ids = nn.utils.rnn.pad_sequence(parts, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(p) for p in parts], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    return MicroBatch(input_ids=ids, labels=labels, attention_mask=mask)


def _furthest(expected: list[float], found: list[float]) -> float:
    """Return the largest relative difference."""
    a, b = Tensor(expected).double(), Tensor(found).double()
    return float(((a - b).abs() / a.abs()).max())


if __name__ == "__main__":
    main()
