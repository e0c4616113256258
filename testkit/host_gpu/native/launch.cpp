#include "launch.h"

#include "faults.h"
#include "random.h"
#include "streams.h"
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/stack.h>

#include <map>

namespace host_gpu {

namespace {
std::mutex unshaped_mutex;
std::map<std::string, int> unshaped;

bool is_list_of_tensors(const c10::Type& type) {
  return type.kind() == c10::TypeKind::ListType &&
      type.expectRef<c10::ListType>().getElementType()->kind() == c10::TypeKind::TensorType;
}

void put(const c10::IValue& target, const c10::IValue& result, const c10::OperatorHandle& op) {
  if (target.isTensor() && target.toTensor().defined()) {
    const auto &to = target.toTensor(), &from = result.toTensor();
    TORCH_CHECK(to.sizes() == from.sizes() && to.scalar_type() == from.scalar_type(),
                op.schema().operator_name(), ": meta foretold ", to.scalar_type(), to.sizes(),
                ", the CPU gives ", from.scalar_type(), from.sizes());
    copy_on_cpu(to, from);
  } else if (target.isTensorList()) {
    const auto to = target.toTensorVector(), from = result.toTensorVector();
    for (size_t i = 0; i < to.size(); i++) put(to[i], from[i], op);
  }
}
}  // namespace

std::string unshaped_ops() {
  std::lock_guard<std::mutex> lock(unshaped_mutex);
  std::string all;
  for (auto& [name, count] : unshaped) all += name + " " + std::to_string(count) + "\n";
  return all;
}

void run_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  at::init_num_threads();
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

void copy_on_cpu(const at::Tensor& target, const at::Tensor& source) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  Stack stack{target, source, false};
  run_on_cpu(op, stack);
}

Launch::Launch(const c10::OperatorHandle& op, Stack& stack)
    : op_(op),
      schema_(op.schema()),
      args_(stack.end() - static_cast<long>(schema_.arguments().size()), stack.end()) {
  torch::jit::drop(stack, args_.size());
  find_device();
}

Stack Launch::go() {
  raise_if_lost(device_);
  if (is_view()) return {view()};
  Stack results;
  if (!queue_it(results)) results = wait_for_it();
  return results;
}

void Launch::find_device() {
  auto look = [&](const at::Tensor& tensor) {
    if (is_device(tensor)) {
      TORCH_CHECK(device_ < 0 || device_ == tensor.device().index(), schema_.name(),
                  ": Expected all tensors to be on the same device, but found hostgpu:", device_,
                  " and ", tensor.device());
      device_ = tensor.device().index();
    }
    return tensor;
  };
  for (auto& arg : args_) {
    changed(arg, look);
    if (arg.isDevice() && arg.toDevice().is_privateuseone() && device_ < 0)
      device_ = resolved(arg.toDevice());
  }
  if (device_ < 0) device_ = current_device();
}

bool Launch::is_view() const {
  if (schema_.returns().size() != 1) return false;
  const auto* info = schema_.returns()[0].alias_info();
  return info && !info->isWrite() && args_[0].isTensor();
}

// The same bytes in another shape: which one, a tensor without bytes tells.
at::Tensor Launch::view() {
  Likeness on_meta(c10::DeviceType::Meta);
  Stack stack = args_for(on_meta, c10::DeviceType::Meta, false);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op_.callBoxed(stack);
  }
  const auto shape = stack[0].toTensor(), self = args_[0].toTensor();
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), shape.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(),
                                                    shape.storage_offset());
  return made;
}

// The arguments with tensors of another device type in the place of ours.
Stack Launch::args_for(Likeness& likeness, c10::DeviceType type, bool draws) {
  Stack made;
  for (size_t i = 0; i < args_.size(); i++) {
    const auto& arg = args_[i];
    if (schema_.arguments()[i].name() == "generator") {
      std::optional<at::Generator> given;
      if (arg.isGenerator()) given = arg.toGenerator();
      made.push_back(draws ? c10::IValue(draw(device_, given)) : c10::IValue());
    } else if (arg.isDevice()) {
      made.push_back(arg.toDevice().is_privateuseone() ? c10::IValue(c10::Device(type)) : arg);
    } else {
      made.push_back(
          changed(arg, [&](const at::Tensor& tensor) { return likeness(taken(tensor, i)); }));
    }
  }
  return made;
}

