"""Code and kernel are known by their bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.optim.native import LIBRARY, load_kernel
from megatrain.run.together.installed import PACKAGE, code_digest, installed_facts, kernel_name
from testkit.effort import require_effort


@pytest.fixture
def package(tmp_path: Path) -> Callable[[str], Path]:
    def made(name: str) -> Path:
        folder = tmp_path / name
        (folder / "part").mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "part" / "rate.py").write_text("RATE = 1\n")
        return folder

    return made


def test_equal_packages_have_one_digest_wherever_they_are(package: Callable[[str], Path]) -> None:
    first, second = package("first"), package("second")
    (second / "__pycache__").mkdir()
    (second / "__pycache__" / "rate.cpython-311.pyc").write_bytes(b"\0")
    assert code_digest(first) == code_digest(second)


@pytest.mark.parametrize("change", ["byte", "added", "removed", "renamed", "moved bytes"])
def test_any_change_of_the_code_is_another_digest(
    package: Callable[[str], Path], change: str
) -> None:
    first, second = package("first"), package("second")
    rate = second / "part" / "rate.py"
    match change:
        case "byte":
            rate.write_text("RATE = 2\n")
        case "added":
            (second / "part" / "more.py").write_text("")
        case "removed":
            rate.unlink()
        case "renamed":
            rate.rename(rate.with_name("other.py"))
        case "moved bytes":
            (second / "__init__.py").write_text("RATE = 1\n")
            rate.write_text("")
    assert code_digest(first) != code_digest(second)


def test_the_kernel_is_known_by_its_bytes(tmp_path: Path) -> None:
    library = tmp_path / LIBRARY.name
    assert kernel_name(library) == "torch", "there is none"
    copy = tmp_path / "copy" / LIBRARY.name
    copy.parent.mkdir()
    copy.write_bytes(LIBRARY.read_bytes())
    assert kernel_name(copy) == kernel_name(LIBRARY)
    assert load_kernel(LIBRARY).description.split()[0] == kernel_name(LIBRARY).split(",")[0]
    other = tmp_path / "other" / LIBRARY.name
    other.parent.mkdir()
    other.write_bytes(LIBRARY.read_bytes() + b"\0")
    assert kernel_name(other) != kernel_name(LIBRARY)


def test_the_facts_name_everything_that_bits_depend_on() -> None:
    versions = {"megatrain", "Python", "torch", "transformers", "tokenizers", "numpy"}
    expected = {"code of megatrain", "kernel", *(f"version of {name}" for name in versions)}
    assert set(installed_facts()) == expected
    assert len(list(PACKAGE.rglob("*.py"))) > 200, "it is the package that is hashed"


def test_hashing_the_package_is_cheap() -> None:
    require_effort(lambda: code_digest.__wrapped__(PACKAGE), at_most=5)
