// The state of the null device: its shape, its memory by address, and the calls that were counted.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace null_cuda {

// What the environment asks for, read once.
struct Shape {
  int num_devices;           // NULL_CUDA_DEVICES, 1
  int capability;            // NULL_CUDA_CAPABILITY, "8.9" is 89
  size_t memory_bytes;       // NULL_CUDA_MIB, 24564
  bool has_nvml;             // NULL_CUDA_NVML, 1; 0: its library refuses to start
  bool is_integrated;        // NULL_CUDA_INTEGRATED, 0
};
const Shape& shape();

// The device that this thread has set; until it does that is the first one.
int current_device();
void set_current_device(int device);

// Count a call, by the thread that makes it, its device, and whether it ever set that. `stream` is
// where it queues work; calls that queue none leave it out.
void count(const char* call);
void count(const char* call, const void* stream);

// Device memory is address space without access: no kernel runs, and a host that reads it dies.
void* reserve(size_t num_bytes);
bool is_device(const void* address);
bool take(int device, size_t num_bytes);  // false: the device is full
void give_back(int device, size_t num_bytes);
size_t free_bytes(int device);

// Host memory that the driver knows.
bool add_host(void* start, size_t num_bytes);  // false: some of it is known already
size_t remove_host(void* start);               // its size, or 0 if it is not known
bool is_pinned(const void* start, size_t num_bytes);

// A handle that nobody looks into, different from all others.
void* new_handle();

}  // namespace null_cuda
