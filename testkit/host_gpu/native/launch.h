// Computing: what one op makes is known from torch's meta kernels, the op is queued on the current
// stream, and done there by the CPU's kernel on the bytes of the device.
#pragma once

#include "likeness.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace host_gpu {

// On a stream's thread: the op below autograd.
void run_on_cpu(const c10::OperatorHandle& op, Stack& stack);
void copy_on_cpu(const at::Tensor& target, const at::Tensor& source);

// One op on its way to the device.
class Launch {
 public:
  Launch(const c10::OperatorHandle& op, Stack& stack);  // takes its arguments from the stack
  Stack go();

 private:
  const c10::AliasInfo* alias(size_t arg) const { return schema_.arguments()[arg].alias_info(); }
  bool writes(size_t arg) const { return alias(arg) && alias(arg)->isWrite(); }
  void find_device();
  bool is_view() const;
  at::Tensor view();
  Stack args_for(Likeness& likeness, c10::DeviceType type, bool draws);
  at::Tensor taken(const at::Tensor& tensor, size_t arg) const;
  std::optional<size_t> returned_arg(size_t number) const;
  bool returns_tensors(bool& makes) const;
  bool find_shapes(Stack& shapes);
  bool queue_it(Stack& results);
  Stack wait_for_it();

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack args_;
  int device_ = -1;
};

std::string unshaped_ops();  // which ops made the host wait for their shape: "name count\n" each

}  // namespace host_gpu
