"""Laws of the file in vLLM's worker; weights go through it in tests/rewards/test_vllm_policy.py."""

from __future__ import annotations

import ast
import sys

import pytest
import torch
from torch import Tensor, nn

from megatrain.rewards.vllm_server import INSIDE
from testkit.vllm_on_loopback import JoiningModel, worker_file

WORKER = worker_file()


@pytest.mark.parametrize("name", ["megatrain_weights.py", "guarded.py"])
def test_nothing_of_ours_is_imported(name: str) -> None:
    """vLLM has an environment of its own, with other versions."""
    tree = ast.parse((INSIDE / name).read_text())
    heads = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert {head.partition(".")[0] for head in heads} <= {"torch", "vllm", *sys.stdlib_module_names}


def tensors() -> dict[str, Tensor]:
    shapes = {
        "model.embed_tokens.weight": (70, 8),
        "model.layers.0.attn.q_proj.weight": (8, 8),
        "model.layers.0.attn.k_proj.weight": (4, 8),
        "model.layers.0.attn.v_proj.weight": (4, 8),
        "model.norm.weight": (8,),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


class Mapper:
    """Names as newer models of vLLM map them: the joined one at once."""

    def apply_list(self, names: list[str]) -> list[str]:
        for part in ("q_proj", "k_proj", "v_proj"):
            names = [name.replace(f".{part}.", ".qkv_proj.") for name in names]
        return names


@pytest.mark.parametrize("maps", [False, True])
def test_each_tensor_has_its_place(maps: bool) -> None:
    given = tensors()
    model = JoiningModel(given)
    if maps:
        model.hf_to_vllm_mapper = Mapper()  # type: ignore[assignment]
    spots = WORKER.find_spots(model, given)
    joined = "model.layers.0.attn.qkv_proj.weight"
    firsts = {name.split(".")[-2]: (spot.param, spot.first) for name, spot in spots.items()}
    assert [firsts[f"{part}_proj"] for part in "qkv"] == [(joined, 0), (joined, 8), (joined, 12)]
    model.load_weights(iter(given.items()))
    model.pack()
    found = dict(WORKER.found_digests(model, spots, torch.float32))
    given["model.layers.0.attn.k_proj.weight"][3, 7] += 1e-6
    model.load_weights(iter(given.items()))
    model.pack()
    changed = dict(WORKER.found_digests(model, spots, torch.float32))
    assert {name for name in found if found[name] != changed[name]} == {
        "model.layers.0.attn.k_proj.weight"
    }


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.norm.weight", (7,)),
        ("model.embed_tokens.weight", (200, 8)),
        ("model.layers.0.attn.v_proj.weight", (5, 8)),
        ("model.layers.0.attn.q_proj.weight", (8, 9)),
    ],
)
def test_other_shapes_are_refused(name: str, shape: tuple[int, ...]) -> None:
    model = JoiningModel(tensors())
    given = {**tensors(), name: torch.randn(shape)}
    with pytest.raises(WORKER.Refused, match="on the server"):
        WORKER.find_spots(model, given)


def test_a_parameter_that_nobody_gives_is_refused() -> None:
    model = JoiningModel(tensors())
    model.register_parameter("scale", nn.Parameter(torch.zeros(3)))
    with pytest.raises(WORKER.Refused, match=r"parameters without tensors of ours \['scale'\]"):
        WORKER.find_spots(model, tensors())
