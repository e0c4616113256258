"""Short form of `python -m proofs.bare_root`: a wheel made without a compiler, and its contents."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from megatrain.optim import native
from proofs.bare_root import LIBRARY, build, wheel_faults

pytestmark = pytest.mark.merge


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "/bin/false")  # the kernel's own build is in tests/optim/test_build.py
        return build(tmp_path_factory.mktemp("wheel"))[1]


def test_a_wheel_made_without_a_compiler_lacks_the_kernel_alone(wheel: Path) -> None:
    assert wheel_faults(wheel) == [f"missing: {LIBRARY}"]


def test_with_the_kernel_a_wheel_is_complete_and_small(wheel: Path, tmp_path: Path) -> None:
    if not native.LIBRARY.exists():
        pytest.skip("the package under test was built without its kernel")
    changed = Path(shutil.copy(wheel, tmp_path))
    with zipfile.ZipFile(changed, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr(LIBRARY, native.LIBRARY.read_bytes())
    assert wheel_faults(changed) == []
