"""Ranks leave together, or say why they end."""

from __future__ import annotations

import pytest

from megatrain.errors import Interrupted
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import ALONE, Said
from megatrain.run.together.joined import joined, together


class Listed:
    """Ranks that note what they are asked to do."""

    owner = Owner(1, 2)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def agree(self, facts: Said) -> list[Said]:
        self.calls.append("agree")
        return [facts, facts]

    def fail(self, error: BaseException) -> None:
        self.calls.append(f"fail: {error}")

    def close(self) -> None:
        self.calls.append("close")

    def __getattr__(self, name: str) -> object:
        raise AssertionError(name)


def test_all_leave_from_a_run_that_has_ended() -> None:
    ranks = Listed()
    with together(ranks):  # type: ignore[arg-type]
        pass
    assert ranks.calls == ["agree", "close"]


def test_a_common_end_on_request_is_no_failure() -> None:
    ranks = Listed()
    with pytest.raises(Interrupted), together(ranks):  # type: ignore[arg-type]
        raise Interrupted("asked")
    assert ranks.calls == ["agree", "close"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_failure_is_told(kind: type[BaseException]) -> None:
    ranks = Listed()
    with pytest.raises(kind), together(ranks):  # type: ignore[arg-type]
        raise kind("my disk")
    assert ranks.calls == ["fail: my disk", "close"]


def test_a_process_alone_joins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    with joined("auto", 1.0) as ranks:
        assert ranks is ALONE
