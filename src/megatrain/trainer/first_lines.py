"""What a run prints before its first step."""

from __future__ import annotations

from typing import Any

from megatrain.config import Config
from megatrain.disk.hf import HostModel
from megatrain.trainer.resolve import Resolved


def opening_line(
    config: Config, resolved: Resolved, home: HostModel, num_steps: int, card: dict[str, Any]
) -> str:
    """Return what is trained, where, for how long, on how much."""
    num_params = sum(param.num_elements for param in home.decoder.params)
    tokens, rows = config.train.batch_tokens, config.train.batch_rows
    size = f"{rows:,} rows" if tokens is None else f"{tokens:,} tokens"
    return (
        f"{num_params:,} params of {config.model.name_or_path} on {resolved.device}, "
        f"{num_steps} steps of {size}, {card['rows']:,} rows; run folder {config.run_dir}"
    )
