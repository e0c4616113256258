"""The commands `export` and `push`: the model or the adapters of a run, for others to load."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatrain.cli.gguf import convert, find_converter
from megatrain.cli.verbs import found_model, read_only
from megatrain.config import load_config
from megatrain.config.load import file_of_run
from megatrain.disk.adapters.peft_targets import require_loaded_by_peft
from megatrain.disk.checkpoint.manifest import MANIFEST_NAME
from megatrain.disk.checkpoint.masters import fill_masters, load_masters
from megatrain.disk.checkpoint.restore import verify_model
from megatrain.disk.checkpoint.retention import finished, step_of
from megatrain.disk.hf.export import Origin
from megatrain.disk.hf.folder import is_adapter_folder
from megatrain.disk.hf.model import HostModel, ModelFolder, Precision, read_model_folder
from megatrain.errors import CheckpointCorrupted, ConfigError, RunFolderError
from megatrain.fetched import url_of
from megatrain.files import rename
from megatrain.memory.kinds import TensorKind
from megatrain.models.decoder import Decoder
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.folder import FOLDER, RunFolder, is_run
from megatrain.run.publishing import push_to_hub
from megatrain.run.run_model import RunModel
from megatrain.run.uploads import export_to


def export_model(
    model: Path,
    target: Path,
    *,
    best: bool = False,
    dtype: Precision | None = None,
    merge: bool = False,
    ranks: Ranks = ALONE,
) -> str:
    """Write the model of a run as a Hugging Face folder; return a summary.

    `dtype` fp32 writes the masters, None the precision that the run was trained in. Adapters are
    written alone, in fp32, unless `merge` adds them to the weights of their model. Raises
    ConfigError for adapters that PEFT would load in part only.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty. Give another name.")
    found = found_model(model, best=best, ranks=ranks)

    def write(folder: Path) -> str:
        said = export_found(found, folder, dtype=dtype, merge=merge, ranks=ranks)
        return said.replace(str(folder), url_of(target) or str(target))

    return export_to(target, write, ranks)


def export_gguf(
    model: Path,
    target: Path,
    *,
    best: bool = False,
    dtype: Precision | None = None,
    merge: bool = False,
) -> str:
    """Write the model of a run as one GGUF file, by llama.cpp's converter; return a summary.

    The Hugging Face folder that the converter reads stands beside the file meanwhile, and takes as
    many bytes. Raises ConfigError, MissingPackage or ConverterError.
    """
    if target.exists() or url_of(target) is not None:
        raise ConfigError(f"--gguf {target}: give the name of a new file on this disk.")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"--gguf {target}: {target.parent} is not a directory.")
    converter = find_converter()
    found = found_model(model, best=best, ranks=ALONE)
    if is_adapter_folder(found.folder) and not merge:
        raise ConfigError(f"--gguf: {found.folder} has adapters alone. Add --merge.")
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=target.absolute().parent) as scratch:
        folder = Path(scratch) / target.stem  # the converter makes the model's name of it
        said = export_found(found, folder, dtype=dtype, merge=merge)
        convert(converter, folder, Path(scratch) / "gguf", read_model_folder(folder).precision)
        rename(Path(scratch) / "gguf", target)
    return f"{said.partition(' in ')[0]} in {target}; llama.cpp and Ollama load it"


def push_run(model: Path, repo_id: str, *, best: bool, merge: bool, private: bool) -> str:
    """Push the model of a run or of one of its checkpoints; return the address of the commit.

    The run is locked meanwhile, so no training can replace the checkpoint that is read. Raises
    RunFolderError while it trains, CheckpointCorrupted for a model that is not as it was written.
    """
    here = model.resolve()
    run = next((folder for folder in (here, *here.parents[:3]) if is_run(folder)), None)
    if run is None:
        raise ConfigError(
            f"{model} is not a run or a checkpoint of one, so there is nothing to write its model "
            f"card from. `hf upload {repo_id} {model}` uploads a folder as it is."
        )
    with RunFolder(run):
        found = found_model(model, best=best, ranks=ALONE)
        if found.passed_over:
            reasons = "\n  ".join(found.passed_over)
            raise CheckpointCorrupted(
                f"{model}: the newest model cannot be pushed:\n  {reasons}\nTo push step "
                f"{found.step} instead, give {found.folder.parent}."
            )

        def export(place: Path) -> str:
            export_found(found, place, merge=merge)
            return f"model{_of_step(found)}"

        config = load_config(file_of_run(run))
        return push_to_hub(run, config, repo_id, export, private=private)


