"""Training on rewards with a real vLLM that draws, from a config, on the CPU.

    MEGATRAIN_VLLM_PYTHON=vllm-env/bin/python python -m proofs.grpo_vllm --json

Run this in an environment with TRL; vLLM has its own. `megatrain train` of examples/rewards starts
the server, at temperature 0.7. Four runs:

    plain     TRL's mean difference of log-probabilities, vLLM to training, in each step
    stale     the same, but weights are handed over once: the difference must show it
    killed    the server gets SIGKILL between two steps: the run goes on with another one
    stopped   SIGTERM, then --resume: all steps have their lines. Whether the export has the
              bits of `plain` is only said, because draws of vLLM need not repeat

Ends with 1 if a difference of `plain`, `killed` or `stopped` is above 0.1, if the last of `stale`
is not ten times that of `plain`, or if a run fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
DIFFERENCE = "sampling/sampling_logp_difference/mean"
LARGEST = 0.1
_STALE = """
from megatrain.integrations.grpo import StreamedGRPO
load = StreamedGRPO._generate_by_vllm
def once(trainer, *given):
    if trainer._vllm_step is not None:
        trainer._vllm_step = trainer.state.global_step
    return load(trainer, *given)
StreamedGRPO._generate_by_vllm = once
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megatrain-grpo-vllm-") as folder:
        world = Path(folder)
        make = [sys.executable, str(ROOT / "examples/rewards/make.py"), "reverse", "2"]
        subprocess.run(make, cwd=world, check=True)
        runs = {
            "plain": _finished(_start(world, "plain", options.steps)),
            "stale": _finished(_start(world, "stale", options.steps, before=_STALE)),
            "killed": _killed(world, options.steps),
            "stopped": _stopped(world, options.steps),
        }
        found: dict[str, Any] = {name: _of_run(world / name) for name in runs}
        found["codes"] = runs
        plain, stale = found["plain"]["differences"], found["stale"]["differences"]
        fresh = [d for name in ("plain", "killed", "stopped") for d in found[name]["differences"]]
        right = not any(runs.values()) and max(fresh) < LARGEST and stale[-1] > 10 * plain[-1]
        right = right and all(len(found[name]["differences"]) == options.steps for name in runs)
        found["same_bits_resumed"] = found["plain"]["export"] == found["stopped"]["export"]
    print(json.dumps(found | {"right": right}, indent=None if options.json else 1))
    sys.exit(not right)


def _start(
    world: Path, name: str, steps: int, *, resume: bool = False, before: str = ""
) -> subprocess.Popen[bytes]:
    """Start a run of so many steps."""
    words = [
        "train", str(ROOT / "examples/rewards/reverse.yaml"), "rollouts.engine=vllm",
        "rollouts.temperature=0.7", "rollouts.samples=8", "train.batch_rows=8",
        f"train.steps={steps}", f"save.dir={name}", "save.every=5", "data.eval=null",
        "eval.samples=0", "log.every=1", *(["--resume"] if resume else []),
        "--rewards", str(ROOT / "examples/rewards/reward.py") + ":letters",
    ]  # fmt: skip
    program = f"{before}\nfrom megatrain.__main__ import main\nmain()"
    arguments = "--max-num-seqs 64 --enforce-eager --gpu-memory-utilization 0.1"
    environment = {
        "MEGATRAIN_VLLM_ARGUMENTS": arguments,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "MEGATRAIN_MEASURE": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-c", program, *words], cwd=world, env=environment, stdout=sys.stderr
    )


def _finished(run: subprocess.Popen[bytes]) -> int:
    return run.wait()


def _killed(world: Path, steps: int) -> int:
    run = _start(world, "killed", steps)
    _wait_for_step(world / "killed", steps // 2, run)
    for process in psutil.Process(run.pid).children(recursive=True):
        if "vllm" in " ".join(process.cmdline()):
            process.kill()
    return run.wait()


def _stopped(world: Path, steps: int) -> int:
    run = _start(world, "stopped", steps)
    _wait_for_step(world / "stopped", steps // 3, run)
    run.send_signal(signal.SIGTERM)
    if (code := run.wait()) != 130:
        return code
    return _start(world, "stopped", steps, resume=True).wait()


def _wait_for_step(folder: Path, step: int, run: subprocess.Popen[bytes]) -> None:
    while run.poll() is None and len(_lines(folder)) < step:
        time.sleep(0.1)


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    found = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in found if line.endswith("\n")]


def _of_run(folder: Path) -> dict[str, Any]:
    lines = [line for line in _lines(folder) if DIFFERENCE in line]
    export = folder / "model" / "model.safetensors"
    return {
        "differences": [line[DIFFERENCE] for line in lines],
        "hand_over_s": [round(line["weights_to_vllm_s"], 3) for line in lines],
        "rewards": [line["reward"] for line in lines],
        "export": hashlib.sha256(export.read_bytes()).hexdigest() if export.exists() else None,
    }


if __name__ == "__main__":
    main()
