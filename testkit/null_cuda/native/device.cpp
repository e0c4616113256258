#include "device.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>

namespace null_cuda {
namespace {

constexpr size_t ADDRESSES = size_t(1) << 45;  // 32 TiB: none is used twice
constexpr size_t SEGMENT = size_t(2) << 20;    // what the driver rounds up to
constexpr int MOST_DEVICES = 16;

long number(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atol(text);
}

Shape read_shape() {
  const char* text = std::getenv("NULL_CUDA_CAPABILITY");
  int major = 8, minor = 9;
  if (text != nullptr) std::sscanf(text, "%d.%d", &major, &minor);
  return {
      .num_devices = int(number("NULL_CUDA_DEVICES", 1)),
      .capability = 10 * major + minor,
      .memory_bytes = size_t(number("NULL_CUDA_MIB", 24564)) << 20,
      .has_nvml = number("NULL_CUDA_NVML", 1) != 0,
      .is_integrated = number("NULL_CUDA_INTEGRATED", 0) != 0,
  };
}

struct Memory {
  size_t used = 0, peak = 0;
};

// What is counted. Never freed: threads of torch make calls after the end of main.
struct Counts {
  std::mutex lock;
  std::map<std::tuple<std::string, long, int, bool>, long> calls;  // by call, thread, device, set
  std::map<const void*, std::set<long>> queued_by;                 // threads by stream
  Memory memory[MOST_DEVICES];
  std::map<char*, size_t> pinned;
  char* base = nullptr;
  size_t reserved = 0;
};

Counts& counts() {
  static Counts* made = new Counts;
  return *made;
}

thread_local int device_of_thread = 0;
thread_local bool was_set = false;
std::atomic<long> handles{0x1000};

long thread_id() {
  thread_local long id = syscall(SYS_gettid);
  return id;
}

}  // namespace

const Shape& shape() {
  static Shape read = read_shape();
  return read;
}

int current_device() { return device_of_thread; }

void set_current_device(int device) {
  device_of_thread = device;
  was_set = true;
}

void count(const char* call) {
  std::lock_guard<std::mutex> held(counts().lock);
  counts().calls[{call, thread_id(), device_of_thread, was_set}]++;
}

void count(const char* call, const void* stream) {
  count(call);
  std::lock_guard<std::mutex> held(counts().lock);
  counts().queued_by[stream].insert(thread_id());
}

void* reserve(size_t num_bytes) {
  Counts& all = counts();
  std::lock_guard<std::mutex> held(all.lock);
  if (all.base == nullptr) {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    all.base = static_cast<char*>(mmap(nullptr, ADDRESSES, PROT_NONE, flags, -1, 0));
    if (all.base == MAP_FAILED) std::abort();
  }
  char* start = all.base + all.reserved;
  all.reserved += (num_bytes + SEGMENT - 1) / SEGMENT * SEGMENT;
  if (all.reserved > ADDRESSES) std::abort();
  return start;
}

bool is_device(const void* address) {
  const char* base = counts().base;
  return base != nullptr && address >= base && address < base + ADDRESSES;
}

bool take(int device, size_t num_bytes) {
  std::lock_guard<std::mutex> held(counts().lock);
  Memory& memory = counts().memory[device];
  if (memory.used + num_bytes > shape().memory_bytes) return false;
  memory.used += num_bytes;
  if (memory.used > memory.peak) memory.peak = memory.used;
  return true;
}

void give_back(int device, size_t num_bytes) {
  std::lock_guard<std::mutex> held(counts().lock);
  counts().memory[device].used -= num_bytes;
}

size_t free_bytes(int device) {
  std::lock_guard<std::mutex> held(counts().lock);
  return shape().memory_bytes - counts().memory[device].used;
}

bool add_host(void* start, size_t num_bytes) {
  Counts& all = counts();
  std::lock_guard<std::mutex> held(all.lock);
  char* first = static_cast<char*>(start);
  auto behind = all.pinned.lower_bound(first + num_bytes);
  if (behind != all.pinned.begin()) {
    auto before = std::prev(behind);
    if (before->first + before->second > first) return false;
  }
  all.pinned[first] = num_bytes;
  return true;
}

size_t remove_host(void* start) {
  Counts& all = counts();
  std::lock_guard<std::mutex> held(all.lock);
  auto found = all.pinned.find(static_cast<char*>(start));
  if (found == all.pinned.end()) return 0;
  size_t num_bytes = found->second;
  all.pinned.erase(found);
  return num_bytes;
}

bool is_pinned(const void* start, size_t num_bytes) {
  Counts& all = counts();
  std::lock_guard<std::mutex> held(all.lock);
  char* first = static_cast<char*>(const_cast<void*>(start));
  auto behind = all.pinned.upper_bound(first);
  if (behind == all.pinned.begin()) return false;
  auto found = std::prev(behind);
  return first + num_bytes <= found->first + found->second;
}

void* new_handle() { return reinterpret_cast<void*>(handles += 16); }

}  // namespace null_cuda

// What Python asks (library.py).

using namespace null_cuda;

// Lines of "call thread device set count", then "stream thread" for each thread that queued on it.
EXPORT const char* null_cuda_report() {
  static std::string text;
  std::lock_guard<std::mutex> held(counts().lock);
  std::ostringstream lines;
  for (const auto& [key, times] : counts().calls) {
    const auto& [call, thread, device, set] = key;
    lines << call << '\t' << thread << '\t' << device << '\t' << set << '\t' << times << '\n';
  }
  for (const auto& [stream, threads] : counts().queued_by)
    for (long thread : threads) lines << stream << '\t' << thread << '\n';
  text = lines.str();
  return text.c_str();
}

EXPORT void null_cuda_forget() {
  std::lock_guard<std::mutex> held(counts().lock);
  counts().calls.clear();
  counts().queued_by.clear();
}

EXPORT size_t null_cuda_peak_bytes(int device) {
  std::lock_guard<std::mutex> held(counts().lock);
  return counts().memory[device].peak;
}

// For stubs that building.py writes.
EXPORT void null_cuda_count(const char* call) { count(call); }
EXPORT void* null_cuda_handle() { return new_handle(); }
