#include "faults.h"
#include "pinned.h"

#include <sys/mman.h>
#include <unistd.h>

namespace host_gpu {

namespace {
enum Code { success = 0, invalid_value = 1, out_of_memory = 2, already = 712, not_registered = 713 };

std::mutex registered_mutex;
Pieces registered;
int refused_in = 0;

bool overlaps(uintptr_t start, size_t size) {
  auto next = registered.lower_bound(start);
  if (next != registered.end() && next->first < start + size) return true;
  if (next == registered.begin()) return false;
  auto before = std::prev(next);
  return before->first + before->second.size > start;
}

bool is_mapped(uintptr_t start, size_t size) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = start / page * page;
  std::vector<unsigned char> resident((start - first + size + page - 1) / page);
  return mincore(reinterpret_cast<void*>(first), start - first + size, resident.data()) == 0;
}
}  // namespace

int register_host(uintptr_t start, size_t size, bool portable) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  if (!start || !size) return invalid_value;
  if (refused_in > 0 && --refused_in == 0) return out_of_memory;
  if (overlaps(start, size)) return already;
  if (!is_mapped(start, size)) return invalid_value;
  registered[start] = {size, portable ? -1 : current_device(), {}};
  return success;
}

int unregister_host(uintptr_t start) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  auto found = registered.find(start);
  if (found == registered.end()) return not_registered;
  for (auto& [queue, number] : found->second.uses)
    if (!queue->has_passed(number)) lose(queue->device, "host memory was unregistered under a copy");
  registered.erase(found);
  return success;
}

void refuse_registration_at(int number) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  refused_in = number;
}

size_t registered_bytes() {
  std::lock_guard<std::mutex> lock(registered_mutex);
  size_t sum = 0;
  for (auto& [_, piece] : registered) sum += piece.size;
  return sum;
}

bool registered_around(const void* address, uintptr_t& stop, int& device) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  auto found = around(registered, address);
  if (found == registered.end()) return false;
  stop = found->first + found->second.size;
  device = found->second.device;
  return true;
}

bool registered_used_by(const void* address, Queue& queue) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  auto found = around(registered, address);
  if (found == registered.end()) return false;
  found->second.uses[&queue] = queue.last();
  return true;
}

}  // namespace host_gpu
