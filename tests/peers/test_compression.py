"""What a difference is on its way to other peers, and what is left of it."""

from __future__ import annotations

import numpy as np
import pytest

from megatrain.errors import NonFiniteStep
from megatrain.peers.compression import (
    CHUNK,
    Compression,
    Dense,
    Floats,
    Plain,
    Refusal,
    Sparse,
    compression_of,
)

SIZES = [1, CHUNK - 1, CHUNK, 3 * CHUNK + 17]
FORMS: list[Compression] = [
    Dense(),
    *(Sparse(density=1 / 64, bits=bits) for bits in range(2, 9)),
    *(Sparse(density=density, bits=4) for density in (0.3, 1 / 4)),
]


def _numbers(size: int, seed: int) -> Floats:
    """Numbers of all sizes that weights have, equal ones and zeros among them."""
    draw = np.random.default_rng(seed)
    found = draw.standard_normal(size) * np.exp(draw.uniform(-30, 3, size))
    found[draw.random(size) < 0.002] *= 1000
    found[draw.random(size) < 0.1] = 0.0
    found[draw.random(size) < 0.1] = 1e-5
    return found.astype(np.float32)


def _sent(form: Compression, data: bytes, size: int) -> np.ndarray:
    total = np.zeros(size)
    form.decode(memoryview(data), size).add_to(total)
    return total


def _is_exact(form: Compression, size: int, seed: int) -> bool:
    anchor, weights, error = (_numbers(size, 3 * seed + i) for i in range(3))
    wanted = (anchor - weights) + error
    found = form.encode(anchor, weights, error)
    assert found.error is not None
    assert len(found.data) <= form.most_bytes(size)
    return bool((wanted == _sent(form, found.data, size) + found.error).all())


@pytest.mark.few(3)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_was_not_sent_is_left_to_the_bit(form: Compression) -> None:
    assert all(_is_exact(form, size, seed) for size in SIZES for seed in range(4))


@pytest.mark.parametrize("density", [1 / 64, 0.015, 0.1, 0.3, 0.5, 0.7, 1.0])
def test_no_honest_difference_is_larger_than_allowed(density: float) -> None:
    form = Sparse(density=density, bits=4)
    for size in (25 * CHUNK, 24 * CHUNK + 1696):
        numbers = np.random.default_rng(0).standard_normal(size).astype(np.float32)
        for scale in (numbers, np.sign(numbers), numbers**9):  # all sent, or few of a chunk
            data = form.encode(scale, np.zeros_like(scale), None).data
            assert len(data) <= form.most_bytes(size)


def test_a_scale_that_is_no_power_of_two_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = np.ldexp
    tenth = np.float32(1.1)
    monkeypatch.setattr(
        np, "ldexp", lambda x, e: real(x, e) * np.where(np.less(e, 0), tenth, 1 / tenth)
    )
    assert not _is_exact(Sparse(density=1 / 64, bits=2), 4 * CHUNK, 0)


def test_weights_go_as_they_are() -> None:
    weights = _numbers(1000, 0)
    found = Plain().encode(_numbers(1000, 1), weights, None)
    assert found.error is None
    assert Plain().decode(memoryview(found.data), 1000).values.tobytes() == weights.tobytes()


def test_sparse_differences_are_the_largest_numbers_in_few_bytes() -> None:
    form, size = Sparse(density=1 / 64, bits=4), 256 * CHUNK
    anchor = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    found = form.encode(anchor, np.zeros(size, np.float32), None)
    sent = form.decode(memoryview(found.data), size)
    assert sent.places is not None
    least = np.sort(np.abs(anchor.reshape(-1, CHUNK)), axis=1)[:, -form.kept]
    assert (np.abs(anchor[sent.places]) >= least[sent.places // CHUNK]).all()
    assert 8 * len(found.data) / size < 0.195  # 12 bits for each of 1 in 64


def test_errors_are_sent_in_the_end() -> None:
    """A difference that is made once has arrived after some rounds, but for its smallest bits."""
    form, size = compression_of("sparse", density=1 / 64, bits=4), 2 * CHUNK
    anchor = np.random.default_rng(5).standard_normal(size).astype(np.float32)
    zero = np.zeros(size, np.float32)
    data = form.encode(anchor, zero, None)
    total = _sent(form, data.data, size)
    for _ in range(500):
        data = form.encode(zero, zero, data.error)
        total += _sent(form, data.data, size)
    assert np.abs(total - anchor).max() < 1e-6 * np.abs(anchor).max()


@pytest.mark.few(3)
@pytest.mark.parametrize("form", [Plain(), *FORMS], ids=lambda form: form.name)
def test_bytes_that_no_peer_wrote_are_refused_or_finite(form: Compression) -> None:
    size = CHUNK + 5
    data = form.encode(_numbers(size, 1), _numbers(size, 2), np.zeros(size, np.float32)).data
    draw = np.random.default_rng(0)
    for cut in (0, 1, 7, len(data) // 2, len(data) - 1):
        with pytest.raises(Refusal):
            form.decode(memoryview(data[:cut]), size)
    with pytest.raises(Refusal):
        form.decode(memoryview(data + b"0"), size)
    for _ in range(50):
        spoilt = bytearray(data)
        for place in draw.integers(0, len(data), 3):
            spoilt[place] = draw.integers(0, 256)
        try:
            found = form.decode(memoryview(bytes(spoilt)), size)
        except Refusal:
            continue
        assert np.isfinite(found.values).all()


def test_numbers_that_are_not_finite_are_not_sent() -> None:
    with pytest.raises(NonFiniteStep, match="numbers that are not finite"):
        Dense().encode(np.full(3, np.inf, np.float32), np.zeros(3, np.float32), None)
