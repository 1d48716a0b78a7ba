// Memory of the device in host memory, and what its streams have done to it.
//
// Operations run at once. What a GPU would let run in any order is followed by vector clocks: each stream counts its
// operations, an event holds what its stream has seen, and who waits for it sees as much. Memory knows who wrote and
// who read it, so that a use without a wait is a hazard, and memory that is free is filled with ones: a NaN.
#include "memory.h"

#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace host_cuda {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

StreamKey key_of(const Stream& stream) { return {stream.device_index(), stream.id()}; }
std::string name_of(const StreamKey& key) {
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
static int64_t pinned_bytes = 0, peak_pinned_bytes = 0;
static std::vector<LateCopy> late_copies;
static std::map<std::string, int64_t> calls;

// Takes what copies the host has waited for to where they belong. The lock is held, and freeing a tensor takes it: the
// caller does so later.
static void finish_copies(std::vector<LateCopy>& done) {
  for (size_t i = 0; i < late_copies.size();) {
    auto& copy = late_copies[i];
    if (has_seen(host_clock, copy.stream, copy.time)) {
      std::memcpy(copy.pinned.data_ptr(), copy.values.data_ptr(), copy.values.nbytes());
      done.push_back(std::move(copy));
      late_copies.erase(late_copies.begin() + i);
    } else {
      i++;
    }
  }
}
void host_has_seen(const Clock& clock) {
  std::vector<LateCopy> done;
  std::lock_guard<std::mutex> held(lock);
  merge(host_clock, clock);
  finish_copies(done);
}
void wait_on_stream(const StreamKey& stream, const Clock& clock) {
  std::lock_guard<std::mutex> held(lock);
  merge(clocks[stream], clock);
}

void run(const std::string& name, DeviceIndex device, const std::vector<void*>& reads, const std::vector<void*>& writes) {
  Reports reports;
  std::lock_guard<std::mutex> held(lock);
  calls[name]++;
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

void wait_for(const std::string& name, const std::string& whom, const Clock* clock) {
  Reports reports;
  std::vector<LateCopy> done;
  std::lock_guard<std::mutex> held(lock);
  if (clock) {
    merge(host_clock, *clock);
  } else {
    for (auto& [stream, seen] : clocks) merge(host_clock, seen);
  }
  finish_copies(done);
  reports.add("wait", name + " waits for " + whom);
}
Clock clock_of(const StreamKey& stream) {
  std::lock_guard<std::mutex> held(lock);
  return clocks[stream];
}
void host_waits(const std::string& name, DeviceIndex device) {
  StreamKey stream = key_of(current_stream(device));
  // CUDA copies 64 KB to the device without waiting for what the stream does: nothing may rely on that wait.
  Clock clock = name == TO_DEVICE ? Clock() : clock_of(stream);
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
    DeviceIndex current = current_device();
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
    pinned_bytes += bytes;
    peak_pinned_bytes = std::max(peak_pinned_bytes, pinned_bytes);
    return {data, data, &release, Device(DeviceType::CPU)};
  }
  static void release(void* data) {
    if (!data) return;
    {
      std::lock_guard<std::mutex> held(lock);
      pinned_bytes -= pinned_blocks[data];
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
bool is_on_device(const void* data) {
  std::lock_guard<std::mutex> held(lock);
  return blocks.count(const_cast<void*>(data)) > 0;
}
bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> held(lock);
  for (auto& [start, bytes] : pinned_blocks)
    if (data >= start && data < static_cast<const char*>(start) + bytes) return true;
  return false;
}

}  // namespace host_cuda

// ---- for Python, by ctypes

extern "C" {
// Lines of an operation and how often it was queued, since the process began.
const char* host_cuda_calls() {
  static thread_local std::string lines;
  lines.clear();
  std::lock_guard<std::mutex> held(host_cuda::lock);
  for (auto& [name, number] : host_cuda::calls) lines += name + "\t" + std::to_string(number) + "\n";
  return lines.c_str();
}
void host_cuda_report_to(host_cuda::Report to) { host_cuda::report = to; }
void host_cuda_memory(int device, int64_t* out) {
  std::lock_guard<std::mutex> held(host_cuda::lock);
  auto& count = host_cuda::counts[device];
  int64_t numbers[] = {count.allocated, count.reserved, count.peak_allocated, count.peak_reserved, count.limit, count.num_blocks};
  std::memcpy(out, numbers, sizeof(numbers));
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
void host_cuda_pinned(int64_t* out) {
  std::lock_guard<std::mutex> held(host_cuda::lock);
  out[0] = host_cuda::pinned_bytes;
  out[1] = host_cuda::peak_pinned_bytes;
}
}
