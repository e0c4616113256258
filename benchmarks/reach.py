"""How far one machine reaches, as `megatrain estimate` predicts it, as tables.

python -m benchmarks.reach TABLE    needs, wear, rows or paper

needs      host memory by how the optimizer's states are kept
wear       states on a drive: time and writes
rows       the longest row that fits, and what a step of it takes: docs/long_context.md
paper      the claims of the paper that the idea is from, beside ours
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.tables import print_table
from megatrain.config.quantities import read_memory
from megatrain.memory.ledger import gib
from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.catalog.known_models import find_known_model
from megatrain.planning.catalog.reference_machines import GIB
from megatrain.planning.estimate import estimate
from megatrain.planning.longest import longest_row
from megatrain.planning.machine.reserve import left_by_system
from megatrain.planning.memory.predicted import predicted_ledger
from megatrain.planning.search import reserves, shortfalls
from megatrain.step.settings import StepSettings
from megatrain.text import duration

UNCLIPPED = "train.max_grad_norm=null"
STEP = "train.batch_tokens=32k"
NEEDED = [STEP, "memory.tape=host", "memory.kept_layers=0"]
"""No card has room for the tape, or for more than that."""


NEEDS = ("Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Llama-3.1-70B", "Mistral-Large")
HOMES = {
    "fp32": StepSettings(state="fp32"),
    "bf16": StepSettings(state="bf16"),
    "8bit": StepSettings(state="8bit"),
    "8bit, no clip": StepSettings(state="8bit", update="in_backward"),
    "fp32 on disk": StepSettings(tier="states"),
}


def needs() -> Iterator[str]:
    """Yield the GiB of host memory that must be free for steps of 32k tokens, tape included."""
    yield f"{'model':14}" + "".join(f"{name:>{_wide(name)}}" for name in HOMES)
    for model in NEEDS:
        plan = estimate(model, NEEDED, gpu="H200", ram="64TB").plan
        row = f"{model:14}"
        for name, home in HOMES.items():
            kept = {key: getattr(home, key) for key in ("state", "tier", "update")}
            ledger = predicted_ledger(plan.profile, plan.workload, plan.settings.changed(**kept))
            needed = ledger.total("host") + reserves(plan.profile, ledger)["host"]
            row += f"{needed / GIB:>{_wide(name)},.0f}"
        yield row


def _wide(name: str) -> int:
    return max(7, len(name) + 2)


WORN = (
    ("Qwen3-8B", "3090", "64GB"),
    ("Qwen3-14B", "4090", "80GB"),
    ("Qwen3-32B", "4090", "192GB"),
    ("Llama-3.1-70B", "H100 SXM", "384GB"),
)
"""Model, card and host memory, beside a drive of 2 TB."""


def wear() -> Iterator[str]:
    """Yield time and writes of states on a drive, with steps of 32k tokens and exact clipping."""
    yield (f"{'model':14}{'machine':16} {'states':20}{'step':>6}{'a day':>8}{'10M tokens':>12}")
    for model, gpu, ram in WORN:
        for state in ("fp32", "8bit"):
            settings = [STEP, f"optim.state={state}"]
            plan = estimate(model, settings, gpu=gpu, ram=ram, disk="2TB").plan
            assert plan.wear is not None, str(plan)
            written = plan.wear.step_bytes * 1e7 / plan.workload.step_tokens
            daily = plan.wear.step_bytes / plan.step_s * 86400
            yield (
                f"{model:14}{f'{gpu}, {ram}':16} {_kept(plan.settings):20}"
                f"{plan.step_s:>4,.0f} s{daily / 1e12:>5,.0f} TB{written / 1e12:>9,.0f} TB"
            )


LONG = (
    ("8GB", "128GB"),
    ("4090", "256GB"),
    ("5090", "256GB"),
    ("H100 SXM", "1TB"),
    ("H200", "1.5TB"),
    ("GH200", "480GB"),
)
"""Card and host memory."""


def rows() -> Iterator[str]:
    """Yield the longest row of a model on a machine, and a step that is this one row."""
    yield (
        f"{'model':14}{'card':9}{'RAM':>6}{'longest row':>13}{'tile':>7}{'device':>10}"
        f"{'a step':>13}{'tok/s':>7}"
    )
    for name in ("Llama-3.1-8B", "Qwen2.5-7B"):
        model = find_known_model(name).shape.renamed(name)
        for gpu, ram in LONG:
            machine, _ = find_machine(gpu)
            length = longest_row(machine.profile(ram_bytes=left_by_system(read_memory(ram))), model)
            plan = estimate(name, gpu=gpu, ram=ram, seq=length, batch_tokens=length).plan
            yield (
                f"{name:14}{gpu:9}{ram:>6}{length:>13,}{plan.settings.tile_tokens or '-':>7}"
                f"{gib(plan.ledger.total('device')):>10}{duration(plan.step_s):>13}"
                f"{length / plan.step_s:>7,.0f}"
            )


def paper() -> Iterator[str]:
    """Yield the paper's claims and what is predicted for ours, with settings and price."""
    long = ["data.max_length=512k", "train.batch_tokens=512k", "data.packing=false"]
    h200, gh200 = {"gpu": "H200", "ram": "1.5TB"}, {"gpu": "GH200", "ram": "480GB"}
    yield from _claim(
        "120B on one H200 with 1.5 TB",
        ("gpt-oss-120b", [STEP, "optim.state=fp32", UNCLIPPED], h200),
        ("gpt-oss-120b", [STEP], h200),
        ("Mistral-Large", [STEP], h200),
    )
    yield from _claim(
        "14B at 1.84 times DeepSpeed ZeRO-3; 2,979 tokens/s on a GH200",
        ("Qwen2.5-14B", ["train.batch_tokens=128k", "data.max_length=1k"], gh200),
    )
    yield from _claim("7B with 512k tokens on one GH200", ("Qwen2.5-7B", long, gh200))


def _claim(claim: str, *ours: tuple[str, list[str], dict[str, str]]) -> Iterator[str]:
    yield f"theirs    {claim}"
    for model, settings, machine in ours:
        found = estimate(model, settings, **machine)  # type: ignore[arg-type]
        plan = found.plan
        if found.fits:
            clip = "exact clipping" if plan.settings.update == "late" else "no clipping"
            text = f"{_kept(plan.settings)} states, {clip}, {found.tokens_per_s:,.0f} tokens/s"
        else:
            short = shortfalls(plan.profile, plan.ledger)
            text = ", ".join(f"{gib(num)} of {place} memory short" for place, num in short.items())
            text = f"not yet: {text}"
        yield f"ours      {model}: {text}"
        yield f"          {' '.join(settings)}"


def _kept(settings: StepSettings) -> str:
    """Return how the states are kept, and what is on disk."""
    return settings.state + ("" if settings.tier == "none" else " on disk")


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "needs": needs,
    "wear": wear,
    "rows": rows,
    "paper": paper,
}


if __name__ == "__main__":
    print_table(TABLES)
