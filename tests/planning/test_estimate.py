"""An estimate: at once, offline, in lines that fit, and honest about what does not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megatrain as mt
from megatrain.choices import BaseForm
from megatrain.errors import ConfigError
from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.catalog.reference_machines import GIB, MACHINES
from megatrain.planning.estimate import Estimate, estimate
from megatrain.planning.machine.examination import Examination
from megatrain.planning.machine.facts import host_facts, profile_path
from megatrain.planning.machine.reserve import left_by_system
from megatrain.planning.prediction import predicted_speed
from testkit.cases import at_a_push
from testkit.effort import children_s, require_effort
from testkit.families import tiny_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatrain", "estimate", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.merge
@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "Llama-3.1-405B", "Kimi-K2-Instruct"])
def test_answers_with_little_effort(model: str) -> None:
    """Measured 27 to 43 loops, about 1.3 to 2 s."""

    def ask() -> None:
        done = _run(model, "--gpu", "H200", "--ram", "16TB")
        assert done.returncode in (0, 3), done.stderr

    require_effort(ask, at_most=120, clock=children_s)


def test_heavy_libraries_are_not_imported() -> None:
    code = (
        "import sys; from megatrain.planning.estimate import estimate;"
        "print(estimate('qwen3-8b', gpu='4090', ram='192GB'));"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("set()\n")


def test_what_fits_says_how_fast_and_what_limits() -> None:
    found = estimate("Qwen/Qwen3-8B", gpu="4090", ram="192GB", tokens="1e9", price=0.5)
    assert found.fits
    assert 1000 < found.tokens_per_s < 2500
    assert found.seconds == pytest.approx(1e9 / found.tokens_per_s)
    assert found.cost == pytest.approx(found.seconds / 3600 * 0.5)  # type: ignore[operator]
    text = found.text(details=True)
    for word in (
        "machine   RTX 4090", "figures   published, not measured", "Qwen/Qwen3-8B, 8.19B params",
        "32,768 tokens in rows of 2,048", "  auto: the default", "  weights  ",
        "limit     compute", ", 1B tokens in ", "at $0.5 an hour", "micro_batch_tokens",
    ):  # fmt: skip
        assert word in text, word
    first = text.splitlines()[0]
    assert first == found.plan.verdict(found.whole)
    assert first == str(found).splitlines()[0]
    assert first.startswith(f"fits: {predicted_speed(found.tokens_per_s)}, 1B tokens in ")
    assert re.search(r"1B tokens in [\d.]+ to [\d.]+ d for \$\d+ to \$\d+ at .* predicted; ", first)


@pytest.mark.merge
@pytest.mark.parametrize(
    ("model", "gpu", "ram"),
    [
        ("openai/gpt-oss-120b", "4090", "1.5TB"),
        ("Qwen/Qwen3-235B-A22B", "4090", "2TB"),
        ("Qwen/Qwen3-30B-A3B", "RTX 3060 12GB", "256GB"),
    ],
)
def test_mixtures_train_with_all_weights_on_small_cards(model: str, gpu: str, ram: str) -> None:
    """The sibling: with experts in their slots, two layers of the larger ones do not fit."""
    words = (model, "optim.state=bf16", "--gpu", gpu, "--ram", ram)
    done = _run(*words, "--details")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"expert_pages +([2-9]|\d{2,}) ", done.stdout)
    if "30B" not in model:
        whole = _run(*words, "memory.expert_pages=1")
        assert whole.returncode == 3


@pytest.mark.merge
def test_what_does_not_fit_says_by_how_much_and_ends_with_3() -> None:
    done = _run("Llama-3.1-70B", "--gpu", "24GB", "--ram", "64GB")
    assert done.returncode == 3
    first, second, *_ = done.stdout.splitlines()
    assert re.fullmatch(r"does not fit: host memory \d+\.\d GiB short", first)
    assert second == "Changes that make it fit, the cheapest first:"
    assert "24GB card, as fast as RTX 3090" in done.stdout


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "machine", at_a_push(MACHINES, 4, others="merge"), ids=lambda machine: machine.name
)
def test_every_machine_has_an_answer(machine: object) -> None:
    found = estimate("SmolLM2-135M", gpu=machine.name)  # type: ignore[attr-defined]
    assert found.tokens_per_s > 0
    assert _widest(found) <= 80


def _widest(found: Estimate) -> int:
    return max(map(len, found.text(details=True).splitlines()[1:]))


def test_json_has_every_figure() -> None:
    done = _run("qwen3-8b", "--gpu", "4090", "--ram", "192GB", "--json", "--tokens", "1e9")
    facts = json.loads(done.stdout)
    assert facts["params"] == 8_190_735_360
    assert facts["fits"] is True
    host = sum(line["num_bytes"] for line in facts["ledger"] if line["place"] == "host")
    assert host < facts["available"]["host"] == left_by_system(192 * GIB)
    assert facts["short"] == {}
    assert facts["tokens"] == 10**9
    predicted = facts["predicted"]
    assert predicted["bottleneck"] == "compute"
    for found, name in ((predicted, "tokens_per_s"), (predicted, "step_s"), (facts, "seconds")):
        assert found[f"{name}_low"] < found[name] < found[f"{name}_high"]
    assert predicted["tokens_per_s_low"] * facts["seconds_high"] == pytest.approx(10**9)
    assert set(facts["settings"]) >= {"micro_batch_tokens", "slots", "tape", "update"}


@pytest.mark.merge
def test_settings_can_be_tried_as_train_takes_them(tmp_path: Path) -> None:
    plain = estimate("qwen3-8b", gpu="4090", ram="192GB").plan
    assert plain.workload.packed, "as train does by default"
    assert plain.workload.max_grad_norm == 1.0
    tried = ["data.packing=false", "train.max_grad_norm=null", "data.max_length=8k"]
    for way in (["qwen3-8b", *tried], [_run_file(tmp_path), "train.max_grad_norm=null"]):
        done = _run(*way, "--gpu", "4090", "--ram", "192GB", "--json")
        assert done.returncode == 0, done.stderr
        facts = json.loads(done.stdout)
        assert (facts["sequence"], facts["settings"]["update"]) == (8192, "in_backward")


def _run_file(folder: Path) -> str:
    path = folder / "run.yaml"
    path.write_text("model: qwen3-8b\ndata: {train: a.jsonl, max_length: 8k, packing: false}\n")
    return str(path)


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.max_norm"):
        estimate("qwen3-8b", ["train.max_norm=1"], gpu="4090")


def test_a_processor_is_not_estimated_as_a_card() -> None:
    with pytest.raises(ConfigError, match=r"memory\.device is cpu, but RTX 4090"):
        estimate("qwen3-8b", ["memory.device=cpu"], gpu="4090")


def test_a_machine_without_a_gpu_is_planned_on_its_cores() -> None:
    for gpu, name in (("none", "CPU"), ("Apple M4 Max", "Apple M4 Max: its CPU, as 8 cores")):
        found = estimate("qwen3-0.6b", ["memory.device=cpu"], gpu=gpu, ram="32GB")
        assert found.fits
        assert found.plan.ledger.total("device") == 0
        assert f"machine   {name}" in str(found)
        assert "figures   assumed, not measured" in str(found)


def test_a_card_without_bf16_says_so_and_keeps_its_scores() -> None:
    asked = {"gpu": "2080 Ti", "ram": "64GB", "batch_tokens": "16k"}
    found = estimate("qwen3-0.6b", **asked)  # type: ignore[arg-type]
    assert "no bf16   products run on the fp32 units, attention is not fused" in str(found)
    assert found.plan.workload.attn == "eager"
    given = estimate("qwen3-0.6b", ["model.attn=sdpa"], **asked)  # type: ignore[arg-type]
    assert given.plan.workload.attn == "sdpa"
    assert "no bf16" not in str(estimate("qwen3-0.6b", gpu="3060", ram="64GB"))


def test_installed_memory_is_read_as_it_is_sold() -> None:
    has = {
        ram: estimate("qwen3-0.6b", gpu="4090", ram=ram, batch_tokens="16k").plan.profile.ram_bytes
        for ram in ("64GB", "64GiB", "64G")
    }
    assert set(has.values()) == {left_by_system(64 * GIB)}
    assert 60 * GIB < left_by_system(64 * GIB) < 62 * GIB
    assert left_by_system(1 * GIB) == GIB // 2


@pytest.mark.merge
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt-oss-120b", "weights   are stored in MXFP4; loading dequantizes them to bf16"),
        ("DeepSeek-V3", "weights   are stored in FP8; loading dequantizes them to bf16"),
        ("Kimi-K2-Instruct", "weights   are stored in FP8"),
        ("gemma-3-27b-pt", "weights   include a vision part"),
    ],
)
def test_published_weights_that_are_not_plain_are_named(model: str, words: str) -> None:
    assert words in str(estimate(model, gpu="H200", ram="2TB"))
    assert "weights   come" not in str(estimate("qwen3-8b", gpu="H200", ram="2TB"))


def test_the_config_of_a_folder_says_how_its_weights_are_kept(tmp_path: Path) -> None:
    config: dict[str, Any] = tiny_config("qwen3").to_dict()
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "weights   are stored in FP8; loading" in str(
        estimate(str(tmp_path), gpu="4090", ram="192GB")
    )
    config["quantization_config"]["quant_method"] = "awq"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "AWQ, which cannot be loaded" in str(estimate(str(tmp_path), gpu="4090", ram="192GB"))


def test_what_is_known_can_be_listed() -> None:
    done = _run("--list")
    assert done.returncode == 0, done.stderr
    for name in ("Qwen/Qwen3-8B", "moonshotai/Kimi-K2-Instruct", "RTX 5070 Ti", "B200"):
        assert name in done.stdout
    assert _run().returncode == 2


@pytest.mark.few(1)
@pytest.mark.parametrize(("tokens", "count"), [("1B", 10**9), ("300M", 3 * 10**8), ("1e9", 10**9)])
def test_tokens_as_people_write_them(tokens: str, count: int) -> None:
    assert estimate("qwen3-0.6b", gpu="4090", ram="64GB", tokens=tokens).tokens == count


def test_from_python() -> None:
    assert mt.estimate("Qwen/Qwen3-8B", gpu="24GB", ram="192GB").tokens_per_s > 0


@pytest.mark.merge
def test_this_machine_is_meant_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match="or run `megatrain doctor` first"):
        estimate("qwen3-0.6b")
    facts = host_facts()
    found = Examination(
        facts=facts, profile=find_machine("5090")[0].profile(ram_bytes=64 * GIB), kernel="native",
        folder=".", when="2026-01-02", seconds=1.0,
    )  # fmt: skip
    path = profile_path(facts)
    path.parent.mkdir(parents=True)
    path.write_text(found.to_json())
    assert "figures   measured 2026-01-02" in str(estimate("qwen3-0.6b"))
    assert estimate("qwen3-0.6b", ram="32GB").plan.profile.ram_bytes == left_by_system(32 * GIB)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"ram": "128"}, "--ram is 128; "),
        ({"ram": "many"}, "--ram is many; give a size"),
        ({"seq": "x"}, "--seq is x; give a number of tokens"),
        ({"tokens": "-1"}, "--tokens is -1; "),
        ({"batch_tokens": "0"}, "--batch-tokens is 0; "),
        (
            {"seq": "4k", "overrides": ["data.max_length=1k"]},
            "--seq is short for data.max_length, and both are given",
        ),
        ({"lora": 16, "overrides": ["lora.rank=8"]}, "--lora is short for lora.rank, and both"),
        ({"gpu": "abacus"}, "--gpu abacus: unknown. Give the memory of its card, like --gpu 8GB"),
    ],
)
def test_what_cannot_be_meant_is_said(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate("qwen3-8b", **({"gpu": "4090"} | asked))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"hosts": 8}, "--hosts is 8: what is between them? Give --network 25GbE"),
        ({"network": "25GbE"}, "--network 25GbE: it is between hosts, and --hosts is 1"),
        ({"gpus": 0}, "--gpus is 0, must be between 1 and"),
        ({"hosts": -2}, "--hosts is -2, must be between 1 and"),
        ({"hosts": 2, "network": "fast"}, "--network fast: unknown"),
    ],
)
def test_ranks_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        estimate("Qwen3-8B", gpu="4090", ram="128GB", **options)


@pytest.mark.merge
def test_a_plan_for_ranks_has_them_in_its_facts() -> None:
    found = estimate("Qwen3-8B", gpu="4090", ram="64GB", hosts=2, gpus=2, network="25GbE")
    facts = json.loads(found.to_json())
    assert (facts["ranks"]["num_hosts"], facts["ranks"]["per_host"]) == (2, 2)
    assert facts["ranks"]["network"]["host_bytes_per_s"] == pytest.approx(2.9375e9)
    assert facts["predicted"]["busy"]["comm"] > 0
    alone = json.loads(estimate("Qwen3-8B", gpu="4090", ram="192GB").to_json())
    assert "ranks" not in alone
    assert alone["predicted"]["busy"]["comm"] == 0


@pytest.mark.merge
@pytest.mark.parametrize(
    ("model", "gpu", "ram", "base"),
    [
        ("Qwen3-30B-A3B", "8GB", "32GB", "nf4"),
        ("Llama-3.1-70B", "RTX 3060 12GB", "64GB", "nf4"),
        ("DeepSeek-V3", "RTX 4090", "768GB", "as_published"),
        ("Kimi-K2-Instruct", "RTX 4090", "768GB", "nf4"),
    ],
)
def test_adapters_fit_where_their_base_is_narrow(
    model: str, gpu: str, ram: str, base: BaseForm
) -> None:
    short: list[str] = ["train.batch_tokens=8k"]
    found = estimate(model, short, gpu=gpu, ram=ram, lora=16, base=base)
    assert found.fits
    assert "bytes each, widened on the device" in found.text()
    assert not estimate(model, short, gpu=gpu, ram=ram, lora=16, base="bf16").fits


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "most"), [("gpt-oss-20b", 0.54), ("DeepSeek-V3", 1.01), ("Qwen3-8B", None)]
)
def test_a_base_stays_as_it_was_published(model: str, most: float | None) -> None:
    plan = estimate(model, gpu="H200", ram="4TB", lora=16).plan
    shape = plan.workload.model
    if most is None:
        assert shape.narrow_params == 0
        return
    each = sum(block.narrow_bytes for block in shape.blocks) / shape.narrow_params
    assert 0.5 < each <= most
    assert shape.narrow_params > 0.8 * shape.params
