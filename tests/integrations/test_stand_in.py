"""Laws of the model that a trainer holds in place of the real one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatrain.disk.hf.model import load_model
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.integrations.stand_in import make_stand_in
from megatrain.integrations.trainer import Served
from megatrain.integrations.turns import take_turns
from megatrain.losses.leaves import TokenOutputSpec
from megatrain.memory.kinds import TensorKind
from testkit.families import save_tiny

WANTED = TokenOutputSpec(entropy=True, mean_logits=True, top_k=1)
LEFT_AND_RIGHT = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    save_tiny(path, "llama")
    return path


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    home = load_model(folder, dtype="fp32", kinds=(TensorKind.HI, TensorKind.LO, TensorKind.GRAD))
    found = Served(home, partial(Engine, home.decoder, home.store), trains=True)
    yield found
    found.close()


def rows(seed: int) -> dict[str, Tensor]:
    """Return two rows, one padded on the left and one on the right."""
    ids = torch.randint(3, 300, (2, 7), generator=torch.Generator().manual_seed(seed))
    labels = ids.masked_fill(LEFT_AND_RIGHT == 0, -100)
    labels[:, :3] = -100
    return {"input_ids": ids, "attention_mask": LEFT_AND_RIGHT, "labels": labels}


def expected_of(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what TRL reads, by the model in memory."""
    logits = model(given["input_ids"], attention_mask=given["attention_mask"]).logits[:, :-1]
    targets = given["labels"][:, 1:]
    mask, logprobs = targets != -100, logits.log_softmax(-1)
    found = {
        "log_probs": logprobs.gather(-1, targets.clamp(min=0)[..., None])[..., 0],
        "entropy": -(logprobs.exp() * logprobs).sum(-1),
        "mean_logits": logits.mean(-1),
        "is_top1": logits.argmax(-1) == targets,
    }
    return {name: tensor * mask for name, tensor in found.items()} | {"label_mask": mask}


def test_outputs_are_those_of_the_model_in_memory(folder: Path, served: Served) -> None:
    stand_in = make_stand_in(served, str(folder), WANTED)
    given = rows(0)
    with torch.no_grad():
        found = stand_in(**given, fused_lm_head=True, use_cache=False)
        plain = stand_in(**given, num_items_in_batch=5)
        expected = expected_of(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), given
        )
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)
    total = -expected["log_probs"].sum()
    torch.testing.assert_close(found.loss, total / expected["label_mask"].sum())
    torch.testing.assert_close(plain.loss, total / 5)


@pytest.mark.parametrize(("factor", "is_same"), [(1.0, True), (1.01, False)])
def test_gradients_are_those_of_the_losses_of_all_micro_batches(
    folder: Path, served: Served, factor: float, is_same: bool
) -> None:
    def lose(model: Callable[..., Any], seed: int, factor: float) -> None:
        out = model(**rows(seed))
        (out["log_probs"].exp().sum() + factor * out["entropy"].pow(2).sum()).backward()

    stand_in = partial(make_stand_in(served, str(folder), WANTED), fused_lm_head=True)
    tasks = [partial(lose, stand_in, seed, factor) for seed in (1, 2)]
    take_turns(tasks, served.answer)
    served.go_back()
    resident = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for seed in (1, 2):
        lose(lambda **given: expected_of(resident, given), seed, 1.0)
    store = served.home.store
    apart = [
        float((store.param(name, TensorKind.GRAD).view(param.shape) - param.grad).norm())
        / float(param.grad.norm())
        for name, param in resident.named_parameters()
    ]
    assert (max(apart) < 1e-5) is is_same


def test_rows_that_do_not_train_are_cut_into_micro_batches(folder: Path, served: Served) -> None:
    batches: list[int] = []
    home = served.home
    engine = served.engine

    class Noting:
        def token_outputs(self, batch: Any, wanted: TokenOutputSpec, **_: bool) -> Any:
            batches.append(len(batch))
            return engine.token_outputs(batch, wanted)

    cut = Served(home, Noting, trains=False, most_tokens=7)  # type: ignore[arg-type]
    with torch.no_grad():
        found, expected = (
            make_stand_in(one, str(folder), WANTED)(**rows(0), fused_lm_head=True)
            for one in (cut, served)
        )
    assert batches == [2]
    for name in ("log_probs", "entropy", "mean_logits", "is_top1"):
        torch.testing.assert_close(found[name], expected[name])


def test_a_step_that_is_dropped_leaves_the_engine_free(folder: Path, served: Served) -> None:
    stand_in = make_stand_in(served, str(folder), WANTED)
    take_turns([partial(stand_in, **rows(1))], served.answer)
    served.drop()
    with torch.no_grad():
        stand_in(**rows(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "without labels"),
        ({"pixel_values": torch.zeros(1)}, "with pixel_values"),
        ({"output_router_logits": True}, "with output_router_logits"),
        ({}, "belongs into `training_step`"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    folder: Path, served: Served, changes: dict[str, Any], message: str
) -> None:
    stand_in = make_stand_in(served, str(folder), WANTED)
    with pytest.raises(ConfigError, match=message):
        stand_in(**rows(0) | changes)


def test_it_cannot_generate_and_says_what_can(folder: Path, served: Served) -> None:
    with pytest.raises(ConfigError, match=r"megatrain\.generate\(trainer\.engine"):
        make_stand_in(served, str(folder), WANTED).generate()


def test_what_is_saved_loads_with_the_tokens_of_the_trainer(
    folder: Path, served: Served, tmp_path: Path
) -> None:
    stand_in = make_stand_in(served, str(folder), WANTED)
    stand_in.config.pad_token_id = stand_in.generation_config.pad_token_id = 7
    stand_in.save_pretrained(tmp_path / "saved")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (found.config.pad_token_id, found.generation_config.pad_token_id) == (7, 7)
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    before = json.loads((folder / "config.json").read_text())
    changed = {name for name in written if written[name] != before.get(name)}
    assert changed == {"pad_token_id", "dtype"}
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name])
