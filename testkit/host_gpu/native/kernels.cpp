// Every op that torch has no composite for is launched; a few need more than that.
#include "launch.h"
#include "tensors.h"

#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

namespace host_gpu {

namespace {

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  for (auto& result : Launch(op, *stack).go()) stack->push_back(std::move(result));
}

// The CPU's kernel draws from the host's generator, without a word of it in its schema.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  if (!train.value_or(true) || p == 0)
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {at::mul(at::mul(input, mask), p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

at::Tensor native_dropout_backward(const at::Tensor& gradient, const at::Tensor& mask,
                                   double scale) {
  return at::mul(at::mul(gradient, mask), scale);
}

// A device counts integers too; the CPU's kernel does not.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& least,
                 const at::Scalar& most) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::histc", "");
  const bool integral = c10::isIntegralType(self.scalar_type(), false);
  Stack stack{integral ? self.to(at::kDouble) : self, bins, least, most};
  fallback(op, kKeys, &stack);
  const auto counts = stack[0].toTensor();
  return integral ? counts.to(self.scalar_type()) : counts;
}

// Attention takes the kernel that the CPU would take, so that its bits are the CPU's.
int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool enable_gqa) {
  Likeness on_cpu(c10::DeviceType::CPU);
  auto like = [&](const at::Tensor& tensor) {
    auto made = on_cpu(tensor);
    if (tensor.requires_grad() && !made.requires_grad()) made.set_requires_grad(true);
    return made;
  };
  const auto mask_there = mask ? std::optional(like(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(like(query), like(key), like(value), mask_there, dropout, causal,
                               scale, enable_gqa);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("native_dropout_backward", TORCH_FN(native_dropout_backward));
  m.impl("histc", TORCH_FN(histc));
  // Torch has composites of these, which give other bits than the CPU's own kernels, or none.
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward",
                           "mish_backward", "convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace host_gpu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &host_gpu::choose_attention)
}  // namespace at::native
