// What goes wrong, and who is told: errors of queued work, waits that are forbidden, counts of waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace host_gpu {

// Work on a stream that throws loses its device, as on CUDA: nothing queued there is done any
// more, and everyone who asks the device is told, until `forget_faults`.
void lose(int device, const std::string& why);
bool is_lost(int device);
void raise_if_lost(int device);
void forget_faults();

// The host is about to wait for the device where torch's CUDA would consult set_sync_debug_mode.
void about_to_wait(const char* why);
extern std::atomic<bool> waits_forbidden;

// A wait that set_sync_debug_mode does not see: a copy from or to memory that is not pinned.
struct Counters {
  std::atomic<uint64_t> tasks{0}, waits{0}, silent_waits{0}, unshaped_ops{0}, late_frees{0},
      full_queues{0};
};
extern Counters counters;

}  // namespace host_gpu
