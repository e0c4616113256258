"""The values that other tools themselves read from the configs of our tests of migration.

    python -m proofs.migrated --json       # prints the table
    python -m proofs.migrated --write      # writes it to tests/config/other_tools/theirs.json
    python -m proofs.migrated --check      # compares it with that file; ends with 1 if it differs

TRL, PEFT, LLaMA-Factory and Axolotl are oracles that are not ours, and no dependencies: run this in
an environment of their own. Nothing of MegaTrain is imported.

    pip install torch==2.13.0                                  # the build for CPUs is enough
    pip install torch==2.13.0 trl==1.16.0 peft==0.21.2
    pip install --no-deps llamafactory==0.9.5 axolotl==0.19.0 triton
    pip install addict fire omegaconf einops python-dotenv colorama art scipy sentencepiece \\
        tiktoken posthog kernels axolotl-contribs-lgpl axolotl-contribs-mit schedulefree evaluate \\
        sse-starlette fastapi pillow numba nvidia-ml-py

LLaMA-Factory and Axolotl pin other versions of transformers and TRL, so they run with
newer ones here; modules that Axolotl imports and that are not installed are empty. Each file is
parsed by the tool: TRL's TrlParser with the config class of the trainer, LLaMA-Factory's
get_train_args, and Axolotl's validate_config with the arguments that its trainer builder makes. A
run of STEPS steps, or of as many as the file gives, then has the learning rates of transformers'
scheduler. Methods without a class in the installed versions have no values, only their name.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import types
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent.parent / "tests/config/other_tools/configs"
TABLE = CONFIGS.parent / "theirs.json"
STEPS = 200
"""Steps of a run whose file gives none."""
TYPES = {
    "Qwen/Qwen2.5-0.5B": "qwen2", "Qwen/Qwen2-0.5B-Instruct": "qwen2", "Qwen/Qwen3-0.6B": "qwen3",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2", "mistralai/Mistral-7B-v0.1": "mistral",
    "microsoft/phi-2": "phi",
}  # fmt: skip
"""Model types of the models that configs adapt without naming modules."""
_TRL = {
    "sft": "trl.SFTConfig", "dpo": "trl.DPOConfig", "kto": "trl.KTOConfig",
    "grpo": "trl.GRPOConfig", "rloo": "trl.RLOOConfig", "reward": "trl.RewardConfig",
    "orpo": "trl.experimental.orpo.ORPOConfig", "cpo": "trl.experimental.cpo.CPOConfig",
    "online_dpo": "trl.experimental.online_dpo.OnlineDPOConfig",
}  # fmt: skip
_LOSS = ("beta", "label_smoothing", "simpo_gamma", "cpo_alpha", "desirable_weight",
         "undesirable_weight", "loss_type")  # fmt: skip

_NEEDS_A_PACKAGE = ("deepspeed", "quantization_bit", "plot_loss", "use_galore")
"""Keys of LLaMA-Factory for which it looks for packages, and that set none of these values."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m proofs.migrated")
    parser.add_argument("--json", action="store_true", help="print the table")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--check", action="store_true", help=f"compare with {TABLE.name}")
    options = parser.parse_args()
    found = table()
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    if options.write:
        TABLE.write_text(text)
    if options.json:
        print(text, end="")
    if options.check:
        faults = differences(json.loads(TABLE.read_text()), json.loads(text))
        print("\n".join(faults) or f"{TABLE.name}: the installed tools say the same")
        sys.exit(bool(faults))


def table() -> dict[str, Any]:
    """Return the values of every config, of the defaults, and PEFT's modules."""
    os.environ |= {"DISABLE_VERSION_CHECK": "1", "AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
                   "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONWARNINGS": "ignore"}  # fmt: skip
    readers = {"trl": _of_trl, "llama_factory": _of_llama_factory, "axolotl": _of_axolotl}
    configs = {}
    for path in sorted(CONFIGS.glob("*/*.yaml")):
        with contextlib.redirect_stdout(io.StringIO()):
            configs[f"{path.parent.name}/{path.name}"] = readers[path.parent.name](path)
    targets = import_module("peft.utils.constants")
    return {
        "versions": {name: version(name) for name in ("trl", "peft", "llamafactory", "axolotl",
                                                      "transformers")},
        "configs": configs,
        "peft_targets": targets.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING,
    }  # fmt: skip


