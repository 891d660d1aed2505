// The two-level collectives as operations of Horovod. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_HOST_OPERATIONS_H
#define HVDKIT_HOST_OPERATIONS_H

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hvdkit_host_allreduce.h"
#include "hvdkit_host_group.h"
#include "hvdkit_host_scatter.h"
#if HAVE_GLOO
#include "hvdkit_gloo_network.h"
#endif
#if HAVE_MPI
#include "hvdkit_mpi_network.h"
#endif
#include "ops/collective_operations.h"

namespace hvdkit {

namespace hvd = horovod::common;

inline bool element_of(hvd::DataType type, Element& element) {
  switch (type) {
    case hvd::HOROVOD_FLOAT32:
      element = Element::kFloat32;
      return true;
    case hvd::HOROVOD_FLOAT64:
      element = Element::kFloat64;
      return true;
    case hvd::HOROVOD_FLOAT16:
      element = Element::kFloat16;
      return true;
    case hvd::HOROVOD_BFLOAT16:
      element = Element::kBfloat16;
      return true;
    case hvd::HOROVOD_INT32:
      element = Element::kInt32;
      return true;
    case hvd::HOROVOD_INT64:
      element = Element::kInt64;
      return true;
    default:
      return false;
  }
}

// The group of all ranks, which the operations share.
class HostCollectives {
 public:
  explicit HostCollectives(hvd::HorovodGlobalState* state) : state_(state) {}

  // Connects the ranks. A collective, at the end of the initialization.
  void connect() {
    auto& controller = *state_->global_controller;
    const char* collectives = std::getenv("HVDKIT_COLLECTIVES");
    const auto timeout = timeout_for(state_->control_operation);
    std::unique_ptr<HostGroup> group(
        new HostGroup(controller.GetRank(), controller.GetSize(), timeout, network(timeout)));
    auto reason = group->connect(collectives && std::string(collectives) == "flat",
                                 [&](std::vector<long long>& words) {
                                   controller.CrossRankBitwiseOr(words, (int)words.size());
                                 });
    std::lock_guard<std::mutex> guard(mutex_);
    group_ = std::move(group);
    flat_reason_ = reason;
    sum_order_ = sum_order_of(*group_, state_->cpu_operation);
  }

  // Closes the connections. To be called before Horovod closes its own.
  void disconnect() {
    std::lock_guard<std::mutex> guard(mutex_);
    group_.reset();
    flat_reason_ = "Horovod is not initialized";
    sum_order_.clear();
  }

  // To be called if this rank cannot take part in a collective. The other ranks of the host get an error;
  // otherwise they would take this rank's next tensor for that of the collective. Only for Horovod's
  // thread.
  void abandon() {
    if (group_) {
      group_->progress().abandon();
    }
  }

  // The reason why all collectives are flat; "" if buckets are reduced in shared memory.
  std::string flat_reason() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return flat_reason_;
  }

  // All that the order of additions depends on, beside the tensor, as JSON: the version of the order, the
  // library for tensors that are not added in shared memory, and the ranks of each host whose ranks share
  // memory. "" if Horovod is not initialized.
  std::string sum_order() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return sum_order_;
  }

  // Whether tensors with kInt8Mark in their names are sent as blocks of 8-bit integers.
  bool has_int8() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return group_ && group_->serves(Wire::kInt8);
  }

  // Null before `connect` and after `disconnect`. Only for Horovod's thread, which calls both.
  HostGroup* group() const { return group_.get(); }

 private:
  static std::string sum_order_of(HostGroup& group, hvd::LibType library) {
    std::string text = "{\"version\": " + std::to_string(kSumOrder) + ", \"library\": \"" +
                       (library == hvd::LibType::MPI ? "mpi" : "gloo") + "\", \"hosts\": [";
    const char* host_separator = "";
    for (auto& ranks : group.peers().ranks_by_host()) {
      if (!group.peers().shared()) {
        break;
      }
      text += host_separator + std::string("[");
      host_separator = ", ";
      const char* separator = "";
      for (int rank : ranks) {
        text += separator + std::to_string(rank);
        separator = ", ";
      }
      text += "]";
    }
    return text + "]}";
  }

  // The time in which a rank must answer. MPI itself has no such limit, so over MPI it is as good as
  // infinite. A rank that has ended is detected in any case.
  static std::chrono::seconds timeout_for(hvd::LibType controller) {
    if (const char* seconds = std::getenv("HOROVOD_GLOO_TIMEOUT_SECONDS")) {
      return std::chrono::seconds(std::max(std::atol(seconds), 1L));
    }
    return controller == hvd::LibType::MPI ? std::chrono::hours(24 * 365) : std::chrono::seconds(30);
  }

  std::unique_ptr<Network> network(std::chrono::milliseconds timeout) const {
    auto& global = state_->process_set_table.Get(0);
#if HAVE_MPI
    if (state_->control_operation == hvd::LibType::MPI) {
      return std::unique_ptr<Network>(
          new MpiNetwork(global.mpi_context.GetMPICommunicator(hvd::Communicator::GLOBAL), timeout));
    }
#endif
#if HAVE_GLOO
    return std::unique_ptr<Network>(new GlooNetwork(global.gloo_context.ctx));
#endif
  }

  hvd::HorovodGlobalState* const state_;
  std::unique_ptr<HostGroup> group_;
  mutable std::mutex mutex_;
  std::string flat_reason_ = "Horovod is not initialized", sum_order_;
};

