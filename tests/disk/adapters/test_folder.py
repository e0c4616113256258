"""Adapter folders: read with every bit, and what is not exactly theirs is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatrain.disk.adapters.folder import read_adapter_folder, reference
from megatrain.disk.hf.exported import RECORD_NAME
from megatrain.disk.hf.folder import is_adapter_folder
from megatrain.disk.hf.model import HostModel, load_model, read_model_folder
from megatrain.errors import ConfigError, MegaTrainError, ModelFolderError, WeightsMismatch
from megatrain.memory.kinds import TensorKind
from megatrain.model_files import ADAPTER_CONFIG_NAME, ADAPTER_NAME, SINGLE_NAME
from megatrain.models.adapters.lora import LoraConfig
from megatrain.models.build import build_decoder
from testkit.families import save_tiny, tiny_config

KINDS = (TensorKind.HI, TensorKind.LO)
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"), "llama", torch.bfloat16)


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """Adapters with random numbers, as PEFT writes them."""
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    lora = LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "down_proj"))
    for param in build_decoder(tiny_config("llama"), "bf16", lora=lora).params:
        if param.is_adapter:
            name = f"base_model.model.{param.name}.weight"
            tensors[name] = torch.randn(param.shape, generator=draw)
    made = tmp_path / "adapters"
    made.mkdir()
    save_file(tensors, made / ADAPTER_NAME)
    _configure(made, base)
    return made


def _configure(folder: Path, base: Path, **changes: Any) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    config["base_model_name_or_path"] = str(base)
    (folder / ADAPTER_CONFIG_NAME).write_text(json.dumps(config | changes))


def _masters(home: HostModel) -> dict[str, Tensor]:
    names = [param.name for param in home.decoder.params if param.is_adapter]
    return {f"base_model.model.{name}.weight": home.store.master(name) for name in names}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_adapters_come_back_with_every_bit(
    folder: Path, base: Path, tmp_path: Path, dtype: Any
) -> None:
    home = load_model(folder, dtype=dtype, kinds=KINDS)
    home.export(tmp_path / "out")
    alone = read_model_folder(tmp_path / "out").load_adapters(KINDS)
    alone.export(tmp_path / "again")
    given = load_file(folder / ADAPTER_NAME)
    for found in (_masters(home), load_file(tmp_path / "out" / ADAPTER_NAME)):
        assert found.keys() == given.keys()
        assert all(torch.equal(found[name], given[name]) for name in given)
    assert (tmp_path / "again" / ADAPTER_NAME).read_bytes() == (
        tmp_path / "out" / ADAPTER_NAME
    ).read_bytes()
    plain = load_model(base, dtype=dtype, kinds=(TensorKind.HI,))
    for param in plain.decoder.params:
        weight = plain.store.param(param.name, TensorKind.HI)
        assert torch.equal(home.store.param(param.name, TensorKind.HI), weight), param.name
    config = json.loads((tmp_path / "out" / ADAPTER_CONFIG_NAME).read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8, "CAUSAL_LM")
    assert config["base_model_name_or_path"] == str(base.resolve())
    assert config["target_modules"] == ["down_proj", "q_proj"]


EXPERTS = "base_model.model.model.layers.0.mlp.experts"


def _expert_names(layers: int) -> set[str]:
    """Return the names that PEFT gives adapters of experts: the last param is outermost."""
    modules = [f"base_model.model.model.layers.{n}.mlp.experts" for n in range(layers)]
    wrappers = [*modules, *(f"{module}.base_layer" for module in modules)]
    return {f"{wrapper}.lora_{half}.weight" for wrapper in wrappers for half in "AB"}


@pytest.fixture
def of_experts(tmp_path: Path) -> Path:
    """Adapters of all experts and one linear module, exported."""
    base = save_tiny(tmp_path / "mixture", "mixtral", torch.float32)
    lora = LoraConfig(
        rank=2, alpha=4, target_modules=("q_proj",), target_parameters=("all-experts",)
    )
    home = load_model(base, lora=lora)
    draw = torch.Generator().manual_seed(3)
    for param in home.decoder.params:
        if param.is_adapter:
            home.store.param(param.name, TensorKind.HI).copy_(
                torch.randn(param.shape, generator=draw)
            )
    home.export(tmp_path / "experts")
    return tmp_path / "experts"


def test_adapters_of_experts_have_the_names_of_peft_and_come_back(
    of_experts: Path, tmp_path: Path
) -> None:
    tensors = load_file(of_experts / ADAPTER_NAME)
    assert {name for name in tensors if "experts" in name} == _expert_names(4)
    # 4 experts of rank 2; gate_up_proj is inside, down_proj outside.
    assert tensors[f"{EXPERTS}.base_layer.lora_B.weight"].shape == (192, 8)
    assert tensors[f"{EXPERTS}.lora_B.weight"].shape == (64, 8)
    config = json.loads((of_experts / ADAPTER_CONFIG_NAME).read_text())
    assert config["target_modules"] == ["q_proj"]
    assert len(config["target_parameters"]) == 8
    again = read_model_folder(of_experts).load_adapters(KINDS)
    again.export(tmp_path / "again")
    for name in (ADAPTER_CONFIG_NAME, ADAPTER_NAME):
        assert (tmp_path / "again" / name).read_bytes() == (of_experts / name).read_bytes()


@pytest.mark.parametrize("names", [["gate_up_proj", "down_proj"], ["mlp.experts.gate_up_proj",
                                    "mlp.experts.down_proj"]])  # fmt: skip
def test_params_may_be_known_by_their_ends(of_experts: Path, names: list[str]) -> None:
    config = json.loads((of_experts / ADAPTER_CONFIG_NAME).read_text())
    config["target_parameters"] = names
    (of_experts / ADAPTER_CONFIG_NAME).write_text(json.dumps(config))
    assert load_model(of_experts).decoder.adapters is not None


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["mlp.experts.down_proj"], r"8 are not in the model: .*experts\.base_layer\.lora_A"),
        (["gate_up_proj", "down_proj", "mlp.gate.weight"], "8 are missing: .*mlp.gate.lora_A"),
        (["mlp.experts.w1"], r"w1 matches no matrix of the layers"),
        (None, r"lora_A has shape \(8, 64\), and r is 2"),
    ],
)
def test_other_params_than_those_of_the_config_are_named(
    of_experts: Path, names: list[str] | None, says: str
) -> None:
    config = json.loads((of_experts / ADAPTER_CONFIG_NAME).read_text())
    config["target_parameters"] = names
    (of_experts / ADAPTER_CONFIG_NAME).write_text(json.dumps(config))
    with pytest.raises((WeightsMismatch, ConfigError), match=says):
        load_model(of_experts)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_magnitudes_start_as_norms_and_come_back(base: Path, tmp_path: Path, dtype: Any) -> None:
    lora = LoraConfig(rank=4, alpha=8, target_modules=("q_proj",), dora=True)
    home = load_model(base, dtype=dtype, kinds=KINDS, lora=lora)
    name = "model.layers.0.self_attn.q_proj"
    weight = home.store.param(f"{name}.weight", TensorKind.HI).float()
    magnitude = home.store.master(f"{name}.lora_magnitude_vector")
    assert torch.allclose(magnitude, weight.norm(dim=1), rtol=1e-6)
    home.export(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / ADAPTER_NAME)
    assert torch.equal(tensors[f"base_model.model.{name}.lora_magnitude_vector"], magnitude)
    assert json.loads((tmp_path / "out" / ADAPTER_CONFIG_NAME).read_text())["use_dora"] is True
    again = read_model_folder(tmp_path / "out").load_adapters(KINDS)
    assert torch.equal(again.store.master(f"{name}.lora_magnitude_vector"), magnitude)


def test_settings_that_peft_does_not_keep_are_those_of_the_run(base: Path, tmp_path: Path) -> None:
    load_model(base, lora=LoraConfig(rank=4, alpha=8)).export(tmp_path / "out")
    given = {"dropout": 0.25, "fp32": True}
    adapters = read_model_folder(tmp_path / "out", trained_with=given).decoder.adapters
    assert adapters is not None
    assert (adapters.lora.dropout, adapters.lora.fp32) == (0.25, True)


def test_modules_that_have_namesakes_are_written_in_full(base: Path, tmp_path: Path) -> None:
    lora = LoraConfig(rank=2, alpha=2, target_modules=("layers.1.self_attn.q_proj",))
    load_model(base, lora=lora).export(tmp_path / "out")
    config = json.loads((tmp_path / "out" / ADAPTER_CONFIG_NAME).read_text())
    assert config["target_modules"] == ["model.layers.1.self_attn.q_proj"]
    assert read_adapter_folder(tmp_path / "out").modules == ("model.layers.1.self_attn.q_proj",)


def _with(folder: Path, changes: dict[str, Tensor | None]) -> None:
    tensors = load_file(folder / ADAPTER_NAME)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / ADAPTER_NAME)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({Q_PROJ: None}, "q_proj.lora_A is missing"),
        ({Q_PROJ: torch.zeros(5, 64)}, r"q_proj\.lora_A has shape \(5, 64\), and r is 4"),
        ({Q_PROJ: torch.zeros(4, 63)}, r"has shape \(4, 63\); the model wants \(4, 64\)"),
        ({Q_PROJ: torch.zeros(4, 64, dtype=torch.int32)}, "is I32; it must be BF16, F16 or F32"),
        ({Q_PROJ: torch.zeros(256)}, r"has shape \(256,\)"),
        (
            {
                Q_PROJ.replace("layers.0", "layers.7"): torch.zeros(4, 64),
                Q_PROJ.replace("layers.0", "layers.7").replace("_A", "_B"): torch.zeros(64, 4),
            },
            r"layers\.7\.self_attn\.q_proj matches no linear module",
        ),
        ({"base_model.model.lm_head.base_layer.weight": torch.zeros(2)}, "save_embedding_layers"),
        ({Q_PROJ.replace("lora_A", "lora_other"): torch.zeros(4)}, "not adapters of"),
        (
            {Q_PROJ.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(64)},
            r"1 are not in the model: .*q_proj\.lora_magnitude_vector",
        ),
        ({Q_PROJ.replace("q_proj", "*"): torch.zeros(4, 64)}, "not adapters of linear modules"),
    ],
)
def test_what_is_not_theirs_is_named(folder: Path, changes: Any, says: str) -> None:
    _with(folder, changes)
    with pytest.raises((WeightsMismatch, ConfigError), match=says):
        load_model(folder)


def test_a_hashed_folder_whose_model_has_moved_is_not_told_to_change_alone(
    folder: Path, base: Path
) -> None:
    """Its changed config would be refused as damaged."""
    _configure(folder, base, base_model_name_or_path="/no/such/place")
    (folder / RECORD_NAME).write_text("{}")
    with pytest.raises(ModelFolderError, match=r"link it to the old place; or .* delete megatrain"):
        read_adapter_folder(folder).base()


def test_ranks_must_be_those_of_the_config(folder: Path, base: Path) -> None:
    _configure(folder, base, r=2)
    with pytest.raises(WeightsMismatch, match="and r is 2"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path"),
        ({"base_model_name_or_path": "/no/such/place"}, "its base model cannot be found"),
    ],
)
def test_a_base_that_is_not_there_is_named(
    folder: Path, base: Path, changes: dict[str, Any], says: str
) -> None:
    _configure(folder, base, **changes)
    with pytest.raises(ModelFolderError, match=says):
        load_model(folder)


def test_a_pickle_is_not_opened(folder: Path) -> None:
    (folder / ADAPTER_NAME).rename(folder / "adapter_model.bin")
    with pytest.raises(ModelFolderError, match="is a pickle, which could run code: refused"):
        load_model(folder)


def test_adapters_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    _configure(folder, save_tiny(tmp_path / "other", "llama", hidden_size=32, head_dim=8))
    with pytest.raises(MegaTrainError, match="the adapters do not match the model"):
        load_model(folder)


def test_a_model_with_a_stray_file_stays_a_model(base: Path, folder: Path) -> None:
    assert is_adapter_folder(folder)
    (folder / SINGLE_NAME).write_bytes(b"")
    assert not is_adapter_folder(folder)
    assert not is_adapter_folder(base)


def test_a_model_of_the_hub_is_named_by_its_id() -> None:
    cache = Path("/c/hub/models--Qwen--Qwen3-8B/snapshots") / ("a1" * 20)
    assert reference(cache) == ("Qwen/Qwen3-8B", "a1" * 20)
    assert reference(Path("/c/models--gpt2/snapshots") / ("0" * 40)) == ("gpt2", "0" * 40)
    assert reference(Path("/models/mine")) == ("/models/mine", None)
