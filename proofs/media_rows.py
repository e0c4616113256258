"""Rows with images through TRL's collator and through MegaTrain: the same tokens and numbers.

    python -m proofs.media_rows --json

TRL is an oracle that is not ours, and no dependency: run this in its own environment, which has
`trl` from PyPI beside MegaTrain's requirements. Tiny processors of two families, made of their
classes in transformers, read rows of one to three turns with up to three pictures of many sizes,
in files and in data URLs. For each row the collator of TRL's SFTTrainer makes the inputs of its
model, with `assistant_only_loss`; ours are prepared in files and read back. Ids, labels, types of
tokens, pixels and grids must be equal, bit for bit. Ends with 1 if one is not, or if a picture of
another row would pass.
"""

from __future__ import annotations

import base64
import io
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proofs.side_by_side import main_of
from testkit.processors import picture, tiny_processor

FAMILIES = ("qwen2_5_vl", "gemma3")
NUM_ROWS = 60
_WORDS = ("what", "is", "two", "and", "three", "four", "six", "you", "are", "hello", "world")


def main() -> None:
    main_of(
        __doc__,
        package="trl",
        kind="family",
        names=lambda: FAMILIES,
        compare=compare,
        is_wrong=lambda result: not result["equal"],
        line=_line,
    )


def made_rows(count: int) -> list[dict[str, Any]]:
    """Return rows as TRL has them, with pictures as bytes."""
    draw = random.Random(7)

    def words() -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(1, 9)))

    rows = []
    for number in range(count):
        images = [
            picture(97 * number + n, draw.randint(8, 90), draw.randint(8, 90))
            for n in range(draw.randint(1, 3))
        ]
        talk: list[dict[str, Any]] = []
        left = len(images)
        for turn in range(num_turns := draw.randint(1, 3)):
            here = left if turn == num_turns - 1 else draw.randint(0, left)
            left -= here
            parts: list[dict[str, Any]] = [{"type": "image"}] * here
            parts.insert(draw.randint(0, here), {"type": "text", "text": words()})
            talk += [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": [{"type": "text", "text": words()}]},
            ]
        rows.append({"messages": talk, "images": images})
    return rows


def compare(family: str) -> dict[str, Any]:
    """Return how many rows are equal in both tools."""
    processor = tiny_processor(family)
    rows = made_rows(NUM_ROWS)
    theirs = [_theirs(row, processor) for row in rows]
    with tempfile.TemporaryDirectory(prefix="megatrain-media-") as path:
        ours = _ours(rows, processor, Path(path))
    equal = [_same(one, other) for one, other in zip(ours, theirs, strict=True)]
    shifted = [_same(one, other) for one, other in zip(ours, theirs[1:] + theirs[:1], strict=True)]
    swapped = [_same({**one, **_media(other)}, one) for one, other in pairwise(ours)]
    return {
        "family": family,
        "rows": len(rows),
        "pictures": sum(len(row["images"]) for row in rows),
        "tokens": sum(one["input_ids"].numel() for one in ours),
        "trained": sum(int((one["labels"] != -100).sum()) for one in ours),
        "media_tokens": sum(int((one["types"] == 1).sum()) for one in ours),
        "equal_rows": sum(equal),
        "equal": all(equal) and not any(shifted) and not any(swapped),
    }


def _theirs(row: Mapping[str, Any], processor: Any) -> dict[str, Tensor]:
    """Return what TRL's trainer gives its model for one row."""
    from PIL import Image
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    collator = DataCollatorForVisionLanguageModeling(processor, assistant_only_loss=True)
    images = [Image.open(io.BytesIO(data)) for data in row["images"]]
    found = collator([{"messages": row["messages"], "images": images}])
    types = found["mm_token_type_ids" if "mm_token_type_ids" in found else "token_type_ids"]
    known = ("input_ids", "labels", "pixel_values", "image_grid_thw")
    return {name: found[name] for name in known if name in found} | {"types": types}


def _ours(
    rows: Sequence[Mapping[str, Any]], processor: Any, folder: Path
) -> list[dict[str, Tensor]]:
    """Return what our rows give, read back from what was prepared."""
    from megatrain.data.media.processing import MediaSettings
    from megatrain.data.media.store import MediaStore
    from megatrain.data.tokens.prepare import prepare

    media = MediaSettings(processor=processor)
    source = written(rows, folder)
    prepared = prepare(
        source, processor.tokenizer, cache_dir=folder / "cache", max_length=4096, max_bad=0.0,
        media=media,
    )  # fmt: skip
    store = MediaStore([prepared], media)
    found = []
    for number in range(len(prepared.lengths)):
        ids, trained = (torch.from_numpy(one.copy()) for one in prepared.tokens(number))
        placed = prepared.media(number)
        assert placed is not None
        items = [store.read(digest) for digest in placed.digests]
        tensors = {
            name: torch.cat([item.tensors[name] for item in items]) for name in items[0].tensors
        }
        found.append(
            {
                "input_ids": ids.long()[None],
                "labels": torch.where(trained, ids.long(), -100)[None],
                "types": torch.from_numpy(placed.token_types.astype("int64"))[None],
                **tensors,
            }
        )
    store.close()
    return found


def written(rows: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Write the rows, with pictures in files and in data URLs by turns; return their file."""
    path = folder / "rows.jsonl"
    lines = []
    for number, row in enumerate(rows):
        names = []
        for n, data in enumerate(row["images"]):
            names.append(f"{number}-{n}.png")
            if (number + n) % 2:
                names[-1] = "data:image/png;base64," + base64.b64encode(data).decode()
            else:
                (folder / names[-1]).write_bytes(data)
        lines.append(json.dumps({**row, "images": names}))
    path.write_text("\n".join(lines))
    return path


def _media(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def _line(result: dict[str, Any]) -> str:
    return (
        f"{result['family']:12} {result['equal_rows']} of {result['rows']} rows equal, "
        f"{result['pictures']} pictures, {result['trained']} trained tokens"
    )


if __name__ == "__main__":
    main()
