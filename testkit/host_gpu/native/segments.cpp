#include "segments.h"

namespace host_gpu {

namespace {
// c10/core/AllocatorConfig.h: the sizes of CUDA's allocator.
constexpr size_t kRound = 512;
constexpr size_t kSmall = 1 << 20;            // up to this a block is in the small pool
constexpr size_t kSmallSegment = 2 << 20;
constexpr size_t kLargeSegment = 20 << 20;    // for requests up to kLarge
constexpr size_t kLarge = 10 << 20;
constexpr size_t kRoundLarge = 2 << 20;

size_t segment_size(size_t size) {
  if (size <= kSmall) return kSmallSegment;
  if (size < kLarge) return kLargeSegment;
  return (size + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
}
}  // namespace

Segments::Segments(size_t first, size_t total) { holes_[first] = total; }

size_t Segments::rounded(size_t num_bytes) { return (num_bytes + kRound - 1) / kRound * kRound; }

Block* Segments::take_cached(Queue* owner, size_t size) {
  auto& blocks = pool(size <= kSmall);
  auto found = blocks.lower_bound(Key{owner, size, 0});
  if (found == blocks.end() || std::get<0>(found->first) != owner) return nullptr;
  Block* block = found->second;
  blocks.erase(found);
  return cut(block, size);
}

Block* Segments::take_new(Queue* owner, size_t size, size_t cap,
                          std::pair<size_t, size_t>& fresh) {
  const size_t needed = segment_size(size);
  if (reserved_ + needed > cap) return nullptr;
  for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
    const auto [start, room] = *hole;
    if (room < needed) continue;
    holes_.erase(hole);
    if (room > needed) holes_[start + needed] = room - needed;
    reserved_ += needed;
    num_segments_++;
    fresh = {start, needed};
    return cut(new Block{start, needed, owner, size <= kSmall}, size);
  }
  return nullptr;
}

// The first `size` bytes; what is left is free, unless it is not worth a block.
Block* Segments::cut(Block* block, size_t size) {
  const size_t rest = block->size - size;
  if (block->small ? rest >= kRound : rest > kSmall) {
    auto* left = new Block{block->start + size, rest, block->owner, block->small};
    left->before = block;
    left->after = block->after;
    if (block->after) block->after->before = left;
    block->after = left;
    block->size = size;
    pool(block->small)[Key{left->owner, left->size, left->start}] = left;
  }
  block->in_use = true;
  return block;
}

void Segments::join(Block* block, Block* with) {
  if (!with || with->in_use) return;
  pool(with->small).erase(Key{with->owner, with->size, with->start});
  if (with == block->before) {
    block->start = with->start;
    block->before = with->before;
    if (with->before) with->before->after = block;
  } else {
    block->after = with->after;
    if (with->after) with->after->before = block;
  }
  block->size += with->size;
  delete with;
}

void Segments::give_back(Block* block) {
  block->in_use = false;
  block->others.clear();
  join(block, block->before);
  join(block, block->after);
  pool(block->small)[Key{block->owner, block->size, block->start}] = block;
}

std::vector<std::pair<size_t, size_t>> Segments::release() {
  std::vector<std::pair<size_t, size_t>> gone;
  for (auto* blocks : {&small_, &large_}) {
    for (auto it = blocks->begin(); it != blocks->end();) {
      Block* block = it->second;
      if (block->before || block->after) {
        ++it;
        continue;
      }
      gone.emplace_back(block->start, block->size);
      reserved_ -= block->size;
      num_segments_--;
      delete block;
      it = blocks->erase(it);
    }
  }
  for (auto& [start, size] : gone) {
    auto at = holes_.emplace(start, size).first;
    auto next = std::next(at);
    if (next != holes_.end() && at->first + at->second == next->first) {
      at->second += next->second;
      holes_.erase(next);
    }
    if (at == holes_.begin()) continue;
    auto before = std::prev(at);
    if (before->first + before->second == at->first) {
      before->second += at->second;
      holes_.erase(at);
    }
  }
  return gone;
}

}  // namespace host_gpu
