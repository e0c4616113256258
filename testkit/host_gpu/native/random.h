// Random numbers: a seed and a count of draws for each device, as CUDA's philox has them.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace host_gpu {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

// A CPU generator for one op: what it draws is decided when the op is queued, not when it is done.
at::Generator draw(int device, const std::optional<at::Generator>& given);

}  // namespace host_gpu
