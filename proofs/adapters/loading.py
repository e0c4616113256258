"""Adapters of every family, exported and loaded by PEFT: all of them, without a warning.

    python -m proofs.adapters.loading --json
    python -m proofs.adapters.loading --family deepseek_v3 --family qwen3_next
    python -m proofs.adapters.loading --kind experts --json
    python -m proofs.adapters.loading --joint --json

Run this in an environment of its own that has `peft` from PyPI beside MegaTrain's requirements. For
each family of testkit/families.py (`--joint`: of testkit/joint_families.py), tiny and in fp32, and
each kind of adapters that it can have: adapters with random numbers are exported. PEFT must load
that folder without a warning, hold each tensor with its bits and no others, and compute the
engine's log-probabilities within 1e-5. The table of targets that PEFT rewrites
(src/megatrain/disk/adapters/peft_targets.py) is compared with what the installed PEFT does, for
every model type of transformers. Where `export` refuses adapters because PEFT would load a part of
them, PEFT must leave out exactly that part. Ends with 1 if anything differs.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM

from megatrain import AdamW, Engine, HostModel, load_model
from megatrain.disk.adapters.peft_targets import REWRITTEN, not_loaded_by_peft, peft_targets
from megatrain.disk.hf.growth import tables
from megatrain.disk.hf.model import read_model_folder
from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind
from megatrain.models.adapters.lora import MAGNITUDE, LoraConfig
from proofs.adapters.options import parsed, parser_of
from testkit.families import FAMILIES, save_tiny
from testkit.joint_families import JOINT_FAMILIES, save_tiny_joint
from testkit.plain import make_batch

LORA = LoraConfig(rank=3, alpha=6, dropout=0.1)
KINDS = {
    "linear": LORA,
    "experts": replace(
        LORA, target_parameters=("all-experts",), ranks=(("*.1.*", 5),), alphas=(("*.2.*", 3.0),)
    ),
    "dora": replace(LORA, dora=True),
    "saved": LORA,
}
"""`linear` is the default; `experts` has theirs besides, in families with experts in one tensor,
and other ranks and alphas in some layers; `dora` is the default with magnitudes,
`saved` the default with embedding and output projection trained whole."""
CLOSE = 1e-5
FILE = "adapter_model.safetensors"
NO_DORA = "lora.ParamWrapper does not work with use_dora=True."
"""What PEFT says of magnitudes where an adapter is found by the name of a param."""
BATCH = make_batch([(2, 24)], seed=3)
ENDS = sorted(frozenset().union(*REWRITTEN.values()) | {"q_proj", "gate_up_proj", "fc1", "router"})


def rewritten_by_peft(model_type: str) -> frozenset[str]:
    """Return the ends of names that the installed PEFT takes for experts in a model type."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[f"model.layers.0.mlp.{end}" for end in ENDS])
    model: Any = nn.Module()
    model.config = SimpleNamespace(model_type=model_type)
    convert_peft_config_for_transformers(config, model, None)
    kept = {str(target).rpartition(".")[2] for target in config.target_modules}
    return frozenset(ENDS) - kept


def table_faults() -> list[str]:
    """Return the model types for which the table differs from the installed PEFT."""
    return [
        f"{model_type}: PEFT rewrites {sorted(rewritten_by_peft(model_type))}, the table has "
        f"{sorted(REWRITTEN.get(model_type, frozenset()))}"
        for model_type in sorted(CONFIG_MAPPING.keys() | REWRITTEN.keys())
        if rewritten_by_peft(model_type) != REWRITTEN.get(model_type, frozenset())
    ]


def compare(family: str, kind: str = "linear", *, joint: bool = False) -> dict[str, Any] | None:
    """Return how PEFT loads what we export of one family; None if it has no such adapters."""
    with tempfile.TemporaryDirectory(prefix="megatrain-adapters-") as path:
        base, ours = Path(path) / "base", Path(path) / "ours"
        (save_tiny_joint if joint else save_tiny)(base, family, torch.float32)
        try:
            home = load_model(base, dtype="fp32", lora=_lora(base, kind))
        except ConfigError as error:
            if kind == "experts" and "have no experts" in str(error):
                return None
            raise
        _fill(home)
        targets = peft_targets(home.decoder)
        home.export(ours)
        found = {"family": family, "kind": kind, "refused": False}
        lost = not_loaded_by_peft(home.decoder)
        ours_computed = _engine_logprobs(home)
        try:
            with _said() as said:
                model = _loaded_by_peft(base, ours, joint=joint)
        except ValueError as error:
            if lost and str(error) == NO_DORA:  # it refuses as we do
                return found | {"refused": True, "faults": []}
            raise
        with torch.no_grad():
            theirs = _logprobs(model.eval())
            with model.disable_adapter():
                plain = _logprobs(model)
        given = load_file(ours / FILE)
        held = _held(model)
    difference = float((theirs - ours_computed).abs().max())
    effect = float((plain - ours_computed).abs().max())
    found["tensors"] = len(given)
    if lost:
        return found | {"refused": True, "faults": _refusal_faults(lost, given, held, said)}
    faults = [f"said: {text}" for text in said] + _tensor_faults(given, held)
    if difference > CLOSE:
        faults.append(f"log-probabilities differ by {difference:.1e}")
    if effect < 1000 * CLOSE:  # else the comparison would prove nothing
        faults.append(f"the adapters change log-probabilities by {effect:.1e} only")
    return found | {
        "by_name_of_param": len(targets.parameters),
        "logprob_difference": difference,
        "effect": effect,
        "faults": faults,
    }


