// A CUDA device in host memory: its guard, streams, events, allocators, generators and hooks. fallback.cpp has its kernels.
//
// Operations run at once. What a GPU would let run in any order is followed by vector clocks: each stream counts its
// operations, an event holds what its stream has seen, and who waits for it sees as much. Memory knows who wrote and
// who read it, so that a use without a wait is a hazard, and memory that is free is filled with ones: a NaN.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

namespace host_cuda {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

using StreamKey = std::pair<int, StreamId>;
using Clock = std::map<StreamKey, uint64_t>;

static StreamKey key_of(const Stream& stream) { return {stream.device_index(), stream.id()}; }
static std::string name_of(const StreamKey& key) {
  return "cuda:" + std::to_string(key.first) + (key.second == 0 ? " default stream" : " stream " + std::to_string(key.second));
}
static void merge(Clock& clock, const Clock& other) {
  for (auto& [stream, time] : other) clock[stream] = std::max(clock[stream], time);
}
static bool has_seen(const Clock& clock, const StreamKey& stream, uint64_t time) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= time;
}

// ---- what is reported to Python

using Report = void (*)(const char* kind, const char* text);
static std::atomic<Report> report{nullptr};

struct Reports {
  std::vector<std::pair<std::string, std::string>> lines;
  void add(const char* kind, std::string text) { lines.emplace_back(kind, std::move(text)); }
  // Python's lock is taken here, so none of ours may be held.
  ~Reports() {
    if (auto to = report.load())
      for (auto& [kind, text] : lines) to(kind.c_str(), text.c_str());
  }
};

// ---- streams and memory

struct Block {
  size_t bytes = 0;
  int device = 0;
  StreamKey owner;
  StreamKey writer;
  uint64_t written = 0;
  Clock readers;
  std::vector<StreamKey> recorded;
};
struct FreedEarly {
  StreamKey user;
  uint64_t time;
};
struct Counts {
  int64_t allocated = 0, reserved = 0, peak_allocated = 0, peak_reserved = 0;
  int64_t limit = int64_t{8} << 30;
  int64_t num_blocks = 0;
};
struct LateCopy {
  StreamKey stream;
  uint64_t time;
  at::Tensor pinned, values;
};

static std::mutex lock;
static std::map<StreamKey, Clock> clocks;
static Clock host_clock;
static std::unordered_map<void*, Block> blocks;
static std::map<StreamKey, std::vector<FreedEarly>> freed_early;
static std::map<int, Counts> counts;
static std::unordered_map<const void*, size_t> pinned_blocks;
static std::vector<LateCopy> late_copies;

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

// Takes what copies the host has waited for to where they belong. The lock is held.
// What is returned is dropped after the lock: a tensor takes it, and Python's, when it goes.
static std::vector<LateCopy> finish_copies() {
  std::vector<LateCopy> finished;
  for (size_t i = 0; i < late_copies.size();) {
    auto& copy = late_copies[i];
    if (has_seen(host_clock, copy.stream, copy.time)) {
      std::memcpy(copy.pinned.data_ptr(), copy.values.data_ptr(), copy.values.nbytes());
      finished.push_back(std::move(copy));
      late_copies.erase(late_copies.begin() + i);
    } else {
      i++;
    }
  }
  return finished;
}
static std::vector<LateCopy> host_has_seen(const Clock& clock) {
  merge(host_clock, clock);
  return finish_copies();
}

void run(const std::string& name, DeviceIndex device, const std::vector<void*>& reads, const std::vector<void*>& writes) {
  Reports reports;
  std::lock_guard<std::mutex> held(lock);
  StreamKey stream = key_of(current_stream(device));
  Clock& clock = clocks[stream];
  merge(clock, host_clock);
  uint64_t tick = ++clock[stream];
  if (auto found = freed_early.find(stream); found != freed_early.end()) {
    for (auto& use : found->second)
      if (!has_seen(clock, use.user, use.time))
        reports.add("hazard", "freed early: memory of " + name_of(stream) + " was used on " + name_of(use.user) + " without record_stream");
    freed_early.erase(found);
  }
  for (void* data : reads) {
    auto found = blocks.find(data);
    if (found == blocks.end()) continue;
    Block& block = found->second;
    if (block.written && !has_seen(clock, block.writer, block.written))
      reports.add("hazard", "unordered: " + name + " on " + name_of(stream) + " reads what " + name_of(block.writer) + " writes");
    block.readers[stream] = tick;
  }
  for (void* data : writes) {
    auto found = blocks.find(data);
    if (found == blocks.end()) continue;
    Block& block = found->second;
    for (auto& [reader, time] : block.readers)
      if (!has_seen(clock, reader, time))
        reports.add("hazard", "unordered: " + name + " on " + name_of(stream) + " overwrites what " + name_of(reader) + " reads");
    block.writer = stream;
    block.written = tick;
    block.readers[stream] = tick;
  }
}

