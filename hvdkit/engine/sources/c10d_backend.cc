// hvdkit's collectives as a backend of torch.distributed. Part of hvdkit (Apache-2.0).
//
// c10d fixes the order of the calls in each group, so there are no names and no negotiation. The ranks of a group
// find each other through its c10d store. The backend is in the engine's library, so a process has one set of
// boards, one flight recorder and one Gloo, whether hvd.init() is called or not. The ranks only read each other's
// memory: a failed or stopped rank cannot change the tensors of the others.

#include "hvdkit_c10d_backend.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/version.h>

#undef LOG
#include "../common/hvdkit_host_allreduce.h"
#include "../common/hvdkit_host_group.h"
#include "../common/hvdkit_host_scatter.h"
#include "../common/python_thread.h"
#include "../common/hvdkit_recorder.h"
#if HAVE_GLOO
#include "../common/gloo/mesh_context.h"
#include "../common/hvdkit_gloo_network.h"
#include "gloo/transport/tcp/device.h"
#endif

namespace hvdkit {
namespace {

using c10::intrusive_ptr;
using c10d::OpType;
using c10d::Work;
using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;

// Horovod's number of a dtype; that of uint8 for dtypes that it does not have.
int recorded_type(at::ScalarType type) {
  static const std::map<at::ScalarType, int> types = {
      {at::kByte, 0}, {at::kChar, 1},  {at::kShort, 3},  {at::kInt, 4},  {at::kLong, 5},
      {at::kHalf, 6}, {at::kFloat, 7}, {at::kDouble, 8}, {at::kBool, 9}, {at::kBFloat16, 10}};
  auto found = types.find(type);
  return found == types.end() ? 0 : found->second;
}

// How a call reduces.
struct Reducing {
  Element element = Element::kFloat32;
  Reduction reduction = Reduction::kSum;
  bool average = false;

