// Host memory that copies can use while the host goes on: allocated pinned, or registered in place.
#pragma once

#include "streams.h"

#include <map>
#include <vector>

namespace host_gpu {

enum class HostKind { pageable, pinned, registered };

// Ranges of host addresses.
struct Piece {
  size_t size = 0;
  int device = -1;                  // -1: of all devices
  std::map<Queue*, uint64_t> uses;  // copies under way
};
using Pieces = std::map<uintptr_t, Piece>;
Pieces::iterator around(Pieces& pieces, const void* address);

// What the memory is to a device. Raises where a range begins in pinned or registered memory and
// goes on beyond it.
HostKind host_kind(const void* address, size_t num_bytes, int device);
bool is_pinned(const void* address);
// The queue's last task reads or writes the memory. A pinned buffer that is dropped is not given
// out again before it is passed.
void used_by(const void* address, Queue& queue);

// cudaHostRegister and cudaHostUnregister, with CUDA's codes. Memory is registered for the calling
// thread's device alone, unless it is said to be portable. To unregister it under a copy loses
// the device that copies.
int register_host(uintptr_t start, size_t size, bool portable);
int unregister_host(uintptr_t start);
void refuse_registration_at(int number);  // of the calls from now on; 0: refuse none
size_t registered_bytes();
bool registered_around(const void* address, uintptr_t& stop, int& device);
bool registered_used_by(const void* address, Queue& queue);

}  // namespace host_gpu
