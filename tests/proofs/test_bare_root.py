"""Short form of `python -m proofs.bare_root`: a wheel made without a compiler, and its contents."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import pytest

from megatrain.optim import native
from proofs.bare_root import LARGEST_BYTES, LIBRARY, build, wheel_faults

pytestmark = pytest.mark.merge


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "/bin/false")  # the kernel's own build is in tests/optim/test_build.py
        return build(tmp_path_factory.mktemp("wheel"))[1]


def with_file(wheel: Path, folder: Path, name: str, content: bytes) -> Path:
    """Return a copy of a wheel that has one more file."""
    changed = Path(shutil.copy(wheel, folder))
    with zipfile.ZipFile(changed, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, content)
    return changed


def test_a_wheel_made_without_a_compiler_lacks_the_kernel_alone(wheel: Path) -> None:
    assert wheel_faults(wheel) == [f"missing: {LIBRARY}"]


def test_with_the_kernel_a_wheel_is_complete_and_small(wheel: Path, tmp_path: Path) -> None:
    if not native.LIBRARY.exists():
        pytest.skip("the package under test was built without its kernel")
    assert wheel_faults(with_file(wheel, tmp_path, LIBRARY, native.LIBRARY.read_bytes())) == []


@pytest.mark.parametrize("name", ["tests/test_text.py", "megatrain/__pycache__/text.pyc"])
def test_a_file_that_does_not_belong_is_named(wheel: Path, tmp_path: Path, name: str) -> None:
    changed = with_file(wheel, tmp_path, name, b"")
    assert f"does not belong: {name}" in wheel_faults(changed)


def test_a_large_wheel_is_noticed(wheel: Path, tmp_path: Path) -> None:
    changed = with_file(wheel, tmp_path, LIBRARY, os.urandom(LARGEST_BYTES))
    (fault,) = wheel_faults(changed)
    assert fault.endswith("bytes, 2,000,000 are allowed")
