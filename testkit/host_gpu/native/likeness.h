// Tensors of another device type that look like ours: over the bytes that workers use, or over none.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <unordered_map>
#include <vector>

namespace host_gpu {

using Stack = std::vector<c10::IValue>;

bool is_device(const at::Tensor& tensor);

// Tensors that share a storage share one there too.
class Likeness {
 public:
  explicit Likeness(c10::DeviceType type) : type_(type) {}
  at::Tensor operator()(const at::Tensor& tensor);

 private:
  c10::Storage storage_of(const at::Tensor& tensor);
  const c10::DeviceType type_;  // CPU or Meta
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

// The value with every tensor in it changed.
template <class Change>
c10::IValue changed(const c10::IValue& value, Change&& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorList()) made.push_back(change(each));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
      made.push_back(each ? std::optional(change(*each)) : std::nullopt);
    return made;
  }
  return value;
}

}  // namespace host_gpu
