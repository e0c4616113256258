// The CUDA driver (libcuda), as the allocator's growing segments and Triton call it, and NVML.

#include <dlfcn.h>

#include "device.h"

using namespace null_cuda;

namespace {

constexpr size_t GRANULARITY = size_t(2) << 20;
constexpr int NVML_SUCCESS = 0, NVML_NOT_FOUND = 6, NVML_DRIVER_NOT_LOADED = 9;

// A piece of device memory without address: the device in the lowest bits of its size.
CUmemGenericAllocationHandle piece(int device, size_t num_bytes) {
  return num_bytes | CUmemGenericAllocationHandle(device);
}
int device_of(CUmemGenericAllocationHandle handle) { return int(handle % GRANULARITY); }
size_t bytes_of(CUmemGenericAllocationHandle handle) {
  return handle / GRANULARITY * GRANULARITY;
}

CUresult succeed() { return CUDA_SUCCESS; }

}  // namespace

EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice* device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return CUresult(cudaDeviceGetAttribute(value, cudaDeviceAttr(attribute), device));
}

EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(16);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  return cuCtxGetCurrent(context);
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

// Segments that grow: address space first, pieces of memory under it later.

EXPORT CUresult cuMemAddressReserve(
    CUdeviceptr* address, size_t num_bytes, size_t, CUdeviceptr, unsigned long long) {
  *address = reinterpret_cast<CUdeviceptr>(reserve(num_bytes));
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(
    CUmemGenericAllocationHandle* handle, size_t num_bytes, const CUmemAllocationProp* wanted,
    unsigned long long) {
  count("cuMemCreate");
  const int device = wanted->location.id;
  if (!take(device, num_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = piece(device, num_bytes);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  give_back(device_of(handle), bytes_of(handle));
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr, size_t) {
  count("cuMemUnmap");
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationGranularity(
    size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *size = GRANULARITY;
  return CUDA_SUCCESS;
}

// Kernels that Triton made.

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = static_cast<CUmodule>(new_handle());
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  count("Triton kernel loaded");
  *function = static_cast<CUfunction>(new_handle());
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS                ? 64
           : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
                                                                  : 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveClusters(int* num, CUfunction, const CUlaunchConfig*) {
  *num = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction, void**, void**) {
  count("launch of Triton", config->hStream);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernel(
    CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
    CUstream stream, void**, void**) {
  count("launch of Triton", stream);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(
    void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *static_cast<CUdeviceptr*>(value) = address;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the null driver";
  return CUDA_SUCCESS;
}

// How torch finds functions of the driver; those that nobody wrote succeed.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (*function == nullptr) *function = reinterpret_cast<void*>(succeed);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// NVML: who uses a card, and what it is connected to. Here nobody and nothing.

EXPORT int nvmlInit_v2() { return shape().has_nvml ? NVML_SUCCESS : NVML_DRIVER_NOT_LOADED; }

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = new_handle();
  return shape().has_nvml ? NVML_SUCCESS : NVML_DRIVER_NOT_LOADED;
}

EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return NVML_SUCCESS; }

EXPORT int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* num_processes, void*) {
  *num_processes = 0;
  return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return NVML_NOT_FOUND; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NVML_NOT_FOUND; }

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDA_VERSION;
  return NVML_SUCCESS;
}
