"""How many rows may be lost: each limit names its key, the share, the reasons and a way out."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from megatrain.config.sections import DataSettings
from megatrain.data.chat.notes import THOUGHTLESS
from megatrain.data.tokens.encoding import NO_TARGET, TOO_LONG
from megatrain.data.tokens.limits import check_limits
from megatrain.data.tokens.prepare import prepare
from megatrain.errors import DataError

LIMITS = {"max_bad": 0.01, "max_dropped": 0.2, "max_lost_thoughts": 0.01}


def _card(**changes: Any) -> dict[str, Any]:
    card = {
        "source": "a.jsonl", "format": "detected: messages (role, content)", "rows": 100,
        "kept": 100, "documents": 100, "longest_read": 3104,
        "bad": {}, "bad_places": {}, "dropped": {}, "dropped_places": {}, "notes": {},
    }  # fmt: skip
    return card | changes


def _lost(what: str, reason: str, count: int) -> dict[str, Any]:
    return {what: {reason: count}, f"{what}_places": {reason: ["a.jsonl:3"]}}


def _refusal(card: dict[str, Any], **limits: float) -> str:
    settings = {**LIMITS, **limits}
    with pytest.raises(DataError) as error:
        check_limits(card, **settings)
    return str(error.value)


def test_long_rows_name_their_key_and_the_length_that_keeps_them() -> None:
    assert _refusal(_card(**_lost("dropped", TOO_LONG, 95))) == (
        "a.jsonl: 95 of 100 rows would be dropped (95.0 %, data.max_dropped allows 20 %):\n"
        "  95 x longer than max_length: a.jsonl:3, ...\n"
        "  Set data.max_length to 3104 to keep all of them, cut them with data.overlong: "
        "truncate, or raise data.max_dropped."
    )


def test_long_texts_can_be_split() -> None:
    card = _card(**_lost("dropped", TOO_LONG, 95), format="detected: text (text)")
    assert "cut them into pieces with data.overlong: split, or raise" in _refusal(card)


def test_rows_without_a_target_name_what_decides_it() -> None:
    text = _refusal(_card(**_lost("dropped", NO_TARGET, 21)))
    assert text.endswith(
        "  Check data.train_on and data.overlong: these rows have no trained token, or raise "
        "data.max_dropped."
    )


def test_bad_rows_name_their_key() -> None:
    assert _refusal(_card(**_lost("bad", "null", 2))) == (
        "a.jsonl: 2 of 100 rows cannot be used (2.0 %, data.max_bad allows 1 %):\n"
        "  2 x null: a.jsonl:3, ...\n"
        "  Fix or remove them, or raise data.max_bad."
    )


def test_all_rows_bad_gives_the_reasons() -> None:
    card = _card(**_lost("bad", "null", 100), kept=0, documents=0)
    assert _refusal(card, max_bad=1.0) == (
        "a.jsonl: no row is left of 100:\n  100 x null: a.jsonl:3, ..."
    )


@pytest.mark.parametrize(
    ("what", "count"), [("bad", 1), ("dropped", 20), ("bad", 0), ("dropped", 0)]
)
def test_what_is_allowed_passes(what: str, count: int) -> None:
    card = _card(**_lost(what, "why", count))
    check_limits(card, **LIMITS)
    if count:
        with pytest.raises(DataError):
            check_limits(_card(**_lost(what, "why", count + 1)), **LIMITS)


def test_rows_that_lose_their_thoughts_name_their_key_and_both_ways_out() -> None:
    card = _card(notes={THOUGHTLESS: 2})
    assert _refusal(card) == (
        "a.jsonl: 2 of 100 rows would be trained without their thoughts (2.0 %, "
        "data.max_lost_thoughts allows 1 %): the chat template leaves them out of the answer.\n"
        "  Set data.chat_template to a template that writes them. To train the answers alone, set "
        "data.max_lost_thoughts: 1."
    )
    check_limits(card, **LIMITS | {"max_lost_thoughts": 1.0})
    check_limits(_card(notes={THOUGHTLESS: 1}), **LIMITS)


@pytest.mark.parametrize("key", LIMITS)
def test_the_limits_of_the_config_are_those_of_preparing(key: str) -> None:
    default = inspect.signature(prepare).parameters[key].default
    assert DataSettings.model_fields[key].default == default
