"""The device's library is built once, and what keeps it from being built is said."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("testkit.host_gpu", exc_type=ImportError)

from testkit.host_gpu import building


def test_who_asks_at_the_same_time_waits_for_the_one_that_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []

    def build(place: Path, library: Path) -> None:
        time.sleep(0.05)
        built.append(library)
        library.touch()

    monkeypatch.setenv("MEGATRAIN_CI_CACHE", str(tmp_path))
    monkeypatch.setattr(building, "_build", build)
    with ThreadPoolExecutor(4) as threads:
        paths = set(threads.map(lambda _: building.built_library(), range(4)))
    assert len(built) == len(paths) == 1
    assert building.built_library() in paths, "from the cache"


def test_another_state_of_the_sources_is_another_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.cpp").write_text("int a;")
    monkeypatch.setattr(building, "SOURCES", tmp_path)
    before = building.build_key("c++")
    assert building.build_key("c++") == before
    (tmp_path / "a.cpp").write_text("int b;")
    assert building.build_key("c++") != before


@pytest.mark.parametrize(("required", "kind"), [("", building.NoHostGpu), ("1", RuntimeError)])
def test_without_a_compiler_tests_are_skipped_or_fail(
    required: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(building.REQUIRED, required)
    with pytest.raises(kind, match=r"^testkit/host_gpu is built by no-such-compiler and ninja"):
        building.built_library()
