// Flash attention by document, behind the ops that torch's `varlen_attn` calls on a card. Each
// document is computed by the CPU's own flash kernel, so its bits are those of the document alone.
//
// What a card's kernel asks for is asked for here, with an error; what it does in silence is done
// here too: rows of a document beyond the longest one that was announced are left unwritten, which
// here is NaN.
#include "launch.h"
#include "tensors.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

namespace host_gpu {

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kWidths = 8, kWidest = 256;

// A document's part of a tensor of (tokens, heads, width), as (1, heads, tokens, width).
at::Tensor part(const at::Tensor& tensor, int64_t begin, int64_t end, int64_t repeats = 1) {
  auto made = tensor.slice(0, begin, end).transpose(0, 1).unsqueeze(0);
  return repeats == 1 ? made : made.repeat_interleave(repeats, 1);
}

struct Document {
  int64_t begin, end, keys_begin, keys_end;
  std::optional<at::Tensor> mask;
  bool causal;
};

// The documents, each with the mask that its window asks for. `before` and `after`: how many tokens
// a token sees on each side of itself, -1: all of them.
std::vector<Document> documents(const at::Tensor& query, const at::Tensor& bounds_q,
                                const at::Tensor& bounds_k, int64_t longest, int64_t before,
                                int64_t after) {
  std::vector<Document> found;
  const auto *q = bounds_q.const_data_ptr<int32_t>(), *k = bounds_k.const_data_ptr<int32_t>();
  for (int64_t i = 0; i + 1 < bounds_q.numel(); i++) {
    Document one{q[i], std::min<int64_t>(q[i + 1], q[i] + longest), k[i], k[i + 1], {}, false};
    one.causal = before < 0 && after == 0 && one.end - one.begin == one.keys_end - one.keys_begin;
    if (!one.causal && (before >= 0 || after >= 0)) {
      const auto places = at::arange(one.end - one.begin).unsqueeze(1);
      const auto ahead = at::arange(one.keys_end - one.keys_begin) - places;
      auto seen = at::full_like(ahead, true, at::kBool);
      if (before >= 0) seen = seen & (ahead >= -before);
      if (after >= 0) seen = seen & (ahead <= after);
      one.mask = at::where(seen, 0.0, -INFINITY).to(query.scalar_type());
    }
    if (one.begin < one.end) found.push_back(one);
  }
  return found;
}

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& query, const at::Tensor& key,
                                           const at::Tensor& value, const at::Tensor& bounds_q,
                                           const at::Tensor& bounds_k, int64_t longest,
                                           double scale, int64_t before, int64_t after) {
  auto output = at::full(query.sizes(), kNaN, query.options());
  auto sums = at::full({query.size(1), query.size(0)}, kNaN, query.options().dtype(at::kFloat));
  const auto group = query.size(1) / key.size(1);
  for (const auto& one : documents(query, bounds_q, bounds_k, longest, before, after)) {
    const auto [made, sum] = at::_scaled_dot_product_flash_attention_for_cpu(
        part(query, one.begin, one.end), part(key, one.keys_begin, one.keys_end, group),
        part(value, one.keys_begin, one.keys_end, group), 0.0, one.causal, one.mask, scale);
    part(output, one.begin, one.end).copy_(made);
    sums.slice(1, one.begin, one.end).copy_(sum[0]);
  }
  return {output, sums};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& output, const at::Tensor& sums,
    const at::Tensor& bounds_q, const at::Tensor& bounds_k, int64_t longest, double scale,
    int64_t before, int64_t after) {
  std::vector<at::Tensor> made;
  for (const auto& each : {query, key, value})
    made.push_back(at::full(each.sizes(), kNaN, each.options()));
  const auto group = query.size(1) / key.size(1);
  for (const auto& one : documents(query, bounds_q, bounds_k, longest, before, after)) {
    const auto [of_query, of_key, of_value] =
        at::_scaled_dot_product_flash_attention_for_cpu_backward(
            part(gradient, one.begin, one.end), part(query, one.begin, one.end),
            part(key, one.keys_begin, one.keys_end, group),
            part(value, one.keys_begin, one.keys_end, group), part(output, one.begin, one.end),
            sums.slice(1, one.begin, one.end).unsqueeze(0), 0.0, one.causal, one.mask, scale);
    part(made[0], one.begin, one.end).copy_(of_query);
    for (auto [whole, repeated] : {std::pair(made[1], of_key), std::pair(made[2], of_value)}) {
      const auto summed = group == 1 ? repeated : repeated.unflatten(1, {-1, group}).sum(2);
      part(whole, one.keys_begin, one.keys_end).copy_(summed);
    }
  }
  return {made[0], made[1], made[2]};
}