def export_found(
    found: RunModel,
    target: Path,
    *,
    dtype: Precision | None = None,
    merge: bool = False,
    ranks: Ranks = ALONE,
) -> str:
    """Write a model that was compared with its hashes, as `export_model` does."""
    if is_adapter_folder(found.folder):
        return _export_adapted(found, target, dtype, merge=merge, ranks=ranks)
    if merge:
        raise ConfigError(f"--merge: {found.folder} has no adapters. Export it without --merge.")
    read = read_model_folder(found.folder, dtype=dtype)
    held = read.precision
    masters = dtype == "fp32" and held == "bf16" and found.step is not None
    home = ranks.long_work(
        lambda: (
            load_masters(_checkpoint_of(found, ranks), ranks.owner)
            if masters
            else read.load(read_only(read), owner=ranks.owner)
        )
    )
    home.export(target, origin=_origin(found), masters=masters, ranks=ranks)
    num_params = sum(param.num_elements for param in home.decoder.params)
    of_step = _of_step(found)
    if dtype == "fp32" and held == "bf16" and not masters:
        of_step = " converted from bf16, as the folder has no masters,"
    written = dtype or held
    return f"{num_params:,} params{of_step} in {target}, {written}; from_pretrained loads it"


def _export_adapted(
    found: RunModel,
    target: Path,
    dtype: Precision | None,
    *,
    merge: bool,
    ranks: Ranks,
) -> str:
    """Write adapters, alone or in the weights of their model."""
    # Masters of fp32 are put together from those of bf16, which the folder may be without.
    read = read_model_folder(found.folder, dtype="bf16" if dtype == "bf16" else None)
    if not merge and dtype is not None:
        raise ConfigError(
            f"--dtype {dtype}: adapters are always written in fp32. With --merge it is the "
            "precision of the merged model."
        )
    if not merge:
        require_loaded_by_peft(read.decoder)
    home = ranks.long_work(lambda: _adapted_home(found, read, merge=merge, ranks=ranks))
    masters = dtype == "fp32" and read.precision == "bf16"
    home.export(target, origin=_origin(found), masters=masters, merge=merge, ranks=ranks)
    own = [param for param in home.decoder.params if not param.is_adapter]
    params = own if merge else [param for param in home.decoder.params if param.trained]
    count = f"{sum(param.num_elements for param in params):,}"
    if merge:
        written = dtype or read.precision
        return f"{count} params{_of_step(found)} in {target}, {written}; from_pretrained loads it"
    said = f"{count} params of adapters{_of_step(found)} in {target}; PEFT loads it"
    return f"{said}{_not_scaled_by_vllm(home.decoder)}"


def _not_scaled_by_vllm(decoder: Decoder) -> str:
    """Return a warning if some adapters have another scale than the one that vLLM reads for all."""
    assert decoder.adapters is not None
    lora = decoder.adapters.lora
    one = replace(lora, ranks=(), alphas=()).scaling_of("")
    names = [*decoder.adapters.modules, *decoder.adapters.params]
    others = [name for name in names if lora.scaling_of(name) != one]
    if not others:
        return ""
    return (
        f". vLLM reads neither rank_pattern nor alpha_pattern and would scale {len(others)} of "
        f"{len(names)} adapters by {one:g}, as all others: export with --merge for it"
    )


def _adapted_home(found: RunModel, read: ModelFolder, *, merge: bool, ranks: Ranks) -> HostModel:
    """Return the adapters with every bit of their masters, and the model only for a merge."""
    kinds = (TensorKind.HI, TensorKind.LO)
    home = read.load(kinds, owner=ranks.owner) if merge else read.load_adapters(kinds, ranks.owner)
    if (found.folder.parent / MANIFEST_NAME).is_file():
        fill_masters(found.folder.parent, home, ranks.owner)
    return home


def _origin(found: RunModel) -> Origin | None:
    return None if found.step is None else Origin(step=found.step, best_loss=found.best_loss)


def _of_step(found: RunModel) -> str:
    return "" if found.step is None else f" of step {found.step}"


def _checkpoint_of(found: RunModel, ranks: Ranks) -> Path:
    """Return the checkpoint of a run's model, the only place that has its masters.

    Beside an export, which alone was compared with its hashes so far, the weights are those of the
    checkpoint: they are compared here. Raises CheckpointCorrupted or DiskError.
    """
    if (found.folder.parent / MANIFEST_NAME).is_file():
        return found.folder.parent
    for checkpoint in finished(found.run / FOLDER) if found.run is not None else ():
        if step_of(checkpoint) == found.step:
            ranks.on_first(partial(verify_model, checkpoint))
            return checkpoint
    raise RunFolderError(
        f"{found.folder}: no checkpoint of the run has the masters of step {found.step} any "
        "more. Without --dtype fp32, `megatrain export` writes its bf16 weights."
    )
