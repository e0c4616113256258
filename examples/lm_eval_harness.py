"""Score a run on tasks of lm-evaluation-harness, which gets the exported model.

    python examples/lm_eval_harness.py RUN --tasks hellaswag,gsm8k --limit 100

What follows RUN are options of the harness. Its own model `hf` loads the export; `parallelize=True`
lets accelerate keep layers that the cards have no room for in host memory, so a model larger than
the card is scored too. Needs `pip install "lm_eval[hf]"` beside MegaTrain.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from megatrain.cli.exporting import export_found
from megatrain.disk.hf.folder import is_adapter_folder
from megatrain.run.run_model import chosen_model


def main() -> None:
    """Export the model, adapters merged into it, to the current folder; start the harness."""
    run, *options = sys.argv[1:]
    found = chosen_model(Path(run), best=False)
    print(found, file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        folder = Path(scratch, "model")
        print(export_found(found, folder, merge=is_adapter_folder(found.folder)), file=sys.stderr)
        arguments = f"pretrained={folder},dtype=auto,parallelize=True"
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf"]
        done = subprocess.run([*command, "--model_args", arguments, *options], check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
