#include "faults.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>

namespace host_gpu {

std::atomic<bool> waits_forbidden{false};
Counters counters;

namespace {
std::mutex lost_mutex;
std::map<int, std::string> lost;
std::atomic<int> num_lost{0};  // so that a sound device costs no lock
}  // namespace

void lose(int device, const std::string& why) {
  std::lock_guard<std::mutex> lock(lost_mutex);
  lost.emplace(device, why);
  num_lost = static_cast<int>(lost.size());
}

bool is_lost(int device) {
  if (num_lost == 0) return false;
  std::lock_guard<std::mutex> lock(lost_mutex);
  return lost.count(device) > 0;
}

void raise_if_lost(int device) {
  if (!is_lost(device)) return;
  std::lock_guard<std::mutex> lock(lost_mutex);
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 710,
                              "hostgpu: work on a stream failed: " + lost[device]);
}

void forget_faults() {
  std::lock_guard<std::mutex> lock(lost_mutex);
  lost.clear();
  num_lost = 0;
}

void about_to_wait(const char* why) {
  TORCH_CHECK(!waits_forbidden, "called a synchronizing operation: ", why);
  counters.waits++;
}

}  // namespace host_gpu
