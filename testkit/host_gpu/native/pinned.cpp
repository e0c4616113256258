#include "pinned.h"

#include "faults.h"

#include <ATen/core/CachingHostAllocator.h>

#include <cstdlib>
#include <cstring>

namespace host_gpu {

Pieces::iterator around(Pieces& pieces, const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto found = pieces.upper_bound(at);
  if (found == pieces.begin()) return pieces.end();
  --found;
  return at < found->first + found->second.size ? found : pieces.end();
}

namespace {

// Gives every buffer fresh memory and overwrites what it drops, so that a copy which comes too late
// meets bytes that are wrong.
class Pinned final : public at::HostAllocator {
 public:
  static Pinned& self() {
    static auto* pinned = new Pinned;
    return *pinned;
  }

  c10::DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0) return {nullptr, nullptr, &Pinned::drop, c10::DeviceType::CPU};
    reclaim();
    void* address = nullptr;
    const size_t size = (num_bytes + 63) / 64 * 64;
    TORCH_CHECK(posix_memalign(&address, 64, size) == 0, "hostgpu: no host memory to pin");
    std::memset(address, 0xFF, size);
    std::lock_guard<std::mutex> lock(mutex_);
    buffers_[reinterpret_cast<uintptr_t>(address)] = {size, -1, {}};
    stats_.active_bytes.increase(static_cast<int64_t>(size));
    return {address, address, &Pinned::drop, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Pinned::drop; }
  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    default_copy_data(target, source, num_bytes);
  }
  bool record_event(void* address, void*, c10::Stream stream) override {
    return use(address, queue(stream));
  }
  void empty_cache() override { reclaim(); }
  at::HostStats get_stats() override {
    std::lock_guard<std::mutex> lock(mutex_);
    at::HostStats stats;
    stats.active_bytes = stats_.active_bytes;
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool use(const void* address, Queue& queue) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = around(buffers_, address);
    if (found == buffers_.end()) return false;
    found->second.uses[&queue] = queue.last();
    return true;
  }

  bool look_up(const void* address, uintptr_t& stop) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = around(buffers_, address);
    if (found == buffers_.end()) return false;
    stop = found->first + found->second.size;
    return true;
  }

 private:
  static void drop(void* address) {
    if (!address) return;
    auto& self = Pinned::self();
    {
      std::lock_guard<std::mutex> lock(self.mutex_);
      auto found = self.buffers_.find(reinterpret_cast<uintptr_t>(address));
      self.stats_.active_bytes.decrease(static_cast<int64_t>(found->second.size));
      if (!over(found->second)) counters.late_frees++;
      self.dropped_.emplace_back(found->first, std::move(found->second));
      self.buffers_.erase(found);
    }
    self.reclaim();
  }

  static bool over(const Piece& piece) {
    for (auto& [queue, number] : piece.uses)
      if (!queue->passed(number)) return false;
    return true;
  }

  void reclaim() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = dropped_.begin(); it != dropped_.end();) {
      if (!over(it->second)) {
        ++it;
        continue;
      }
      std::memset(reinterpret_cast<void*>(it->first), 0xFF, it->second.size);
      std::free(reinterpret_cast<void*>(it->first));
      it = dropped_.erase(it);
    }
  }

  std::mutex mutex_;
  Pieces buffers_;
  std::vector<std::pair<uintptr_t, Piece>> dropped_;
  at::HostStats stats_;
};

struct RegisterPinned {
  RegisterPinned() { at::setHostAllocator(kType, &Pinned::self()); }
} register_pinned;

}  // namespace

HostKind host_kind(const void* address, size_t num_bytes, int device) {
  uintptr_t stop = 0;
  int owner = -1;
  HostKind kind = HostKind::pageable;
  if (Pinned::self().look_up(address, stop))
    kind = HostKind::pinned;
  else if (registered_around(address, stop, owner) && (owner < 0 || owner == device))
    kind = HostKind::registered;
  // cudaMemcpyAsync fails so where a range begins in registered memory and goes on beyond it.
  TORCH_CHECK(
      kind == HostKind::pageable || reinterpret_cast<uintptr_t>(address) + num_bytes <= stop,
      "hostgpu: invalid argument: a copy crosses the end of its pinned memory");
  return kind;
}

bool is_pinned(const void* address) {
  uintptr_t stop = 0;
  int owner = -1;
  return Pinned::self().look_up(address, stop) || registered_around(address, stop, owner);
}

void used_by(const void* address, Queue& queue) {
  if (!Pinned::self().use(address, queue)) registered_used_by(address, queue);
}

}  // namespace host_gpu
