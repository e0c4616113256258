"""What a trainer's arguments ask of the engine. What it cannot do is refused by name.

Law (tests/integrations/test_arguments.py): every argument in REFUSED is refused unless it has the
value at which it does nothing, and the message has its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from megatrain.disk.hf.model import Precision
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.optim.adamw import AdamW
from megatrain.optim.groups import ParamGroup
from megatrain.optim.optimizer import decays

REFUSED: Mapping[str, str] = {
    "fp16": "weights are bf16 or fp32: set bf16=True, or both to False",
    "fp16_full_eval": "evaluations have the precision of training",
    "deepspeed": "the engine does what it would do",
    "fsdp": "the engine does what it would do",
    "parallelism_config": "one process trains",
    "torch_compile": "give streamed(..., settings=StepSettings(compile=True))",
    "use_liger_kernel": 'give streamed(..., settings=StepSettings(kernels="liger"))',
    "activation_offloading": 'give streamed(..., settings=StepSettings(tape="host"))',
    "auto_find_batch_size": "the step's memory is reserved ahead: set the batch size",
    "neftune_noise_alpha": "embeddings get no noise",
    "label_smoothing_factor": "it needs the logits of all tokens",
    "optim_args": "AdamW has no further ones",
    "optim_target_modules": "all parameters have AdamW",
    "enable_jit_checkpoint": "it saves in the middle of a step",
    "sync_ref_model": "the reference stays as it was loaded",
    "use_weighting": "it needs the sum of all squared probabilities",
    "cast_lm_head_to_fp32": "logits are summed in fp32 and have the precision of the model",
    "debug": "it watches the modules of a model in memory",
}
"""Arguments, and why they cannot be, or what to do. False, None, 0 and empty do nothing."""
REFUSED_OBJECTS: Mapping[str, str] = {
    "optimizers": "the optimizer is the engine's AdamW; its rate follows args.lr_scheduler_type",
    "optimizer_cls_and_kwargs": "the optimizer is the engine's AdamW",
    "compute_loss_func": "it gets the logits of all tokens; override compute_loss",
    "compute_metrics": "it gets the logits of all tokens",
    "preprocess_logits_for_metrics": "it gets the logits of all tokens",
    "quantization_config": "give streamed(..., lora=mt.LoraConfig(...)) over a quantized folder",
    "peft_config": "give streamed(..., lora=mt.LoraConfig(rank=..., alpha=...))",
    "model_init": "weights are streamed from a folder: give its path as model",
}
"""The same of what trainers are given beside their arguments."""
_ADAMW = {"adamw_torch", "adamw_torch_fused"}
_PRECISIONS: Mapping[str, Precision] = {
    "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
    "fp32": "fp32", "float32": "fp32", "torch.float32": "fp32",
}  # fmt: skip
_MODEL_KEYS = {"dtype", "torch_dtype", "attn_implementation", "revision", "trust_remote_code"}


def check_arguments(args: Any, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for what the engine cannot honor, all of it at once."""
    faults = [
        f"{name}={getattr(args, name)!r}: {why}."
        for name, why in REFUSED.items()
        if not _is_idle(getattr(args, name, None))
    ]
    faults += [
        f"{name}: {why}."
        for name, why in REFUSED_OBJECTS.items()
        if given.get(name) not in (None, (None, None))
    ]
    if str(getattr(args.optim, "value", args.optim)) not in _ADAMW:
        faults.append(f"optim={args.optim}: the optimizer is AdamW; set it to adamw_torch.")
    if args.world_size > 1:
        faults.append(f"{args.world_size} processes: start the script without a launcher.")
    if args.load_best_model_at_end and args.save_only_model:
        faults.append("save_only_model: the best model is loaded from a full checkpoint.")
    if args.bf16_full_eval and precision_of(args) != "bf16":
        faults.append("bf16_full_eval=True: evaluations have the precision of training.")
    faults += [
        f"model_init_kwargs[{name!r}]: the engine does not read it."
        for name in sorted(model_settings(args).keys() - _MODEL_KEYS)
    ]
    template = getattr(args, "chat_template_path", None)
    if template is not None and not Path(template).is_file():
        faults.append("chat_template_path: give a file; tokens of another model are not added.")
    if faults:
        raise ConfigError("arguments that a streamed trainer cannot honor: " + " ".join(faults))


def precision_of(args: Any) -> Precision:
    """Return the precision of compute: masters are in fp32 anyway."""
    asked = model_settings(args)
    dtype = str(asked.get("dtype", asked.get("torch_dtype", "float32")))
    if args.bf16:
        return "bf16"
    if dtype not in _PRECISIONS:
        raise ConfigError(f"model_init_kwargs: dtype is {dtype}; give bfloat16 or float32.")
    return _PRECISIONS[dtype]


def model_settings(args: Any) -> Mapping[str, Any]:
    """Return `model_init_kwargs`, empty if there are none."""
    found: Mapping[str, Any] | None = getattr(args, "model_init_kwargs", None)
    return found or {}


def optimizer_of(
    args: Any,
    decoder: Decoder,
    rate: Callable[[int], float],
    decayed: Collection[str],
    *,
    state: str,
    num_threads: int,
) -> AdamW:
    """Return the AdamW that the arguments ask for; `decayed` are names of params that decay."""
    known = [p for p in decoder.params if p.trained and not p.is_adapter]
    other = [p for p in known if decays(p) != (p.name in decayed)]
    groups = tuple(
        ParamGroup(params=names, weight_decay=decay)
        for decay in (args.weight_decay, 0.0)
        if (names := tuple(p.name for p in other if (p.name in decayed) == bool(decay)))
    )
    return AdamW(
        learning_rate=rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        groups=groups if args.weight_decay else (),
        max_grad_norm=args.max_grad_norm or None,
        state=state,
        num_threads=num_threads,
    )


def _is_idle(value: Any) -> bool:
    return value is None or value is False or value in (0, "", [], {}, ())
