"""Losses of several sides on the same rows, and their distance to plain fp32."""

from __future__ import annotations

REFERENCE = "plain_fp32"
Curves = dict[str, list[float]]
"""The losses of each side: those of the steps, then those of the held-out rows."""


def gaps(curves: Curves, name: str, num_steps: int) -> list[float]:
    """Return by how much the loss of each step is above that of plain_fp32."""
    pairs = zip(curves[name][:num_steps], curves[REFERENCE][:num_steps], strict=True)
    return [loss - reference for loss, reference in pairs]
