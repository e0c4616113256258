"""The lower bounds of pyproject.toml, and the script that tests them (.ci/versions.py)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def versions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("versions", ROOT / ".ci" / "versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_requirement_has_a_lower_bound_and_nothing_else(versions: ModuleType) -> None:
    bounds = versions.lower_bounds(versions.PROJECT["dependencies"])
    assert len(bounds) == len(versions.PROJECT["dependencies"]) > 10
    for other in ("numpy", "numpy==2.0", "numpy>=2,<3"):
        with pytest.raises(SystemExit, match=f"{other!r} is not of the form NAME>=VERSION"):
            versions.lower_bounds([other])


def test_ci_has_no_version_below_a_lower_bound(versions: ModuleType) -> None:
    """A bound was raised, and the lock file with it."""
    text = (ROOT / "requirements-dev.lock").read_text().lower()
    lock = dict(re.findall(r"^([\w-]+)==([\w.]+)", text, re.M))
    for name, bound in versions.lower_bounds(versions.PROJECT["dependencies"]).items():
        pinned, least = ([int(n) for n in text.split(".")] for text in (lock[name], bound))
        assert pinned >= least, name
