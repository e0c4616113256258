// Device memory has two addresses: the one that tensors carry, where nothing can be read or written
// (the host that touches it dies), and the one that only work on streams knows.
#pragma once

#include "segments.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <unordered_map>

namespace host_gpu {

// Memory that is dropped is at once free for the stream it was allocated on and for no other, and
// filled with NaN behind what that stream still does. Whoever uses it on another stream without
// `record_stream` reads NaN, or what somebody else computes.
class Memory final : public c10::DeviceAllocator {
 public:
  static Memory& self();

  c10::DataPtr allocate(size_t num_bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &Memory::drop; }
  void copy_data(void* target, const void* source, size_t num_bytes) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override;
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;

  void cap(int device, double fraction);
  int device_of(const void* address) const;  // -1: of none
  // Of registered host memory it is the same, where host and device are one memory.
  void* worker_address(const void* address) const;
  void resize(const c10::Storage& storage, size_t num_bytes);

 private:
  struct Use {
    Block* block;
    size_t requested;
  };
  // Dropped, but other streams may be at it yet.
  struct Waiting {
    Block* block;
    int device;
    std::vector<std::pair<Queue*, uint64_t>> until;
  };

  Memory();
  char* map(int protection) const;
  static void drop(void* address);
  void free(void* address);
  Block* found_for(int device, Queue* owner, size_t size);
  void cache(int device, Block* block);
  void reclaim();
  void release(int device);
  void count(int device);
  std::vector<c10::CachingAllocator::Stat*> stats_of(int device);

  const size_t total_;  // of each device
  char *seen_, *real_;
  std::mutex mutex_;
  std::vector<Segments> segments_;
  std::unordered_map<void*, Use> live_;
  std::vector<Waiting> waiting_;
  c10::CachingDeviceAllocator::DeviceStats stats_[kMaxDevices];
  size_t cap_[kMaxDevices];
};

}  // namespace host_gpu
