// Kernels of the device: each is the CPU's, run over the same memory by one boxed fallback.
//
// Arguments on the device become CPU tensors that alias their storage, outputs become the device's again. Tensors of two
// devices in one call raise, as on a GPU.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/RedispatchFunctions.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <string>

using namespace at;

namespace host_cuda {

// ---- the same memory, seen from the other side

static void drop_tensor(void* tensor) { delete static_cast<Tensor*>(tensor); }

static Tensor over(Storage storage, const Tensor& like, DispatchKey key) {
  auto impl = c10::make_intrusive<TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return Tensor(std::move(impl));
}

static Tensor alias(const Tensor& tensor, Device device) {
  auto* allocator = device.is_cpu() ? at::getCPUAllocator() : device_allocator();
  auto key = device.is_cpu() ? DispatchKey::CPU : DispatchKey::CUDA;
  const auto& storage = tensor.storage();
  DataPtr data(storage.mutable_data(), new Tensor(tensor), &drop_tensor, device);
  Storage shared(Storage::use_byte_size_t(), storage.nbytes(), std::move(data), allocator, true);
  Tensor made = over(std::move(shared), tensor, key);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

static Tensor sparse_with(const Tensor& sparse, const Tensor& indices, const Tensor& values) {
  auto options = values.options().layout(kSparse);
  Tensor made = at::_sparse_coo_tensor_unsafe(indices, values, sparse.sizes(), options);
  return made._coalesced_(sparse.is_coalesced());
}
static Tensor to_host_memory(const Tensor& tensor);
static Tensor to_device_memory(const Tensor& tensor, DeviceIndex device);

static Tensor to_host_memory(const Tensor& tensor) {
  if (tensor.layout() == kSparse) return sparse_with(tensor, to_host_memory(tensor._indices()), to_host_memory(tensor._values()));
  return alias(tensor, Device(kCPU));
}
static Tensor to_device_memory(const Tensor& tensor, DeviceIndex device) {
  if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
  if (tensor.layout() == kSparse)
    return sparse_with(tensor, to_device_memory(tensor._indices(), device), to_device_memory(tensor._values(), device));
  if (tensor.layout() != kStrided) return tensor;
  return alias(tensor, Device(kCUDA, device));
}
static bool is_on_device(const Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() && (tensor.layout() == kStrided || tensor.layout() == kSparse);
}
static void* memory_of(const Tensor& tensor) { return tensor.layout() == kStrided ? tensor.storage().mutable_data() : nullptr; }

// ---- one call

// Operations that take tensors of the host beside those of a device.
static bool may_mix(const std::string& name) {
  static const std::set<std::string> names{"aten::copy_", "aten::_to_copy", "aten::index.Tensor", "aten::index_put_",
      "aten::_index_put_impl_", "aten::_copy_from", "aten::set_.source_Tensor", "aten::_pin_memory"};
  return names.count(name) > 0;
}
// Operations for whose result the host waits: how large it is depends on values.
static bool waits(const std::string& name) {
  static const std::set<std::string> names{"aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::_coalesce"};
  return names.count(name) > 0;
}

// Applies a function to each tensor in a value: a tensor, a list, a list of lists.
template <typename Function>
static IValue map_tensors(const IValue& value, Function&& function) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(function(value.toTensor())) : value;
  if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors)
      if (tensor.defined()) tensor = function(tensor);
    return c10::List<Tensor>(tensors);
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const auto& tensor : value.toOptionalTensorVector())
      mapped.push_back(tensor && tensor->defined() ? std::optional<Tensor>(function(*tensor)) : tensor);
    return mapped;
  }
  bool is_list_of_lists = value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList();
  if (!is_list_of_lists) return value;
  auto outer = value.toList();
  for (size_t i = 0; i < outer.size(); i++) {
    IValue inner = outer.get(i);
    if (inner.isTensorList()) outer.set(i, map_tensors(inner, function));
  }
  return outer;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(*stack), first_(stack->size() - schema_.arguments().size()) {
    const auto& operator_name = schema_.operator_name();
    name_ = operator_name.name + (operator_name.overload_name.empty() ? "" : "." + operator_name.overload_name);
  }

  void run() {
    check_gradient();
    place_tables();
    for (size_t i = 0; i < schema_.arguments().size(); i++) convert_argument(i);
    TORCH_CHECK(!(has_host_ && device_ >= 0 && !pairs_.empty() && !may_mix(name_)),
        "Expected all tensors to be on the same device, but found at least two devices, cuda:", int(device_), " and cpu! (when checking ",
        name_, ")");
    if (device_ < 0) device_ = current_device();
    auto keys = DispatchKeySet(has_sparse_ ? DispatchKey::SparseCPU : DispatchKey::CPU);
    {
      std::optional<DeviceNumbers> numbers;
      if (op_.hasTag(at::Tag::nondeterministic_seeded)) numbers.emplace(device_);
      op_.redispatchBoxed(keys, &stack_);
    }
    take_resized();
    for (size_t i = stack_.size() - schema_.returns().size(); i < stack_.size(); i++)
      stack_[i] = map_tensors(stack_[i], [&](const Tensor& tensor) { return output(tensor); });
    if (!is_view()) {
      host_cuda::run(name_, device_, reads_, writes_);
      if (waits(name_) || is_index_by_mask_) host_waits(name_, device_);
    }
  }

 private:
  // FBGEMM makes graphs within some of its CPU's kernels, which see nothing that needs a gradient.
  void check_gradient() const {
    if (name_.rfind("fbgemm::", 0) != 0 || !GradMode::is_enabled() || schema_.returns().empty()) return;
    for (auto key : {DispatchKey::Autograd, DispatchKey::AutogradCUDA})
      if (op_.hasKernelForDispatchKey(key)) return;
    for (size_t i = 0; i < schema_.arguments().size(); i++) {
      const IValue& value = stack_[first_ + i];
      bool needs_gradient = value.isTensor() && value.toTensor().defined() && value.toTensor().requires_grad();
      TORCH_CHECK(!needs_gradient, name_, " has no gradient on the CUDA device in host memory");
    }
  }
  // FBGEMM's kernels take weights and states in one of several places. On a device the host's is empty, and the CPU's
  // kernel reads that one.
  void place_tables() {
    if (name_.find("_pt2_wrapper") == std::string::npos) return;
    const auto& arguments = schema_.arguments();
    for (size_t i = 0; i < arguments.size(); i++) {
      size_t at = arguments[i].name().find("host");
      if (at == std::string::npos || has_rows(stack_[first_ + i])) continue;
      for (const char* place : {"dev", "uvm"}) {
        std::string other = arguments[i].name();
        other.replace(at, 4, place);
        for (size_t j = 0; j < arguments.size(); j++)
          if (arguments[j].name() == other && has_rows(stack_[first_ + j])) stack_[first_ + i] = stack_[first_ + j];
      }
    }
  }
  static bool has_rows(const IValue& value) { return value.isTensor() && value.toTensor().defined() && value.toTensor().numel() > 0; }

  void convert_argument(size_t i) {
    IValue& value = stack_[first_ + i];
    const auto* info = schema_.arguments()[i].alias_info();
    bool is_written = info && info->isWrite();
    if (value.isOptionalTensorList() && name_ == "aten::index.Tensor")
      for (const auto& index : value.toOptionalTensorVector())
        is_index_by_mask_ |= index && index->defined() && index->scalar_type() == kBool;
    if (value.isDevice()) {
      Device device = value.toDevice();
      if (device.is_cuda()) {
        if (device_ < 0) device_ = device.index() < 0 ? current_device() : device.index();
        value = Device(kCPU);
      } else if (device.is_cpu()) {
        to_host_ = true;
      }
    } else if (value.isGenerator()) {
      if (value.toGenerator().device().is_cuda()) value = on_host(value.toGenerator());
    } else {
      value = map_tensors(value, [&](const Tensor& tensor) { return input(tensor, is_written); });
    }
  }

  Tensor input(const Tensor& tensor, bool is_written) {
    if (!is_on_device(tensor)) {
      if (tensor.device().is_cpu() && tensor.dim() > 0) has_host_ = true;
      if (tensor.layout() == kSparse) has_sparse_ = true;
      return tensor;
    }
    TORCH_CHECK(device_ < 0 || tensor.device().index() == device_,
        "Expected all tensors to be on the same device, but found at least two devices, cuda:", int(device_), " and ", tensor.device(),
        "! (when checking ", name_, ")");
    device_ = tensor.device().index();
    if (tensor.layout() == kSparse) has_sparse_ = true;
    if (void* memory = memory_of(tensor)) (is_written ? writes_ : reads_).push_back(memory);
    for (auto& [on_device, on_host] : pairs_)
      if (on_device.is_same(tensor)) return on_host;
    pairs_.emplace_back(tensor, to_host_memory(tensor));
    return pairs_.back().second;
  }

  Tensor output(const Tensor& tensor) {
    for (auto& [on_device, on_host] : pairs_)
      if (on_host.is_same(tensor)) return on_device;
    if (to_host_) return tensor;
    Tensor made = taken(tensor);
    if (made.defined() && made.is_cuda())
      if (void* memory = memory_of(made)) writes_.push_back(memory);
    return made;
  }

  // What the kernel has made in the host's memory comes to the device's, where its uses are followed.
  Tensor taken(const Tensor& tensor) const {
    bool is_made = tensor.defined() && tensor.device().is_cpu() && tensor.layout() == kStrided && !is_view();
    if (!is_made || is_known(tensor.storage().data())) return to_device_memory(tensor, device_);
    OnDevice on(device_);
    size_t bytes = tensor.storage().nbytes();
    Storage copied(Storage::use_byte_size_t(), bytes, device_allocator(), true);
    if (bytes) std::memcpy(copied.mutable_data(), tensor.storage().data(), bytes);
    return over(std::move(copied), tensor, DispatchKey::CUDA);
  }
  bool is_known(const void* data) const {
    auto is_same = [&](const void* memory) { return memory == data; };
    return host_cuda::is_on_device(data) || std::any_of(reads_.begin(), reads_.end(), is_same) || std::any_of(writes_.begin(), writes_.end(), is_same);
  }

  // Arguments that the kernel has given another size or other memory.
  void take_resized() {
    for (auto& [on_device, on_host] : pairs_) {
      if (on_device.layout() == kSparse) {
        auto* impl = static_cast<SparseTensorImpl*>(on_device.unsafeGetTensorImpl());
        if (!on_host._indices().is_alias_of(impl->indices()) || on_host._nnz() != on_device._nnz()) {
          impl->raw_resize_(on_host.sparse_dim(), on_host.dense_dim(), on_host.sizes());
          impl->set_indices_and_values_unsafe(to_device_memory(on_host._indices(), device_), to_device_memory(on_host._values(), device_));
        }
        impl->set_coalesced(on_host.is_coalesced());
        continue;
      }
      bool is_unchanged = on_host.sizes() == on_device.sizes() && on_host.strides() == on_device.strides() &&
          on_host.storage_offset() == on_device.storage_offset() && on_host.storage().data() == on_device.storage().data();
      if (is_unchanged) continue;
      Tensor resized = taken(on_host);
      on_device.unsafeGetTensorImpl()->set_storage_keep_dtype(resized.storage());
      on_device.unsafeGetTensorImpl()->set_sizes_and_strides(resized.sizes(), resized.strides(), resized.storage_offset());
    }
  }

  bool is_view() const {
    for (const auto& returned : schema_.returns())
      if (returned.alias_info() && !returned.alias_info()->isWrite()) return true;
    return false;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  size_t first_;
  std::string name_;
  DeviceIndex device_ = -1;
  bool has_host_ = false;
  bool has_sparse_ = false;
  bool to_host_ = false;
  bool is_index_by_mask_ = false;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
  std::vector<void*> reads_, writes_;
};

