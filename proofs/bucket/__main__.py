"""Disturb runs whose truth is a bucket: 0 acknowledged checkpoints are lost, 0 are mixed.

    python -m proofs.bucket --json
    python -m proofs.bucket --count 100 --json
    python -m proofs.bucket --count 100 --spoil order     # the entry before its chunks
    python -m proofs.bucket --count 100 --spoil fence     # entries that replace each other

The storage is moto's S3 on loopback, behind a door that disturbs requests (server.py). Disturbances
are SIGKILL, connections that are dropped, cut and slow, answers that are lost, 500 and 503,
listings that lie, two processes at once, and one that sleeps while another takes its run. Needs
obstore and moto[server]. Machines have their folders in memory: proofs.crash is about disks. Ends
with 1 if anything was lost or mixed; with --spoil it must.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from testkit.printed import print_figures

MEMORY = Path("/dev/shm")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="how many disturbances")
    parser.add_argument("--first", type=int, default=0, help="number of the first chain")
    parser.add_argument("--spoil", choices=["order", "fence"], help="what to break")
    parser.add_argument(
        "--scratch", type=Path, default=MEMORY if MEMORY.is_dir() else None, help="where to work"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    from proofs.bucket import trials

    with tempfile.TemporaryDirectory(prefix="megatrain-bucket-", dir=options.scratch) as scratch:
        result = trials.run(
            Path(scratch),
            options.count,
            options.first,
            tell=not options.json,
            spoil=options.spoil,
        )
    print_figures(result, as_json=options.json)
    sys.exit(bool(result["failures"]))


if __name__ == "__main__":
    main()
