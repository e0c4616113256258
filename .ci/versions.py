"""Runs the core of the tests with the lowest versions that pyproject.toml admits, or the newest.

    python .ci/versions.py lowest              # this interpreter, an environment for the occasion
    python3.13 .ci/versions.py newest --env build/newest-3.13 -n 2
    python .ci/versions.py beside trl==1.16.0  # the versions that this package leaves us

Torch comes first and alone, as everywhere here; an old one brings CUDA, several GB of it, so give
`lowest` an index that has builds for CPUs if you can. `lowest` then takes each package of
pyproject.toml, extras included, at its lower bound, and what these packages need at the newest.
Where the index has no wheel of a lower bound for this Python, the next one that has a wheel is
taken and named; on the oldest Python that we admit, the first of CI, every lower bound must be
installable.

`beside` resolves MegaTrain, its extra trl and the other package together, and then installs what
MegaTrain and trl need, at the versions that came out; the package itself may need a GPU. It has the
torch of requirements-dev.lock, and runs the tests of TRL's trainers too.

The tests run against the built package. Warnings are errors, as in CI. Other words go to pytest.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "setuptools")
"""At the versions of requirements-dev.lock: they are ours to choose, and no user has them."""
CORE = (
    "tests/cli/test_app.py",
    "tests/config/test_load.py",
    "tests/config/test_settings.py",
    "tests/data/chat/test_template.py",
    "tests/data/rows/test_in_memory.py",
    "tests/data/rows/test_hub_rows.py",
    "tests/data/rows/test_reading.py",
    "tests/data/test_preview.py",
    "tests/data/tokens/test_prepare.py",
    "tests/disk/checkpoint/test_restore.py",
    "tests/disk/hf/test_export.py",
    "tests/disk/hf/test_load.py",
    "tests/engine/test_exactness.py",
    "tests/engine/test_sampling.py",
    "tests/memory/test_host.py",
    "tests/models/test_balance.py",
    "tests/models/test_compiled.py",
    "tests/models/test_documents.py",
    "tests/models/test_key_values.py",
    "tests/optim/test_kernel.py",
    "tests/report/test_page.py",
    "tests/run/test_console.py",
    "tests/run/test_sinks.py",
    "tests/run/test_trainer.py",
    "tests/test_compat.py",
)
"""Minutes, with every package of pyproject.toml in use."""
WITH_TRL = ("tests/integrations/test_trl.py",)
LOCK = "requirements-dev.lock"


def lower_bounds(requirements: Iterable[str]) -> dict[str, str]:
    """Return the lower bound of each requirement by its name in lower case."""
    bounds = {}
    for requirement in requirements:
        match = re.fullmatch(r"([\w.-]+)>=([\w.]+)", requirement)
        if match is None:
            raise SystemExit(f"pyproject.toml: {requirement!r} is not of the form NAME>=VERSION")
        bounds[match[1].lower()] = match[2]
    return bounds


def differing(bounds: Mapping[str, str], frozen: str) -> list[str]:
    """Return the packages whose version in the output of `pip freeze` is not the lower bound."""
    versions = {
        name.lower(): version.split("+")[0]
        for name, _, version in (line.partition("==") for line in frozen.splitlines())
    }
    return [
        f"{name}>={bound} came as {versions.get(name)}"
        for name, bound in bounds.items()
        if _numbers(versions.get(name, "")) != _numbers(bound)
    ]


def _numbers(version: str) -> list[str]:
    """2, 2.0 and 2.0.0 are one version."""
    return re.sub(r"(\.0)+$", "", version).split(".")


EXTRAS = [each for extra in PROJECT["optional-dependencies"].values() for each in extra]
LOWEST = lower_bounds([*PROJECT["dependencies"], *EXTRAS])


class Environment:
    """A virtual environment that uv fills."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.run("-m", "pip", "install", "--quiet", "--upgrade", "uv")

    def run(self, *words: str | Path, **variables: str) -> None:
        """Run the environment's Python; a failure ends the program with its exit code."""
        path = f"{self._folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        command = [self._folder.resolve() / "bin" / "python", *words]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PATH": path} | variables, check=False
        )
        if done.returncode:
            raise SystemExit(done.returncode)

    def install(self, *words: str | Path) -> None:
        self.run("-m", "uv", "pip", "install", "--quiet", *words)

    def frozen(self) -> str:
        command = [str(self._folder / "bin" / "python"), "-m", "uv", "pip", "freeze"]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def fill(environment: Environment, asked: argparse.Namespace, scratch: Path) -> None:
    """Install torch, the packages, the tools of the tests, and the package itself."""
    torch = {
        "lowest": f"torch=={LOWEST['torch']}",
        "newest": "torch",
        "beside": re.findall(r"^torch==\S+", (ROOT / LOCK).read_text(), re.M)[0],
    }[asked.which]
    environment.install("--upgrade", torch)
    pinned, chosen = scratch / "torch.txt", scratch / "packages.txt"
    pinned.write_text(
        "".join(f"{line}\n" for line in environment.frozen().splitlines() if line[:7] == "torch==")
    )
    resolution = "lowest-direct" if asked.which == "lowest" else "highest"
    resolve = ("-m", "uv", "pip", "compile", "--quiet", "--no-build", "pyproject.toml")
    words: tuple[str | Path, ...] = ("--resolution", resolution, "--constraint", pinned)
    if asked.which == "beside":
        other, together = scratch / "other.txt", scratch / "together.txt"
        other.write_text(f"{asked.package}\n")
        extra = ("--extra", "trl", *words)
        environment.run(*resolve, other, *extra, "--output-file", together)
        environment.run(*resolve, *extra, "--constraint", together, "--output-file", chosen)
    else:
        environment.run(*resolve, "--all-extras", *words, "--output-file", chosen)
    environment.install("--requirement", chosen)
    environment.install("--constraint", LOCK, *TOOLS)
    environment.run("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, ".")
    environment.install("--no-deps", "--reinstall", *scratch.glob("megatrain-*.whl"))


def read_words(words: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return what is asked for, and the words that go to pytest."""
    parser = argparse.ArgumentParser(description="The core of the tests by versions.")
    ways = parser.add_subparsers(dest="which", required=True)
    for name in ("lowest", "newest", "beside"):
        way = ways.add_parser(name)
        if name == "beside":
            way.add_argument("package", help="another package, like trl==1.16.0")
        way.add_argument("--env", type=Path, help="keep the environment in this folder")
    return parser.parse_known_args(words)


def main(words: Sequence[str] | None = None) -> None:
    asked, for_pytest = read_words(words)
    with tempfile.TemporaryDirectory() as scratch:
        environment = Environment(asked.env or Path(scratch) / "env")
        fill(environment, asked, Path(scratch))
        print(environment.frozen(), flush=True)
        others = differing(LOWEST, environment.frozen()) if asked.which == "lowest" else []
        for line in others:
            print(f"not at its lower bound: {line}", flush=True)
        oldest = PROJECT["requires-python"].removeprefix(">=")
        if others and oldest == "{}.{}".format(*sys.version_info):
            raise SystemExit("pyproject.toml: raise the lower bounds to versions that install")
        given = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment.run("-m", "pytest", "-q", *CORE, *for_pytest, **given)
        if asked.which == "beside":
            environment.run("-m", "pytest", "-q", *WITH_TRL, "-m", "", *for_pytest, **given)


if __name__ == "__main__":
    main()
