"""An estimate as a picture: speed against tokens per step, and models against host memory.

Left, simulated tokens/s, below the lines of the speed that compute, the link in, the link out or
the optimizer alone would allow. Where the curve leaves a line, another resource limits. Right, the
largest model for each size of host memory, with known models on the line; the estimate's model is
at the memory that its run needs, right of the line of host memory if it does not fit.

matplotlib is optional (`pip install matplotlib`) and imported only here.

Laws (tests/planning/test_plots.py)
    1. A plan that does not fit has that in its title, and has no dot on the curve of speeds.
    2. No known model is named beside one of nearly its size.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any

from megatrain.errors import ConfigError
from megatrain.memory.kinds import bytes_per_param, store_kinds
from megatrain.memory.ledger import gib
from megatrain.planning.catalog.families import shape_from_config
from megatrain.planning.catalog.known_models import find_known_model
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.plan import Plan
from megatrain.planning.search import reserves, shortfall_texts
from megatrain.planning.simulate import simulate
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

STEP_TOKENS = tuple(1 << power for power in range(10, 21))
LANE_LABELS = {
    "compute": "compute",
    "in": "link to the device",
    "out": "link to the host",
    "host": "optimizer",
    "comm": "network",
}
_COLOURS = {
    "compute": "#d55e00", "in": "#0072b2", "out": "#3a9bd9", "host": "#00875f", "comm": "#8a4fbf",
}  # fmt: skip
_CURVE = "#222222"
_RED = "#d55e00"
_APART = 1.4
"""Names of models less than this far apart in size would overlap."""
_LABEL = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
MARKED = (
    "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "google/gemma-3-27b-pt",
    "meta-llama/Llama-3.1-70B", "openai/gpt-oss-120b", "Qwen/Qwen3-235B-A22B",
    "meta-llama/Llama-3.1-405B", "moonshotai/Kimi-K2-Instruct",
)  # fmt: skip
"""Known models that everyone can place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedPoint:
    """One size of step."""

    step_tokens: int
    tokens_per_s: float
    allowed: dict[str, float]
    """Tokens/s by lane, if nothing else took time."""


def speed_curve(
    profile: MachineProfile, workload: Workload, settings: StepSettings
) -> list[SpeedPoint]:
    """Return the simulated speed at each of STEP_TOKENS."""
    points = []
    for step_tokens in STEP_TOKENS:
        fewer = settings.changed(micro_batch_tokens=min(settings.micro_batch_tokens, step_tokens))
        played = simulate(profile, replace(workload, step_tokens=step_tokens), fewer)
        allowed = {lane: step_tokens / busy for lane, busy in played.busy_s.items() if busy > 0}
        points.append(
            SpeedPoint(step_tokens=step_tokens, tokens_per_s=played.tokens_per_s, allowed=allowed)
        )
    return points


