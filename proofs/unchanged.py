"""Plans and bits as one file of hashes, to hold two versions of the source against each other.

    python -m proofs.unchanged > before.json     (at one commit)
    python -m proofs.unchanged > after.json      (at another)
    diff before.json after.json

Plans are those of `megatrain estimate --json`: README's rows and others that take every lever.
Runs are three steps of tiny models of all structures, in both precisions, on the CPU and on the
simulated accelerator, with settings that take every lever; the hash is over losses, norms, weights
and optimizer states. A change that moves code gives the same file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

UNCLIPPED = "train.max_grad_norm=null"
PLANS = (
    "Qwen/Qwen3-4B --gpu 3060 --ram 64GB",
    f"Qwen/Qwen3-8B {UNCLIPPED} --gpu 3090 --ram 64GB",
    "Qwen/Qwen3-8B --gpu 3090 --ram 64GB --disk 1TB",
    "Qwen/Qwen3-8B --gpu 4090 --ram 128GB",
    "Qwen/Qwen3-8B --gpu 4090 --ram 48GB",
    "Qwen/Qwen3-8B data.max_length=131072 --gpu 4090 --ram 192GB",
    "Qwen/Qwen3-14B --gpu 3090 --ram 128GB",
    "Qwen/Qwen3-14B --gpu 4090 --ram 256GB",
    "Qwen/Qwen3-14B memory.kept_layers=4 memory.slots=3 --gpu A100 --ram 512GB",
    f"Qwen/Qwen3-32B {UNCLIPPED} --gpu 4090 --ram 128GB --disk 2TB",
    "Qwen/Qwen3-32B --gpu 5090 --ram 384GB",
    "Qwen/Qwen3-32B lora.rank=16 --gpu 3090 --ram 96GB",
    "meta-llama/Llama-3.1-70B --gpu A100 --ram 768GB",
    "meta-llama/Llama-3.1-70B memory.tile_tokens=4096 --gpu 4090 --ram 1TB",
    "meta-llama/Llama-3.1-8B data.max_length=524288 --gpu GH200",
    "openai/gpt-oss-120b --gpu H200 --ram 1.5TB",
    "openai/gpt-oss-120b --gpu 4090 --ram 1.5TB",
    "openai/gpt-oss-20b --gpu 4090 --ram 192GB",
    "mistralai/Mistral-Large-Instruct-2407 --gpu H200 --ram 1.5TB",
    "google/gemma-2-9b --gpu 4090 --ram 128GB",
    "Qwen/Qwen3-30B-A3B --gpu 4090 --ram 512GB",
    "Qwen/Qwen3-30B-A3B optim.state=8bit model.dtype=fp32 --gpu 4090 --ram 512GB",
    "Qwen/Qwen3-8B --gpu 4090 --ram 192GB --gpus 2",
    "Qwen/Qwen3-8B data.packing=false loss=dpo --gpu 4090 --ram 192GB",
)
LEVERS: tuple[dict[str, Any], ...] = (
    {},
    {"tape": "host", "slots": 3},
    {"kept_layers": 2, "grad_slots": 1},
    {"tile_tokens": 8, "chunk_tokens": 16},
    {"gather_embedding": True},
    {"update": "in_backward", "tape": "host"},
    {"state": "bf16", "tile_tokens": 8},
    {"state": "8bit", "kept_layers": 1, "chunk_tokens": 8},
)
"""Settings of runs, in turn; what a model or a device cannot do is left out of them."""


def plan_hashes(plans: Sequence[str] = PLANS) -> dict[str, str]:
    """Return the hash of each plan, or of the message by which it is refused."""
    found = {}
    for words in plans:
        command = [sys.executable, "-m", "megatrain", "estimate", *words.split(), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = done.stdout if done.stdout.strip() else done.stderr
        found[words] = f"{done.returncode} {_hash(said.encode())}"
    return found


def run_hashes(only: Collection[str] = ()) -> dict[str, str]:
    """Return the hash of each run, or of those of a few families."""
    import torch

    from testkit.families import COVERING, save_tiny

    torch.set_num_threads(1)
    found = {}
    for number, family in enumerate(COVERING):
        if only and family not in only:
            continue
        for dtype in ("fp32", "bf16"):
            levers = LEVERS[(number + (dtype == "bf16")) % len(LEVERS)]
            simulated = bool((number + 2 * (dtype == "bf16")) % 3)
            with tempfile.TemporaryDirectory(prefix="megatrain-unchanged-") as path:
                folder = save_tiny(Path(path), family, getattr(torch, _TORCH[dtype]))
                name = f"{family} {dtype} {'simulated' if simulated else 'cpu'} {levers}"
                found[name] = _run(folder, dtype, levers, simulated=simulated)
    return found


_TORCH = {"fp32": "float32", "bf16": "bfloat16"}


def _run(folder: Path, dtype: Any, levers: dict[str, Any], *, simulated: bool) -> str:
    from megatrain import AdamW, Engine, StepSettings, load_model
    from megatrain.devices.accelerator import AcceleratorDevice
    from megatrain.devices.device import CpuDevice
    from megatrain.memory.kinds import store_kinds
    from megatrain.optim.states import STATES
    from testkit.plain import make_batch
    from testkit.simulated.accelerator import Simulator

    settings = StepSettings(**levers)
    clip = None if settings.update == "in_backward" else 0.5
    kinds = store_kinds(STATES["adamw"][settings.state], waits=clip is not None)
    home = load_model(folder, dtype=dtype, kinds=kinds)
    if home.decoder.tied:  # the head reads all of a tied table
        settings = settings.changed(gather_embedding=False)
    device = AcceleratorDevice(Simulator(policy="early")) if simulated else CpuDevice()
    if not simulated:
        settings = settings.changed(gather_embedding=False)
    said: list[Any] = []
    optimizer = AdamW(learning_rate=1e-3, max_grad_norm=clip, state=settings.state)
    try:
        with Engine(
            home.decoder, home.store, optimizer=optimizer, settings=settings, device=device
        ) as engine:
            for step in range(3):
                result = engine.step(make_batch([(2, 16), (1, 24)], seed=step))
                said.append((result.loss, result.grad_norm))
    except Exception as error:  # what is refused stays refused
        return f"refused: {type(error).__name__}"
    digest = hashlib.sha256(repr(said).encode())
    for param in home.decoder.params:
        for kind in home.store.kinds:
            if kind.fp32 is None and str(param.dtype) == "torch.float32":
                continue
            if param.trained or kind.is_for_frozen:
                digest.update(_bytes(home.store.param(param.name, kind)))
    return digest.hexdigest()[:16]


def _bytes(tensor: Any) -> bytes:
    import torch

    data: bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return data


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    print(json.dumps({"plans": plan_hashes(), "runs": run_hashes()}, indent=1))


if __name__ == "__main__":
    main()