def differences(kept: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the values in which two tables differ, but for the versions."""
    faults = []
    for part in ("configs", "peft_targets"):
        for name in sorted({*kept[part], *found[part]}):
            ours, theirs = kept[part].get(name), found[part].get(name)
            if ours != theirs:
                faults.append(f"{part} {name}: the table has {ours}, the tool says {theirs}")
    return faults


def _class(name: str) -> Any:
    module, _, found = name.rpartition(".")
    return getattr(import_module(module), found)


def _values(path: Path) -> dict[str, Any]:
    import yaml

    values: dict[str, Any] = yaml.safe_load(path.read_text())
    return values


def _with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return values for the installed transformers: since 5 a fraction is a warmup_steps below 1,
    and later versions have no warmup_ratio."""
    known = import_module("transformers").TrainingArguments.__dataclass_fields__
    if "warmup_ratio" in values and "warmup_ratio" not in known:
        ratio = values["warmup_ratio"]
        return {key: value for key, value in values.items() if key != "warmup_ratio"} | {
            "warmup_steps": ratio
        }
    return values


def _of_trl(path: Path) -> dict[str, Any]:
    trainer = path.read_text().split("\n", 1)[0].split()[2]
    if trainer not in _TRL:
        return {"method": trainer, "values": None}
    trl = import_module("trl")
    kinds = (trl.ScriptArguments, _class(_TRL[trainer]), trl.ModelConfig)
    values = _with_new_names(_values(path))
    values |= {"use_cpu": True, "bf16": False, "use_vllm": False, "fp16": False, "report_to": []}
    if trainer not in ("grpo", "rloo", "online_dpo"):
        del values["use_vllm"]
    with tempfile.TemporaryDirectory() as folder:
        values["output_dir"] = folder
        _, args, model = trl.TrlParser(kinds).parse_dict(values, allow_extra_keys=False)
    found = _arguments(args) | {key: getattr(args, key) for key in _LOSS if hasattr(args, key)}
    found["max_length"] = getattr(args, "max_length", None)
    lora = None
    if model.use_peft:
        peft = trl.get_peft_config(model)
        named = peft.target_modules
        lora = {"rank": peft.r, "alpha": peft.lora_alpha, "dropout": peft.lora_dropout,
                "targets": named if isinstance(named, str) else sorted(named or []) or
                _peft_chooses(model.model_name_or_path)}  # fmt: skip
    return {"method": trainer, "values": found | {"lora": lora}}


def _peft_chooses(model: str) -> list[str]:
    chosen = import_module("peft.utils.constants")
    return sorted(chosen.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[TYPES[model]])


def _of_llama_factory(path: Path) -> dict[str, Any]:
    values = _with_new_names(_values(path))
    method = values["stage"]
    with tempfile.TemporaryDirectory() as folder:
        values |= {"output_dir": folder, "use_cpu": True, "bf16": False, "fp16": False}
        for key in _NEEDS_A_PACKAGE:
            values.pop(key, None)
        get_train_args = import_module("llamafactory.hparams").get_train_args
        _, data, args, tuned, _ = get_train_args(values)
    found = _arguments(args) | {
        "max_length": data.cutoff_len, "packing": bool(data.packing or data.neat_packing),
        "loss_type": tuned.pref_loss, "beta": tuned.pref_beta, "simpo_gamma": tuned.simpo_gamma,
        "label_smoothing": tuned.dpo_label_smoothing,
        "desirable_weight": tuned.kto_chosen_weight,
        "undesirable_weight": tuned.kto_rejected_weight,
        "lora": None if tuned.finetuning_type != "lora" else {
            "rank": tuned.lora_rank, "alpha": tuned.lora_alpha, "dropout": tuned.lora_dropout,
            "targets": sorted(tuned.lora_target),
        },
    }  # fmt: skip
    return {"method": method, "kind": tuned.finetuning_type, "values": found}


def _of_axolotl(path: Path) -> dict[str, Any]:
    values = _values(path)
    for key in ("reward_model", "process_reward_model"):
        if values.get(key):
            return {"method": key, "values": None}
    method = values.get("rl") or "sft"
    if method in ("grpo", "gdpo"):  # their trainers need vLLM
        return {"method": method, "values": None}
    _empty_modules("wandb", "trl.experimental.prm")
    config = import_module("axolotl.utils.config")
    cfg = config.validate_config(_class("axolotl.utils.dict.DictDefault")(values))
    cfg.bf16, cfg.fp16 = False, False
    steps = values.get("max_steps") or STEPS
    builders = import_module("axolotl.core.builders")
    kind = builders.HFRLTrainerBuilder if cfg.rl else builders.HFCausalTrainerBuilder
    builder = kind.__new__(kind)
    builder.cfg, builder.eval_dataset = cfg, None
    kwargs, _ = builder._set_base_training_args(total_num_steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        if cfg.rl:
            cfg.output_dir = folder
            builder.cfg.use_cpu = True
            args = _on_cpu(lambda: builder._build_training_arguments(steps)[0])
        else:
            kept = import_module("transformers").TrainingArguments
            names = set(kept.__dataclass_fields__)
            plain = {key: value for key, value in kwargs.items() if key in names}
            args = kept(**(plain | {"output_dir": folder, "use_cpu": True}))
    args.max_steps, args.num_train_epochs = cfg.max_steps or -1, cfg.num_epochs
    found = _arguments(args) | {key: getattr(args, key) for key in _LOSS if hasattr(args, key)}
    found |= {"max_length": cfg.sequence_len, "packing": bool(cfg.sample_packing), "lora": None}
    if cfg.adapter:
        named = ["all-linear"] if cfg.lora_target_linear else sorted(cfg.lora_target_modules)
        found["lora"] = {"rank": cfg.lora_r, "alpha": cfg.lora_alpha,
                         "dropout": cfg.lora_dropout, "targets": named}  # fmt: skip
    return {"method": method, "values": found}


def _on_cpu(make: Any) -> Any:
    """Return the arguments of `make`, without the check that there is a GPU for them."""
    kind = import_module("transformers").TrainingArguments
    validate = kind._validate_args if hasattr(kind, "_validate_args") else None
    if validate is not None:
        kind._validate_args = lambda self: None
    try:
        return make()
    finally:
        if validate is not None:
            kind._validate_args = validate


def _empty_modules(*names: str) -> None:
    for name in names:
        try:
            import_module(name)
        except ImportError:
            empty = _Empty(name)
            empty.__spec__ = ModuleSpec(name, None)
            sys.modules[name] = empty


class _Empty(types.ModuleType):
    """A module that is not installed: every name is a class without contents."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _arguments(args: Any) -> dict[str, Any]:
    """Return the values of transformers' arguments, and the learning rates of a run with them."""
    steps = args.max_steps if args.max_steps > 0 else STEPS
    return {
        "rows": args.per_device_train_batch_size * args.gradient_accumulation_steps,
        "epochs": args.num_train_epochs,
        "steps": args.max_steps if args.max_steps > 0 else None,
        "weight_decay": args.weight_decay,
        "betas": [args.adam_beta1, args.adam_beta2],
        "eps": args.adam_epsilon,
        "max_grad_norm": args.max_grad_norm,
        "packing": bool(getattr(args, "packing", False)),
        "sequential": getattr(args, "train_sampling_strategy", "random") == "sequential",
        "rates": _rates(args, steps),
    }


def _rates(args: Any, steps: int) -> list[float]:
    """Return the learning rate of some steps of a run, by transformers' own scheduler."""
    import torch

    scheduler = import_module("transformers").get_scheduler
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([param], lr=args.learning_rate)
    options = args.lr_scheduler_kwargs or {}
    schedule = scheduler(
        args.lr_scheduler_type, optimizer, num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps, scheduler_specific_kwargs=options,
    )  # fmt: skip
    rates = []
    for _ in range(steps):
        rates.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return [rates[place] for place in (0, 1, steps // 20, steps // 2, steps - 1)]


if __name__ == "__main__":
    main()
