#include "events.h"

#include "faults.h"

#include <c10/util/Exception.h>

#include <chrono>

namespace host_gpu {

namespace {
double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}
}  // namespace

void Event::record(Queue& queue) {
  queue_ = &queue;
  at_ms_ = std::make_shared<std::atomic<double>>(0.0);
  number_ = queue.push([at = at_ms_] { *at = now_ms(); });
}

void Event::block(Queue& other) const {
  if (!queue_ || queue_ == &other) return;
  other.push([queue = queue_, number = number_] { queue->await(number); });
}

bool Event::passed() const { return !queue_ || queue_->passed(number_); }

void Event::await() const {
  if (queue_) queue_->await(number_);
}

double Event::ms_since(const Event& earlier) const {
  TORCH_CHECK(queue_ && earlier.queue_, "hostgpu: both events must be recorded");
  TORCH_CHECK(passed() && earlier.passed(), "hostgpu: both events must be completed (600)");
  return *at_ms_ - *earlier.at_ms_;
}

}  // namespace host_gpu
