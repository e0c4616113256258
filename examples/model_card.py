"""Write the model card of a run, as `trainer.push_to_hub` does, for people who publish otherwise.

python examples/model_card.py RUN NAME > README.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatrain.config import load_config
from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.run.opening.resumption import known_of
from megatrain.run.publishing import model_card


def main() -> None:
    run, name = Path(sys.argv[1]), sys.argv[2]
    state = known_of(read_manifest(run / "last")).state
    rows = json.loads((run / "data_card.json").read_text())
    is_adapter = (run / "last" / "model" / "adapter_config.json").exists()
    card = model_card(name, load_config(run / "config.yaml"), state, rows, is_adapter=is_adapter)
    print(card, end="")


if __name__ == "__main__":
    main()
