// Copies between host and device, and between devices.
#include "events.h"
#include "faults.h"
#include "launch.h"
#include "memory.h"
#include "pinned.h"

#include <torch/library.h>

#include <cstring>
#include <thread>

namespace host_gpu {

namespace {

// Copy at the rate of the link.
void move(void* to, const void* from, size_t size) {
  std::memcpy(to, from, size);
  const double ns = timing.copy_ns_per_byte * static_cast<double>(size);
  if (ns > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(static_cast<int64_t>(ns)));
}

// The stream of either device goes on when the other has come so far; the host does not wait.
void copy_on_device(const at::Tensor& source, const at::Tensor& target) {
  auto& reads = current_queue(source.device().index());
  auto& writes = current_queue(target.device().index());
  Likeness on_cpu(c10::DeviceType::CPU);
  Event ready, done;
  ready.record(writes);
  ready.block(reads);
  reads.push([to = on_cpu(target), from = on_cpu(source)] { copy_on_cpu(to, from); });
  done.record(reads);
  done.block(writes);
}

// Torch would go by temporary tensors and wait at some point; so do we, but only wait.
void copy_changing(const at::Tensor& source, const at::Tensor& target, Queue& queue) {
  about_to_wait("a copy that changes dtype or strides on its way");
  Likeness on_cpu(c10::DeviceType::CPU);
  queue.await(queue.push(
      [to = on_cpu(target), from = on_cpu(source)] { copy_on_cpu(to, from); }));
}

void copy_bytes(const at::Tensor& source, const at::Tensor& target, Queue& queue,
                bool non_blocking) {
  const bool inbound = is_device(target);
  const size_t size = target.nbytes();
  void* host = inbound ? source.data_ptr() : target.data_ptr();
  const auto& on_device = inbound ? target : source;
  void* device = Memory::self().worker_address(on_device.data_ptr());
  const auto kind = host_kind(host, size, queue.device);
  if (!non_blocking) about_to_wait("a blocking copy");
  if (kind == HostKind::pageable && inbound && non_blocking && integrated) {
    queue.push([=, held = source] { move(device, host, size); });
    return;
  }
  if (kind == HostKind::pageable) {
    // The driver waits for the stream, then copies through memory of its own: both ways the host
    // stands still, and set_sync_debug_mode is not asked.
    if (non_blocking) counters.silent_waits++;
    queue.await(queue.last());
  }
  const auto number = queue.push([=] {
    if (inbound)
      move(device, host, size);
    else
      move(host, device, size);
  });
  if (kind != HostKind::pageable) used_by(host, queue);
  if (!non_blocking || kind == HostKind::pageable) queue.await(number);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const int device = (is_device(target) ? target : source).device().index();
  raise_if_lost(device);
  if (target.numel() == 0) return target;
  if (is_device(source) && is_device(target)) {
    copy_on_device(source, target);
    return target;
  }
  auto& queue = current_queue(device);
  if (source.scalar_type() == target.scalar_type() && source.sizes() == target.sizes() &&
      source.is_contiguous() && target.is_contiguous())
    copy_bytes(source, target, queue, non_blocking);
  else
    copy_changing(source, target, queue);
  raise_if_lost(device);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
}

}  // namespace host_gpu
