"""Twenty steps of adapters by MegaTrain's engine and by PEFT on the resident model, in fp32.

    python -m proofs.adapters.steps --json
    python -m proofs.adapters.steps --kind experts --family gpt_oss

Run this in an environment of its own that has `peft` from PyPI beside MegaTrain's requirements.
These are the kinds whose operations are not PEFT's one by one, so they agree within rounding:
adapters of experts, which PEFT computes as `W + s B A`, and DoRA, whose norms it takes of that sum.
Both sides start from the same values and
take twenty steps with AdamW, each by its own gradients. The losses of all steps, the gradients of
the first and what the adapters have moved at the end are compared. Ends with 1 if a case differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain import AdamW, Engine, HostModel, load_model
from megatrain.disk.adapters.names import adapter_tensors
from megatrain.memory.kinds import TensorKind
from megatrain.models.adapters.lora import MAGNITUDE
from proofs.adapters.loading import KINDS
from proofs.adapters.options import parsed, parser_of
from testkit.adamw_by_hand import HandAdamW
from testkit.families import save_tiny
from testkit.plain import load_plain, make_batch, plain_gradients
from testkit.plain_lora import drawn_like

RATE, DECAY, STEPS = 1e-3, 0.1, 20
FAMILIES = {
    "experts": ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "jetmoe"),
    "dora": ("llama", "qwen2", "gpt2", "gemma2", "phi3"),
}
BATCHES = [make_batch([(2, 24), (1, 17)], seed=seed) for seed in range(STEPS)]
CLOSE_LOSS, CLOSE_GRADIENT, CLOSE_MOVE = 1e-5, 1e-4, 1e-2
"""Of the loss; of the largest element of a gradient; of the length of what weights have moved,
which AdamW makes of gradients near zero as well."""


def compare(family: str, kind: str) -> dict[str, Any]:
    """Return by how much twenty steps of both sides differ."""
    with tempfile.TemporaryDirectory(prefix="megatrain-adapters-") as path:
        folder = save_tiny(Path(path) / "base", family, torch.float32)
        home = load_model(folder, dtype="fp32", lora=replace(KINDS[kind], dropout=0.0))
        _fill(home)
        home.export(Path(path) / "ours")
        model = _trained_by_peft(folder, Path(path) / "ours")
        figures = _train_both(home, model)
    faults = [
        f"{name} differ by {figures[name]:.1e}"
        for name, most in (
            ("losses", CLOSE_LOSS),
            ("gradients", CLOSE_GRADIENT),
            ("moves", CLOSE_MOVE),
        )
        if not figures[name] <= most
    ]
    return {"family": family, "kind": kind, **figures, "faults": faults}


def _fill(home: HostModel) -> None:
    names = [param.name for param in home.decoder.params if param.is_adapter]
    values = drawn_like({name: home.store.param(name, TensorKind.HI) for name in names}, seed=4)
    for name, drawn in values.items():
        if name.endswith(MAGNITUDE):  # near the norms that it starts with
            home.store.param(name, TensorKind.HI).mul_(1 + drawn)
        else:
            home.store.param(name, TensorKind.HI).copy_(drawn)


def _trained_by_peft(base: Path, folder: Path) -> Any:
    from peft import PeftModel

    model = load_plain(base, torch.float32)
    return PeftModel.from_pretrained(model, folder, is_trainable=True).train()


def _file_name(name: str) -> str:
    """Return the name in PEFT's files of a param of its model."""
    found = f"base_model.model.{name}".replace(".default.", ".")
    return found.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def _train_both(home: HostModel, model: Any) -> dict[str, Any]:
    store = home.store
    ours = {tensor.name: tensor.param for tensor in adapter_tensors(home.decoder)}
    params = {
        ours[_file_name(name)]: (name, param)
        for name, param in model.get_base_model().named_parameters()
        if param.requires_grad
    }
    assert params.keys() == set(ours.values()), params.keys() ^ set(ours.values())
    first = {name: param.detach().clone() for name, (_, param) in params.items()}
    by_hand = HandAdamW(
        first,
        lr=RATE,
        weight_decay=DECAY,
        decays=lambda name: not name.endswith(MAGNITUDE),  # only matrices decay
    )
    of_losses = of_gradients = 0.0
    with Engine(
        home.decoder, store, optimizer=AdamW(learning_rate=RATE, weight_decay=DECAY)
    ) as engine:
        for number, batch in enumerate(BATCHES, start=1):
            losses, found = plain_gradients(model.get_base_model(), batch, step=number)
            gradients = {name: found[path] for name, (path, _) in params.items()}
            mine = engine.step(batch).micro_losses
            of_losses = max(of_losses, *(abs(a - b) for a, b in zip(mine, losses, strict=True)))
            if number == 1:
                off = [_off(store.param(n, TensorKind.GRAD), g) for n, g in gradients.items()]
                of_gradients = max(off)
            by_hand.update(gradients, number)
            for name, (_, param) in params.items():
                param.data.copy_(by_hand.masters[name])
        engine.synchronize()
    moved = _length({n: by_hand.masters[n] - first[n] for n in params})
    apart = _length({n: by_hand.masters[n] - store.param(n, TensorKind.HI) for n in params})
    return {
        "adapters": len(params),
        "losses": of_losses,
        "gradients": of_gradients,
        "moves": apart / moved,
    }


def _off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _length(tensors: dict[str, Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors.values()]).norm())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kind", action="append", choices=FAMILIES, help="only this kind")
    options = parsed(parser)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = [
        (family, kind)
        for kind in options.kind or FAMILIES
        for family in options.family or FAMILIES[kind]
    ]
    results = []
    for family, kind in cases:
        with redirect_stdout(sys.stderr):
            results.append(compare(family, kind))
        if not options.json:
            print(results[-1], flush=True)
    wrong = [f"{result['family']} {result['kind']}" for result in results if result["faults"]]
    if options.json:
        print(json.dumps({"cases": len(results), "wrong": wrong, "results": results}))
    sys.exit(bool(wrong) or not results)


if __name__ == "__main__":
    main()
