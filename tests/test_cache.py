"""The cache folder: where it is, and what is said where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.cache import cache_folder, writable_cache_folder
from megatrain.errors import DiskError


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEGATRAIN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_the_folder_is_ours_then_that_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "megatrain"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "megatrain"
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own" / "megatrain"
    assert writable_cache_folder().is_dir()


@pytest.mark.parametrize("home", ["/proc", "/dev/null", "/sys/kernel"])
def test_a_home_that_takes_no_cache_is_an_error_that_names_the_setting(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", home)
    with pytest.raises(
        DiskError, match=f"^the cache folder {home}/.cache/megatrain cannot"
    ) as told:
        writable_cache_folder()
    assert "Set MEGATRAIN_CACHE to a writable folder" in str(told.value)


def test_a_folder_without_permission_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: mode == 4)  # the tests may run as root
    with pytest.raises(DiskError, match=r"it is not writable\. Set MEGATRAIN_CACHE"):
        writable_cache_folder()
