#include "memory.h"

#include "faults.h"
#include "pinned.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <cstring>

namespace host_gpu {

namespace {
constexpr int kPoison = 0xFF;  // NaN in every floating dtype, -1 as an index

// What the host has free, without pages of files, and in all: an integrated GPU tells these.
std::pair<size_t, size_t> host_memory() {
  struct sysinfo facts {};
  sysinfo(&facts);
  return {facts.freeram * facts.mem_unit, facts.totalram * facts.mem_unit};
}

struct RegisterMemory {
  RegisterMemory() { c10::SetAllocator(kType, &Memory::self()); }
} register_memory;
}  // namespace

Memory& Memory::self() {
  static auto* memory = new Memory;
  return *memory;
}

Memory::Memory() : total_(setting("HOST_GPU_MEMORY_MIB", 4096) << 20) {
  seen_ = map(PROT_NONE);
  real_ = map(PROT_READ | PROT_WRITE);
  for (int device = 0; device < device_count(); device++) {
    segments_.emplace_back(device * total_, total_);
    cap_[device] = total_;
  }
}

char* Memory::map(int protection) const {
  void* made = mmap(nullptr, total_ * device_count(), protection,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(made != MAP_FAILED, "hostgpu: no address space for ", total_, " bytes a device");
  // A core dump of a crashed test needs none of it.
  madvise(made, total_ * device_count(), MADV_DONTDUMP);
  return static_cast<char*>(made);
}

c10::DataPtr Memory::allocate(size_t num_bytes) {
  const int device = current_device();
  const c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
  if (num_bytes == 0) return {nullptr, nullptr, &Memory::drop, where};
  raise_if_lost(device);
  Queue* owner = &current_queue(device);
  const size_t size = Segments::rounded(num_bytes);
  std::unique_lock<std::mutex> lock(mutex_);
  reclaim();
  Block* block = found_for(device, owner, size);
  if (!block) {  // as cudaFree does: wait for all, then give back what is cached
    lock.unlock();
    synchronize(device);
    lock.lock();
    reclaim();
    release(device);
    block = found_for(device, owner, size);
  }
  if (!block) {
    stats_[device].num_ooms++;
    const auto reserved = segments_[device].reserved();
    TORCH_CHECK_WITH(OutOfMemoryError, false, "hostgpu out of memory. Tried to allocate ", num_bytes,
                     " bytes. Device ", device, " has a total capacity of ", total_, " bytes, ",
                     reserved, " are reserved, ", cap_[device], " are allowed");
  }
  auto& stats = stats_[device];
  stats.allocated_bytes[0].increase(block->size);
  stats.requested_bytes[0].increase(num_bytes);
  stats.active_bytes[0].increase(block->size);
  stats.allocation[0].increase(1);
  count(device);
  void* address = seen_ + block->start;
  live_[address] = {block, num_bytes};
  return {address, address, &Memory::drop, where};
}

Block* Memory::found_for(int device, Queue* owner, size_t size) {
  auto& segments = segments_[device];
  if (auto* block = segments.take_cached(owner, size)) return block;
  std::pair<size_t, size_t> fresh;
  auto* block = segments.take_new(owner, size, cap_[device], fresh);
  if (block) std::memset(real_ + fresh.first, kPoison, fresh.second);
  return block;
}

void Memory::copy_data(void* target, const void* source, size_t num_bytes) const {
  void *to = worker_address(target), *from = worker_address(source);
  current_queue(current_device()).push([=] { std::memcpy(to, from, num_bytes); });
}

void Memory::emptyCache(c10::MempoolId_t) {
  for (int device = 0; device < device_count(); device++) {
    synchronize(device);
    std::lock_guard<std::mutex> lock(mutex_);
    reclaim();
    release(device);
  }
}

void Memory::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = live_.find(pointer.get());
  if (found == live_.end()) return;
  Block* block = found->second.block;
  Queue* other = &queue(stream);
  if (other != block->owner) block->others.insert(other);
}

void Memory::drop(void* address) {
  if (address) self().free(address);
}

void Memory::free(void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = live_.find(address);
  TORCH_INTERNAL_ASSERT(found != live_.end());
  auto [block, requested] = found->second;
  live_.erase(found);
  const int device = block->owner->device;
  auto& stats = stats_[device];
  stats.allocated_bytes[0].decrease(block->size);
  stats.requested_bytes[0].decrease(requested);
  stats.allocation[0].decrease(1);
  if (block->others.empty()) {
    cache(device, block);
    return;
  }
  Waiting waiting{block, device, {}};
  for (auto* other : block->others) waiting.until.emplace_back(other, other->last());
  waiting_.push_back(std::move(waiting));
}

void Memory::cache(int device, Block* block) {
  char* start = real_ + block->start;
  const size_t size = block->size;
  Queue* owner = block->owner;
  // An idle stream has nothing that this could overtake. To queue it there instead would be a write
  // that no program can order its own work on other streams behind.
  if (owner->idle())
    std::memset(start, kPoison, size);
  else
    owner->push([=] { std::memset(start, kPoison, size); });
  stats_[device].active_bytes[0].decrease(size);
  segments_[device].give_back(block);
}

void Memory::reclaim() {
  for (size_t i = 0; i < waiting_.size();) {
    bool over = true;
    for (auto& [queue, number] : waiting_[i].until) over = over && queue->passed(number);
    if (!over) {
      i++;
      continue;
    }
    cache(waiting_[i].device, waiting_[i].block);
    waiting_.erase(waiting_.begin() + static_cast<long>(i));
  }
}

void Memory::release(int device) {
  for (auto& [start, size] : segments_[device].release())
    madvise(real_ + start, size, MADV_DONTNEED);  // the host has its memory back
  count(device);
}

// What the device holds, as torch.accelerator.memory_reserved tells it.
void Memory::count(int device) {
  auto follow = [](c10::CachingAllocator::Stat& stat, int64_t now) {
    if (now > stat.current)
      stat.increase(now - stat.current);
    else
      stat.decrease(stat.current - now);
  };
  follow(stats_[device].reserved_bytes[0], static_cast<int64_t>(segments_[device].reserved()));
  follow(stats_[device].segment[0], static_cast<int64_t>(segments_[device].num_segments()));
}

std::vector<c10::CachingAllocator::Stat*> Memory::stats_of(int device) {
  auto& stats = stats_[device];
  return {&stats.allocated_bytes[0], &stats.requested_bytes[0], &stats.active_bytes[0],
          &stats.reserved_bytes[0],  &stats.allocation[0],      &stats.segment[0]};
}

c10::CachingDeviceAllocator::DeviceStats Memory::getDeviceStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_[device];
}

