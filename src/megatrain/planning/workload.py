"""The work of a step: a model, and so many tokens of rows of one length.

Law (tests/planning/test_workload.py): the micro-batches of a step hold its tokens; only the last
may be smaller. Of several ranks the first has most of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megatrain.optim.states import STATES, StatesByName
from megatrain.planning.model.shapes import AttentionShape, Dtype, ModelShape
from megatrain.planning.ranks.division import SOLE_RANK, Division


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and the tokens of one step."""

    model: ModelShape
    step_tokens: int
    """Tokens of one optimizer step."""
    batch_rows: int | None = None
    """Rows of a step that is counted in rows; its tokens are then the most it has."""
    sequence: int = 2048
    """Length of a row."""
    dtype: Dtype = "bf16"
    attn: str = "auto"
    """Attention implementation, as `model.attn`."""
    packed: bool = False
    """Rows hold several documents, which must not see each other."""
    compiled: bool = False
    """Layers are compiled: each is one graph, for rows as they are."""
    kernels: str = "none"
    """Fused kernels of layers, as `train.kernels`."""
    products: str = "plain"
    """How linear modules of layers multiply, as `train.products`."""
    max_grad_norm: float | None = 1.0
    """None: no clipping, so that updates may run in backward."""
    projects_twice: bool = False
    """The loss needs all log-probabilities of a micro-batch before its gradients."""
    taught_tokens: int = 0
    """Tokens of a teacher that the loss compares at each trained token."""
    keeps_reference: bool = False
    """The weights that training begins with stay in memory."""
    serves_weights: bool = False
    """A server on this host reads a copy of the weights."""
    states: StatesByName = field(default_factory=lambda: STATES["adamw"], hash=False)
    """States that the optimizer keeps beside the fp32 master, by StepSettings.state."""
    kept_checkpoints: int = 2
    """Checkpoints that stay on disk beside the one that is being written."""
    division: Division = SOLE_RANK
    """The ranks that share the model and the step."""

    def with_step(self, tokens: int) -> Workload:
        """Return the workload with steps of so many tokens, and rows in proportion."""
        rows = self.batch_rows and max(1, round(self.batch_rows * tokens / self.step_tokens))
        return replace(self, step_tokens=tokens, batch_rows=rows)

    @property
    def step_setting(self) -> tuple[str, int]:
        """The setting that makes the step as long as it is, and its value."""
        if self.batch_rows is not None:
            return "train.batch_rows", self.batch_rows
        return "train.batch_tokens", self.step_tokens

    @property
    def masked(self) -> bool:
        """Whether attention is given a mask, and computes what the mask hides."""
        if self.masked_by_media:
            return True
        return self.packed and self.attn != "flash_attention_2" and not self.by_document

    @property
    def masked_by_media(self) -> bool:
        """Whether that mask depends on the places of media."""
        return self.model.media is not None and self.model.media.masked

    @property
    def by_document(self) -> bool:
        """Whether each document of a packed row is attended to alone."""
        takes = not self.compiled or self.attn != "eager"
        return self.packed and self.model.by_document and takes and not self.masked_by_media

    def attends_eagerly(self, attention: AttentionShape) -> bool:
        """Return whether attention is taken apart: all scores of a row pass through memory."""
        if self.attn == "flash_attention_2":
            return False
        return self.attn == "eager" or attention.score_bytes > 0

    def num_micro(self, micro_batch_tokens: int) -> int:
        """Return the micro-batches that a rank has of a step; the last may be smaller."""
        return -(-self.step_tokens // (micro_batch_tokens * self.division.size))

    def micro_sizes(self, micro_batch_tokens: int) -> list[int]:
        """Return the tokens of each micro-batch of a step; of ranks, of the one that has most."""
        full, rest = divmod(self.step_tokens, micro_batch_tokens)
        sizes = [micro_batch_tokens] * full + ([rest] if rest else [])
        return sizes[:: self.division.size]

    @property
    def even_tokens(self) -> int:
        """The tokens of a rank, in full rows, if all have as many: micro-batches of more leave some
        of them idle."""
        size = self.division.size
        if size == 1:
            return self.step_tokens
        rows = -(-self.step_tokens // self.sequence)
        return min(self.step_tokens, -(-rows // size) * self.sequence)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of a weight, a hidden state or a gradient, as compute has them."""
        return 2 if self.dtype == "bf16" else 4

    def distinct_tokens(self) -> int:
        """Return the most rows of the embedding that one step needs."""
        return min(self.model.vocab, self.step_tokens)
