#include "random.h"

#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>

#include <cstring>
#include <vector>

namespace host_gpu {

namespace {

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device)
      : c10::GeneratorImpl(c10::Device(kType, static_cast<c10::DeviceIndex>(device)),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  static c10::DeviceType device_type() { return kType; }

  void set_current_seed(uint64_t seed) override { seed_ = seed, count_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { count_ = offset; }
  uint64_t get_offset() const override { return count_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    const uint64_t both[] = {seed_, count_};
    std::memcpy(state.mutable_data_ptr(), both, sizeof(both));
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    uint64_t both[2];
    TORCH_CHECK(state.numel() == sizeof(both) && state.is_contiguous(),
                "hostgpu: no such random state");
    std::memcpy(both, state.data(), sizeof(both));
    seed_ = both[0], count_ = both[1];
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_, copy->count_ = count_;
    return copy;
  }
  uint64_t next() { return mixed(mixed(seed_) ^ count_++); }

 private:
  uint64_t seed_ = c10::default_rng_seed_val, count_ = 0;
};

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int each = 0; each < device_count(); each++) made->push_back(new_generator(each));
    return made;
  }();
  return all->at(static_cast<size_t>(device < 0 ? current_device() : device));
}

at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device);
}

at::Generator draw(int device, const std::optional<at::Generator>& given) {
  at::Generator chosen = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(chosen.device().index() == device, "Expected a generator of hostgpu:", device,
              ", found one of ", chosen.device());
  std::lock_guard<std::mutex> lock(chosen.mutex());
  return at::detail::createCPUGenerator(chosen.get<Generator>()->next());
}

}  // namespace host_gpu
