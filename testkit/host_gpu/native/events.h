// A mark in a stream: others wait for it, and two of them tell the time between.
#pragma once

#include "streams.h"

#include <memory>

namespace host_gpu {

class Event {
 public:
  void record(Queue& queue);
  void block(Queue& other) const;  // `other` does nothing more until this is passed
  bool passed() const;
  void await() const;
  double ms_since(const Event& earlier) const;
  int device() const { return queue_ ? queue_->device : 0; }

 private:
  Queue* queue_ = nullptr;  // none: never recorded, and so passed
  uint64_t number_ = 0;
  std::shared_ptr<std::atomic<double>> at_ms_;  // outlives an event that is recorded anew
};

}  // namespace host_gpu