  double factor(int ranks) const { return average ? 1.0 / ranks : 1.0; }
};

// Returns whether the engine has the reduction. The same on all ranks that call it with equal arguments.
bool reduces(at::ScalarType type, const c10d::ReduceOp& op, Reducing& how) {
  if (!element_of(recorded_type(type), how.element)) {
    return false;
  }
  switch ((c10d::ReduceOp::RedOpType)op) {
    case c10d::ReduceOp::SUM:
      return true;
    case c10d::ReduceOp::AVG:
      how.average = true;
      return at::isFloatingType(type);
    case c10d::ReduceOp::MIN:
      how.reduction = Reduction::kMin;
      break;
    case c10d::ReduceOp::MAX:
      how.reduction = Reduction::kMax;
      break;
    case c10d::ReduceOp::PRODUCT:
      how.reduction = Reduction::kProduct;
      break;
    default:
      return false;
  }
  return has_reduction(how.element, how.reduction);
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg();
}

// The call in HostGroup::expect: operation, dtype, reduction, root; and the number of elements.
HostGroup::Call call_of(OpType operation, const at::Tensor& tensor, int64_t elements, int reduction = 0,
                        int root = 0) {
  const auto type = (uint64_t)tensor.scalar_type();
  return {(uint64_t)operation | type << 8 | (uint64_t)reduction << 16 | (uint64_t)root << 32, (uint64_t)elements};
}

std::string name_of(const HostGroup::Call& call) {
  static const char* reductions[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
  const auto operation = (OpType)(call[0] & 0xff);
  const auto type = (at::ScalarType)(call[0] >> 8 & 0xff);
  const auto reduction = call[0] >> 16 & 0xff;
  std::string text = c10d::opTypeToString(operation);
  if (operation == OpType::BARRIER) {
    return text;
  }
  text += " of " + std::to_string(call[1]) + " elements of " + c10::toString(type);
  if (operation == OpType::ALLREDUCE || operation == OpType::ALLREDUCE_COALESCED || operation == OpType::REDUCE ||
      operation == OpType::REDUCE_SCATTER || operation == OpType::_REDUCE_SCATTER_BASE) {
    text += std::string(" (") + (reduction < 9 ? reductions[reduction] : "?") + ")";
  } else if (operation == OpType::BROADCAST) {
    text += " from rank " + std::to_string(call[0] >> 32) + " of the group";
  }
  return text;
}

// Horovod's number of an operation, for the flight recorder.
int recorded_operation(OpType operation) {
  switch (operation) {
    case OpType::ALLGATHER:
    case OpType::_ALLGATHER_BASE:
    case OpType::ALLGATHER_COALESCED:
    case OpType::GATHER:
      return 1;
    case OpType::BROADCAST:
    case OpType::SCATTER:
      return 2;
    case OpType::ALLTOALL:
    case OpType::ALLTOALL_BASE:
      return 5;
    case OpType::BARRIER:
      return 6;
    case OpType::REDUCE_SCATTER:
    case OpType::_REDUCE_SCATTER_BASE:
    case OpType::REDUCE_SCATTER_TENSOR_COALESCED:
      return 7;
    default:
      return 0;
  }
}

// A tensor's memory as one piece, for reading and for writing. `finish` writes to a tensor that is not contiguous.
class Flat {
 public:
  explicit Flat(const at::Tensor& tensor) : tensor_(tensor), flat_(tensor.contiguous()) {}

  void* data() const { return flat_.data_ptr(); }
  size_t elements() const { return (size_t)flat_.numel(); }
  size_t bytes() const { return flat_.nbytes(); }
  bool overlaps(const Flat& other) const {
    return (char*)data() < (char*)other.data() + other.bytes() && (char*)other.data() < (char*)data() + bytes();
  }

  void finish() const {
    if (!flat_.is_same(tensor_)) {
      at::AutoDispatchBelowADInplaceOrView guard;
      tensor_.copy_(flat_);
    }
  }

 private:
  const at::Tensor tensor_, flat_;
};

int64_t elements_of(const Tensors& tensors) {
  int64_t elements = 0;
  for (auto& tensor : tensors) {
    elements += tensor.numel();
  }
  return elements;
}

// Several tensors one after the other.
at::Tensor joined(const Tensors& tensors) {
  Tensors flat;
  for (auto& tensor : tensors) {
    flat.push_back(tensor.detach().reshape({-1}));
  }
  return at::cat(flat);
}

void split_into(const at::Tensor& joined, const Tensors& tensors) {
  at::AutoDispatchBelowADInplaceOrView guard;
  int64_t at = 0;
  for (auto& tensor : tensors) {
    tensor.copy_(joined.narrow(0, at, tensor.numel()).view(tensor.sizes()));
    at += tensor.numel();
  }
}

Parts parts_of(const Tensors& tensors, size_t size = 0) {
  std::vector<size_t> counts;
  for (auto& tensor : tensors) {
    counts.push_back(size ? (size_t)tensor.numel() * size : (size_t)tensor.numel());
  }
  return Parts(std::move(counts));
}

// -- The queue of a group ----------------------------------------------------------------------------

class Queue;

class Task : public Work {
 public:
  // `record` is the number of the call in the flight recorder.
  Task(int rank, OpType operation, uint64_t number, uint64_t record, std::shared_ptr<Queue> queue, Tensors outputs,
       std::function<void()> run)
      : Work(rank, operation), number_(number), record_(record), queue_(std::move(queue)),
        outputs_(std::move(outputs)), run_(std::move(run)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  bool wait(Milliseconds timeout) override;
  Tensors result() override { return outputs_; }
  intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return number_; }

  // Runs the collective. `end` is to be called with the result.
  std::exception_ptr run() {
    try {
      run_();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  void end(std::exception_ptr error) {
    run_ = nullptr;
    Recorder::instance().end(record_, text_of(error));
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
    finish(error);
  }

 private:
  static std::string text_of(const std::exception_ptr& error) {
    try {
      if (error) {
        std::rethrow_exception(error);
      }
    } catch (const std::exception& exception) {
      return exception.what();
    }
    return "";
  }

  const uint64_t number_, record_;
  const std::shared_ptr<Queue> queue_;
  const Tensors outputs_;
  std::function<void()> run_;
  const intrusive_ptr<c10::ivalue::Future> future_;
};

// The calls of a group, in their order. A thread runs them, or a thread that waits for one of them.
class Queue {
 public:
  void add(const intrusive_ptr<Task>& task) {
    std::lock_guard<std::mutex> guard(mutex_);
    TORCH_CHECK(!closed_, "The group has been ended by abort or destroy_process_group.");
    tasks_.push_back(task);
    changed_.notify_all();
  }

  // Returns when the task runs or has run. The tasks after it are left, because the caller does not wait for them.
  void run_until(const Task& task) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!tasks_.empty() && tasks_.front()->getSequencenumber() <= task.getSequencenumber()) {
      step(lock);
    }
  }

  void run_until_closed() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!closed_ || !tasks_.empty()) {
      if (tasks_.empty()) {
        changed_.wait(lock);
        // A caller that waits for its task at once runs it itself. That saves two changes of threads.
        changed_.wait_for(lock, std::chrono::microseconds(50), [this] { return closed_ || tasks_.size() > 1; });
      } else {
        step(lock);
      }
    }
  }

