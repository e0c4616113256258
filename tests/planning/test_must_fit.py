"""What one GPU is said to train: models, machines, and the settings that they need."""

from __future__ import annotations

import pytest

from megatrain.planning.estimate import estimate

UNCLIPPED = "train.max_grad_norm=null"
CASES = [
    # model, settings, card, host memory, disk; states and tier that come of it
    ("Mistral-Large", ["train.batch_tokens=32k"], "H200", "1.5TB", None, "bf16 none"),
    ("gpt-oss-120b", ["optim.state=fp32", UNCLIPPED], "H200", "1.5TB", None, "fp32 none"),
    ("gpt-oss-120b", [], "H200", "1.5TB", None, "bf16 none"),
    ("Qwen3-8B", [UNCLIPPED], "24GB", "64GB", None, "8bit none"),
    ("Qwen3-8B", [], "24GB", "64GB", "1TB", "fp32 states"),
    ("Qwen3-14B", [], "24GB", "128GB", None, "8bit none"),
    ("Qwen3-32B", [], "24GB", "128GB", "2TB", "fp32 gradients"),
    ("Llama-3.1-70B", [], "80GB", "768GB", None, "bf16 none"),
    ("Qwen3-8B", [], "24GB", "128GB", None, "fp32 none"),
]


@pytest.mark.parametrize(("model", "settings", "gpu", "ram", "disk", "home"), CASES)
def test_it_fits(
    model: str, settings: list[str], gpu: str, ram: str, disk: str | None, home: str
) -> None:
    found = estimate(model, settings, gpu=gpu, ram=ram, disk=disk)
    assert found.fits, str(found)
    chosen = found.plan.settings
    assert f"{chosen.state} {chosen.tier}" == home
    assert UNCLIPPED in settings or chosen.update == "late", "clipping stays exact"
    assert (found.plan.wear is not None) == (chosen.tier != "none")


def test_a_machine_that_is_too_small_would_be_noticed() -> None:
    assert not estimate("Mistral-Large", ["train.batch_tokens=32k"], gpu="H200", ram="900GB").fits
    assert not estimate("Qwen3-32B", ["train.batch_tokens=32k"], gpu="24GB", ram="128GB").fits