void Memory::resetAccumulatedStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto* stat : stats_of(device)) stat->reset_accumulated();
}

void Memory::resetPeakStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto* stat : stats_of(device)) stat->reset_peak();
}

std::pair<size_t, size_t> Memory::getMemoryInfo(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (integrated) return host_memory();
  return {total_ - segments_[device].reserved(), total_};
}

void Memory::cap(int device, double fraction) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t told = integrated ? host_memory().second : total_;
  cap_[device] = std::min(total_, static_cast<size_t>(fraction * static_cast<double>(told)));
}

int Memory::device_of(const void* address) const {
  const auto* at = static_cast<const char*>(address);
  if (at < seen_ || at >= seen_ + total_ * device_count()) return -1;
  return static_cast<int>((at - seen_) / total_);
}

void* Memory::worker_address(const void* address) const {
  if (!address) return nullptr;
  if (device_of(address) >= 0) return real_ + (static_cast<const char*>(address) - seen_);
  uintptr_t stop = 0;
  int owner = -1;
  TORCH_CHECK(integrated && registered_around(address, stop, owner),
              "hostgpu: an illegal memory access was encountered: host memory that is not "
              "registered, or of a device that does not share it");
  return const_cast<void*>(address);
}

void Memory::resize(const c10::Storage& storage, size_t num_bytes) {
  auto fresh = allocate(num_bytes);
  const size_t kept = std::min(num_bytes, storage.nbytes());
  if (kept) copy_data(fresh.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
}

}  // namespace host_gpu
