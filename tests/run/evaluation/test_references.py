"""Reference log-probabilities: those of the resident model, computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from megatrain import load_model
from megatrain.data.media.placed import DocumentMedia
from megatrain.data.steps.micro_batches import laid_out
from megatrain.data.tokens.documents import Documents
from megatrain.engine.engine import Engine
from megatrain.memory.kinds import TensorKind
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.evaluation.references import (
    References,
    compute_references,
    document_groups,
    documents_digest,
    read_references,
    weights_digest,
    write_references,
)
from testkit.families import save_tiny
from testkit.plain import load_plain, plain_logprobs
from testkit.rank_threads import Together
from testkit.rank_training import RankCase, engine_of

LENGTHS = (9, 5, 23, 14, 14, 3, 40, 8, 17, 2, 11, 30)
MICRO = 40


class Drawn:
    """Documents of random tokens; all but the first few are trained."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)
        self.row_starts = np.arange(0, len(lengths) + 1, 2)
        draw = np.random.default_rng(seed)
        self._ids = [draw.integers(3, 300, length).astype(np.int32) for length in lengths]

    def tokens(self, document: int) -> tuple[Any, Any]:
        ids = self._ids[document]
        return ids, np.arange(len(ids)) >= min(3, len(ids) - 1)


class Pictured(Drawn):
    """The same documents, one with a picture."""

    def __init__(self, digest: str) -> None:
        super().__init__()
        self._digest = digest

    def media(self, document: int) -> DocumentMedia | None:
        if document != 2:
            return None
        types = np.zeros(self.lengths[2], dtype=np.uint8)
        return DocumentMedia(digests=(self._digest,), begins=(1,), token_types=types)


def test_the_digest_of_documents_tells_pictures_apart() -> None:
    found = {documents_digest(one) for one in (Drawn(), Pictured("a"), Pictured("b"))}
    assert len(found) == 3
    assert documents_digest(Pictured("a")) in found


def references_of(engine: Engine, documents: Documents, ranks: Ranks = ALONE) -> References:
    return compute_references(
        engine,
        documents,
        ranks,
        micro_batch_tokens=MICRO,
        pass_tokens=3 * MICRO,
        one_row=True,
        pad_id=0,
    )


@pytest.mark.parametrize("one_row", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_they_are_those_of_the_resident_model_bit_for_bit(
    dtype: Literal["fp32", "bf16"], one_row: bool, tmp_path: Path
) -> None:
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    save_tiny(tmp_path, "llama", torch_dtype)
    home, plain, documents = load_model(tmp_path, dtype=dtype), None, Drawn()
    with Engine(home.decoder, home.store) as engine:
        found = compute_references(
            engine,
            documents,
            ALONE,
            micro_batch_tokens=MICRO,
            pass_tokens=100,
            one_row=one_row,
            pad_id=0,
        )
    plain = load_plain(tmp_path, torch_dtype).eval()
    expected = np.zeros(len(LENGTHS), dtype=np.float32)
    for group in document_groups(documents, MICRO, one_row=one_row):
        micro = laid_out(group, documents, one_row=one_row, pad_id=0)
        with torch.no_grad():
            logprobs = plain_logprobs(plain, micro)
        for place, number in enumerate(group):
            belongs = micro.loss_tensors["answers"] == place
            expected[number] = float(logprobs[belongs].double().sum())
    assert found.tobytes() == expected.tobytes()
    assert float(found.max()) < 0


def test_a_model_that_differs_in_one_weight_would_be_noticed(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    home, found = load_model(tmp_path, dtype="fp32"), []
    with Engine(home.decoder, home.store) as engine:
        for _ in range(2):
            found.append((weights_digest(home.store, ALONE), references_of(engine, Drawn())))
            home.store.param(home.decoder.params[3].name, TensorKind.HI).view(-1)[5] += 1.0
    assert found[0][0] != found[1][0]
    assert found[0][1].tobytes() != found[1][1].tobytes()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_the_work_and_have_the_same_bits(size: int) -> None:
    case = RankCase(size=size, dtype="fp32")
    model, documents = case.model(), Drawn()

    def referenced(ranks: Ranks) -> References:
        engine, _ = engine_of(case, ranks, model)
        with engine:
            return references_of(engine, documents, ranks)

    (alone,) = Together(1).run(referenced)
    for found in Together(size).run(referenced):
        assert found.tobytes() == alone.tobytes()


def test_documents_are_known_by_their_tokens_and_masks() -> None:
    known = documents_digest(Drawn())
    assert known == documents_digest(Drawn())
    assert known != documents_digest(Drawn(seed=1))
    other = Drawn()
    real = other.tokens

    def changed(document: int) -> tuple[Any, Any]:
        tokens, trained = real(document)
        return tokens, trained ^ (document == 7)

    other.tokens = changed  # type: ignore[method-assign]
    assert known != documents_digest(other)


def test_a_damaged_or_foreign_file_is_not_used(tmp_path: Path) -> None:
    path, values = tmp_path / "references.bin", np.array([-1.5, -2.25], dtype=np.float32)
    assert read_references(path, "a") is None
    write_references(path, "a", values)
    found = read_references(path, "a")
    assert found is not None
    assert found.tobytes() == values.tobytes()
    assert read_references(path, "b") is None
    data = bytearray(path.read_bytes())
    for place in (0, len(data) - 1):
        path.write_bytes(bytes(data[:place]) + bytes([data[place] ^ 1]) + bytes(data[place + 1 :]))
        assert read_references(path, "a") is None
    path.write_bytes(data[:-4])
    assert read_references(path, "a") is None
