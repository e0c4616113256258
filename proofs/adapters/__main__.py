"""LoRA by MegaTrain's engine and by PEFT on the resident model, on the CPU in fp32, bit for bit.

    python -m proofs.adapters --json
    python -m proofs.adapters --family llama --family gpt2

Run this in an environment of its own that has `peft` from PyPI beside MegaTrain's requirements. For
each family five chained steps with AdamW: the loss of each micro-batch and the gradient of each
adapter must have the same bits, and PEFT's `all-linear` must choose the modules that we choose,
but for those that we name as left out. Ends with 1 if a family differs.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import redirect_stdout

from proofs.adapters.options import parsed, parser_of


def main() -> None:
    options = parsed(parser_of(__doc__))
    import torch

    from proofs.adapters.training import compare
    from testkit.families import FAMILIES

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = []
    for family in options.family or FAMILIES:
        with redirect_stdout(sys.stderr):
            results.append(compare(family))
        if not options.json:
            print(results[-1], flush=True)
    wrong = [result["family"] for result in results if result["faults"]]
    if options.json:
        print(json.dumps({"families": len(results), "wrong": wrong, "results": results}))
    sys.exit(bool(wrong) or not results)


if __name__ == "__main__":
    main()