  // Refuses more tasks. Returns whether a task runs or waits.
  bool close() {
    std::lock_guard<std::mutex> guard(mutex_);
    closed_ = true;
    changed_.notify_all();
    return busy_ || !tasks_.empty();
  }

  // Returns when no task runs or waits.
  void finish() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (busy_ || !tasks_.empty()) {
      step(lock);
    }
  }

 private:
  // Runs the next task; if one runs, waits for a change instead.
  void step(std::unique_lock<std::mutex>& lock) {
    if (busy_) {
      changed_.wait(lock);
      return;
    }
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    lock.unlock();
    auto error = task->run();
    lock.lock();
    // Before the callbacks of the task's future, which may wait for another task.
    busy_ = false;
    changed_.notify_all();
    lock.unlock();
    task->end(error);
    task.reset();
    lock.lock();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<intrusive_ptr<Task>> tasks_;
  bool busy_ = false, closed_ = false;
};

bool Task::wait(Milliseconds timeout) {
  if (timeout == kNoTimeout) {
    queue_->run_until(*this);
  }
  return Work::wait(timeout);
}

// -- The backend -------------------------------------------------------------------------------------

class HvdBackend : public c10d::Backend {
 public:
  HvdBackend(intrusive_ptr<c10d::Store> store, int rank, int size, Milliseconds timeout, std::vector<int> ranks,
             int set, intrusive_ptr<c10d::Backend> inner)
      : Backend(rank, size), timeout_(timeout), set_(set), inner_(std::move(inner)),
        group_(new HostGroup(ranks, rank, timeout, false, std::make_unique<NoNetwork>())),
        queue_(std::make_shared<Queue>()) {
    Recorder::instance().set_group(set_, ranks);
    uint64_t exchanges = 0;
    const char* collectives = std::getenv("HVDKIT_COLLECTIVES");
    const bool flat = collectives && std::string(collectives) == "flat";
    auto& peers = group_->peers();
    peers.connect(
        [&](std::vector<long long>& words) {
          const auto key = "hvdkit/" + std::to_string(exchanges++) + "/";
          const auto* bytes = reinterpret_cast<const uint8_t*>(words.data());
          for (auto& theirs : exchange(*store, key, {bytes, bytes + words.size() * sizeof(long long)})) {
            TORCH_CHECK(theirs.size() == words.size() * sizeof(long long),
                        "Ranks have different versions of hvdkit.");
            for (size_t i = 0; i < words.size(); ++i) {
              words[i] |= reinterpret_cast<const long long*>(theirs.data())[i];
            }
          }
        },
        flat ? kRequested : kNone);
    TORCH_CHECK(peers.same_version(), "Ranks have different versions of hvdkit's engine.");
    if (peers.hosts() > 1) {
      group_->set_network(network(*store));
    }
  }

  ~HvdBackend() override {
    if (process_ != getpid()) {
      // The parent's threads do not exist here, and its connections belong to it.
      new std::thread(std::move(thread_));
      group_.release();
      inner_.release();
      return;
    }
    end();
  }

  const std::string getBackendName() const override { return "hvd"; }

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 6
  intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("hvd", timeout_);
  }

