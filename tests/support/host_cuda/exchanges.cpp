// Exchanges between ranks: each group's backend for the device, gloo or one called nccl, exchanges the same memory.
#include "device.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

using namespace c10d;

namespace host_cuda {

using c10::IValue;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// A group that hands tensors of the CPU to the backend that another one has for the device.
static Group for_host_memory(const Group& group) {
  static std::mutex lock;
  static std::unordered_map<c10d::ProcessGroup*, std::pair<c10::weak_intrusive_ptr<c10d::ProcessGroup>, Group>> known;
  std::lock_guard<std::mutex> held(lock);
  auto found = known.find(group.get());
  if (found != known.end() && found->second.first.lock() == group) return found->second.second;
  auto backend = group->getBackend(c10::DeviceType::CUDA);
  auto made = c10::make_intrusive<c10d::ProcessGroup>(group->getRank(), group->getSize());
  made->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, backend);
  known.insert_or_assign(group.get(), std::make_pair(c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), made));
  return made;
}

static IValue* argument(const c10::OperatorHandle& op, torch::jit::Stack* stack, const std::string& name) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++)
    if (arguments[i].name() == name) return &(*stack)[stack->size() - arguments.size() + i];
  return nullptr;
}

static void exchange(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (IValue* group = argument(op, stack, "process_group")) *group = for_host_memory(group->toCustomClass<c10d::ProcessGroup>());
  fallback(op, keys, stack);
}

// NCCL's mean of whole numbers is one; gloo's division refuses them.
static void all_reduce(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto tensors = argument(op, stack, "tensors")->toTensorVector();
  auto size = argument(op, stack, "process_group")->toCustomClass<c10d::ProcessGroup>()->getSize();
  IValue* reduce_op = argument(op, stack, "reduce_op");
  bool is_mean = reduce_op->toCustomClass<c10d::ReduceOp>()->op_ == c10d::ReduceOp::AVG;
  bool is_whole = is_mean && at::isIntegralType(tensors.at(0).scalar_type(), true);
  if (is_whole) *reduce_op = c10::make_intrusive<c10d::ReduceOp>(c10d::ReduceOp::SUM);
  exchange(op, keys, stack);
  if (!is_whole) return;
  stack->back().toCustomClass<c10d::Work>()->wait();
  for (auto& tensor : tensors) tensor.div_(size, "trunc");
}

// NCCL gathers tensors of unequal sizes, by broadcasts; gloo refuses them.
static void all_gather(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  IValue outputs = *argument(op, stack, "output_tensors");
  auto parts = outputs.toList().get(0).toTensorVector();
  bool is_even = std::all_of(parts.begin(), parts.end(), [&](const auto& part) { return part.sizes() == parts[0].sizes(); });
  if (is_even) return exchange(op, keys, stack);
  auto own = argument(op, stack, "input_tensors")->toTensorVector().at(0);
  auto group = argument(op, stack, "process_group")->toCustomClass<c10d::ProcessGroup>();
  c10::intrusive_ptr<c10d::Work> work;
  for (int rank = 0; rank < group->getSize(); rank++) {
    std::vector<at::Tensor> sent{rank == group->getRank() ? parts[rank].copy_(own) : parts[rank]};
    c10d::BroadcastOptions options;
    options.rootRank = rank;
    work = group->broadcast(sent, options);
    work->wait();
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, outputs, work);
}

// DistributedDataParallel's logger asks for one. Nothing takes time on the device.
struct NoTimer final : c10d::Timer {
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, NoTimer)

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace host_cuda

// In place of torch's own kernels, which hand tensors of the device to the backend.
extern "C" void host_cuda_register_exchanges() {
  static host_cuda::Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static torch::Library library(torch::Library::IMPL, "c10d", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const char* name : {"send", "recv_", "recv_any_source_", "reduce_", "broadcast_", "allreduce_coalesced_",
           "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "_reduce_scatter_base_", "reduce_scatter_",
           "reduce_scatter_tensor_coalesced_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&host_cuda::exchange>());
  library.impl("allgather_", torch::CppFunction::makeFromBoxedFunction<&host_cuda::all_gather>());
  library.impl("allreduce_", torch::CppFunction::makeFromBoxedFunction<&host_cuda::all_reduce>());
}
