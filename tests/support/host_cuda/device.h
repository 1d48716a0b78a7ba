// What the device has: streams with vector clocks, memory that is counted, generators of its own.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace host_cuda {

int num_devices();

// Of this thread.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);

// Makes a device current for a scope.
struct OnDevice {
  explicit OnDevice(c10::DeviceIndex device) : previous(current_device()) { set_current_device(device); }
  ~OnDevice() { set_current_device(previous); }
  c10::DeviceIndex previous;
};

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);
bool is_on_device(const void* data);

// Queues an operation on the device's current stream: what its storages are tells whether streams have waited for each other.
void run(const std::string& name, c10::DeviceIndex device, const std::vector<void*>& reads, const std::vector<void*>& writes);

// The host waits for the device's current stream.
constexpr const char* TO_DEVICE = "copy to the device";
void host_waits(const std::string& name, c10::DeviceIndex device);

// Copies to pinned memory once the host has waited for it; until then what is there has no meaning.
void copy_to_pinned_later(const at::Tensor& pinned, const at::Tensor& values, c10::DeviceIndex device);

// Keeps a block from being used again before the stream has passed this point.
void record_stream(void* data, c10::Stream stream);

// The device's numbers come in place of the CPU's default generator's while this lives.
struct DeviceNumbers {
  explicit DeviceNumbers(c10::DeviceIndex device);
  ~DeviceNumbers();
  c10::DeviceIndex device;
};

// The generator on the host that makes the numbers of one of the device.
at::Generator on_host(const at::Generator& generator);

// Runs an operation by the CPU's kernel over the same memory.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace host_cuda
