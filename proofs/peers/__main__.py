"""Disturb peers that meet at a place: 0 anchors differ, 0 bad differences enter, nothing is lost.

    python -m proofs.peers --json
    python -m proofs.peers --kills 20 --bad 10 --json
    python -m proofs.peers --kills 20 --bad 10 --spoil record    # what is claimed by now enters
    python -m proofs.peers --kills 20 --bad 10 --spoil checks    # norms are believed

Peers are processes with a few params (testkit/toy_peers.py), which meet in a folder. They are
killed at any instant and started again from what they had saved, they leave and come back, and new
ones join. Others put differences that are corrupt, torn, missing, too large, not finite, huge,
stale, late, unsigned or signed by another key. Afterwards a peer that has seen nothing replays all
exchanges. With `cryptography` everything is signed; without it the bad ones of signatures are left
out. Ends with 1 if an anchor differs, a bad difference entered or something was lost; with --spoil
it must.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from testkit.printed import print_figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="kills, joins and leaves")
    parser.add_argument("--bad", type=int, default=100, help="bad differences")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spoil", choices=["record", "checks"], help="what to break")
    parser.add_argument("--scratch", type=Path, help="where to work")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    from proofs.peers import disturbed

    with tempfile.TemporaryDirectory(prefix="megatrain-peers-", dir=options.scratch) as scratch:
        result = disturbed.run(
            Path(scratch),
            num_kills=options.kills,
            num_bad=options.bad,
            seed=options.seed,
            spoil=options.spoil,
            tell=not options.json,
        )
    print_figures(result, as_json=options.json)
    sys.exit(bool(result["anchors_differ"] or result["bad_entered"] or result["lost"]))


if __name__ == "__main__":
    main()
