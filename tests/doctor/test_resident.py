"""The resident side: torch's own loss and gradients where sums have one term."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain.batch import MicroBatch
from megatrain.doctor.resident import resident_gradients

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip


def test_one_micro_batch_has_the_loss_and_gradients_of_the_models_own_forward() -> None:
    torch.manual_seed(0)
    for tied in (False, True):
        config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        ids = torch.randint(0, 32, (2, 9))
        (loss,), gradients = resident_gradients(model, [MicroBatch(input_ids=ids, labels=ids)])
        expected = model(input_ids=ids, labels=ids).loss
        torch.autograd.backward(expected)
        torch.testing.assert_close(torch.tensor(loss), expected.detach())
        assert gradients.keys() == dict(model.named_parameters()).keys()
        for name, param in model.named_parameters():
            torch.testing.assert_close(gradients[name], param.grad, msg=name)
