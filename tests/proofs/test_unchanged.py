"""A short form of `python -m proofs.unchanged`, and that it would notice what it is there for."""

from __future__ import annotations

import pytest

from proofs.unchanged import PLANS, plan_hashes, run_hashes
from testkit import plain

pytestmark = pytest.mark.merge

FAMILIES = ("llama",)


def test_runs_have_the_same_hashes_again_and_another_batch_has_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = run_hashes(FAMILIES)
    assert len(first) == 2 * len(FAMILIES)
    assert not [name for name, found in first.items() if found.startswith("refused")]
    assert run_hashes(FAMILIES) == first
    batches = plain.make_batch
    monkeypatch.setattr(plain, "make_batch", lambda shapes, seed: batches(shapes, seed=seed + 1))
    assert not set(run_hashes(FAMILIES).values()) & set(first.values())


def test_a_plan_has_the_same_hash_again_and_a_refusal_one_of_its_own() -> None:
    fits, other = PLANS[0], PLANS[0].replace("64GB", "8GB")
    first = plan_hashes([fits, other])
    assert plan_hashes([fits, other]) == first
    assert first[fits].startswith("0 ")
    assert first[other].startswith("3 ")
