"""A proof that plays cases in another tool and in ours, and compares the two: its command.

The other tool is not a dependency: the proof runs in a separate environment that has it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def quiet_arguments(output: Path) -> dict[str, Any]:
    """Return arguments of transformers' and TRL's trainers: on the CPU, in fp32, losses alone."""
    return {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def main_of(
    about: str | None,
    *,
    package: str,
    kind: str,
    names: Callable[[], Iterable[str]],
    compare: Callable[[str], Result],
    is_wrong: Callable[[Result], bool],
    line: Callable[[Result], object],
) -> None:
    """Compare the cases that were asked for, print each or one JSON object; 1 if one is wrong.

    `kind` is what a case is called. `names` is asked once `package` is known to be here.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(f"--{kind}", action="append", help=f"only this {kind}; may be repeated")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    if importlib.util.find_spec(package) is None:
        sys.exit(f"{package} is not installed: pip install {package}, in its own environment")
    asked = getattr(options, kind)
    results: list[Result] = []
    for name in names():
        if asked and name not in asked:
            continue
        with redirect_stdout(sys.stderr):  # the other tool prints every step
            results.append(compare(name))
        if not options.json:
            print(line(results[-1]), flush=True)
    wrong = [result[kind] for result in results if is_wrong(result)]
    if options.json:
        print(json.dumps({"cases": len(results), "wrong": wrong, "results": results}))
    sys.exit(bool(wrong) or not results)
