"""What one GPU, and many, are said to train: models, machines, and settings that they need."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.catalog.asked_models import find_shape
from megatrain.planning.estimate import estimate
from megatrain.planning.longest import longest_row

UNCLIPPED = "train.max_grad_norm=null"
BF16, EIGHT_BITS = "optim.state=bf16", "optim.state=8bit"
CASES = [
    # model, settings, card, host memory, disk; states and tier that come of it
    ("Mistral-Large", ["train.batch_tokens=32k", BF16], "H200", "1.5TB", None, "bf16 none"),
    ("gpt-oss-120b", [UNCLIPPED], "H200", "1.5TB", None, "fp32 none"),
    ("gpt-oss-120b", [BF16], "H200", "1.5TB", None, "bf16 none"),
    ("Qwen3-8B", [UNCLIPPED, EIGHT_BITS], "24GB", "64GB", None, "8bit none"),
    ("Qwen3-8B", [EIGHT_BITS], "24GB", "64GB", None, "8bit none"),
    ("Qwen3-8B", [], "24GB", "52GB", "1TB", "fp32 states"),
    ("Qwen3-14B", [EIGHT_BITS], "24GB", "128GB", None, "8bit none"),
    ("Qwen3-32B", [], "24GB", "128GB", "2TB", "fp32 states"),
    ("Llama-3.1-70B", [BF16], "80GB", "768GB", None, "bf16 none"),
    ("Qwen3-8B", [], "24GB", "128GB", None, "fp32 none"),
    ("Qwen2.5-7B", ["data.max_length=512k", "train.batch_tokens=512k"], "GH200", "480GB", None,
     "fp32 none"),
    ("Llama-3.1-70B", [], "4090", "1TB", None, "fp32 none"),
    ("Qwen3-8B", [], "10GB", "128GB", None, "fp32 none"),
    ("Llama-3.1-8B", [], "8GB", "256GB", None, "fp32 none"),
    ("Llama-3.1-70B", ["lora.rank=16"], "24GB", "192GB", None, "fp32 none"),
]  # fmt: skip

MANY = [
    # model, card, memory of each host, cards of a host, hosts, network, settings
    ("Llama-3.1-70B", "24GB", "128GB", 1, 8, "25GbE", [BF16]),
    ("gpt-oss-120b", "H100 SXM", "2TB", 8, 1, None, []),
    ("Mistral-Large", "H100 SXM", "2TB", 8, 1, None, []),
    ("Llama-3.1-405B", "H200", "2TB", 8, 4, "400GbE", []),
    ("Qwen3-32B", "4090", "384GB", 2, 2, "10GbE", []),
]

LONGEST = [("24GB", 1 << 17), ("32GB", 1 << 18), ("80GB", 1 << 19), ("141GB", 1 << 20)]
"""Device memory, and the tokens of one row of Llama-3.1-8B; host memory without a limit."""


@pytest.mark.few(2)
@pytest.mark.parametrize(("model", "settings", "gpu", "ram", "disk", "home"), CASES)
def test_it_fits(
    model: str, settings: list[str], gpu: str, ram: str, disk: str | None, home: str
) -> None:
    found = estimate(model, settings, gpu=gpu, ram=ram, disk=disk)
    assert found.fits, str(found)
    chosen = found.plan.settings
    assert f"{chosen.state} {chosen.tier}" == home
    assert UNCLIPPED in settings or chosen.update != "in_backward", "clipping stays exact"
    assert (found.plan.wear is not None) == (chosen.tier != "none")


@pytest.mark.few(2)
@pytest.mark.parametrize(("model", "gpu", "ram", "gpus", "hosts", "network", "settings"), MANY)
def test_it_fits_on_many(
    model: str,
    gpu: str,
    ram: str,
    gpus: int,
    hosts: int,
    network: str | None,
    settings: list[str],
) -> None:
    ranks: dict[str, Any] = {"gpus": gpus, "hosts": hosts, "network": network}
    found = estimate(model, settings, gpu=gpu, ram=ram, batch_tokens="128k", **ranks)
    assert found.fits, str(found)
    text = found.text(details=True)
    for part in (f"ranks     {gpus * hosts} on", f"each owns 1/{gpus * hosts} of", ", network "):
        assert part in text
    assert max(map(len, text.splitlines()[1:])) <= 80


@pytest.mark.parametrize(("card", "longest"), LONGEST)
def test_the_longest_row_of_8b(card: str, longest: int) -> None:
    reference, num_bytes = find_machine(card)
    assert num_bytes is not None
    profile = reference.profile(ram_bytes=4 << 40).changed(device_bytes=reference.usable(num_bytes))
    assert longest_row(profile, find_shape("Llama-3.1-8B")) == longest
