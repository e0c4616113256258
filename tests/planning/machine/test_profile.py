"""A profile is plain numbers that go to JSON and back."""

from __future__ import annotations

import subprocess
import sys
from pkgutil import walk_packages

import pytest

from megatrain import planning
from megatrain.errors import ConfigError
from megatrain.planning.machine.profile import FlopRate, MachineProfile, interpolate
from testkit.machines import DESKTOP

POINTS = (FlopRate(256, 128, 1.0), FlopRate(256, 512, 3.0), FlopRate(1024, 128, 5.0))


def test_json_and_back() -> None:
    assert MachineProfile.from_json(DESKTOP.to_json()) == DESKTOP
    assert MachineProfile.from_json(DESKTOP.changed(cores=3).to_json()) != DESKTOP


@pytest.mark.parametrize(
    ("width", "tokens", "rate"),
    [(256, 128, 1.0), (256, 256, 2.0), (256, 4096, 3.0), (1, 1, 1.0), (512, 128, 3.0)],
)
def test_between_points_rates_are_interpolated_and_flat_beyond(
    width: int, tokens: int, rate: float
) -> None:
    assert interpolate(POINTS, width, tokens) == pytest.approx(rate)


def test_backward_is_like_forward_unless_it_was_measured() -> None:
    assert DESKTOP.backward_rate(1, 1) == DESKTOP.forward_rate(1, 1)
    other = DESKTOP.changed(backward_flops=(FlopRate(1, 1, 7.0),))
    assert other.backward_rate(1, 1) == 7.0


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"desktop: copy_in_bytes_per_s is .*, must be positive"):
        DESKTOP.changed(copy_in_bytes_per_s=value)
    with pytest.raises(ConfigError, match="must be positive"):
        DESKTOP.changed(forward_flops=(FlopRate(1, 1, value),))
    with pytest.raises(ConfigError, match="forward_flops is empty"):
        DESKTOP.changed(forward_flops=())


def test_what_is_no_profile_is_refused() -> None:
    with pytest.raises(ConfigError, match="profile: invalid JSON"):
        MachineProfile.from_json("{")
    with pytest.raises(ConfigError, match="unknown keys color"):
        MachineProfile.from_facts({"name": "x", "color": "red"})
    with pytest.raises(ConfigError, match=r"missing .* argument"):
        MachineProfile.from_facts({"name": "x"})


def test_planning_needs_no_torch() -> None:
    found = walk_packages(planning.__path__, "megatrain.planning.")
    modules = [module.name for module in found]
    program = "import sys\n" + "".join(f"import {name}\n" for name in modules)
    program += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert len(modules) > 15
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
