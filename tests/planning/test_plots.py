"""Pictures of an estimate say what the estimate says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import ConfigError
from megatrain.planning.estimate import estimate
from megatrain.planning.plots import _draw_memory, draw, marked_beside, needed_bytes, title
from testkit.machines import GIB


def test_the_title_names_the_machine_that_was_asked_for() -> None:
    found = estimate("qwen3-0.6b", gpu="24GB", ram="64GB")
    assert title(found.plan, found.machine) == "Qwen/Qwen3-0.6B on 24GB card, as fast as RTX 3090"


@pytest.mark.merge
def test_what_does_not_fit_says_so_and_stands_right_of_the_memory_there_is() -> None:
    large = estimate("Llama-3.1-70B", gpu="80GB", ram="256GB")
    assert ": does not fit, host memory " in title(large.plan, large.machine)
    assert needed_bytes(large.plan) > large.plan.profile.ram_bytes
    small = estimate("Llama-3.1-8B", gpu="4090", ram="192GB")
    assert 105 * GIB < needed_bytes(small.plan) < small.plan.profile.ram_bytes


def test_no_name_lies_over_the_one_that_was_asked_for() -> None:
    model = estimate("Llama-3.1-8B", gpu="4090", ram="192GB").plan.workload.model
    names = [shape.name for shape in marked_beside(model)]
    assert "Qwen/Qwen3-8B" not in names
    assert "Qwen/Qwen3-14B" in names


@pytest.mark.merge
def test_both_kinds_of_picture_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    for model, ram in (("qwen3-0.6b", "64GB"), ("Llama-3.1-70B", "64GB")):
        found = estimate(model, gpu="4090", ram=ram)
        assert draw(found.plan, found.machine).startswith(b"\x89PNG")


def _names_over_the_legend(**moved: Any) -> list[str]:
    """Return the names of models that the legend covers, or that cover it."""
    figures = pytest.importorskip("matplotlib.figure")
    found = estimate("Qwen3-4B", gpu="3060", ram="64GB")
    figure = figures.Figure(figsize=(13, 5.6), dpi=120, layout="constrained")
    _, axes = figure.subplots(1, 2)
    _draw_memory(axes, found.plan)
    if moved:
        axes.legend(**moved)
    figure.draw_without_rendering()
    legend = axes.get_legend().get_window_extent()
    return [text.get_text() for text in axes.texts if text.get_window_extent().overlaps(legend)]


def test_the_legend_covers_no_name() -> None:
    assert _names_over_the_legend() == []


def test_a_legend_over_a_name_would_be_noticed() -> None:
    covered = _names_over_the_legend(loc="lower right")
    assert any("Qwen3-4B" in name for name in covered), covered


@pytest.mark.merge
def test_a_plot_replaces_a_plot_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found, path = estimate("qwen3-0.6b", gpu="4090", ram="64GB"), tmp_path / "plan.png"
    found.draw(path)
    found.draw(path)
    path.write_text("rows of somebody")
    with pytest.raises(ConfigError, match=r"plan\.png exists and was not written by megatrain"):
        found.draw(path)
    assert path.read_text() == "rows of somebody"
