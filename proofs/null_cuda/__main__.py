"""Laws over the calls of whole steps, on torch's own CUDA build without a card.

    python -m proofs.null_cuda [--json] [--short] [--capability 9.0] [--case packed]

Each compute capability is a process on the null device (testkit/null_cuda). In a steady step of
each case (cases.py)

    host_waits        times that a lane waited for the device, beyond what the case says
    pageable_copies   copies of host memory that the driver does not know
    foreign_calls     calls of another device, or of a thread that never set one
    shared_streams    streams on which two threads queued work
    cudnn_plans       plans that cuDNN would have built in a lane
    growing           cases with more device memory behind the step than before it
    failed            cases that ended in an error

are all 0. Over all cases, `peak_over_plan` is the largest ratio of the allocator's peak to what the
plan says of the device, and `plan_over_peak` that of the plan to the peak, but for cases whose plan
has more room than that (cases.py says why). Libraries' own memory is
kept small, because the plan counts it apart (planning/machine/reserve.py). Each mutant, one for
each of the first four laws, has to break its law: `mutants_caught` of `mutants`.

`launches` by case (kernels, products and Triton's, of one step) are to read, not to hold.

Ends with 3 if the null device cannot be had here, with 1 if a law is broken.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from proofs.null_cuda.cases import CAPABILITIES, CASES, MUTANTS, SHORT
from testkit.null_cuda.building import NoNullCuda
from testkit.null_cuda.environment import UNAVAILABLE, NoEnvironment
from testkit.null_cuda.launching import ROOT, program_and_environment

LAWS = ("host_waits", "pageable_copies", "foreign_calls", "shared_streams", "cudnn_plans")
MOST_PEAK_OVER_PLAN = 1.0
MOST_PLAN_OVER_PEAK = 1.1
SHORT_CAPABILITY = "8.9"
SMALL_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


def played(capability: str, names: Sequence[str], mutant: str = "") -> Iterator[dict[str, Any]]:
    """Yield the results of cases on a device of a compute capability."""
    python, variables = program_and_environment(
        capability=capability, devices=2, variables=SMALL_WORKSPACES
    )
    command = [python, "-m", "proofs.null_cuda.played", "--cases", ",".join(names)]
    if mutant:
        command += ["--mutant", mutant]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if any("error" in result for result in results) or len(results) < len(names):
        print(done.stderr[-6000:], file=sys.stderr)
    yield from results
    for name in names[len(results) :]:
        yield {"capability": capability, "case": name, "error": f"ended with {done.returncode}"}


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the laws."""
    peaks = [result["peak_over_plan"] for result in results if "peak_over_plan" in result]
    plans = [result["plan_over_peak"] for result in results if "plan_over_peak" in result]
    return {
        "cases": len(results),
        **{law: sum(result.get(law, 0) for result in results) for law in LAWS},
        "growing": sum(result.get("grows", False) for result in results),
        "failed": sum("error" in result for result in results),
        "peak_over_plan": max(peaks, default=0.0),
        "plan_over_peak": max(plans, default=0.0),
    }


def is_kept(figures: dict[str, Any]) -> bool:
    """Return whether every law is kept."""
    return (
        not any(figures[law] for law in (*LAWS, "growing", "failed"))
        and figures["peak_over_plan"] <= MOST_PEAK_OVER_PLAN
        and figures["plan_over_peak"] <= MOST_PLAN_OVER_PEAK
        and figures["mutants_caught"] == figures["mutants"]
    )


def caught_mutants() -> int:
    """Return how many mutants break the law that they are for."""
    found = 0
    for mutant in MUTANTS:
        (result,) = played(SHORT_CAPABILITY, [mutant.case], mutant.name)
        found += result.get(mutant.breaks, 0) > 0
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--short", action="store_true", help="a few cases on one capability")
    parser.add_argument("--capability", action="append", help="only this one; may be repeated")
    parser.add_argument("--case", action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    capabilities = options.capability or ([SHORT_CAPABILITY] if options.short else CAPABILITIES)
    chosen = options.case or (SHORT if options.short else [case.name for case in CASES])
    results = []
    try:
        for capability in capabilities:
            names = [c.name for c in CASES if c.name in chosen and c.runs_on(capability)]
            for result in played(capability, names):
                results.append(result)
                if not options.json:
                    print(result, flush=True)
        further = {
            "mutants": len(MUTANTS),
            "mutants_caught": caught_mutants(),
        }
    except (NoEnvironment, NoNullCuda) as error:
        print(error, file=sys.stderr)
        return UNAVAILABLE
    figures = {**summary(results), **further}
    print(json.dumps({**figures, "results": results} if options.json else figures))
    return 0 if is_kept(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