  void abort() override { end(); }
  void shutdown() override { end(); }
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 8
  void setTimeout(Milliseconds timeout) override {
    timeout_ = timeout;
    group_->progress().set_timeout(timeout);
  }
#endif

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }

  intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(tensors.size() == 1, "allreduce has ", tensors.size(), " tensors; expected 1.");
    const auto tensor = tensors[0];
    const auto call = call_of(OpType::ALLREDUCE, tensor, tensor.numel(), (int)options.reduceOp.op_);
    Reducing how;
    if (!is_plain(tensor) || !reduces(tensor.scalar_type(), options.reduceOp, how)) {
      return delegate(OpType::ALLREDUCE, call, tensors,
                      [=](c10d::Backend& inner, Tensors given) { return inner.allreduce(given, options); });
    }
    return submit(OpType::ALLREDUCE, call, tensors, options, [=] { reduce(tensor, how); });
  }

  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& options) override {
    Reducing how;
    for (auto& tensor : tensors) {
      TORCH_CHECK(is_plain(tensor) && reduces(tensor.scalar_type(), options.reduceOp, how),
                  "allreduce_coalesced has a tensor of ", tensor.scalar_type(), " on ", tensor.device(),
                  "; expected numbers on the CPU, and a reduction that they have.");
    }
    const auto call =
        call_of(OpType::ALLREDUCE_COALESCED, tensors.at(0), elements_of(tensors), (int)options.reduceOp.op_);
    return submit(OpType::ALLREDUCE_COALESCED, call, tensors, options, [this, tensors, options] {
      for (auto& tensor : tensors) {
        Reducing each;
        reduces(tensor.scalar_type(), options.reduceOp, each);
        reduce(tensor, each);
      }
    });
  }

  intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    TORCH_CHECK(tensors.size() == 1, "broadcast has ", tensors.size(), " tensors; expected 1.");
    const auto tensor = tensors[0];
    const int root = (int)options.rootRank;
    TORCH_CHECK(root >= 0 && root < size_, "broadcast from rank ", root, " of a group of ", size_, " ranks.");
    const auto call = call_of(OpType::BROADCAST, tensor, tensor.numel(), 0, root);
    if (!is_plain(tensor)) {
      return delegate(OpType::BROADCAST, call, tensors,
                      [=](c10d::Backend& inner, Tensors given) { return inner.broadcast(given, options); });
    }
    return submit(OpType::BROADCAST, call, tensors, options, [=] {
      const Flat flat(tensor);
      GroupBroadcast(*group_).run(flat.data(), flat.bytes(), root);
      flat.finish();
    });
  }

  intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& options) override {
    check_gather(output, input);
    return submit(OpType::_ALLGATHER_BASE, call_of(OpType::_ALLGATHER_BASE, input, input.numel()), {output}, options,
                  [=] { gather(output, input); });
  }

  intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(outputs.size() == inputs.size() && !inputs.empty(), "allgather_into_tensor_coalesced has ",
                outputs.size(), " outputs and ", inputs.size(), " inputs; expected as many, and at least one.");
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_gather(outputs[i], inputs[i]);
    }
    const auto call = call_of(OpType::ALLGATHER_COALESCED, inputs[0], elements_of(inputs));
    return submit(OpType::ALLGATHER_COALESCED, call, outputs, options, [this, outputs, inputs] {
      for (size_t i = 0; i < inputs.size(); ++i) {
        gather(outputs[i], inputs[i]);
      }
    });
  }

  intrusive_ptr<Work> allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(inputs.size() == 1 && outputs.size() == 1, "allgather expects one input and one list of outputs.");
    const auto input = inputs[0];
    const auto list = outputs[0];
    const bool plain = check_list("allgather", list, input);
    const int64_t elements = elements_of(list);
    const auto call = call_of(OpType::ALLGATHER, input, elements);
    if (!plain) {
      return delegate(OpType::ALLGATHER, call, list, [=](c10d::Backend& inner, Tensors given) {
        Lists lists{given};
        Tensors sources{input};
        return inner.allgather(lists, sources, options);
      });
    }
    return submit(OpType::ALLGATHER, call, list, options, [this, list, input, elements] {
      const Flat source(input);
      const auto all = at::empty({elements}, input.options().requires_grad(false));
      GroupAllgather(*group_).run(source.data(), all.data_ptr(), parts_of(list, input.element_size()));
      split_into(all, list);
    });
  }

  intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& options) override {
    check_scatter(output, input);
    const auto call = call_of(OpType::_REDUCE_SCATTER_BASE, input, input.numel(), (int)options.reduceOp.op_);
    Reducing how;
    if (!is_plain(input) || !reduces(input.scalar_type(), options.reduceOp, how)) {
      Tensors outputs{output};
      return delegate(OpType::_REDUCE_SCATTER_BASE, call, outputs, [=](c10d::Backend& inner, Tensors given) {
        auto source = input;
        return inner._reduce_scatter_base(given[0], source, options);
      });
    }
    return submit(OpType::_REDUCE_SCATTER_BASE, call, {output}, options, [=] { scatter(output, input, how); });
  }

  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == inputs.size() && !inputs.empty(), "reduce_scatter_tensor_coalesced has ",
                outputs.size(), " outputs and ", inputs.size(), " inputs; expected as many, and at least one.");
    std::vector<Reducing> hows(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_scatter(outputs[i], inputs[i]);
      TORCH_CHECK(is_plain(inputs[i]) && reduces(inputs[i].scalar_type(), options.reduceOp, hows[i]),
                  "reduce_scatter_tensor_coalesced has a tensor of ", inputs[i].scalar_type(), " on ",
                  inputs[i].device(), "; expected numbers on the CPU, and a reduction that they have.");
    }
    const auto call = call_of(OpType::REDUCE_SCATTER_TENSOR_COALESCED, inputs[0], elements_of(inputs),
                              (int)options.reduceOp.op_);
    return submit(OpType::REDUCE_SCATTER_TENSOR_COALESCED, call, outputs, options, [this, outputs, inputs, hows] {
      for (size_t i = 0; i < inputs.size(); ++i) {
        scatter(outputs[i], inputs[i], hows[i]);
      }
    });
  }

  intrusive_ptr<Work> reduce_scatter(Tensors& outputs, Lists& inputs,
                                     const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1,
                "reduce_scatter expects one output and one list of inputs.");
    const auto output = outputs[0];
    const auto list = inputs[0];
    const bool plain = check_list("reduce_scatter", list, output);
    const auto call = call_of(OpType::REDUCE_SCATTER, output, elements_of(list), (int)options.reduceOp.op_);
    Reducing how;
    if (!plain || !reduces(output.scalar_type(), options.reduceOp, how)) {
      return delegate(OpType::REDUCE_SCATTER, call, outputs, [=](c10d::Backend& inner, Tensors given) {
        Lists lists{list};
        return inner.reduce_scatter(given, lists, options);
      });
    }
    return submit(OpType::REDUCE_SCATTER, call, outputs, options, [this, output, list, how] {
      const Flat target(output), source(joined(list));
      GroupReducescatter(*group_).run(source.data(), target.data(), parts_of(list), how.element, how.factor(size_),
                                      how.reduction);
      target.finish();
    });
  }

  intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                    std::vector<int64_t>& input_splits,
                                    const c10d::AllToAllOptions& options) override {
    TORCH_CHECK(is_plain(input) && is_plain(output) && input.scalar_type() == output.scalar_type(),
                "alltoall_base has an input of ", input.scalar_type(), " on ", input.device(), " and an output of ",
                output.scalar_type(), " on ", output.device(), "; expected tensors of one dtype on the CPU.");
    const auto sent = splits(input, input_splits), received = splits(output, output_splits);
    // With splits, the numbers of elements may differ.
    const auto call = call_of(OpType::ALLTOALL_BASE, input, input_splits.empty() ? input.numel() : 0);
    return submit(OpType::ALLTOALL_BASE, call, {output}, options, [this, output, input, sent, received] {
      const Flat source(input), target(output);
      GroupAlltoall(*group_).run(source.data(), sent, target.data(), received);
      target.finish();
    });
  }

  intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    const auto& kept = inputs.at((size_t)rank_);
    TORCH_CHECK(check_list("alltoall", inputs, kept) && check_list("alltoall", outputs, kept),
                "alltoall expects tensors on the CPU.");
    return submit(OpType::ALLTOALL, call_of(OpType::ALLTOALL, inputs[0], 0), outputs, options,
                  [this, outputs, inputs] {
      const size_t size = inputs[0].element_size();
      const Parts sent = parts_of(inputs, size), received = parts_of(outputs, size);
      const auto source = joined(inputs);
      const auto target = at::empty({(int64_t)(received.total() / size)}, source.options());
      GroupAlltoall(*group_).run(source.data_ptr(), sent, target.data_ptr(), received);
      split_into(target, outputs);
    });
  }

  intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    const HostGroup::Call call{(uint64_t)OpType::BARRIER, 0};
    return submit(OpType::BARRIER, call, {}, options, [this] { GroupBarrier(*group_).run(); });
  }

  // -- Gloo's

  intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const auto call = call_of(OpType::REDUCE, tensors.at(0), tensors[0].numel(), (int)options.reduceOp.op_,
                              (int)options.rootRank);
    return delegate(OpType::REDUCE, call, tensors,
                    [=](c10d::Backend& inner, Tensors given) { return inner.reduce(given, options); });
  }

  intrusive_ptr<Work> allgather_coalesced(Lists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    const auto lists = outputs;
    const auto call = call_of(OpType::ALLGATHER_COALESCED, inputs.at(0), inputs[0].numel());
    return delegate(OpType::ALLGATHER_COALESCED, call, inputs, [=](c10d::Backend& inner, Tensors given) {
      auto targets = lists;
      return inner.allgather_coalesced(targets, given, options);
    });
  }

  intrusive_ptr<Work> gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const auto lists = outputs;
    const auto call = call_of(OpType::GATHER, inputs.at(0), inputs[0].numel(), 0, (int)options.rootRank);
    return delegate(OpType::GATHER, call, inputs, [=](c10d::Backend& inner, Tensors given) {
      auto targets = lists;
      return inner.gather(targets, given, options);
    });
  }

  intrusive_ptr<Work> scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    const auto lists = inputs;
    const auto call = call_of(OpType::SCATTER, outputs.at(0), outputs[0].numel(), 0, (int)options.rootRank);
    return delegate(OpType::SCATTER, call, outputs, [=](c10d::Backend& inner, Tensors given) {
      auto sources = lists;
      return inner.scatter(given, sources, options);
    });
  }

  intrusive_ptr<Work> allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const auto call = call_of(OpType::_ALLREDUCE_SPARSE, tensors.at(0), 0);
    return delegate(OpType::_ALLREDUCE_SPARSE, call, tensors,
                    [=](c10d::Backend& inner, Tensors given) { return inner.allreduce_sparse(given, options); });
  }

  intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    check_process();
    return inner_->send(tensors, to, tag);
  }

  intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    check_process();
    return inner_->recv(tensors, from, tag);
  }

  intrusive_ptr<Work> recvAnysource(Tensors& tensors, int tag) override {
    check_process();
    return inner_->recvAnysource(tensors, tag);
  }

 private:
  // -- Connections

  // Gives `own` to the other ranks. Returns theirs, in the order of the ranks.
  std::vector<std::vector<uint8_t>> exchange(c10d::Store& store, const std::string& key,
                                             const std::vector<uint8_t>& own) const {
    store.set(key + std::to_string(rank_), own);
    std::vector<std::string> keys;
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_) {
        keys.push_back(key + std::to_string(rank));
      }
    }
    if (keys.empty()) {
      return {};
    }
    store.wait(keys, timeout_);
    return store.multiGet(keys);
  }

  std::unique_ptr<Network> network(c10d::Store& store) const {
#if HAVE_GLOO
    auto context = std::make_shared<MeshContext>(rank_, size_, timeout_);
    context->connect(device(), [&](const std::vector<char>& own, std::vector<std::vector<char>>& theirs) {
      const size_t width = own.size() / (size_t)(size_ - 1);
      int rank = 0;
      for (auto& all : exchange(store, "hvdkit/mesh/", {own.begin(), own.end()})) {
        rank += rank == rank_;
        // Without the rank itself.
        const size_t place = (size_t)(rank < rank_ ? rank_ - 1 : rank_);
        TORCH_CHECK(all.size() == own.size(), "rank ", rank, " has sent addresses of another length.");
        theirs.emplace_back(all.begin() + (std::ptrdiff_t)(place * width),
                            all.begin() + (std::ptrdiff_t)((place + 1) * width));
        ++rank;
      }
      return true;
    });
    return std::make_unique<GlooNetwork>(context);
#else
    TORCH_CHECK(false, "A group of ranks on several hosts needs an engine that is built with Gloo.");
#endif
  }

