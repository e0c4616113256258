"""The anchor, and the outer optimizer that moves it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatrain import files
from megatrain.errors import DiskFull
from megatrain.memory.store import Store
from megatrain.peers.anchor import Anchor, Masters, OuterStep, pieces_of
from megatrain.peers.compression import Plain, Sent
from testkit.toy_peers import change, toy_layout


def _sent(*weights: np.ndarray) -> list[Sent]:
    return [Sent(values=one, are_weights=True) for one in weights]


def test_the_mean_of_one_peer_is_its_weights_in_every_bit() -> None:
    draw = np.random.default_rng(0)
    anchor, weights = draw.standard_normal((2, 4000)).astype(np.float32)
    weights[:100] *= np.float32(1e-12)  # lost in a difference from the anchor
    weights[100:110] = -0.0
    moved, _ = OuterStep(rate=1.0, momentum=0.0)(anchor, None, _sent(weights))
    assert moved.tobytes() == weights.tobytes()
    assert (anchor - (anchor - weights)).tobytes() != weights.tobytes()


def test_outer_steps_are_those_of_torch() -> None:
    draw = np.random.default_rng(1)
    anchor = draw.standard_normal(1000).astype(np.float32)
    buffer: np.ndarray | None = np.zeros_like(anchor)
    param = torch.from_numpy(anchor.astype(np.float64)).requires_grad_()
    outer = torch.optim.SGD([param], lr=0.7, momentum=0.9, nesterov=True)
    step = OuterStep(rate=0.7, momentum=0.9)
    for _ in range(10):
        weights = [(anchor + 0.01 * draw.standard_normal(1000)).astype(np.float32) for _ in "abc"]
        mean = np.mean([one.astype(np.float64) for one in weights], axis=0)
        param.grad = torch.from_numpy(anchor - mean)
        anchor, buffer = step(anchor, buffer, _sent(*weights))
        outer.step()
        assert np.abs(anchor - param.detach().numpy()).max() < 1e-6


def test_parts_have_every_piece_once_and_about_the_same_size() -> None:
    layout = toy_layout(7)
    whole = pieces_of(layout)
    parts = pieces_of(layout, 3)
    assert [piece.span for piece in parts] == [piece.span for piece in whole]
    sizes = [sum(p.num_elements for p in parts if p.part == part) for part in range(3)]
    assert max(sizes) <= 2 * min(sizes)


def test_a_disk_that_fails_leaves_an_anchor_that_can_be_moved_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = toy_layout()
    anchors = []
    for name in ("whole", "failing"):
        masters = Masters(Store(layout))
        anchor = Anchor(
            tmp_path / name, pieces_of(layout), Plain(), OuterStep(rate=0.7, momentum=0.9)
        )
        anchor.begin(masters)
        anchors.append(anchor)
    real, calls = files.write_file, [0]

    def full(path: Path, data: bytes, **words: bool) -> None:
        calls[0] += "failing" in str(path)
        if calls[0] in (2, 5, 6) and "failing" in str(path):
            raise DiskFull("made to fail")
        real(path, data, **words)

    monkeypatch.setattr(files, "write_file", full)
    for anchor in anchors:
        while any(anchor.head(piece)[0] < 1 for piece in anchor.pieces):
            for piece in anchor.pieces:
                moved = _sent(change("a", 1, piece.number, piece.num_elements))
                try:
                    anchor.move(piece, 1, moved)
                except DiskFull:
                    break
    assert calls[0] > len(anchors[0].pieces)
    assert anchors[0].digest == anchors[1].digest
