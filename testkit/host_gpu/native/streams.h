// A stream is a thread that does what it is given, in order, whenever it likes.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <random>

namespace host_gpu {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;

// How streams dawdle. lazy: a task is done only when somebody asks for it or something behind it.
struct Timing {
  std::atomic<bool> lazy{false};
  std::atomic<double> probability{0.0};
  std::atomic<int> most_us{0};
  std::atomic<double> copy_ns_per_byte{0.0};
};
extern Timing timing;
void timing_changed();

// Whether the device claims to be in one memory with the host, as an integrated GPU is: then its free
// memory is the host's, and a copy that does not block reads memory that is not pinned when it is
// done, not when it is asked for.
extern std::atomic<bool> integrated;

// Tasks are numbered from 1; number n is passed when task n is done. Never destroyed: its thread
// ends with the process.
class Queue {
 public:
  Queue(int device, int id);
  // A launch queue is finite: behind a thousand tasks the caller waits, and whoever waits for the
  // caller's locks with it.
  uint64_t push(std::function<void()> task);
  uint64_t last();
  bool passed(uint64_t number);  // asks: a lazy stream goes on
  bool has_passed(uint64_t number) const { return passed_ >= number; }  // looks only
  bool idle();
  void await(uint64_t number);
  void wake();
  const int device, id;

 private:
  void run();
  void do_one(std::unique_lock<std::mutex>& lock);
  void want(uint64_t number);
  bool may_go() const;

  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<std::function<void()>> tasks_;
  uint64_t pushed_ = 0, wanted_ = 0;
  std::atomic<uint64_t> passed_{0};
  std::mt19937 dice_;
};

int device_count();
uint64_t setting(const char* name, uint64_t usual);  // from the environment

// Each host thread has a current device, and a current stream of every device.
int current_device();
void set_current_device(int device);
int current_stream(int device);
void set_current_stream(int device, int id);
int resolved(c10::Device device);  // without an index: the current one

Queue& queue(int device, int id);
Queue& queue(const c10::Stream& stream);
Queue& current_queue(int device);
int next_stream(int device);  // from the pool, in turn
void synchronize(int device);

}  // namespace host_gpu
