"""Crash, and look at what is left: a checkpoint is whole or not there, and a resume is exact.

    python -m proofs.crash sigkill --count 1000 --json
    python -m proofs.crash sigkill --tier --count 300 --json
    python -m proofs.crash states  --count 100000 --json
    python -m proofs.crash states  --count 2000 --spoil files
    python -m proofs.crash strace  --json
    python -m proofs.crash power   --count 1000 --json
    python -m proofs.crash corrupt --count 10000 --json

    sigkill   kill a training run at random instants, resume it, and compare the end with that of
              the run that nobody killed, bit for bit; every third run keeps its moments in fp32,
              in bf16, in 8 bits; --tier: masters and moments are on disk
    states    every state a power loss may leave, made from the recorded calls of real saves, of
              one process and of ranks that save together; --spoil files, --spoil folders: ranks
              other than the first leave their fsync of these out, which must be found
    strace    kill at each system call of one save, one delete and one load
    power     shut ext4 down under a process that saves; needs root, loop devices and mkfs.ext4
    corrupt   change files of checkpoints, and see each change found and an older one taken

Trial number i of a seed is always the same kind: `--first i` goes on from there. Ends with 1 if
anything was torn, lost or different.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from testkit.printed import print_figures

MODULES = {
    "sigkill": "kills",
    "states": "crash_states",
    "strace": "syscalls",
    "power": "power_loss",
    "corrupt": "corruption",
}
COUNTS = {"sigkill": 1000, "states": 100_000, "strace": 0, "power": 1000, "corrupt": 10_000}


def main() -> None:
    # Imports wait until here: processes that are spawned import this module again.
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=sorted(MODULES))
    parser.add_argument("--count", type=int, help="how many trials (strace: 0 for every call)")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--scratch", type=Path, help="where to work; a disk, not memory")
    parser.add_argument("--tier", action="store_true", help="sigkill: runs with a disk tier")
    parser.add_argument(
        "--spoil", choices=["files", "folders"], help="states: what other ranks do not fsync"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    count = COUNTS[options.what] if options.count is None else options.count
    module = importlib.import_module(f"proofs.crash.{MODULES[options.what]}")
    told: dict[str, Any] = {"tell": not options.json}
    if options.tier:
        if options.what != "sigkill":
            parser.error("--tier goes with sigkill")
        told["tier"] = True
    if options.spoil is not None:
        if options.what != "states":
            parser.error("--spoil goes with states")
        told["spoil"] = options.spoil
    with tempfile.TemporaryDirectory(prefix="megatrain-crash-", dir=options.scratch) as scratch:
        result = module.run(Path(scratch), count, options.first, **told)
    print_figures(result, as_json=options.json)
    sys.exit(bool(result["failures"]))


if __name__ == "__main__":
    main()
