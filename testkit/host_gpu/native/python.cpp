// What Python calls, by ctypes. Nothing in here throws.
#include "faults.h"
#include "launch.h"
#include "memory.h"
#include "pinned.h"
#include "random.h"

#include <chrono>
#include <cstring>
#include <thread>

using namespace host_gpu;

extern "C" {

int host_gpu_device_count() { return device_count(); }
void host_gpu_cap(int device, double fraction) { Memory::self().cap(device, fraction); }

int host_gpu_register(uintptr_t start, size_t size, int portable) {
  return register_host(start, size, portable != 0);
}
int host_gpu_unregister(uintptr_t start) { return unregister_host(start); }
void host_gpu_refuse_at(int number) { refuse_registration_at(number); }
size_t host_gpu_registered_bytes() { return registered_bytes(); }

void host_gpu_seed(int device, uint64_t seed) {
  auto generator = default_generator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}
void host_gpu_random_state(int device, uint64_t* both) {
  auto generator = default_generator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  both[0] = generator.current_seed(), both[1] = generator.get_offset();
}
void host_gpu_set_random_state(int device, const uint64_t* both) {
  auto generator = default_generator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(both[0]);
  generator.set_offset(both[1]);
}

void host_gpu_sleep(uint64_t us) {
  current_queue(current_device()).push([us] {
    std::this_thread::sleep_for(std::chrono::microseconds(us));
  });
}
void host_gpu_timing(int lazy, double probability, int most_us, double copy_ns_per_byte) {
  timing.lazy = lazy != 0;
  timing.probability = probability;
  timing.most_us = most_us;
  timing.copy_ns_per_byte = copy_ns_per_byte;
  timing_changed();
}
void host_gpu_synchronize() {
  for (int device = 0; device < device_count(); device++) synchronize(device);
}

void host_gpu_integrate(int is_integrated) { integrated = is_integrated != 0; }
void host_gpu_forbid_waits(int forbidden) { waits_forbidden = forbidden != 0; }
void host_gpu_forget_faults() { forget_faults(); }
uint64_t host_gpu_counter(int which) {
  std::atomic<uint64_t>* all[] = {&counters.tasks, &counters.waits, &counters.silent_waits,
                                  &counters.unshaped_ops, &counters.late_frees,
                                  &counters.full_queues};
  return *all[which];
}
size_t host_gpu_unshaped_ops(char* text, size_t size) {
  const auto all = unshaped_ops();
  if (text && size > all.size()) std::memcpy(text, all.c_str(), all.size() + 1);
  return all.size();
}

}  // extern "C"
