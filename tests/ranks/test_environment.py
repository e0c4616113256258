"""What a launcher said is understood, or refused by name."""

from __future__ import annotations

import pytest

from megatrain.errors import ConfigError
from megatrain.ranks.environment import local_rank, read_environment
from megatrain.ranks.ownership import Owner

WHOLE = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "host-0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environment",
    [{}, {"MASTER_ADDR": "host-0", "MASTER_PORT": "29500"}, WHOLE | {"WORLD_SIZE": "1"}],
)
def test_without_others_a_process_is_alone(environment: dict[str, str]) -> None:
    assert read_environment(environment) is None


def test_the_environment_says_who_we_are_and_where_ranks_meet() -> None:
    seat = read_environment(WHOLE)
    assert seat is not None
    assert (seat.owner, seat.address, seat.port, seat.agent) == (
        Owner(2, 4),
        "host-0",
        29500,
        False,
    )
    agent = read_environment(WHOLE | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent is not None
    assert agent.agent


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"RANK": ""}, "WORLD_SIZE and MASTER_ADDR and MASTER_PORT set, RANK not"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE not"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT not"),
        ({"RANK": "4"}, "RANK is 4, WORLD_SIZE 4"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_environment(WHOLE | changes)


def test_the_local_rank_chooses_the_gpu() -> None:
    assert local_rank({}) == 0
    assert local_rank({"LOCAL_RANK": "3"}) == 3
    with pytest.raises(ConfigError, match="LOCAL_RANK is 'x'"):
        local_rank({"LOCAL_RANK": "x"})