def _lora(base: Path, kind: str) -> LoraConfig:
    if kind != "saved":
        return KINDS[kind]
    names = tables(read_model_folder(base, dtype="fp32").decoder)
    return replace(
        KINDS[kind], modules_to_save=tuple(dict.fromkeys(n.rpartition(".")[0] for n in names))
    )


def _fill(home: HostModel) -> None:
    draw = torch.Generator().manual_seed(5)
    for param in home.decoder.params:
        if param.trained:
            values, held = torch.randn(param.shape, generator=draw) * 0.2, home.store.param
            if param.name.endswith(MAGNITUDE) or not param.is_adapter:
                values = held(param.name, TensorKind.HI) * (1 + values)
            held(param.name, TensorKind.HI).copy_(values)


def _engine_logprobs(home: HostModel) -> Tensor:
    """Return the engine's log-probabilities behind the last token of each row."""
    with Engine(home.decoder, home.store, optimizer=AdamW(learning_rate=1e-3)) as engine:
        return engine.next_token_logits(BATCH)[0].log_softmax(-1)


def _logprobs(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=BATCH[0].input_ids, use_cache=False).logits
    return logits[:, -1].float().log_softmax(-1)


def _loaded_by_peft(base: Path, folder: Path, *, joint: bool) -> Any:
    from peft import PeftModel

    kind = AutoModelForMultimodalLM if joint else AutoModelForCausalLM
    return PeftModel.from_pretrained(kind.from_pretrained(base, dtype=torch.float32), folder)


class _Lines(logging.Handler):
    """A handler that keeps the warnings of a logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage()[:200])


@contextmanager
def _said() -> Iterator[list[str]]:
    """Give the list of warnings about adapters, which is filled at the end."""
    found: list[str] = []
    handler = _Lines()
    logging.getLogger("peft").addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        logging.getLogger("peft").removeHandler(handler)
    found += handler.lines + [str(warning.message)[:200] for warning in caught]


def _held(model: Any) -> dict[str, Tensor]:
    """Return what PEFT holds beside the base, under the names of files."""
    from peft import get_peft_model_state_dict

    return dict(get_peft_model_state_dict(model, save_embedding_layers=False))


def _tensor_faults(given: dict[str, Tensor], held: dict[str, Tensor]) -> list[str]:
    missing, surplus = sorted(given.keys() - held.keys()), sorted(held.keys() - given.keys())
    other = sorted(n for n in given.keys() & held.keys() if not torch.equal(given[n], held[n]))
    parts = {"not loaded": missing, "not ours": surplus, "with other bits": other}
    return [f"{len(names)} tensors {what}: {names[:2]}" for what, names in parts.items() if names]


def _refusal_faults(
    lost: tuple[str, ...], given: dict[str, Tensor], held: dict[str, Tensor], said: list[str]
) -> list[str]:
    """Return what is wrong with a refusal: PEFT loads the adapters, or leaves out others."""
    modules = tuple(f"base_model.model.{module}.lora_" for module in lost)
    names = {name for name in given if name.startswith(modules)}
    other = {name for name in given if name not in held or not torch.equal(given[name], held[name])}
    faults = [] if said else ["refused, and PEFT says nothing"]
    return faults + ([f"refused {len(names)}, lost {len(other)}"] if names != other else [])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--joint", action="store_true", help="joint models in place of text ones")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind")
    options = parsed(parser)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = []
    families = options.family or (JOINT_FAMILIES if options.joint else FAMILIES)
    for family, kind in itertools.product(families, options.kind or KINDS):
        with redirect_stdout(sys.stderr):
            try:
                found = compare(family, kind, joint=options.joint)
            except Exception as error:  # PEFT refuses with many kinds of exception
                fault = f"{type(error).__name__}: {str(error)[:300]}"
                found = {"family": family, "kind": kind, "faults": [fault]}
        if found is None:
            continue
        results.append(found)
        if not options.json:
            print(found, flush=True)
    table = table_faults()
    wrong = {f"{result['family']} {result['kind']}": result["faults"]
             for result in results if result["faults"]}  # fmt: skip
    print(json.dumps(_summary(results, wrong, table)))
    sys.exit(bool(wrong or table) or not results)


def _summary(
    results: list[dict[str, Any]], wrong: dict[str, list[str]], table: list[str]
) -> dict[str, Any]:
    import peft

    whole = [r for r in results if not r["faults"] and not r["refused"]]
    return {
        "peft": peft.__version__,
        "families": len({result["family"] for result in results}),
        "folders": len(results),
        "loaded_whole": len(whole),
        "loaded_by_kind": {kind: sum(r["kind"] == kind for r in whole) for kind in KINDS},
        "refused": [f"{r['family']} {r['kind']}" for r in results if r.get("refused")],
        "tensors": sum(result["tensors"] for result in whole),
        "folders_with_names_of_params": sum(result["by_name_of_param"] > 0 for result in whole),
        "largest_logprob_difference": max((r["logprob_difference"] for r in whole), default=None),
        "least_effect": min((r["effect"] for r in whole), default=None),
        "model_types_in_table": len(REWRITTEN),
        "model_types_compared": len(CONFIG_MAPPING.keys() | REWRITTEN.keys()),
        "table_faults": table,
        "wrong": wrong,
    }


if __name__ == "__main__":
    main()
