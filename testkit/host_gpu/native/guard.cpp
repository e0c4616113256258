// What torch calls for devices, streams and events.
#include "events.h"
#include "faults.h"
#include "memory.h"
#include "pinned.h"
#include "random.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace host_gpu {

namespace {

c10::Device device_of(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

c10::Stream stream_of(int device, int id) {
  return c10::Stream(c10::Stream::UNSAFE, device_of(device), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return device_of(current_device()); }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) set_current_device(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    if (device.index() >= 0) setDevice(device);
    return before;
  }
  // Also while the device is hidden: autograd makes a thread for each device at its first use.
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(resolved(device), current_stream(resolved(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(resolved(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_of(resolved(device), next_stream(resolved(device)));
  }
  // A priority is accepted and changes nothing: threads of a host are scheduled as it likes.
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    set_current_stream(stream.device_index(), static_cast<int>(stream.id()));
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &queue(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    raise_if_lost(stream.device_index());
    return queue(stream).passed(queue(stream).last());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    about_to_wait("synchronize a stream");
    queue(stream).await(queue(stream).last());
    raise_if_lost(stream.device_index());
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    const int device = index < 0 ? current_device() : index;
    counters.waits++;
    synchronize(device);
    raise_if_lost(device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    raise_if_lost(stream.device_index());
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->record(queue(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) static_cast<Event*>(event)->block(queue(stream));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    raise_if_lost(static_cast<Event*>(event)->device());
    return static_cast<Event*>(event)->passed();
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    counters.waits++;
    static_cast<Event*>(event)->await();
    raise_if_lost(static_cast<Event*>(event)->device());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return static_cast<Event*>(second)->ms_since(*static_cast<Event*>(first));
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    Memory::self().recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(device_of(device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return at::getHostAllocator(kType);
  }
  at::Device getDeviceFromPtr(void* address) const override {
    const int device = Memory::self().device_of(address);
    TORCH_CHECK(device >= 0, "hostgpu: not device memory");
    return device_of(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    Memory::self().resize(storage, num_bytes);
  }
};

struct RegisterHooks {
  RegisterHooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
} register_hooks;

}  // namespace
}  // namespace host_gpu
