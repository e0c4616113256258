"""Adapters with a new head that scores texts, trained here, loaded by PEFT: the same losses.

    python -m proofs.adapters.scores --json
    python -m proofs.adapters.scores --family llama

Run this in an environment of its own that has `peft` from PyPI beside MegaTrain's requirements. For
each family, with one label (pairs) and three (classes): a language model gets adapters and a new
head, is trained for some steps and exported. PEFT must load the folder for sequence classification
without a warning and give the engine's loss; with zeros for the head, another.
Ends with 1 if a case differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging

import megatrain as mt
from proofs.adapters.options import parsed, parser_of
from testkit.families import save_tiny

FAMILIES = ["llama", "qwen3", "gpt2"]
FILE = "adapter_model.safetensors"
ROWS = [[5, 6, 7], [8, 9, 3]]
CLASSES = [0, 2]
CLOSE = 1e-6


def compare(family: str, num_labels: int) -> dict[str, Any]:
    """Return the engine's loss after some steps, and PEFT's of the export."""
    with tempfile.TemporaryDirectory(prefix="megatrain-scores-") as path:
        base, made = Path(path) / "base", Path(path) / "made"
        save_tiny(base, family, torch.float32)
        lora = mt.Lora(rank=2, alpha=4)
        home = mt.load_model(base, dtype="fp32", num_labels=num_labels, lora=lora)
        loss = mt.Reward() if num_labels == 1 else mt.Classes(num_labels)
        batch = mt.scored_batch(ROWS, CLASSES if num_labels > 1 else [0, 0], pad_token=0)
        optimizer = mt.AdamW(learning_rate=1e-2)
        with mt.Engine(home.decoder, home.store, optimizer=optimizer, loss=loss) as engine:
            for _ in range(4):
                engine.step([batch])
            total, count = engine.evaluate([batch])
        home.export(made)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            theirs = _peft_loss(base, made, num_labels)
        tensors = load_file(made / FILE)
        other = {name: t * 0 if "score" in name else t for name, t in tensors.items()}
        save_file(other, made / FILE)
        without = _peft_loss(base, made, num_labels)
    ours = total / count
    faults = [f"PEFT warns: {one.message}" for one in said]
    if not abs(theirs - ours) <= CLOSE:
        faults.append(f"PEFT has the loss {theirs}, the engine {ours}")
    if not abs(without - ours) > 1e-2:
        faults.append("a head of zeros is not noticed")
    found = {"family": family, "labels": num_labels, "ours": ours, "peft": theirs}
    return found | {"without_head": without, "faults": faults}


def _peft_loss(base: Path, folder: Path, num_labels: int) -> float:
    """Return the loss of adapters over a model whose own head is random."""
    from peft import PeftModel, PeftModelForSequenceClassification

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=num_labels, dtype=torch.float32
    )
    model.config.pad_token_id = 0
    adapted: Any = PeftModel.from_pretrained(model, folder)
    assert type(adapted) is PeftModelForSequenceClassification
    with torch.no_grad():
        logits: Tensor = torch.cat(
            [adapted.eval()(input_ids=torch.tensor([row])).logits for row in ROWS]
        )
    if num_labels == 1:
        return float(-F.logsigmoid(logits[0, 0] - logits[1, 0]))
    return float(F.cross_entropy(logits, torch.tensor(CLASSES)))


def main() -> None:
    options = parsed(parser_of(__doc__))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with redirect_stdout(sys.stderr):
        cases = [compare(family, n) for family in options.family or FAMILIES for n in (1, 3)]
    wrong = sum(bool(case["faults"]) for case in cases)
    print(json.dumps({"cases": cases, "wrong": wrong}, indent=None if options.json else 1))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
