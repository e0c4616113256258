// The CUDA runtime (libcudart): every call succeeds at once, and kernels do nothing.
//
// An answer that torch reads is one that a card could give. What a call of torch 2.13 does not read
// is left at zero. Functions that no line of torch 2.13 needs are not here: see symbols.txt.

#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>

#include "device.h"

using namespace null_cuda;

namespace {

constexpr size_t ANSWER = 4096;  // bytes of a copy to the host that a program may look at
constexpr size_t PAGE = 4096;

struct Allocation {
  int device;
  size_t num_bytes;
};

struct Event {
  double at_ms = 0;
};

struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};

std::mutex lock;
std::map<void*, Allocation> allocations;
thread_local cudaError_t last_error = cudaSuccess;
thread_local Launch pushed;

cudaError_t failed(cudaError_t error) { return last_error = error; }

double now_ms() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e3 * double(time.tv_sec) + 1e-6 * double(time.tv_nsec);
}

size_t segments(size_t num_bytes) {
  constexpr size_t size = size_t(2) << 20;
  return (num_bytes + size - 1) / size * size;
}

}  // namespace

// Devices.

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = shape().num_devices;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= shape().num_devices) return failed(cudaErrorInvalidDevice);
  set_current_device(device);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  const int capability = shape().capability;
  const bool is_data_center = capability == 80 || capability == 90 || capability == 100;
  std::memset(found, 0, sizeof *found);
  std::snprintf(found->name, sizeof found->name, "Null GPU sm_%d", capability);
  found->totalGlobalMem = shape().memory_bytes;
  found->major = capability / 10;
  found->minor = capability % 10;
  found->multiProcessorCount = 128;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = is_data_center ? 2048 : 1536;
  found->maxBlocksPerMultiProcessor = 24;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = capability == 80 ? 166912 : is_data_center ? 232448 : 101376;
  found->sharedMemPerMultiprocessor = found->sharedMemPerBlockOptin + 1024;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->l2CacheSize = 72 << 20;
  found->memoryBusWidth = 384;
  found->textureAlignment = 512;
  found->concurrentKernels = 1;
  found->asyncEngineCount = 2;
  found->unifiedAddressing = 1;
  found->integrated = shape().is_integrated;
  found->pciBusID = device + 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  constexpr int FABRIC_HANDLES = 128;  // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
  cudaDeviceProp found;
  cudaGetDeviceProperties(&found, device);
  switch (int(attribute)) {
    case cudaDevAttrComputeCapabilityMajor: *value = found.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = found.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = found.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = found.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = found.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(found.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(found.sharedMemPerBlockOptin); break;
    case cudaDevAttrMaxRegistersPerBlock: *value = found.regsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = found.maxGridSize[0]; break;
    case cudaDevAttrWarpSize: *value = found.warpSize; break;
    case FABRIC_HANDLES: *value = 0; break;
    default: *value = 1;  // that it has a capability
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, size_t(size), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDA_VERSION;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  count("cudaDeviceSynchronize");
  return cudaSuccess;
}

// Streams and events. All work is done when it is queued.

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  count("cudaStreamCreate");
  *stream = static_cast<cudaStream_t>(new_handle());
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) {
  count("cudaStreamSynchronize");
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  count("cudaStreamWaitEvent");
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
    const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* num_dependencies) {
  *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  if (num_dependencies != nullptr) *num_dependencies = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = cudaStreamCaptureModeGlobal;
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  count("cudaEventCreate");
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned) {
  count("cudaEventRecord");
  reinterpret_cast<Event*>(event)->at_ms = now_ms();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t) {
  count("cudaEventQuery");
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) {
  count("cudaEventSynchronize");
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  *ms = float(reinterpret_cast<Event*>(end)->at_ms - reinterpret_cast<Event*>(begin)->at_ms);
  return cudaSuccess;
}

// Memory.

EXPORT cudaError_t cudaMalloc(void** address, size_t num_bytes) {
  count("cudaMalloc");
  *address = nullptr;
  if (!take(current_device(), segments(num_bytes))) return failed(cudaErrorMemoryAllocation);
  *address = reserve(num_bytes);
  std::lock_guard<std::mutex> held(lock);
  allocations[*address] = {current_device(), segments(num_bytes)};
  return cudaSuccess;
}

EXPORT cudaError_t cudaFree(void* address) {
  count("cudaFree");
  std::lock_guard<std::mutex> held(lock);
  auto found = allocations.find(address);
  if (found == allocations.end()) return cudaSuccess;  // of nothing, as torch does to begin
  give_back(found->second.device, found->second.num_bytes);
  allocations.erase(found);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = free_bytes(current_device());
  *total = shape().memory_bytes;
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void** address, size_t num_bytes, unsigned) {
  count("cudaHostAlloc");
  const size_t size = num_bytes == 0 ? PAGE : num_bytes;
  void* made = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  add_host(made, size);
  *address = made;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFreeHost(void* address) {
  if (const size_t num_bytes = remove_host(address)) munmap(address, num_bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void* address, size_t num_bytes, unsigned) {
  count("cudaHostRegister");
  const bool is_new = add_host(address, num_bytes);
  return is_new ? cudaSuccess : failed(cudaErrorHostMemoryAlreadyRegistered);
}

EXPORT cudaError_t cudaHostUnregister(void* address) {
  count("cudaHostUnregister");
  return remove_host(address) != 0 ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  std::memset(found, 0, sizeof *found);
  if (is_device(address)) {
    found->type = cudaMemoryTypeDevice;
    found->devicePointer = const_cast<void*>(address);
    found->device = current_device();
  } else if (is_pinned(address, 1)) {
    found->type = cudaMemoryTypeHost;
    found->hostPointer = found->devicePointer = const_cast<void*>(address);
  } else {
    found->type = cudaMemoryTypeUnregistered;
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(
    void* target, const void* source, size_t num_bytes, cudaMemcpyKind, cudaStream_t stream) {
  const bool to_device = is_device(target), from_device = is_device(source);
  if (to_device && from_device) {
    count("copy on the device", stream);
  } else if (to_device) {
    count(is_pinned(source, num_bytes) ? "copy in" : "pageable copy in", stream);
  } else if (from_device) {
    count(is_pinned(target, num_bytes) ? "copy out" : "pageable copy out", stream);
    if (num_bytes <= ANSWER) std::memset(target, 0, num_bytes);
  } else {
    std::memcpy(target, source, num_bytes);
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind kind) {
  count("cudaMemcpy");
  return cudaMemcpyAsync(target, source, size, kind, nullptr);
}

EXPORT cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t stream) {
  count("memset", stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void*, int, size_t) {
  count("memset");
  return cudaSuccess;
}

// Kernels.

EXPORT cudaError_t cudaLaunchKernel(
    const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  count("launch", stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  count("launch", config->stream);
  return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(
    cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) {
  count("launch", stream);
  return cudaSuccess;
}

// What the compiler puts around `kernel<<<grid, block, shared, stream>>>(...)`.
EXPORT unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared_bytes, struct CUstream_st* stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(
    dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *static_cast<void**>(stream) = pushed.stream;
  return cudaSuccess;
}

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* binary = nullptr;
  return &binary;
}

EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterFunction(
    void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  const int built_for = shape().capability == 89 ? 86 : shape().capability;  // as torch is
  std::memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->ptxVersion = found->binaryVersion = built_for;
  found->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* num_blocks, const void*, int, size_t, unsigned) {
  *num_blocks = 2;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  *address = reserve(1);
  return cudaSuccess;
}

// Errors.

EXPORT cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }

EXPORT const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the null device";
}

EXPORT const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}
