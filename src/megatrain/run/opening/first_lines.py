"""What a run prints before its first step."""

from __future__ import annotations

from megatrain.config import Config
from megatrain.data.preview import card_lines
from megatrain.devices.device import Device
from megatrain.disk.hf.model import HostModel
from megatrain.memory.host import is_in_memory
from megatrain.planning.plan import Plan
from megatrain.run.opening.training_data import TrainingData
from megatrain.text import size

MOST_REASONS = 3
COUNTED_ROWS = 1_000_000
"""Steps by tokens of so many rows are counted in some 3 s."""


def opening_line(config: Config, device: Device, home: HostModel, num_steps: int) -> str:
    """Return the line with the model, the device and the length of the run."""
    num_params = sum(param.num_elements for param in home.decoder.params)
    tokens, rows = config.train.batch_tokens, config.train.batch_rows
    length = f"{rows:,} rows" if tokens is None else f"{tokens:,} tokens"
    return (
        f"{num_params:,} params of {config.model.name_or_path} on {device.name}, "
        f"{num_steps} steps of {length}; run folder {config.run_dir}"
    )


def data_lines(data: TrainingData, *, needs_count: bool) -> list[str]:
    """Return what the sources hold, how they are mixed, and how long an epoch is.

    `needs_count`: the run counts the steps of an epoch anyway, which takes minutes for a billion.
    """
    rows = data.rows
    lines = [line for source in rows.prepared for line in card_lines(source.card, MOST_REASONS)]
    if len(rows.shares) > 1 or rows.shares[0].weight != 1:
        mixed = ", ".join(
            f"{share.name} {share.num_rows:,} rows x {share.weight:g}" for share in rows.shares
        )
        lines.append(f"{mixed}: {rows.order.size:,} rows an epoch")
    length = f"{rows.order.size:,} rows"
    if needs_count or rows.order.size <= COUNTED_ROWS:
        length += f" in {data.steps_in_epoch:,} steps"
    held = f"; {data.num_judged:,} rows to evaluate on" if rows.held else ""
    return [*lines, f"an epoch: {length}{held}"]


def tier_lines(home: HostModel, plan: Plan) -> list[str]:
    """Return where the disk tier is and how much the run writes to it, if it has one."""
    tier, wear = home.store.tier, plan.wear
    if tier is None:
        return []
    kinds = ", ".join(map(str, tier.regions.kinds))
    line = (
        f"disk tier: {kinds} in {tier.folder}, {size(tier.regions.num_bytes)}, written once a step"
    )
    if wear is not None and wear.day_bytes is not None:
        line += f": {wear.day_bytes / 1e12:.3g} TB a day"
    lines = [f"{line}. Compare it with the disk's rated endurance (TBW)"]
    if is_in_memory(tier.folder):
        lines.append(
            f"memory.disk: {tier.folder} is in memory itself (tmpfs), so the tier frees none. Set "
            "memory.disk to a folder on a disk"
        )
    return lines
