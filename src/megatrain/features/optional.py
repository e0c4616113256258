"""Features, imported when a step first has them (late.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.late import imported_late

if TYPE_CHECKING:
    from megatrain.features.activation_offload import activation_offload as activation_offload
    from megatrain.features.disk_offload import disk_offload as disk_offload
    from megatrain.features.embedding_rows import embedding_rows as embedding_rows
    from megatrain.features.expert_pages import expert_pages as expert_pages
    from megatrain.features.muon import muon as muon
    from megatrain.features.router_loss import router_loss as router_loss
    from megatrain.features.saved_activations import saved_activations as saved_activations
    from megatrain.features.sharding import sharding as sharding
    from megatrain.features.tied_embeddings import tied_embeddings as tied_embeddings
    from megatrain.features.two_backward_passes import two_backward_passes as two_backward_passes
    from megatrain.features.unified_memory import unified_memory as unified_memory

__getattr__ = imported_late(
    __name__,
    "megatrain.features.activation_offload.activation_offload",
    "megatrain.features.disk_offload.disk_offload",
    "megatrain.features.embedding_rows.embedding_rows",
    "megatrain.features.expert_pages.expert_pages",
    "megatrain.features.muon.muon",
    "megatrain.features.router_loss.router_loss",
    "megatrain.features.saved_activations.saved_activations",
    "megatrain.features.sharding.sharding",
    "megatrain.features.tied_embeddings.tied_embeddings",
    "megatrain.features.two_backward_passes.two_backward_passes",
    "megatrain.features.unified_memory.unified_memory",
)