static void wait_for(const std::string& name, const std::string& whom, const Clock* clock) {
  Reports reports;
  std::vector<LateCopy> finished;
  std::lock_guard<std::mutex> held(lock);
  if (clock) {
    finished = host_has_seen(*clock);
  } else {
    for (auto& [stream, seen] : clocks) merge(host_clock, seen);
    finished = finish_copies();
  }
  reports.add("wait", name + " waits for " + whom);
}
static Clock clock_of(const StreamKey& stream) {
  std::lock_guard<std::mutex> held(lock);
  return clocks[stream];
}
void host_waits(const std::string& name, DeviceIndex device) {
  StreamKey stream = key_of(current_stream(device));
  Clock clock = clock_of(stream);
  wait_for(name, name_of(stream), &clock);
}
void copy_to_pinned_later(const at::Tensor& pinned, const at::Tensor& values, DeviceIndex device) {
  std::lock_guard<std::mutex> held(lock);
  StreamKey stream = key_of(current_stream(device));
  std::memset(pinned.data_ptr(), 0xFF, pinned.nbytes());
  late_copies.push_back({stream, clocks[stream][stream], pinned, values});
}
void record_stream(void* data, Stream stream) {
  std::lock_guard<std::mutex> held(lock);
  if (auto found = blocks.find(data); found != blocks.end()) found->second.recorded.push_back(key_of(stream));
}

struct DeviceAllocator final : c10::Allocator {
  static constexpr size_t rounding = 512;
  static size_t rounded(size_t bytes) { return (bytes + rounding - 1) / rounding * rounding; }

  c10::DataPtr allocate(size_t bytes) override {
    Device device(DeviceType::CUDA, current);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    {
      std::lock_guard<std::mutex> held(lock);
      Counts& count = counts[current];
      if (count.allocated + int64_t(rounded(bytes)) > count.limit)
        TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ", int(current),
            " has a total capacity of ", count.limit, " bytes of which ", count.limit - count.allocated, " bytes is free.");
    }
    void* data = c10::alloc_cpu(bytes);
    std::lock_guard<std::mutex> held(lock);
    Block block;
    block.bytes = bytes;
    block.device = current;
    block.owner = key_of(current_stream(current));
    Counts& count = counts[current];
    count.num_blocks++;
    count.allocated += rounded(bytes);
    count.reserved = std::max(count.reserved, count.allocated);
    count.peak_allocated = std::max(count.peak_allocated, count.allocated);
    count.peak_reserved = std::max(count.peak_reserved, count.reserved);
    blocks[data] = block;
    return {data, data, &release, device};
  }
  static void release(void* data) {
    if (!data) return;
    {
      std::lock_guard<std::mutex> held(lock);
      Block block = blocks[data];
      blocks.erase(data);
      counts[block.device].allocated -= rounded(block.bytes);
      counts[block.device].num_blocks--;
      for (auto& [user, time] : block.readers) {
        bool recorded = std::find(block.recorded.begin(), block.recorded.end(), user) != block.recorded.end();
        if (user != block.owner && !recorded && !has_seen(clocks[block.owner], user, time))
          freed_early[block.owner].push_back({user, time});
      }
      std::memset(data, 0xFF, block.bytes);
    }
    c10::free_cpu(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    std::lock_guard<std::mutex> held(lock);
    if (data) pinned_blocks[data] = bytes;
    return {data, data, &release, Device(DeviceType::CPU)};
  }
  static void release(void* data) {
    if (!data) return;
    {
      std::lock_guard<std::mutex> held(lock);
      pinned_blocks.erase(data);
    }
    c10::free_cpu(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

static DeviceAllocator the_device_allocator;
static PinnedAllocator the_pinned_allocator;
c10::Allocator* device_allocator() { return &the_device_allocator; }
c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }
bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> held(lock);
  for (auto& [start, bytes] : pinned_blocks)
    if (data >= start && data < static_cast<const char*>(start) + bytes) return true;
  return false;
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
    std::vector<LateCopy> finished;
    std::lock_guard<std::mutex> held(lock);
    finished = host_has_seen(clocks[key_of(stream)]);
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
    if (!event) return;
    std::lock_guard<std::mutex> held(lock);
    merge(clocks[key_of(stream)], *static_cast<Clock*>(event));
  }
  bool queryEvent(void* event) const override {
    if (event) {
      std::vector<LateCopy> finished;
      std::lock_guard<std::mutex> held(lock);
      finished = host_has_seen(*static_cast<Clock*>(event));
    }
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
  Start() { c10::SetAllocator(DeviceType::CUDA, &the_device_allocator); }
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
void host_cuda_report_to(host_cuda::Report to) { host_cuda::report = to; }
void host_cuda_memory(int device, int64_t* out) {
  std::lock_guard<std::mutex> held(host_cuda::lock);
  auto& count = host_cuda::counts[device];
  int64_t numbers[] = {count.allocated, count.reserved, count.peak_allocated, count.peak_reserved, count.limit, count.num_blocks};
  std::memcpy(out, numbers, sizeof(numbers));
}
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
void host_cuda_empty_cache() {
  std::lock_guard<std::mutex> held(host_cuda::lock);
  for (auto& [device, count] : host_cuda::counts) count.reserved = count.allocated;
}
void host_cuda_reset_peak(int device) {
  std::lock_guard<std::mutex> held(host_cuda::lock);
  auto& count = host_cuda::counts[device];
  count.peak_allocated = count.allocated;
  count.peak_reserved = count.reserved;
}
void host_cuda_limit(int device, int64_t bytes) {
  std::lock_guard<std::mutex> held(host_cuda::lock);
  host_cuda::counts[device].limit = bytes;
}
}