// Base class of the operations. If the group cannot serve a tensor, `flat` passes the tensor to the first
// enabled operation of Horovod.
template <typename Operation>
class HostOperation : public Operation {
 public:
  HostOperation(hvd::HorovodGlobalState* state, std::shared_ptr<HostCollectives> collectives,
                std::vector<std::shared_ptr<Operation>> flat)
      : Operation(state), collectives_(std::move(collectives)), flat_(std::move(flat)) {}

 protected:
  // The same on all ranks: it depends only on the response and on the result of `connect`.
  bool serves(const std::vector<hvd::TensorTableEntry>& entries, Wire wire) const {
    return collectives_->group() && collectives_->group()->serves(wire) &&
           entries[0].device == CPU_DEVICE_ID && entries[0].process_set_id == 0;
  }

  HostGroup& group() const { return *collectives_->group(); }

  hvd::Status flat(std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response) {
    for (auto& operation : flat_) {
      if (operation->Enabled(this->global_state_->parameter_manager, entries, response)) {
        return operation->Execute(entries, response);
      }
    }
    throw std::logic_error("no operation is enabled for " + entries[0].tensor_name);
  }

  static size_t elements(const std::vector<hvd::TensorTableEntry>& entries) {
    size_t count = 0;
    for (auto& entry : entries) {
      count += (size_t)entry.tensor->shape().num_elements();
    }
    return count;
  }

  static bool sums(const hvd::Response& response) {
    return response.reduce_op() == hvd::ReduceOp::SUM ||
           response.reduce_op() == hvd::ReduceOp::AVERAGE;
  }

  // The factor after the sum.
  double factor(const hvd::Response& response) const {
    const bool average = response.reduce_op() == hvd::ReduceOp::AVERAGE;
    return response.postscale_factor() /
           (average ? this->global_state_->global_controller->GetSize() : 1);
  }

 private:
  const std::shared_ptr<HostCollectives> collectives_;
  const std::vector<std::shared_ptr<Operation>> flat_;
};

// Tensors with kInt8Mark in their names are sent between hosts as blocks of 8-bit integers; then every
// rank may be on a host of its own.
class HostAllreduce : public HostOperation<hvd::AllreduceOp> {
 public:
  using HostOperation::HostOperation;

  bool Enabled(const hvd::ParameterManager&, const std::vector<hvd::TensorTableEntry>& entries,
               const hvd::Response& response) const override {
    Element element;
    return serves(entries, wire_of(entries, response)) && sums(response) &&
           element_of(entries[0].tensor->dtype(), element) &&
           GroupAllreduce(group()).serves(elements(entries) * size_of(element)) &&
           // `Execute` scales before it can find out that a rank's memory cannot be read.
           (group().peers().readable() ||
            (entries.size() == 1 && response.prescale_factor() == 1.0));
  }

  hvd::Status Execute(std::vector<hvd::TensorTableEntry>& entries,
                      const hvd::Response& response) override {
    WaitForData(entries);
    auto& timeline = global_state_->timeline;
    auto& first = entries[0];
    Element element = Element::kFloat32;
    element_of(first.tensor->dtype(), element);
    const size_t count = elements(entries);
    const void* input = first.tensor->data();
    void* output = const_cast<void*>(first.output->data());
    if (entries.size() > 1) {
      size_t bytes;
      timeline.ActivityStartAll(entries, "MEMCPY_IN_FUSION_BUFFER");
      MemcpyInFusionBuffer(entries, input, output, bytes);
      timeline.ActivityEndAll(entries);
    }
    if (response.prescale_factor() != 1.0) {
      ScaleBuffer(response.prescale_factor(), entries, input, output, (int64_t)count);
      input = output;
    }
    timeline.ActivityStartAll(entries, "HOST_ALLREDUCE");
    bool done = GroupAllreduce(group()).run(input, output, count, element, factor(response),
                                            wire_of(entries, response));
    timeline.ActivityEndAll(entries);
    if (!done) {
      return flat(entries, response);
    }
    if (entries.size() > 1) {
      timeline.ActivityStartAll(entries, "MEMCPY_OUT_FUSION_BUFFER");
      MemcpyOutFusionBuffer(output, entries);
      timeline.ActivityEndAll(entries);
    }
    return hvd::Status::OK();
  }

