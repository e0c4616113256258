"""Install the package in a bare Debian, without compiler and git, and run the demo there.

    sudo env "PATH=$PATH" python -m proofs.bare_root --json
    sudo env "PATH=$PATH" python -m proofs.bare_root --root build/bare --json  # keeps the Debian

debootstrap makes the smallest Debian with Python. The sdist is made from this tree, the wheel from
the sdist. Inside, in a virtual environment that has torch:

    wheel_bytes        size of the wheel; `faults` names whatever is wrong with its contents
    install_s          pip installs the wheel with everything it needs, nothing downloaded before
    install_cached_s   the same again, with what pip keeps of its downloads
    demo_s             `megatrain demo`: streamed = resident, resumed = uninterrupted
    ..._cpu_s          the same in processor time, which a busy machine does not change
    kernel             the update's implementation: native, from the wheel
    sdist_kernel       the same after installing the sdist instead: torch, as there is no compiler

It must run as root: it mounts and changes the root folder, in its own mount namespace. Folders
of PIP_FIND_LINKS and the certificates of the host are visible inside.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from testkit.effort import children_s
from testkit.printed import print_figures

TREE = Path(__file__).parents[1]
SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "python3,python3-venv,ca-certificates"
ABSENT = ("cc", "gcc", "clang", "make", "ninja", "git")
LARGEST_BYTES = 2_000_000
LONGEST_S = 120.0
LIBRARY = "megatrain/optim/libkernel.so"
TORCH = "torch==2.13.0"
SEEN = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")
MOUNTS = """\
set -e
root=$1; shift
mount --bind /dev "$root/dev"
mount -t proc proc "$root/proc"
while [ "$1" != -- ]; do
  if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$root${1%/*}"; touch "$root$1"; fi
  mount --bind -o ro "$1" "$root$1"
  shift
done
shift
exec chroot "$root" "$@"
"""
KERNEL = "from megatrain.optim.native import load_kernel; print(load_kernel().description)"


def wheel_faults(wheel: Path) -> list[str]:
    """Return what is wrong with a wheel: files that do not belong, missing files, its size."""
    source = TREE / "src"
    ours = {
        path.relative_to(source).as_posix()
        for path in (source / "megatrain").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    expected = ours | {LIBRARY}
    faults = [f"does not belong: {name}" for name in sorted(names - expected)]
    faults += [f"missing: {name}" for name in sorted(expected - names)]
    if wheel.stat().st_size >= LARGEST_BYTES:
        faults.append(f"{wheel.stat().st_size:,} bytes, {LARGEST_BYTES:,} are allowed")
    return faults


def build(folder: Path) -> tuple[Path, Path]:
    """Make the sdist from this tree, unpack it, and make the wheel of that; return both."""
    backend = "from setuptools import build_meta; import sys; "
    make = [sys.executable, "-c", backend + "build_meta.build_sdist(sys.argv[1])", str(folder)]
    subprocess.run(make, cwd=TREE, stdout=sys.stderr, check=True)
    (sdist,) = folder.glob("megatrain-*.tar.gz")
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    make = [sys.executable, "-c", backend + "build_meta.build_wheel(sys.argv[1])", str(folder)]
    subprocess.run(make, cwd=unpacked, stdout=sys.stderr, check=True)
    (wheel,) = folder.glob("megatrain-*.whl")
    return sdist, wheel


class BareRoot:
    """A Debian with Python and nothing to build with, made unless the folder has one."""

    def __init__(self, folder: Path) -> None:
        self._root = folder.resolve()
        if not (self._root / "usr").exists():
            command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE]
            subprocess.run([*command, self._root, MIRROR], stdout=sys.stderr, check=True)
        for name in ("work", "root/.cache"):
            shutil.rmtree(self._root / name, ignore_errors=True)
        self.work = self._root / "work"
        self.work.mkdir()

    def run(self, command: str) -> str:
        """Run a shell command in the root's folder /work; return its output."""
        links = os.environ.get("PIP_FIND_LINKS", "").split()
        seen = [path for path in (*SEEN, *links) if Path(path).exists()]
        passed = [f"{name}={value}" for name, value in os.environ.items() if name[:4] == "PIP_"]
        inside = ["env", "-i", "PATH=/usr/bin:/bin", "HOME=/root", "LANG=C.UTF-8", *passed]
        script = ["sh", "-ec", f"cd /work; {command}"]
        outside = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", MOUNTS, "sh"]
        return subprocess.run(
            [*outside, str(self._root), *seen, "--", *inside, *script],
            stdout=subprocess.PIPE, text=True, check=True,
        ).stdout  # fmt: skip

    def timed(self, name: str, command: str) -> dict[str, float]:
        """Run a command, its output among the messages; return its seconds, and those of cores."""
        began, before = time.monotonic(), children_s()
        print(self.run(command), file=sys.stderr)
        figures = {f"{name}_s": time.monotonic() - began, f"{name}_cpu_s": children_s() - before}
        return {name: round(seconds, 1) for name, seconds in figures.items()}


def prove(root: BareRoot) -> dict[str, Any]:
    """Build, install, run; return the figures."""
    found = [name for name in ABSENT if root.run(f"command -v {name} || true")]
    with tempfile.TemporaryDirectory() as folder:
        sdist, wheel = (Path(shutil.copy(each, root.work)) for each in build(Path(folder)))
    facts: dict[str, Any] = {
        "python": root.run("python3 --version").split()[1],
        "compilers": found,
        "wheel_bytes": wheel.stat().st_size,
        "sdist_bytes": sdist.stat().st_size,
        "faults": wheel_faults(wheel),
    }
    root.run(f"python3 -m venv env; env/bin/pip install --quiet {TORCH}")
    before = _lines(root)
    install = f"env/bin/pip install --quiet --no-warn-script-location ./{wheel.name}"
    facts |= root.timed("install", install)
    facts |= root.timed("demo", "env/bin/megatrain demo first")
    facts["kernel"] = root.run(f"env/bin/python -c {shlex.quote(KERNEL)}").strip()
    added = {line.split("==")[0].split(" @ ")[0] for line in _lines(root) - before}
    root.run(f"env/bin/pip uninstall --quiet --yes {' '.join(sorted(added))}")
    root.run(f"env/bin/pip install --quiet {TORCH}")  # it and ours may share packages
    facts |= root.timed("install_cached", install)
    root.run(f"env/bin/pip install --quiet --force-reinstall --no-deps ./{sdist.name}")
    facts |= root.timed("sdist_demo", "env/bin/megatrain demo second")
    facts["sdist_kernel"] = root.run(f"env/bin/python -c {shlex.quote(KERNEL)}").strip()
    facts["total_s"] = round(facts["install_s"] + facts["demo_s"], 1)
    facts["total_cached_s"] = round(facts["install_cached_s"] + facts["demo_s"], 1)
    return facts


def _lines(root: BareRoot) -> set[str]:
    return set(root.run("env/bin/pip freeze").split("\n"))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, help="keep the Debian in this folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    asked = parser.parse_args(words)
    place = nullcontext(asked.root) if asked.root else tempfile.TemporaryDirectory()
    with place as folder:
        facts = prove(BareRoot(Path(folder)))
    print_figures(facts, as_json=asked.json)
    fine = not facts["compilers"] and not facts["faults"] and facts["kernel"][:6] == "native"
    sys.exit(not (fine and facts["total_s"] < LONGEST_S))


if __name__ == "__main__":
    main()