def draw(plan: Plan, machine: str) -> bytes:
    """Return both pictures of a plan for `machine` as one PNG. Raises ConfigError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install matplotlib"
        ) from None
    figure = Figure(figsize=(13, 5.6), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_speed(left, plan)
    figure.suptitle(_plain(title(plan, machine), 140), color=_CURVE if plan.fits else _RED)
    _draw_memory(right, plan)
    written = io.BytesIO()
    figure.savefig(written, format="png", metadata={"Software": "MegaTrain"})
    return written.getvalue()


def title(plan: Plan, machine: str) -> str:
    """Return the title: model, machine, and whether it fits."""
    named = f"{plan.workload.model.name} on {machine}"
    if plan.fits:
        return named
    lacks = shortfall_texts(plan.profile, plan.ledger)
    return f"{named}: does not fit, {', '.join(f'{text} short' for text in lacks)}"


def _draw_speed(axes: Any, plan: Plan) -> None:
    points = speed_curve(plan.profile, plan.workload, plan.settings)
    tokens = [point.step_tokens for point in points]
    top = max(point.tokens_per_s for point in points)
    for lane, name in LANE_LABELS.items():
        line = [(p.step_tokens, p.allowed[lane]) for p in points if lane in p.allowed]
        if line:
            axes.plot(*zip(*line, strict=True), "--", color=_COLOURS[lane], label=f"{name} alone")
    speeds = [point.tokens_per_s for point in points]
    label = "simulated" if plan.fits else "simulated, if memory were enough"
    axes.plot(tokens, speeds, color=_CURVE, linewidth=2.5, label=label)
    if plan.fits:
        _mark_speed(axes, plan.workload.step_tokens, plan.simulation.tokens_per_s)
    axes.set(xscale="log", yscale="log", xlabel="tokens per step", ylabel="tokens/s", title="Speed")
    axes.set_xticks(tokens[::2], [_tokens(each) for each in tokens[::2]])
    axes.minorticks_off()
    axes.set_ylim(min(speeds) / 1.5, 2.5 * top)
    axes.set_yticks(*_round_ticks(min(speeds) / 1.5, 2.5 * top))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")


def _mark_speed(axes: Any, step_tokens: int, tokens_per_s: float) -> None:
    axes.plot(step_tokens, tokens_per_s, "o", color=_CURVE, markersize=9)
    axes.annotate(
        f"{tokens_per_s:,.0f} tokens/s",
        (step_tokens, tokens_per_s),
        xytext=(8, -18),
        textcoords="offset points",
        bbox=_LABEL,
    )


def _draw_memory(axes: Any, plan: Plan) -> None:
    model, shapes = plan.workload.model, marked_beside(plan.workload.model)
    params = sorted(shape.params for shape in (*shapes, model))
    span = [params[0] / 2, params[-1] * 2]
    states = plan.workload.states[plan.settings.state]
    clipped, unclipped = (
        bytes_per_param(store_kinds(states, waits=waits)) for waits in (True, False)
    )
    names = ((clipped, "-", "clipped by the global norm"), (unclipped, ":", "unclipped"))
    for per_param, style, name in names:
        axes.plot(
            [each * per_param / _GIB for each in span],
            span,
            style,
            color="#888888",
            label=f"{per_param:g} bytes a parameter: {name}",
        )
    for shape in shapes:
        _mark(axes, shape, round(shape.params * clipped))
    needed = needed_bytes(plan)
    _mark(axes, model.renamed(f"{model.name}: {gib(needed)}"), needed, plan.fits)
    _draw_host_memory(axes, plan.profile.ram_bytes)
    axes.set(xscale="log", yscale="log", xlabel="host memory, GiB", ylabel="parameters")
    memory = [span[0] * clipped / _GIB, 2 * span[1] * clipped / _GIB]
    axes.set(xlim=memory, ylim=span, title="Largest model against host memory")
    ticks = [each for each in _PARAM_TICKS if span[0] <= each <= span[1]]
    axes.minorticks_off()
    axes.set_yticks(ticks, [_params(each) for each in ticks])
    axes.set_xticks(*_round_ticks(memory[0], memory[1], (1, 3)))
    axes.grid(alpha=0.3)
    # Below the axes: inside, names of models reach into every corner.
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _draw_host_memory(axes: Any, ram_bytes: int) -> None:
    """Draw the line of what the machine has, with its name along its upper end."""
    axes.axvline(ram_bytes / _GIB, color=_RED, linestyle="--")
    axes.annotate(
        f"host memory here: {gib(ram_bytes)}",
        (ram_bytes / _GIB, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 0),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="top",
        color=_RED,
    )


def needed_bytes(plan: Plan) -> int:
    """Return the host memory that the run needs free, its reserve included."""
    return plan.ledger.total("host") + reserves(plan.profile, plan.ledger)["host"]


def marked_beside(model: ModelShape) -> list[ModelShape]:
    """Return the known models to show, without those whose names would overlap this one's."""
    shapes = [shape_from_config(find_known_model(name).config, name) for name in MARKED]
    return [s for s in shapes if not 1 / _APART < s.params / model.params < _APART]


def _mark(axes: Any, shape: ModelShape, num_bytes: int, fits: bool | None = None) -> None:
    """Draw a model; `fits` is known of the estimate's own."""
    place, chosen = (num_bytes / _GIB, shape.params), fits is not None
    colour = {None: "#0072b2", True: _CURVE, False: _RED}[fits]
    axes.plot(*place, "o", color=colour, markersize=9 if chosen else 6, zorder=3)
    axes.annotate(
        _plain(shape.name.rpartition("/")[2]).removesuffix("-Instruct"),
        place,
        xytext=(9, -9),
        textcoords="offset points",
        weight="bold" if chosen else "normal",
        bbox=_LABEL,
    )


_GIB = 1 << 30
_PARAM_TICKS = [mantissa * 10**power for power in range(8, 13) for mantissa in (1, 3)]


def _round_ticks(
    low: float, high: float, mantissas: tuple[int, ...] = (1, 2, 5)
) -> tuple[list[float], list[str]]:
    """Return round numbers and their tenfolds between two numbers, and how they are written."""
    every = [mantissa * 10.0**power for power in range(-2, 8) for mantissa in mantissas]
    ticks = [tick for tick in every if low <= tick <= high]
    return ticks, [f"{tick:,.10g}" for tick in ticks]


def _tokens(count: int) -> str:
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}k"


def _params(count: int) -> str:
    return f"{count / 1e12:g}T" if count >= 10**12 else f"{count / 1e9:g}B"


def _plain(text: str, longest: int = 60) -> str:
    """Return a name as matplotlib draws it: in its font, and no formula."""
    return text.encode("ascii", "backslashreplace").decode()[:longest].replace("$", r"\$")
