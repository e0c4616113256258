"""How far one machine reaches, as `megatrain estimate` predicts it, as tables.

python -m benchmarks.reach TABLE    needs, wear, rows, machines, adapters, rollouts or paper

needs      host memory by how the optimizer's states are kept
wear       states on a drive: time and writes
rows       the longest row that fits, and what a step of it takes: docs/long_context.md
machines   tok/s by model and card
adapters   tok/s of adapters over large bases: docs/adapters.md
rollouts   a step on rewards, and what its sampling waits for: docs/rewards.md
paper      the claims of the paper that the idea is from, beside ours
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from megatrain.config.quantities import read_memory
from megatrain.memory.ledger import gib
from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.catalog.known_models import find_known_model
from megatrain.planning.catalog.reference_machines import GIB
from megatrain.planning.estimate import estimate
from megatrain.planning.longest import longest_row
from megatrain.planning.machine.reserve import left_by_system
from megatrain.planning.memory.predicted import predicted_ledger
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.prediction import predicted_speed, predicted_time
from megatrain.planning.search import Search, reserves, shortfalls
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

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
    yield f"{'model':14}{'machine':16} {'states':14}{'a step':>14}{'10M tokens':>12}"
    for model, gpu, ram in WORN:
        for state in ("fp32", "8bit"):
            settings = [STEP, f"optim.state={state}"]
            plan = estimate(model, settings, gpu=gpu, ram=ram, disk="2TB").plan
            assert plan.wear is not None, str(plan)
            written = plan.wear.step_bytes * 1e7 / plan.workload.step_tokens
            yield (
                f"{model:14}{f'{gpu}, {ram}':16} {_kept(plan.settings):14}"
                f"{predicted_time(plan.step_s):>14}{written / 1e12:>9,.0f} TB"
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
        f"{'model':14}{'card':9}{'RAM':>6}{'longest row':>13}{'tile':>7}"
        f"{'device':>10}{'a step':>15}"
    )
    for name in ("Llama-3.1-8B", "Qwen2.5-7B"):
        model = find_known_model(name).shape.renamed(name)
        for gpu, ram in LONG:
            machine, _ = find_machine(gpu)
            length = longest_row(machine.profile(ram_bytes=left_by_system(read_memory(ram))), model)
            plan = estimate(name, gpu=gpu, ram=ram, seq=length, batch_tokens=length).plan
            yield (
                f"{name:14}{gpu:9}{ram:>6}{length:>13,}{plan.settings.tile_tokens or '-':>7}"
                f"{gib(plan.ledger.total('device')):>10}{predicted_time(plan.step_s):>15}"
            )


HOME = 14
"""Bytes per param in host memory."""
ONE_GPU = ("3090", "4090", "5090", "H100 SXM", "GH200")
MODELS = (
    "Qwen2.5-7B", "Qwen3-14B", "Qwen3-32B", "Llama-3.1-70B", "Mistral-Large-Instruct-2407",
    "gpt-oss-120b", "Qwen3-235B-A22B", "Llama-3.1-405B", "Kimi-K2-Instruct",
)  # fmt: skip


def machines() -> Iterator[str]:
    """Yield the tok/s of one GPU with steps of 128k tokens, if its host has the memory."""
    yield f"{'model':16}{'GiB host':>8}" + "".join(f"{gpu:>11}" for gpu in ONE_GPU)
    for name in MODELS:
        shape = find_known_model(name).shape.renamed(name)
        planned = [_speed(shape, gpu) for gpu in ONE_GPU]
        speeds = ["-" if speed is None else _narrow(speed) for speed in planned]
        yield f"{_short(name)[:15]:16}{HOME * shape.params / GIB:>8,.0f}" + "".join(
            f"{speed:>11}" for speed in speeds
        )


def _narrow(per_s: float) -> str:
    """Return a predicted speed for a column: 1.7k-3.0k."""
    return predicted_speed(per_s).removesuffix(" tok/s").replace(" to ", "-")


def _speed(shape: ModelShape, gpu: str) -> float | None:
    """Return the planned tokens/s; None where device memory is too small for a block."""
    profile = find_machine(gpu)[0].profile(ram_bytes=64 << 40)
    workload = Workload(model=shape, step_tokens=128 << 10, packed=True)
    for micro_batch_tokens in (16384, 4096, 2048):
        settings = StepSettings(micro_batch_tokens=micro_batch_tokens, slots=2, tape="host")
        pins = dict.fromkeys(("micro_batch_tokens", "slots", "tape"), "as published")
        search = Search(profile, workload, settings, pins)
        found = search.best()
        if found is not None:
            return workload.step_tokens / found.step_s
    return None


def _short(name: str) -> str:
    return name.rpartition("/")[2].removesuffix("-Instruct").removesuffix("-Instruct-2407")


OVER_BASES = (
    ("Qwen3-30B-A3B", "8GB", "32GB", "nf4", "32k"),
    ("Llama-3.1-70B", "3060", "64GB", "nf4", "8k"),
    ("DeepSeek-V3", "4090", "768GB", "as_published", "32k"),
    ("Kimi-K2", "4090", "768GB", "nf4", "32k"),
)
"""Model, card, host memory, the form of the base and the tokens of a step."""


def adapters() -> Iterator[str]:
    """Yield the tok/s of adapters of rank 16 over bases that are far larger than the card."""
    yield f"{'adapters of':15}{'card':6}{'RAM':>6}  {'model.base':14}{'step':>4}{'tok/s':>13}"
    for model, gpu, ram, base, step in OVER_BASES:
        settings = [f"model.base={base}", f"train.batch_tokens={step}"]
        plan = estimate(model, settings, gpu=gpu, ram=ram, lora=16).plan
        assert plan.fits, str(plan)
        speed = plan.speed.removesuffix(" tok/s")
        yield f"{model:15}{gpu:6}{ram:>6}  {base:14}{step:>4}{speed:>13}"


SAMPLED: tuple[tuple[str, str, list[str]], ...] = (
    ("Qwen3-8B, all weights", "128GB", []),
    ("Qwen3-32B, all weights", "512GB", []),
    ("Qwen3-32B, adapters, nf4", "128GB", ["lora.rank=16", "model.base=nf4"]),
)
"""What is trained, host memory, and settings."""


def rollouts() -> Iterator[str]:
    """Yield a step on 64 answers of 1,024 tokens on an RTX 4090."""
    yield f"{'trained':25}{'RAM':>6}{'layers that stay':>18}{'sampling':>15}{'training':>15}"
    for name, ram, settings in SAMPLED:
        model = name.partition(",")[0]
        asked = estimate(model, settings, gpu="4090", ram=ram, rollouts="64x1024")
        found = asked.rollouts
        assert found is not None, str(asked)
        stay = f"{found.resident_layers} of {found.num_layers}"
        yield (
            f"{name:25}{ram:>6}{stay:>18}{predicted_time(found.draw_s):>15}"
            f"{predicted_time(found.train_s):>15}"
        )
        yield f"  {found.at_once} answers at a time; limited by {found.limit}"


def paper() -> Iterator[str]:
    """Yield the paper's claims and what is predicted for ours, with settings and price."""
    long = ["data.max_length=512k", "train.batch_tokens=512k", "data.packing=false"]
    h200, gh200 = {"gpu": "H200", "ram": "1.5TB"}, {"gpu": "GH200", "ram": "480GB"}
    yield from _claim(
        "120B on one H200 with 1.5 TB",
        ("gpt-oss-120b", [STEP, UNCLIPPED], h200),
        ("gpt-oss-120b", [STEP, "optim.state=bf16"], h200),
        ("Mistral-Large", [STEP, "optim.state=bf16"], h200),
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
            clip = "no clipping" if plan.workload.max_grad_norm is None else "exact clipping"
            text = f"{_kept(plan.settings)} states, {clip}, {plan.speed}"
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
    "machines": machines,
    "adapters": adapters,
    "rollouts": rollouts,
    "paper": paper,
}


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) == 2 else ""
    if wanted not in TABLES:
        sys.exit(f"give one of: {', '.join(TABLES)}")
    print("\n".join(TABLES[wanted]()))
