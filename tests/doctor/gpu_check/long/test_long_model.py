"""The model of a long check: the blocks of 8B where they fit, and the same kind elsewhere."""

from __future__ import annotations

import pytest

from megatrain.doctor.gpu_check.long.long_model import STEP_S, forms, long_model
from megatrain.doctor.gpu_check.long.results import CannotRun
from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.machine.profile import FlopRate
from megatrain.planning.simulate import simulate
from testkit.machines import GIB
from tests.doctor.gpu_check.long.givens import SLOW

CARD = find_machine("4090")[0].profile().changed(ram_bytes=58 * GIB)


def test_a_card_beside_64_gb_gets_the_blocks_of_8b() -> None:
    model = long_model(CARD, 1.0)
    facts = model.facts()
    assert (facts["hidden"], facts["vocabulary"], facts["layers"]) == (4096, 151936, 8)
    work = model.workload(model.step_tokens, packed=True)
    assert 0.5 < simulate(CARD, work, model.settings()).step_s < 2 * STEP_S


def test_less_memory_and_less_speed_get_less() -> None:
    less = long_model(CARD.changed(ram_bytes=20 * GIB), 1.0)
    assert less.form.hidden == 2048
    assert long_model(SLOW, 0.05).form.hidden <= 256
    slower = CARD.changed(forward_flops=(FlopRate(4096, 4096, 6e12),))
    assert long_model(slower, 1.0).form.hidden < 4096
    with pytest.raises(CannotRun, match="no model is small enough"):
        long_model(CARD.changed(ram_bytes=1 << 20), 1.0)


def test_every_form_shares_keys_and_divides_its_step() -> None:
    for model in forms():
        form = model.form
        assert form.heads == 4 * form.kv_heads
        assert form.hidden % form.heads == 0
        for times in (0.5, 1, 2, 4):
            tokens = int(times * model.step_tokens)
            assert model.with_step(tokens, packed=True).step_tokens == tokens


def test_a_packed_step_is_one_flat_row_of_documents() -> None:
    *_, model = forms()
    batch = model.with_step(model.step_tokens, packed=True).batch()
    plain = model.with_step(model.step_tokens, packed=False).batch()
    assert sum(micro.num_tokens for micro in batch) == model.step_tokens
    documents = batch[0].packed_documents()
    assert documents is not None
    assert documents.lengths == (model.form.length,) * len(plain[0].input_ids)
    assert plain[0].packed_documents() is None
