"""Every command in README, docs and examples works as written.

Each page's bash blocks run in order, in a folder of their own, with a `.venv` whose programs are
those of the tests; the Hub is one on the loopback that has a tiny model under the name they use.
The first command of a page is a new process, and so is pytest, which wants to import by itself; the
others are forked from one that is warm.
What cannot run in CI is shortened, or only held against its parser: SHORTER and CUDA say which, and
a test says that they are still there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli.app import app
from megatrain.cli.demo import write_demo
from testkit.hub_on_loopback import serving
from testkit.warm_python import WarmPython

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md"))
    if "```bash" in path.read_text()
)
NEEDS_TRL = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl is not installed"
)
INSTALL = re.compile(r"-m venv |/pip install ")
SHORTER = {
    "make.py addition": "make.py addition 2000",
    "train examples/addition/addition.yaml": (
        "train examples/addition/addition.yaml train.steps=2 eval.every=null eval.samples=0 "
        "optim.warmup=1"
    ),
    "held_out.jsonl --answers": "held_out.jsonl --answers --max-rows 20",
    "train examples/rewards/reverse.yaml": (
        "train examples/rewards/reverse.yaml train.steps=2 eval.every=null eval.samples=0"
    ),
    "train run.yaml save.dir=runs/keeper-1": "train run.yaml save.dir=runs/keeper-1 train.epochs=4",
}
CUDA = {"-m pytest": "--collect-only -q", "-m benchmarks.gpu": "--help", "doctor --gpu": "--help"}
"""What is added to commands that ask for a GPU."""
PROGRAMS = {
    "python": '"$@"',
    "megatrain": '-m megatrain "$@"',
}
PROGRAM = """\
#!/bin/sh
if [ -e .started ] && [ "$2" != pytest ]; then exec {warm} {words}; fi
: > .started
exec {python} {words}
"""
LINKED = ("examples", "tests", "testkit", "proofs", "benchmarks", "pyproject.toml")


def by_page(pages: list[str]) -> list[Any]:
    """Return the pages as parameters: a push runs the README, a merge the others."""
    return [
        pytest.param(
            page,
            marks=[
                *([] if page == "README.md" else [pytest.mark.merge]),
                *([NEEDS_TRL] if "rewards" in page else []),
            ],
        )
        for page in pages
    ]


def blocks(page: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.S)


def runnable(block: str) -> str:
    """Return a block as CI can run it."""
    lines = []
    for line in block.replace("\\\n", " ").splitlines():
        if INSTALL.search(line):
            continue
        for long, short in SHORTER.items():
            line = line.replace(long, short)
        if "--device cuda" in line:
            (extra,) = [extra for start, extra in CUDA.items() if start in line]
            line = f"{line.split(' > ')[0]} {extra} > /dev/null"
        lines.append(line)
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What the commands of all pages share: a Hub, its cache, and a warm interpreter."""

    environment: dict[str, str]
    warm: WarmPython


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A Hub that has the model of the pages."""
    folder = tmp_path_factory.mktemp("hub")
    write_demo(folder / "demo", num_steps=2)
    model = (folder / "demo" / "model").iterdir()
    with serving() as hub:
        hub.accepts_pushes = True
        hub.put("Qwen/Qwen3-0.6B", {path.name: path.read_bytes() for path in model})
        environment = environment_of(hub.url, folder)
        with closing(WarmPython(environment)) as warm:
            yield World(environment=environment, warm=warm)


def environment_of(hub: str, folder: Path) -> dict[str, str]:
    """Return the environment of commands that ask this Hub, with a cache in `folder`."""
    searched = os.environ.get("PYTHONPATH", "").split(":")
    return {
        **os.environ,
        "PYTHONPATH": ":".join(str(Path(part).resolve()) for part in searched),
        "HF_HOME": str(folder / "hf"),
        "HF_ENDPOINT": hub,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",  # which is no HTTP of its own
    }


def run(script: str, folder: Path, world: World) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder that looks like a clone with an environment."""
    programs = folder / ".venv" / "bin"
    if not programs.exists():
        programs.mkdir(parents=True)
        for name, words in PROGRAMS.items():
            program = programs / name
            warm = " ".join(world.warm.command)
            program.write_text(PROGRAM.format(python=sys.executable, warm=warm, words=words))
            program.chmod(0o755)
        for name in LINKED:
            (folder / name).symlink_to(ROOT / name)
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder, env=world.environment | {"MEGATRAIN_CACHE": str(folder / "cache")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.merge
@pytest.mark.parametrize("page", by_page(PAGES))
def test_commands_run(page: str, tmp_path: Path, world: World) -> None:
    for block in blocks(page):
        done = run(runnable(block), tmp_path, world)
        assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_what_is_shortened_is_still_in_the_pages() -> None:
    text = "\n".join(block for page in PAGES for block in blocks(page))
    for command in (*SHORTER, *CUDA, "--device cuda"):
        assert command in text, command


def test_verbs_named_in_the_text_exist() -> None:
    verbs = {info.name or info.callback.__name__ for info in app.registered_commands}  # type: ignore[union-attr]
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    named = {
        (path.name, verb)
        for path in pages
        for verb in re.findall(r"(?:`|/bin/)megatrain ([a-z][\w-]*)", path.read_text())
    }
    assert {verb for _, verb in named} == verbs, named
