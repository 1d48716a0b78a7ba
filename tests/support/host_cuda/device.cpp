// A CUDA device in host memory: its guard, streams, events, generators and hooks. memory.cpp has its memory, fallback.cpp
// its kernels.
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace host_cuda {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

static thread_local DeviceIndex current = 0;
static thread_local std::unordered_map<int, StreamId> streams;

int num_devices() {
  static const int visible = [] {
    const char* set = std::getenv("HOST_CUDA_DEVICES");
    int devices = set ? std::atoi(set) : 1;
    const char* list = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!list) return devices;
    int listed = *list != 0;
    for (const char* c = list; *c; c++) listed += *c == ',';
    return std::min(devices, listed);
  }();
  return visible;
}
DeviceIndex current_device() { return current; }
void set_current_device(DeviceIndex device) {
  TORCH_CHECK(device < num_devices(), "CUDA error: invalid device ordinal");
  if (device >= 0) current = device;
}
static DeviceIndex index_of(Device device) { return device.index() < 0 ? current : device.index(); }
Stream current_stream(DeviceIndex device) {
  return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, device), streams[device]);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    Device previous(DeviceType::CUDA, current);
    set_current_device(device.index());
    return previous;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices(); }

  Stream getStream(Device device) const override { return current_stream(index_of(device)); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index_of(device)), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<StreamId> last{0};
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index_of(device)), ++last);
  }
  Stream exchangeStream(Stream stream) const override {
    Stream previous = current_stream(stream.device_index());
    streams[stream.device_index()] = stream.id();
    return previous;
  }
  bool queryStream(const Stream& stream) const override {
    host_has_seen(clock_of(key_of(stream)));
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    Clock clock = clock_of(key_of(stream));
    wait_for("synchronize", name_of(key_of(stream)), &clock);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    wait_for("synchronize", "cuda:" + std::to_string(device), nullptr);
  }
  bool isStreamCapturing(const Stream&) const override { return false; }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }

  // An event is the clock of its stream when it was recorded.
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    delete static_cast<Clock*>(*event);
    *event = new Clock(clock_of(key_of(stream)));
  }
  void block(void* event, const Stream& stream) const override {
    if (event) wait_on_stream(key_of(stream), *static_cast<Clock*>(event));
  }
  bool queryEvent(void* event) const override {
    if (event) host_has_seen(*static_cast<Clock*>(event));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for("synchronize", "an event", static_cast<Clock*>(event));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    host_cuda::record_stream(data.get(), stream);
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- random numbers

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex device)
      : GeneratorImpl(Device(DeviceType::CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)), host(at::detail::createCPUGenerator()) {
    set_current_seed(c10::default_rng_seed_val);
  }
  static DeviceType device_type() { return DeviceType::CUDA; }
  // Other numbers than a CPU's for the same seed, as on a GPU.
  static uint64_t mixed(uint64_t seed) { return seed ^ 0x9E3779B97F4A7C15ull; }
  void set_current_seed(uint64_t seed) override {
    this->initial_seed = seed;
    host.set_current_seed(mixed(seed));
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "offsets of generators are not emulated"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return initial_seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return initial_seed;
  }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->initial_seed = initial_seed;
    copy->host = host.clone();
    return copy;
  }
  uint64_t initial_seed = 0;
  at::Generator host;
};

static std::map<int, at::Generator>& default_generators() {
  static std::map<int, at::Generator> generators = [] {
    std::map<int, at::Generator> made;
    for (int device = 0; device < num_devices(); device++) made[device] = at::make_generator<DeviceGenerator>(DeviceIndex(device));
    return made;
  }();
  return generators;
}
static thread_local int makes_default = -1;

at::Generator on_host(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}
static void exchange_states(at::Generator one, at::Generator other) {
  std::scoped_lock held(one.mutex(), other.mutex());
  auto* first = static_cast<at::CPUGeneratorImpl*>(one.unsafeGetGeneratorImpl());
  auto* second = static_cast<at::CPUGeneratorImpl*>(other.unsafeGetGeneratorImpl());
  auto engine = first->engine();
  auto next_float = first->next_float_normal_sample();
  auto next_double = first->next_double_normal_sample();
  first->set_engine(second->engine());
  first->set_next_float_normal_sample(second->next_float_normal_sample());
  first->set_next_double_normal_sample(second->next_double_normal_sample());
  second->set_engine(engine);
  second->set_next_float_normal_sample(next_float);
  second->set_next_double_normal_sample(next_double);
}
DeviceNumbers::DeviceNumbers(DeviceIndex device) : device(device) {
  exchange_states(at::detail::getDefaultCPUGenerator(), on_host(default_generators().at(device)));
}
DeviceNumbers::~DeviceNumbers() { exchange_states(at::detail::getDefaultCPUGenerator(), on_host(default_generators().at(device))); }

static struct Start {
  Start() { c10::SetAllocator(DeviceType::CUDA, device_allocator()); }
} start;

}  // namespace host_cuda

namespace at {
// torch asks for its hooks once, by this name.
struct CUDAHooks final : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return host_cuda::num_devices() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return host_cuda::current; }
  DeviceIndex deviceCount() const override { return host_cuda::num_devices(); }
  int getNumGPUs() const override { return host_cuda::num_devices(); }
  void setCurrentDevice(DeviceIndex device) const override { host_cuda::set_current_device(device); }
  DeviceIndex getCurrentDevice() const override { return host_cuda::current; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto previous = host_cuda::current;
    host_cuda::set_current_device(device);
    return previous;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return host_cuda::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return host_cuda::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return host_cuda::device_allocator(); }
  const Generator& getDefaultGenerator(DeviceIndex device) const override {
    return host_cuda::default_generators().at(device < 0 ? host_cuda::current : device);
  }
  Generator getNewGenerator(DeviceIndex device) const override {
    DeviceIndex index = device < 0 ? host_cuda::current : device;
    if (host_cuda::makes_default == index) return host_cuda::default_generators().at(index);
    return make_generator<host_cuda::DeviceGenerator>(index);
  }
  long versionCUDART() const override { return 13000; }
  void deviceSynchronize(DeviceIndex device) const override { host_cuda::Guard().synchronizeDevice(device); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

// ---- for Python, by ctypes

extern "C" {
int host_cuda_num_devices() { return host_cuda::num_devices(); }
int host_cuda_device() { return host_cuda::current; }
void host_cuda_set_device(int device) {
  if (device >= 0 && device < host_cuda::num_devices()) host_cuda::current = device;
}
int64_t host_cuda_stream(int device) { return host_cuda::streams[device]; }
void host_cuda_set_stream(int device, int64_t stream) { host_cuda::streams[device] = stream; }
void host_cuda_synchronize(int device) { host_cuda::Guard().synchronizeDevice(device); }
// The next torch.Generator of this device is the default one; -1: no more.
void host_cuda_make_default_generator(int device) { host_cuda::makes_default = device; }
// storage: a c10::StorageImpl of the device.
void host_cuda_resize_storage(void* storage, int64_t bytes) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  host_cuda::OnDevice on(impl->device().index());
  auto data = host_cuda::device_allocator()->allocate(bytes);
  size_t kept = std::min(impl->nbytes(), size_t(bytes));
  if (kept) std::memcpy(data.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}
}
