"""Adapter folders between MegaTrain and PEFT, both ways, and merged weights, bit for bit.

    python -m proofs.adapters.files --json
    python -m proofs.adapters.files --family llama --dtype bf16

Run this in an environment of its own that has `peft` from PyPI beside MegaTrain's requirements. For
each family, in fp32 and in bf16: PEFT saves adapters with random numbers, and MegaTrain loads and
exports them; PEFT loads that folder over the base; each tensor must have the same bits, and the
same modules must be adapted. Then MegaTrain's merged export is compared with what PEFT's
`merge_and_unload` makes of its own folder. Where PEFT adapts a weight (`target_parameters`) it
rounds twice in bf16, and these are compared within that rounding. Ends with 1 if a case differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megatrain import load_model
from megatrain.disk.adapters.peft_targets import peft_targets
from megatrain.disk.hf.model import Precision
from megatrain.memory.kinds import TensorKind
from proofs.adapters.options import parsed, parser_of
from testkit.families import save_tiny

FAMILIES = """
llama gpt2 mixtral qwen3 gemma2 opt bloom phi3 falcon gpt_neox mistral qwen2 starcoder2 olmo2 cohere
stablelm glm4 granite gpt_oss deepseek_v3 qwen3_next smollm3 gemma3_text
""".split()  # noqa: SIM905
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
FILE = "adapter_model.safetensors"


def compare(family: str, dtype: Precision, number: int) -> dict[str, Any]:
    """Return what agrees and what does not, of one family in one precision."""
    found: dict[str, Any] = {"family": family, "dtype": dtype, "faults": []}
    with tempfile.TemporaryDirectory(prefix="megatrain-adapters-") as path:
        place = Path(path)
        base = save_tiny(place / "base", family, DTYPES[dtype])
        _saved_by_peft(base, place / "theirs", dtype, number)
        home = load_model(place / "theirs", dtype=dtype, kinds=(TensorKind.HI, TensorKind.LO))
        home.export(place / "ours")
        home.export(place / "merged", merge=True)
        given, exported = load_file(place / "theirs" / FILE), load_file(place / "ours" / FILE)
        found["tensors"] = len(given)
        found["faults"] += _differences("load and export", given, exported)
        reread = _loaded_by_peft(base, place / "ours", dtype)
        adapters = {n: t for n, t in reread.state_dict().items() if ".lora_" in n}
        theirs = {n.replace(".default.", "."): t for n, t in adapters.items()}
        found["faults"] += _differences("PEFT's load", given, theirs)
        merged = _loaded_by_peft(base, place / "theirs", dtype).merge_and_unload()
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=DTYPES[dtype])
        ours = AutoModelForCausalLM.from_pretrained(place / "merged", dtype=DTYPES[dtype])
        twice = peft_targets(home.decoder).parameters if dtype == "bf16" else ()
        found["faults"] += _merge_faults(_weights(merged), _weights(ours), twice)
        # Else the comparison would prove nothing.
        changed = len(_differing(_weights(plain), _weights(ours)))
        found["merged"] = changed
        if changed != len(given) // 2:
            found["faults"].append(f"merge: {changed} weights have changed")
    return found


def _saved_by_peft(base: Path, folder: Path, dtype: Precision, number: int) -> None:
    """Let PEFT save adapters with random numbers over each module that we adapt."""
    from peft import LoraConfig, get_peft_model

    decoder = load_model(base, dtype=dtype, lora=LoraConfig(rank=1, alpha=1)).decoder
    assert decoder.adapters is not None
    weights = peft_targets(decoder).parameters
    modules = [name for name in decoder.adapters.modules if f"{name}.weight" not in weights]
    config = LoraConfig(
        r=3 + number % 3,
        lora_alpha=5 + number,
        use_rslora=bool(number % 2),
        target_modules=modules,
        target_parameters=list(weights) or None,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=DTYPES[dtype]), config)
    draw = torch.Generator().manual_seed(number)
    for name, param in model.named_parameters():
        if ".lora_" in name:
            param.data.copy_(torch.randn(param.shape, generator=draw))
    model.save_pretrained(folder)


def _loaded_by_peft(base: Path, folder: Path, dtype: Precision) -> Any:
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(base, dtype=DTYPES[dtype])
    return PeftModel.from_pretrained(model, folder)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict())


def _differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Return the tensors that are not in both with the same dtype and bits."""
    return sorted(
        name
        for name in first.keys() | second.keys()
        if name not in first
        or name not in second
        or first[name].dtype is not second[name].dtype
        or not torch.equal(first[name], second[name])
    )


def _merge_faults(
    theirs: dict[str, Tensor], ours: dict[str, Tensor], twice: tuple[str, ...]
) -> list[str]:
    """Return what differs. Beside a weight, PEFT rounds the product to bf16 before it adds it."""
    near = 2**-7
    far = [n for n in twice if (theirs[n] - ours[n]).abs().max() > near * ours[n].abs().max()]
    once = [{n: t for n, t in side.items() if n not in twice} for side in (theirs, ours)]
    return _differences("merge", *once) + [f"merge: {name} is far off" for name in far]


def _differences(what: str, first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    wrong = _differing(first, second)
    return [f"{what}: {len(wrong)} tensors differ: {wrong[:3]}"] if wrong else []


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--dtype", choices=DTYPES, help="only this precision")
    options = parsed(parser)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = []
    for number, family in enumerate(options.family or FAMILIES):
        for dtype in DTYPES:
            if options.dtype not in (None, dtype):
                continue
            with redirect_stdout(sys.stderr):
                results.append(compare(family, dtype, number))
            if not options.json:
                print(results[-1], flush=True)
    wrong = [f"{result['family']} {result['dtype']}" for result in results if result["faults"]]
    if options.json:
        print(json.dumps({"cases": len(results), "wrong": wrong, "results": results}))
    sys.exit(bool(wrong) or not results)


if __name__ == "__main__":
    main()
