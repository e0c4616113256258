#include "tensors.h"

#include "memory.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace host_gpu {

bool is_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

at::Tensor Likeness::operator()(const at::Tensor& tensor) {
  if (!is_device(tensor)) return tensor;
  const auto key =
      type_ == c10::DeviceType::CPU ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
  auto made = at::detail::make_tensor<c10::TensorImpl>(storage_of(tensor),
                                                       c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return made;
}

c10::Storage Likeness::storage_of(const at::Tensor& tensor) {
  auto* original = tensor.storage().unsafeGetStorageImpl();
  auto found = storages_.find(original);
  if (found != storages_.end()) return found->second;
  const bool on_cpu = type_ == c10::DeviceType::CPU;
  void* address = on_cpu ? Memory::self().worker_address(original->data()) : nullptr;
  c10::Storage made(c10::Storage::use_byte_size_t(), original->nbytes(),
                    c10::DataPtr(address, c10::Device(type_)),
                    on_cpu ? nullptr : c10::GetAllocator(type_), !on_cpu);
  storages_.emplace(original, made);
  return made;
}

at::Tensor empty_as(const at::Tensor& shape, int device) {
  c10::DeviceGuard guard(c10::Device(kType, static_cast<c10::DeviceIndex>(device)));
  return at::detail::empty_strided_generic(shape.sizes(), shape.strides(), &Memory::self(), kKeys,
                                           shape.scalar_type());
}

void reshape_in_place(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const auto needed = at::detail::computeStorageNbytes(
      sizes, strides, tensor.itemsize(), static_cast<size_t>(tensor.storage_offset()));
  if (needed > tensor.storage().nbytes()) {
    c10::DeviceGuard guard(tensor.device());
    Memory::self().resize(tensor.storage(), needed);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

namespace {

// torch.utils.deterministic.fill_uninitialized_memory: a write on the stream of who allocates.
at::Tensor filled(at::Tensor made) {
  auto& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory() &&
      made.nbytes()) {
    void* start = Memory::self().worker_address(made.storage().data());
    const size_t size = made.storage().nbytes();
    current_queue(made.device().index()).push([=] { std::memset(start, 0xFF, size); });
  }
  return made;
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only host memory can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return filled(at::detail::empty_generic(size, &Memory::self(), kKeys,
                                          c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return filled(at::detail::empty_strided_generic(size, stride, &Memory::self(), kKeys,
                                                  c10::dtype_or_default(dtype)));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat>) {
  if (self.sizes() == size) return self;
  std::vector<int64_t> strides(size.size(), 1);
  for (int64_t i = static_cast<int64_t>(size.size()) - 2; i >= 0; i--)
    strides[i] = strides[i + 1] * std::max<int64_t>(size[i + 1], 1);
  reshape_in_place(self, size, strides);
  return self;
}

at::Tensor& set_(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                 at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

void record_stream(at::Tensor& self, at::Stream stream) {
  Memory::self().recordStream(self.storage().data_ptr(), stream);
}

// `module.to(device)` changes its params in place, so that tied ones stay tied, where this is true.
bool may_become(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(may_become));
}

}  // namespace host_gpu
