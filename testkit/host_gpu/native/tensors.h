// Making, resizing and filling tensors of the device.
#pragma once

#include "likeness.h"

namespace host_gpu {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty_as(const at::Tensor& shape, int device);  // sizes, strides and dtype
void reshape_in_place(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace host_gpu
