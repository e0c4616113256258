#include "streams.h"

#include "faults.h"

#include <c10/util/Exception.h>

#include <pthread.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <thread>
#include <vector>

namespace host_gpu {

Timing timing;
std::atomic<bool> integrated{false};

namespace {

constexpr int kPool = 32;                // as CUDA: then streams are handed out again
constexpr uint64_t kMostPending = 1024;  // then the host waits, and a lazy stream goes on
thread_local bool is_worker = false;  // what a task drops is queued by the stream itself
thread_local int this_device = 0;
thread_local int this_stream[kMaxDevices] = {};

struct Queues {
  std::mutex mutex;
  std::map<int, std::unique_ptr<Queue>> by_id[kMaxDevices];
  int next[kMaxDevices] = {};
};

Queues& queues() {
  static auto* all = new Queues;
  return *all;
}

std::vector<Queue*> queues_of(int device) {
  std::lock_guard<std::mutex> lock(queues().mutex);
  std::vector<Queue*> found;
  for (auto& [_, queue] : queues().by_id[device]) found.push_back(queue.get());
  return found;
}

}  // namespace

Queue::Queue(int device, int id) : device(device), id(id), dice_(device * 1000 + id) {
  std::thread([this] { run(); }).detach();
}

uint64_t Queue::push(std::function<void()> task) {
  counters.tasks++;
  std::unique_lock<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  const auto number = ++pushed_;
  work_.notify_one();
  if (!is_worker && number > passed_ + kMostPending) {
    counters.full_queues++;
    done_.wait(lock, [&] { return number <= passed_ + kMostPending; });
  }
  return number;
}

uint64_t Queue::last() {
  std::lock_guard<std::mutex> lock(mutex_);
  return pushed_;
}

bool Queue::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return passed_ == pushed_;
}

void Queue::wake() {
  std::lock_guard<std::mutex> lock(mutex_);
  work_.notify_one();
}

void Queue::want(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (number > wanted_) {
    wanted_ = number;
    work_.notify_one();
  }
}

bool Queue::passed(uint64_t number) {
  if (passed_ >= number) return true;
  want(number);
  return false;
}

void Queue::await(uint64_t number) {
  if (passed(number)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return passed_ >= number; });
}

bool Queue::may_go() const {
  return !tasks_.empty() &&
      (!timing.lazy || wanted_ > passed_ || pushed_ - passed_ > kMostPending);
}

void Queue::run() {
  is_worker = true;
  pthread_setname_np(pthread_self(), ("hostgpu " + std::to_string(id)).c_str());
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return may_go(); });
    do_one(lock);
  }
}

void Queue::do_one(std::unique_lock<std::mutex>& lock) {
  auto task = std::move(tasks_.front());
  tasks_.pop_front();
  int dawdles_us = 0;
  if (timing.most_us > 0 && std::uniform_real_distribution<>()(dice_) < timing.probability)
    dawdles_us = std::uniform_int_distribution<>(0, timing.most_us)(dice_);
  lock.unlock();
  if (dawdles_us) std::this_thread::sleep_for(std::chrono::microseconds(dawdles_us));
  try {
    if (!is_lost(device)) task();
  } catch (const c10::Error& error) {
    lose(device, error.what_without_backtrace());
  } catch (const std::exception& error) {
    lose(device, error.what());
  }
  task = nullptr;  // what it holds goes before anyone is told
  lock.lock();
  passed_++;
  done_.notify_all();
}

void timing_changed() {
  for (int device = 0; device < device_count(); device++)
    for (auto* queue : queues_of(device)) queue->wake();
}

uint64_t setting(const char* name, uint64_t usual) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : usual;
}

int device_count() {
  static const int count = std::min<uint64_t>(kMaxDevices, setting("HOST_GPU_DEVICES", 2));
  return count;
}

int current_device() { return this_device; }

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "hostgpu: invalid device ordinal ", device);
  this_device = device;
}

int current_stream(int device) { return this_stream[device]; }
void set_current_stream(int device, int id) { this_stream[device] = id; }

int resolved(c10::Device device) {
  const int index = device.has_index() ? device.index() : this_device;
  TORCH_CHECK(index < device_count(), "hostgpu: invalid device ordinal ", index);
  return index;
}

Queue& queue(int device, int id) {
  std::lock_guard<std::mutex> lock(queues().mutex);
  auto& found = queues().by_id[device][id];
  if (!found) found = std::make_unique<Queue>(device, id);
  return *found;
}

Queue& queue(const c10::Stream& stream) {
  return queue(stream.device_index(), static_cast<int>(stream.id()));
}

Queue& current_queue(int device) { return queue(device, this_stream[device]); }

int next_stream(int device) {
  std::lock_guard<std::mutex> lock(queues().mutex);
  return 1 + queues().next[device]++ % kPool;
}

void synchronize(int device) {
  for (auto* queue : queues_of(device)) queue->await(queue->last());
}

}  // namespace host_gpu
