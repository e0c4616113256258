"""Bytes of a frozen base in each form: of host memory, and of the link in one pass, per parameter.

    python -m benchmarks.frozen [--json] [--params 800e6] [--forms fp8 mxfp4 int4 nf4 bf16]

A model of that many parameters, almost all of them in linear modules or experts, is written as a
folder in its published form (fp8, mxfp4, int4) or in bf16 (nf4, bf16), and loaded with
adapters of rank 1 by a process of its own. `host` is what loading it has added to the anonymous
memory of the process, less the adapters' own; `link` what fetches have moved in one evaluation of
a few tokens over a device that copies. Both are divided by the number of frozen parameters.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, LlamaConfig, PreTrainedConfig

from megatrain.devices.device import CpuDevice
from megatrain.disk.hf.model import read_model_folder
from megatrain.memory.kinds import Kind
from megatrain.models.adapters.lora import Lora
from megatrain.step.ops import OpKind
from testkit.engines import make_engine
from testkit.plain import make_batch

FORMS = ("fp8", "mxfp4", "int4", "nf4", "bf16")
WIDTH, INNER, VOCAB = 2048, 5632, 512
EXPERTS = 16
LORA = Lora(rank=1, alpha=1, targets=("q_proj",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--params", type=float, default=800e6)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measured(Path(asked.measure[0]), asked.measure[1])))
        return
    found = {form: _in_a_process(form, int(asked.params)) for form in asked.forms}
    if asked.json:
        host = {form: figures["host"] for form, figures in found.items()}
        print(json.dumps(host | {"measured": found}, indent=1))
        return
    print(f"{'form':12} {'frozen':>8} {'host':>6} {'link':>6}  bytes per parameter")
    for form, figures in found.items():
        print(
            f"{form:12} {figures['params'] / 1e6:7,.0f}M {figures['host']:6.3f} "
            f"{figures['link']:6.3f}"
        )


def _in_a_process(form: str, params: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="frozen-") as folder:
        write_folder(Path(folder), form, params)
        command = [sys.executable, "-m", "benchmarks.frozen", "--measure", folder, form]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(folder: Path, form: str) -> dict[str, float]:
    """Load the folder; return bytes per frozen parameter."""
    base = form if form in ("nf4", "bf16") else "as_published"
    model = read_model_folder(folder, lora=LORA, base=base)  # type: ignore[arg-type]
    before = _anonymous_bytes()
    home = model.load((Kind.HI,))
    host = _anonymous_bytes() - before
    frozen = [param for param in home.decoder.params if not param.trained]
    count = sum(param.num_elements for param in frozen)
    trained = 2 * sum(param.num_elements for param in home.decoder.params if param.trained)
    with make_engine(
        home.decoder, home.store, device=CpuDevice(copying=True), trace=True
    ) as engine:
        engine.evaluate(make_batch([(1, 8)], seed=1))
        assert engine.trace is not None
        fetches = [span for span in engine.trace.spans if span.op.kind is OpKind.FETCH]
    link = sum(span.num_bytes for span in fetches)
    return {
        "params": count,
        "host": (host - trained) / count,
        "ledger": (home.store.arena(Kind.HI).nbytes - trained) / count,
        "link": (link - trained) / count,
    }


def _anonymous_bytes() -> int:
    """Return what the process holds; what it has freed goes back to the system first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def write_folder(folder: Path, form: str, params: int) -> None:
    """Write a folder of random weights in its form: a file for each layer, and one for the rest."""
    config = _config(form, params)
    fields = json.loads(config.to_json_string()) | _QUANTIZED.get(form, {})
    (folder / "config.json").write_text(json.dumps(fields))
    names: dict[str, str] = {}
    for number, tensors in enumerate(_files(form, config)):
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


_QUANTIZED = {
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "mxfp4": {"quantization_config": {"quant_method": "mxfp4"}},
    "int4": {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                        "group_size": 32,
                    },
                }
            },
        }
    },
}  # fmt: skip


def _config(form: str, params: int) -> PreTrainedConfig:
    if form == "mxfp4":
        layer = EXPERTS * 3 * WIDTH * WIDTH + 4 * WIDTH * 512
        return GptOssConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=WIDTH, head_dim=64,
            num_attention_heads=8, num_key_value_heads=8, num_local_experts=EXPERTS,
            num_experts_per_tok=2, num_hidden_layers=max(1, params // layer),
            tie_word_embeddings=True, dtype="bfloat16", pad_token_id=0,
        )  # fmt: skip
    layer = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=16,
        num_key_value_heads=16, num_hidden_layers=max(1, params // layer),
        tie_word_embeddings=True, dtype="bfloat16", pad_token_id=0,
    )  # fmt: skip


def _files(form: str, config: PreTrainedConfig) -> Iterator[dict[str, Tensor]]:
    yield {
        "model.embed_tokens.weight": _normal(VOCAB, WIDTH),
        "model.norm.weight": torch.ones(WIDTH, dtype=torch.bfloat16),
    }
    make = _expert_layer if form == "mxfp4" else _dense_layer
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield {f"{prefix}{name}": tensor for name, tensor in make(form)}


def _dense_layer(form: str) -> Iterator[tuple[str, Tensor]]:
    sizes = {f"self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
    sizes |= {f"mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
    sizes["mlp.down_proj.weight"] = (WIDTH, INNER)
    for name, (rows, columns) in sizes.items():
        match form:
            case "fp8":
                codes = torch.randint(0, 120, (rows, columns), dtype=torch.uint8)
                yield name, codes.view(torch.float8_e4m3fn)
                yield f"{name}_scale_inv", torch.full((-(-rows // 128), -(-columns // 128)), 1e-4)
            case "int4":
                packed = torch.randint(-(2**31), 2**31, (rows, columns // 8)).int()
                yield f"{name}_packed", packed
                yield f"{name}_scale", torch.full((rows, columns // 32), 1e-3).bfloat16()
                yield f"{name}_shape", torch.tensor([rows, columns])
            case _:
                yield name, _normal(rows, columns)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        yield name, torch.ones(WIDTH, dtype=torch.bfloat16)


def _expert_layer(_: str) -> Iterator[tuple[str, Tensor]]:
    for name, (rows, columns) in {
        "q_proj": (512, WIDTH), "k_proj": (512, WIDTH), "v_proj": (512, WIDTH),
        "o_proj": (WIDTH, 512),
    }.items():  # fmt: skip
        yield f"self_attn.{name}.weight", _normal(rows, columns)
        yield f"self_attn.{name}.bias", torch.zeros(rows, dtype=torch.bfloat16)
    yield "self_attn.sinks", torch.zeros(8, dtype=torch.bfloat16)
    yield "mlp.router.weight", _normal(EXPERTS, WIDTH)
    yield "mlp.router.bias", torch.zeros(EXPERTS, dtype=torch.bfloat16)
    for name, rows in (("gate_up_proj", 2 * WIDTH), ("down_proj", WIDTH)):
        shape = (EXPERTS, rows, WIDTH // 32, 16)
        yield f"mlp.experts.{name}_blocks", torch.randint(0, 256, shape, dtype=torch.uint8)
        yield f"mlp.experts.{name}_scales", torch.full(shape[:-1], 112, dtype=torch.uint8)
        yield f"mlp.experts.{name}_bias", torch.zeros(EXPERTS, rows, dtype=torch.bfloat16)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        yield name, torch.ones(WIDTH, dtype=torch.bfloat16)


def _normal(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(std=0.02)


if __name__ == "__main__":
    main()