void fallback(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) { Call(op, stack).run(); }

// ---- kernels that a fallback cannot be: memory, copies between devices, views

static Device full(std::optional<Device> device) {
  return Device(kCUDA, device && device->has_index() ? device->index() : current_device());
}
static Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout> layout, std::optional<Device> device,
    std::optional<bool>, std::optional<MemoryFormat> format) {
  OnDevice on(full(device).index());
  return at::detail::empty_generic(size, device_allocator(), DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}
static Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
    std::optional<Device> device, std::optional<bool>) {
  OnDevice on(full(device).index());
  return at::detail::empty_strided_generic(size, stride, device_allocator(), DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}
static Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  Tensor to = self.is_cuda() ? to_host_memory(self) : self;
  Tensor from = source.is_cuda() ? to_host_memory(source) : source;
  DeviceIndex device = self.is_cuda() ? self.device().index() : source.device().index();
  std::vector<void*> reads, writes;
  if (source.is_cuda()) reads.push_back(memory_of(source));
  if (self.is_cuda()) writes.push_back(memory_of(self));
  std::string way = !source.is_cuda() ? "copy_ to the device" : self.is_cuda() ? "copy_" : "copy_ to the host";
  host_cuda::run(way, device, reads, writes);
  bool is_on_one_side = self.is_cuda() && source.is_cuda();
  const Tensor& host = self.is_cuda() ? source : self;
  bool is_asynchronous = is_on_one_side || (non_blocking && is_pinned(host.storage().data()));
  if (is_asynchronous && !self.is_cuda() && self.is_contiguous()) {
    Tensor values = at::empty_like(to);
    at::redispatch::copy_(DispatchKeySet(DispatchKey::CPU), values, from, false);
    copy_to_pinned_later(self, values, device);
    return self;
  }
  at::redispatch::copy_(DispatchKeySet(DispatchKey::CPU), to, from, false);
  if (!is_asynchronous) host_waits(self.is_cuda() ? TO_DEVICE : "copy to the host", device);
  return self;
}
static Scalar local_scalar(const Tensor& self) {
  host_cuda::run("_local_scalar_dense", self.device().index(), {memory_of(self)}, {});
  host_waits("_local_scalar_dense", self.device().index());
  return to_host_memory(self).item();
}
static Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
static Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
static Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) { return at::native::_reshape_alias(self, size, stride); }
static Tensor& set_storage_offset(Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
static Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
static Tensor& set_storage(Tensor& self, Storage storage) {
  int64_t count = storage.nbytes() / self.itemsize();
  return set_storage_offset(self, std::move(storage), 0, {count}, {1});
}
static Tensor& set_empty(Tensor& self) { return set_tensor(self, at::empty({0}, self.options())); }
static const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
  size_t needed = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) {
    OnDevice on(self.device().index());
    auto data = device_allocator()->allocate(needed);
    if (storage->nbytes()) std::memcpy(data.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
static void record_stream_of(Tensor& self, Stream stream) {
  TORCH_CHECK_NOT_IMPLEMENTED(self.layout() == kStrided, "record_stream of a tensor of layout ", self.layout());
  record_stream(memory_of(self), stream);
}
static bool tensor_is_pinned(const Tensor&, std::optional<Device>) { return false; }
TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, SparseCUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("set_.source_Storage_storage_offset", set_storage_offset);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_", set_empty);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream_of);
  library.impl("resize_", resize_);
  library.impl("is_pinned", tensor_is_pinned);
}
// What a sparse tensor is made of lies where its parts lie: torch's own functions do not ask for the device.
TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) {
  library.impl("_sparse_coo_tensor_with_dims", at::native::new_with_dims_sparse);
  library.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
  library.impl("_indices", at::native::_indices_sparse);
  library.impl("_values", at::native::_values_sparse);
  library.impl("indices", at::native::indices_sparse);
  library.impl("values", at::native::values_sparse);
  library.impl("_nnz", at::native::_nnz_sparse);
  library.impl("sparse_dim", at::native::sparse_dim_sparse);
  library.impl("dense_dim", at::native::dense_dim_sparse);
  library.impl("is_coalesced", at::native::is_coalesced_sparse);
  library.impl("_coalesced_", at::native::_coalesced_sparse_);
  library.impl("copy_sparse_to_sparse_", at::native::copy_sparse_);
  library.impl("copy_", at::native::copy_sparse_wrapper_);
  library.impl("sparse_resize_", at::native::sparse_resize_);
  library.impl("sparse_resize_and_clear_", at::native::sparse_resize_and_clear_);
  library.impl("empty.memory_format", at::native::empty_sparse_symint);
}
}  // namespace host_cuda