#if HAVE_GLOO
  // One listener and one thread for all groups of the process.
  static std::shared_ptr<gloo::transport::Device> device() {
    static auto& device = *new std::shared_ptr<gloo::transport::Device>;
    static auto& mutex = *new std::mutex;
    static pid_t process = 0;
    std::lock_guard<std::mutex> guard(mutex);
    if (process != getpid()) {
      gloo::transport::tcp::attr address;
      for (const char* name : {"GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"}) {
        const char* interfaces = std::getenv(name);
        if (interfaces && address.iface.empty()) {
          address.iface = std::string(interfaces).substr(0, std::string(interfaces).find(','));
        }
      }
      if (address.iface.empty()) {
        char host[256] = {};
        gethostname(host, sizeof host - 1);
        address.hostname = host;
      }
      address.ai_family = AF_UNSPEC;
      new std::shared_ptr<gloo::transport::Device>(device);
      device = gloo::transport::tcp::CreateDevice(address);
      process = getpid();
    }
    return device;
  }
#endif

  // -- Collectives, in the thread that runs the queue

  void reduce(const at::Tensor& tensor, const Reducing& how) const {
    const Flat flat(tensor);
    GroupAllreduce(*group_).run(flat.data(), flat.data(), flat.elements(), how.element, how.factor(size_),
                                Wire::kElements, how.reduction);
    flat.finish();
  }

  void gather(const at::Tensor& output, const at::Tensor& input) const {
    const Flat source(input), target(output);
    GroupAllgather(*group_).run(source.data(), target.data(), equal_parts(source.bytes()));
    target.finish();
  }

  void scatter(const at::Tensor& output, const at::Tensor& input, const Reducing& how) const {
    const Flat source(input), target(output);
    if (source.overlaps(target)) {
      const Flat copy(input.clone());
      GroupReducescatter(*group_).run(copy.data(), target.data(), equal_parts(target.elements()), how.element,
                                      how.factor(size_), how.reduction);
    } else {
      GroupReducescatter(*group_).run(source.data(), target.data(), equal_parts(target.elements()), how.element,
                                      how.factor(size_), how.reduction);
    }
    target.finish();
  }

  Parts equal_parts(size_t count) const { return Parts(std::vector<size_t>((size_t)size_, count)); }

  // The bytes for each rank.
  Parts splits(const at::Tensor& tensor, const std::vector<int64_t>& rows) const {
    const int64_t all = tensor.dim() ? tensor.size(0) : 1;
    std::vector<size_t> bytes;
    int64_t sum = 0;
    for (int rank = 0; rank < size_; ++rank) {
      const int64_t count = rows.empty() ? all / size_ : rows.at((size_t)rank);
      bytes.push_back((size_t)count * (all ? tensor.nbytes() / (size_t)all : 0));
      sum += count;
    }
    TORCH_CHECK(sum == all && (rows.empty() || (int)rows.size() == size_), "alltoall_base has splits for ", sum,
                " of ", all, " rows, and ", size_, " ranks; expected splits with the sum of the rows.");
    return Parts(std::move(bytes));
  }

  // Checks a list with a tensor for each rank, of which one has the shape of `own`. Returns whether all are plain.
  bool check_list(const char* name, const Tensors& list, const at::Tensor& own) const {
    TORCH_CHECK((int)list.size() == size_, name, " has a list of ", list.size(),
                " tensors; expected one for each of the ", size_, " ranks.");
    bool plain = is_plain(own);
    for (auto& tensor : list) {
      TORCH_CHECK(tensor.scalar_type() == own.scalar_type(), name, " has tensors of ", own.scalar_type(), " and ",
                  tensor.scalar_type(), "; expected the same dtype.");
      plain = plain && is_plain(tensor);
    }
    const auto& same = list[(size_t)rank_];
    TORCH_CHECK(same.numel() == own.numel(), name, " has tensors of ", own.numel(), " and ", same.numel(),
                " elements for rank ", rank_, " of the group; expected the same number.");
    return plain;
  }

  void check_gather(const at::Tensor& output, const at::Tensor& input) const {
    TORCH_CHECK(is_plain(input) && is_plain(output) && input.scalar_type() == output.scalar_type() &&
                    output.numel() == size_ * input.numel(),
                "allgather has an input of ", input.numel(), " elements of ", input.scalar_type(), " on ",
                input.device(), " and an output of ", output.numel(), " elements of ", output.scalar_type(),
                "; expected tensors of one dtype on the CPU, and an output of ", size_ * input.numel(), " elements.");
  }

  void check_scatter(const at::Tensor& output, const at::Tensor& input) const {
    TORCH_CHECK(input.scalar_type() == output.scalar_type() && input.numel() == size_ * output.numel(),
                "reduce_scatter has an input of ", input.numel(), " elements of ", input.scalar_type(),
                " and an output of ", output.numel(), " elements of ", output.scalar_type(),
                "; expected one dtype, and an input of ", size_ * output.numel(), " elements.");
  }

  // -- The queue

  void check_process() const {
    TORCH_CHECK(process_ == getpid(), "This process was forked from a rank of the group. It is not a rank itself. "
                "Call torch.distributed in the rank only.");
  }

  // Whether the caller does not wait for the result.
  template <typename Options>
  static auto is_async(const Options& options, int) -> decltype(options.asyncOp) {
    return options.asyncOp;
  }
  template <typename Options>
  static bool is_async(const Options&, long) {
    return true;
  }

  template <typename Options>
  intrusive_ptr<Work> submit(OpType operation, const HostGroup::Call& call, const Tensors& outputs,
                             const Options& options, std::function<void()> run) {
    check_process();
    const uint64_t number = ++number_;
    const auto type = (at::ScalarType)(call[0] >> 8 & 0xff);
    const uint64_t record = Recorder::instance().begin(
        "torch.distributed." + c10d::opTypeToString(operation), recorded_operation(operation), set_,
        recorded_type(type), call[1] * c10::elementSize(type));
    auto task = c10::make_intrusive<Task>(rank_, operation, number, record, queue_, outputs, [this, call, run] {
      group_->expect(call, name_of);
      run();
    });
    const bool async = is_async(options, 0);
    queue_->add(task);
    if (!async) {
      queue_->run_until(*task);
    } else {
      std::call_once(started_, [this] {
        thread_ = std::thread([queue = queue_] {
          keep_python_thread_state();
          queue->run_until_closed();
        });
      });
    }
    return task;
  }

  // Lets Gloo run a collective, after the ranks have compared their calls.
  template <typename Run>
  intrusive_ptr<Work> delegate(OpType operation, const HostGroup::Call& call, const Tensors& tensors, Run run) {
    return submit(operation, call, tensors, c10d::AllreduceOptions(), [this, tensors, run] {
      group_->post(nullptr, 0, nullptr);
      group_->compare_hosts();
      Tensors dense;  // Gloo ignores strides
      for (auto& tensor : tensors) {
        dense.push_back(tensor.layout() == at::kStrided ? tensor.contiguous() : tensor);
      }
      run(*inner_, dense)->wait();
      for (size_t i = 0; i < tensors.size(); ++i) {
        if (!dense[i].is_same(tensors[i])) {
          at::AutoDispatchBelowADInplaceOrView guard;
          tensors[i].copy_(dense[i]);
        }
      }
    });
  }

  // Ends the group. The calls that run or wait fail, also on the other ranks.
  void end() {
    if (process_ != getpid()) {
      return;
    }
    // The thread may need Python's lock to free a tensor.
    std::unique_ptr<pybind11::gil_scoped_release> released;
    if (Py_IsInitialized() && PyGILState_Check()) {
      released = std::make_unique<pybind11::gil_scoped_release>();
    }
    if (queue_->close()) {
      group_->progress().abandon(HostProgress::kAborted);
      group_->network().abort();
      abort_inner();
    }
    queue_->finish();
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();  // a callback has dropped the last reference to the group
    } else if (thread_.joinable()) {
      thread_.join();
    }
    group_->peers().disconnect();
    Recorder::instance().remove_group(set_);
  }

  void abort_inner() {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 6
    inner_->abort();
#endif
  }

  Milliseconds timeout_;
  const int set_;
  const pid_t process_ = getpid();
  intrusive_ptr<c10d::Backend> inner_;
  std::unique_ptr<HostGroup> group_;
  const std::shared_ptr<Queue> queue_;
  std::atomic<uint64_t> number_{0};
  std::once_flag started_;
  std::thread thread_;
};

intrusive_ptr<c10d::Backend> create(const intrusive_ptr<c10d::Store>& store, int rank, int size,
                                    std::chrono::milliseconds timeout, std::vector<int> ranks, int set,
                                    const intrusive_ptr<c10d::Backend>& inner) {
  return c10::make_intrusive<HvdBackend>(store, rank, size, timeout, std::move(ranks), set, inner);
}

}  // namespace

void bind_c10d(pybind11::module& module) {
  module.def("hvdkit_c10d_backend", &create, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace hvdkit