 private:
  static constexpr const char* kInt8Mark = "hvdkit.int8.";

  // The same on all ranks: they negotiate names and dtypes.
  static Wire wire_of(const std::vector<hvd::TensorTableEntry>& entries,
                      const hvd::Response& response) {
    bool int8 = entries.size() == 1 && entries[0].tensor->dtype() == hvd::HOROVOD_FLOAT32 &&
                response.tensor_names()[0].find(kInt8Mark) != std::string::npos;
    return int8 ? Wire::kInt8 : Wire::kElements;
  }
};

class HostReducescatter : public HostOperation<hvd::ReducescatterOp> {
 public:
  using HostOperation::HostOperation;

  bool Enabled(const hvd::ParameterManager&, const std::vector<hvd::TensorTableEntry>& entries,
               const hvd::Response& response) const override {
    Element element;
    return entries.size() == 1 && serves(entries, Wire::kElements) && sums(response) &&
           response.prescale_factor() == 1.0 && element_of(entries[0].tensor->dtype(), element) &&
           GroupReducescatter(group()).serves(elements(entries) * size_of(element));
  }

  hvd::Status Execute(std::vector<hvd::TensorTableEntry>& entries,
                      const hvd::Response& response) override {
    WaitForData(entries);
    auto& entry = entries[0];
    Element element = Element::kFloat32;
    element_of(entry.tensor->dtype(), element);
    auto counts = ComputeReceiveCounts(
        ComputeOutputShapes(entries, global_state_->global_controller->GetSize()));
    const Parts parts(std::vector<size_t>(counts.begin(), counts.end()));
    auto& timeline = global_state_->timeline;
    timeline.ActivityStartAll(entries, "HOST_REDUCESCATTER");
    bool done = GroupReducescatter(group()).run(entry.tensor->data(),
                                                const_cast<void*>(entry.output->data()), parts,
                                                element, factor(response));
    timeline.ActivityEndAll(entries);
    return done ? hvd::Status::OK() : flat(entries, response);
  }
};

class HostAllgather : public HostOperation<hvd::AllgatherOp> {
 public:
  using HostOperation::HostOperation;

  bool Enabled(const hvd::ParameterManager&, const std::vector<hvd::TensorTableEntry>& entries,
               const hvd::Response& response) const override {
    return entries.size() == 1 && serves(entries, Wire::kElements) &&
           GroupAllgather(group()).serves(parts(entries[0], response).total());
  }

  hvd::Status Execute(std::vector<hvd::TensorTableEntry>& entries,
                      const hvd::Response& response) override {
    WaitForData(entries);
    auto& entry = entries[0];
    int64_t** unused = nullptr;
    hvd::Status status;
    group().guarded([&] { status = AllocateOutput(entries, response, unused); });
    if (!status.ok()) {
      // Otherwise the other ranks would take this rank's next tensor for this one.
      group().progress().abandon();
      return status;
    }
    auto& timeline = global_state_->timeline;
    timeline.ActivityStartAll(entries, "HOST_ALLGATHER");
    GroupAllgather(group()).run(entry.tensor->data(), const_cast<void*>(entry.output->data()),
                                parts(entry, response));
    timeline.ActivityEndAll(entries);
    return hvd::Status::OK();
  }

 private:
  // The bytes of each rank.
  static Parts parts(const hvd::TensorTableEntry& entry, const hvd::Response& response) {
    size_t row = (size_t)hvd::DataType_Size(entry.tensor->dtype());
    for (int dimension = 1; dimension < entry.tensor->shape().dims(); ++dimension) {
      row *= (size_t)entry.tensor->shape().dim_size(dimension);
    }
    std::vector<size_t> bytes;
    for (int64_t rows : response.tensor_sizes()) {
      bytes.push_back((size_t)rows * row);
    }
    return Parts(std::move(bytes));
  }
};

// Makes `Host` the operation that is asked first.
template <typename Host, typename Operation>
void put_first(std::vector<std::shared_ptr<Operation>>& operations, hvd::HorovodGlobalState* state,
               const std::shared_ptr<HostCollectives>& collectives) {
  auto first = std::make_shared<Host>(state, collectives, operations);
  operations.insert(operations.begin(), first);
}

}  // namespace hvdkit

#endif  // HVDKIT_HOST_OPERATIONS_H
