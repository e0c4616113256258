// Device memory in segments, cut and joined as CUDA's caching allocator cuts and joins them, so that
// what is reserved, cached and lost to fragments has the sizes that it has there.
#pragma once

#include "streams.h"

#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

namespace host_gpu {

struct Block {
  size_t start, size;
  Queue* owner;  // the stream that it was allocated on: only it may have the memory anew
  bool small;
  Block *before = nullptr, *after = nullptr;  // neighbors in the segment
  bool in_use = false;
  std::set<Queue*> others;  // streams that use it beside the owner (record_stream)
};

// The memory of one device, without its bytes. Not thread-safe.
class Segments {
 public:
  Segments(size_t first, size_t total);
  Block* take_cached(Queue* owner, size_t size);
  // A new segment where `cap` and the device have room; `fresh` is the range to be filled.
  Block* take_new(Queue* owner, size_t size, size_t cap, std::pair<size_t, size_t>& fresh);
  void give_back(Block* block);  // joins it with free neighbors
  // Forget every segment that is entirely free; nothing may be under way on the device.
  std::vector<std::pair<size_t, size_t>> release();
  size_t reserved() const { return reserved_; }
  size_t num_segments() const { return num_segments_; }
  static size_t rounded(size_t num_bytes);

 private:
  using Key = std::tuple<Queue*, size_t, size_t>;  // the least that fits, then the first
  std::map<Key, Block*>& pool(bool small) { return small ? small_ : large_; }
  Block* cut(Block* block, size_t size);
  void join(Block* block, Block* with);

  std::map<size_t, size_t> holes_;  // address space that is in no segment: start, size
  std::map<Key, Block*> small_, large_;
  size_t reserved_ = 0, num_segments_ = 0;
};

}  // namespace host_gpu