// A number on the host goes along by value, as a kernel's argument; an index on the host is
// copied by torch itself. Anything else must be on the device.
at::Tensor Launch::taken(const at::Tensor& tensor, size_t arg) const {
  if (!tensor.defined() || is_device(tensor)) return tensor;
  const auto& name = schema_.name();
  const bool index = name.find("aten::index") == 0 || name.find("aten::_index_put") == 0;
  TORCH_CHECK(tensor.device().is_cpu() && !writes(arg) && (tensor.dim() == 0 || index), name,
              ": Expected all tensors to be on the same device, but found one on ",
              tensor.device());
  at::Tensor copy = at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type());
  copy_on_cpu(copy, tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// Which argument a result is, if it is one.
std::optional<size_t> Launch::returned_arg(size_t number) const {
  const auto* info = schema_.returns()[number].alias_info();
  if (!info) return std::nullopt;
  for (size_t i = 0; i < args_.size(); i++)
    if (alias(i) && alias(i)->beforeSets() == info->beforeSets()) return i;
  return std::nullopt;
}

// Whether all results are tensors; `makes`: some are no arguments.
bool Launch::returns_tensors(bool& makes) const {
  const auto& returns = schema_.returns();
  for (size_t i = 0; i < returns.size(); i++) {
    if (returned_arg(i)) continue;
    makes = true;
    if (returns[i].type()->kind() != c10::TypeKind::TensorType &&
        !is_list_of_tensors(*returns[i].type()))
      return false;
  }
  return true;
}

// What the op makes, without bytes; grows `out` arguments to what they will hold. False where
// nobody knows it before the op is done.
bool Launch::find_shapes(Stack& shapes) {
  Likeness on_meta(c10::DeviceType::Meta);
  shapes = args_for(on_meta, c10::DeviceType::Meta, false);
  const Stack given = shapes;
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    op_.callBoxed(shapes);
  } catch (...) {
    return false;  // no such function, or wrong arguments: the CPU's kernel will say which
  }
  if (schema_.name() == "aten::native_layer_norm") {
    // On the CPU the statistics have the dtype of the weight, or else of the input.
    const auto& typed = given[2].isTensor() ? given[2].toTensor() : given[0].toTensor();
    for (int i : {1, 2}) shapes[i] = shapes[i].toTensor().to(typed.scalar_type());
  }
  for (size_t i = 0; i < args_.size(); i++) {
    if (!schema_.arguments()[i].is_out() || !args_[i].isTensor()) continue;
    const auto out = args_[i].toTensor(), shape = given[i].toTensor();
    if (out.sizes() != shape.sizes()) reshape_in_place(out, shape.sizes(), shape.strides());
  }
  return true;
}

// False if nobody knows what the op gives before it is done.
bool Launch::queue_it(Stack& results) {
  bool makes = false, grows = false;
  if (!returns_tensors(makes)) return false;
  // Composites give outputs of the right shape; only empty ones may have to grow.
  for (size_t i = 0; i < args_.size(); i++)
    grows = grows || (schema_.arguments()[i].is_out() && args_[i].isTensor() &&
                      args_[i].toTensor().numel() == 0);
  Stack shapes;
  if ((makes || grows) && !find_shapes(shapes)) return false;

  Likeness on_cpu(c10::DeviceType::CPU);
  Stack work = args_for(on_cpu, c10::DeviceType::CPU, true), targets;
  for (size_t i = 0; i < schema_.returns().size(); i++) {
    if (auto arg = returned_arg(i)) {
      results.push_back(args_[*arg]);
      targets.emplace_back();
      continue;
    }
    results.push_back(changed(shapes[i], [&](const at::Tensor& shape) {
      return shape.defined() ? empty_as(shape, device_) : shape;
    }));
    targets.push_back(changed(results.back(), on_cpu));
  }
  current_queue(device_).push(
      [op = op_, work = std::move(work), targets = std::move(targets)]() mutable {
        run_on_cpu(op, work);
        for (size_t i = 0; i < targets.size(); i++) put(targets[i], work[i], op);
      });
  return true;
}

// Do the op now, in this thread: the host waits, as for `nonzero` on CUDA.
Stack Launch::wait_for_it() {
  const auto name = toString(schema_.operator_name());
  about_to_wait(name.c_str());
  counters.unshaped_ops++;
  {
    std::lock_guard<std::mutex> lock(unshaped_mutex);
    unshaped[name]++;
  }
  auto& queue = current_queue(device_);
  queue.await(queue.last());
  raise_if_lost(device_);
  Likeness on_cpu(c10::DeviceType::CPU);
  Stack work = args_for(on_cpu, c10::DeviceType::CPU, true), results;
  run_on_cpu(op_, work);
  for (size_t i = 0; i < work.size(); i++) {
    if (auto arg = returned_arg(i)) {
      results.push_back(args_[*arg]);
      continue;
    }
    results.push_back(changed(work[i], [&](const at::Tensor& made) {
      if (!made.defined()) return made;
      auto placed = empty_as(made, device_);
      queue.push([to = on_cpu(placed), made] { copy_on_cpu(to, made); });
      return placed;
    }));
  }
  return results;
}

}  // namespace host_gpu