std::tuple<at::Tensor, at::Tensor> forward_shapes(const at::Tensor& query, const at::Tensor&,
                                                  const at::Tensor&, const at::Tensor&,
                                                  const at::Tensor&, int64_t, double, int64_t,
                                                  int64_t) {
  return {at::empty(query.sizes(), query.options()),
          at::empty({query.size(1), query.size(0)}, query.options().dtype(at::kFloat))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_shapes(
    const at::Tensor&, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, double,
    int64_t, int64_t) {
  auto like = [](const at::Tensor& each) { return at::empty(each.sizes(), each.options()); };
  return {like(query), like(key), like(value)};
}

// What the kernels of CUDA check before they start.
void require(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
             const at::Tensor& bounds_q, const at::Tensor& bounds_k, double dropout) {
  const auto type = query.scalar_type();
  TORCH_CHECK(type == at::kHalf || type == at::kBFloat16,
              "FlashAttention only support fp16 and bf16 data type");
  for (const auto& each : {query, key, value}) {
    TORCH_CHECK(each.dim() == 3 && each.stride(-1) == 1,
                "Input tensor must have contiguous last dimension");
    TORCH_CHECK(each.size(2) == query.size(2) && each.scalar_type() == type,
                "query, key and value must have one width and one dtype");
  }
  TORCH_CHECK(query.size(2) % kWidths == 0, "head_size must be a multiple of ", kWidths);
  TORCH_CHECK(query.size(2) <= kWidest, "head dimension at most ", kWidest);
  TORCH_CHECK(query.size(1) % key.size(1) == 0, "heads of queries are no multiple of those of keys");
  for (const auto& bounds : {bounds_q, bounds_k})
    TORCH_CHECK(bounds.scalar_type() == at::kInt && bounds.is_contiguous() && is_device(bounds),
                "bounds of documents are int32, contiguous and on the device");
  TORCH_CHECK(dropout == 0, "no dropout here");
}

double given_or_usual(std::optional<double> scale, const at::Tensor& query) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(query.size(2))));
}

// The right bound of a window: none after a token where attention is causal.
int64_t after_of(std::optional<int64_t> right, bool causal) { return causal ? 0 : right.value_or(-1); }

Stack launched(const char* name, Stack stack) {
  return Launch(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), stack).go();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> flash_attention_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& bounds_q, const std::optional<at::Tensor>& bounds_k,
    int64_t longest, int64_t, double dropout, bool causal, bool, std::optional<double> scale,
    std::optional<int64_t> left, std::optional<int64_t> right,
    const std::optional<at::Tensor>& used, const std::optional<at::Tensor>& slopes,
    const std::optional<at::Tensor>& table, std::optional<int64_t>) {
  TORCH_CHECK(bounds_q && bounds_k && !used && !slopes && !table, "documents by their bounds only");
  require(query, key, value, *bounds_q, *bounds_k, dropout);
  auto made = launched("host_gpu::documents_forward",
                       {query, key, value, *bounds_q, *bounds_k, longest,
                        given_or_usual(scale, query), left.value_or(-1), after_of(right, causal)});
  const auto random = at::empty({2}, query.options().dtype(at::kLong));
  const auto none = at::empty({0}, query.options());
  return {made[0].toTensor(), made[1].toTensor(), random, none, none};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_attention_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& output, const at::Tensor& sums,
    const at::Tensor& bounds_q, const at::Tensor& bounds_k, int64_t longest, int64_t,
    double dropout, bool causal, const at::Tensor&, const at::Tensor&, std::optional<double> scale,
    std::optional<int64_t> left, std::optional<int64_t> right) {
  require(query, key, value, bounds_q, bounds_k, dropout);
  auto made = launched("host_gpu::documents_backward",
                       {gradient, query, key, value, output, sums, bounds_q, bounds_k, longest,
                        given_or_usual(scale, query), left.value_or(-1), after_of(right, causal)});
  return {made[0].toTensor(), made[1].toTensor(), made[2].toTensor()};
}

}  // namespace

TORCH_LIBRARY(host_gpu, m) {
  m.def(
      "documents_forward(Tensor query, Tensor key, Tensor value, Tensor bounds_q, Tensor bounds_k, "
      "int longest, float scale, int before, int after) -> (Tensor, Tensor)");
  m.def(
      "documents_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor output, "
      "Tensor sums, Tensor bounds_q, Tensor bounds_k, int longest, float scale, int before, "
      "int after) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(host_gpu, CPU, m) {
  m.impl("documents_forward", TORCH_FN(forward));
  m.impl("documents_backward", TORCH_FN(backward));
}

TORCH_LIBRARY_IMPL(host_gpu, Meta, m) {
  m.impl("documents_forward", TORCH_FN(forward_shapes));
  m.impl("documents_backward", TORCH_FN(backward_shapes));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_flash_attention_forward", TORCH_FN(flash_attention_forward));
  m.impl("_flash_attention_backward", TORCH_FN(flash_attention_backward));
}

}  // namespace host_gpu
