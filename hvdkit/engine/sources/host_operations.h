// The collectives of a HostGroup as operations of Horovod. Part of hvdkit (Apache-2.0).

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

// The groups of all process sets, which the operations share.
class HostCollectives {
 public:
  explicit HostCollectives(hvd::HorovodGlobalState* state) : state_(state) {}

  // Connects all ranks. A collective, at the end of the initialization.
  void connect() {
    auto& controller = *state_->global_controller;
    const char* collectives = std::getenv("HVDKIT_COLLECTIVES");
    FlatReason flat = kRequested;
    std::string detail;
    if (!collectives || std::string(collectives) != "flat") {
      detail = Arena::instance().renew((size_t)controller.GetSize());
      flat = detail.empty() ? kNone : kNoMemory;
    }
    std::shared_ptr<HostGroup> group;
    auto reason = connect(state_->process_set_table.Get(0), group, flat, detail);
    Arena::instance().share(reason.empty());
    std::lock_guard<std::mutex> guard(mutex_);
    group_ = std::move(group);
    flat_reason_ = reason;
    sum_order_ = sum_order_of(*group_, state_->cpu_operation);
  }

  // Closes the connections. To be called before Horovod closes its own.
  void disconnect() {
    Arena::instance().share(false);
    std::lock_guard<std::mutex> guard(mutex_);
    group_.reset();
    flat_reason_ = "Horovod is not initialized";
    sum_order_.clear();
  }

  // To be called if this rank cannot take part in a collective. The other ranks of the host get an error;
  // otherwise they would take this rank's next tensor for that of the collective. Only for Horovod's
  // thread.
  void abandon(int32_t process_set) {
    for (auto* group : groups(process_set)) {
      group->progress().abandon();
    }
  }

  // Makes the group of a process set, if it has none. A collective of its ranks. To be called before each of
  // their negotiations. Only for Horovod's thread.
  void prepare(hvd::ProcessSet& set) {
    const bool is_global = &set == &state_->process_set_table.Get(0);
    if (is_global || set.hvdkit_group || !group_->peers().same_version()) {
      return;
    }
    if (group_->peers().shared()) {
      connect(set, set.hvdkit_group);
    } else {
      // The reason is the same for some of the ranks.
      set.hvdkit_group = new_group(set);
      set.hvdkit_group->peers().separate();
    }
  }

  // The groups that serve a process set. The last one serves every collective; the first one, which may be
  // the same, is faster, and serves only some. Empty if ranks have different versions of the engine. The
  // same on all ranks of the process set. Only for Horovod's thread.
  std::vector<HostGroup*> groups(int32_t process_set) const {
    if (!group_ || !group_->peers().same_version()) {
      return {};
    }
    std::vector<HostGroup*> result;
    auto* group = process_set == 0 ? group_.get() : state_->process_set_table.Get(process_set).hvdkit_group.get();
    for (; group; group = group->fallback()) {
      result.push_back(group);
    }
    return result;
  }

  // The reason why all collectives are flat; "" if buckets are reduced in shared memory.
  std::string flat_reason() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return flat_reason_;
  }

  // All that the order of additions depends on, beside the tensor, as JSON: the version of the order, the
  // library for small tensors that are not added in shared memory, and the ranks of each host whose ranks
  // share memory. "" if Horovod is not initialized.
  std::string sum_order() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return sum_order_;
  }

  // Whether tensors with kInt8Mark in their names are sent as blocks of 8-bit integers.
  bool has_int8() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return group_ && group_->peers().same_version();
  }

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

  // Makes the group of a process set. A collective of its ranks. Returns "", or why no ranks share memory.
  std::string connect(hvd::ProcessSet& set, std::shared_ptr<HostGroup>& group, FlatReason flat = kNone,
                      const std::string& detail = "") const {
    group = new_group(set);
    auto reason = group->peers().connect(
        [&](std::vector<long long>& words) { set.controller->CrossRankBitwiseOr(words, (int)words.size()); }, flat,
        detail);
    if (!group->peers().readable()) {
      auto separate = new_group(set);
      separate->peers().separate();
      group->set_fallback(std::move(separate));
    }
    return reason;
  }

  // Over MPI, a collective.
  std::unique_ptr<HostGroup> new_group(hvd::ProcessSet& set) const {
    const auto timeout = timeout_for(state_->control_operation);
    return std::unique_ptr<HostGroup>(new HostGroup(set.registered_global_ranks, set.controller->GetRank(),
                                                    timeout, true, network(set, timeout)));
  }

  std::unique_ptr<Network> network(hvd::ProcessSet& set, std::chrono::milliseconds timeout) const {
#if HAVE_MPI
    if (state_->control_operation == hvd::LibType::MPI) {
      return std::unique_ptr<Network>(
          new MpiNetwork(set.mpi_context.GetMPICommunicator(hvd::Communicator::GLOBAL), timeout));
    }
#endif
#if HAVE_GLOO
    return std::unique_ptr<Network>(new GlooNetwork(set.gloo_context.ctx));
#endif
  }

  hvd::HorovodGlobalState* const state_;
  std::shared_ptr<HostGroup> group_;  // of all ranks
  mutable std::mutex mutex_;
  std::string flat_reason_ = "Horovod is not initialized", sum_order_;
};

// Base class of the operations.
template <typename Operation>
class HostOperation : public Operation {
 public:
  using Entries = std::vector<hvd::TensorTableEntry>;

  HostOperation(hvd::HorovodGlobalState* state, std::shared_ptr<HostCollectives> collectives)
      : Operation(state), collectives_(std::move(collectives)) {}

 protected:
  // The same on all ranks: it depends only on the response and on the result of `connect`.
  bool serves(const Entries& entries) const {
    return entries[0].device == CPU_DEVICE_ID && !groups(entries).empty();
  }

  // See HostCollectives.
  std::vector<HostGroup*> groups(const Entries& entries) const {
    return collectives_->groups(entries[0].process_set_id);
  }

  // Calls `call`, an activity in the timeline.
  template <typename Call>
  void record(const Entries& entries, const char* activity, Call call) {
    auto& timeline = this->global_state_->timeline;
    timeline.ActivityStartAll(entries, activity);
    call();
    timeline.ActivityEndAll(entries);
  }

  // Calls `reduce` with one group after the other, until it returns true.
  template <typename Reduce>
  void record_in_group(const Entries& entries, const char* activity, Reduce reduce) {
    record(entries, activity, [&] {
      for (auto* group : groups(entries)) {
        if (reduce(*group)) {
          return;
        }
      }
    });
  }

  // The number of ranks.
  int size(const Entries& entries) const {
    return this->global_state_->process_set_table.Get(entries[0].process_set_id)
        .controller->GetSize();
  }

  static size_t elements(const Entries& entries) {
    size_t count = 0;
    for (auto& entry : entries) {
      count += (size_t)entry.tensor->shape().num_elements();
    }
    return count;
  }

 private:
  const std::shared_ptr<HostCollectives> collectives_;
};

// Tensors with kInt8Mark in their names are sent between hosts as blocks of 8-bit integers.
class HostAllreduce : public HostOperation<hvd::AllreduceOp> {
 public:
  using HostOperation::HostOperation;

  bool Enabled(const hvd::ParameterManager&, const Entries& entries,
               const hvd::Response& response) const override {
    Element element;
    return serves(entries) &&
           (response.reduce_op() == hvd::ReduceOp::SUM ||
            response.reduce_op() == hvd::ReduceOp::AVERAGE) &&
           element_of(entries[0].tensor->dtype(), element) &&
           GroupAllreduce(*groups(entries)[0]).serves(elements(entries) * size_of(element));
  }

  hvd::Status Execute(Entries& entries, const hvd::Response& response) override {
    WaitForData(entries);
    auto& first = entries[0];
    Element element = Element::kFloat32;
    element_of(first.tensor->dtype(), element);
    const size_t count = elements(entries);
    const void* input = first.tensor->data();
    void* output = const_cast<void*>(first.output->data());
    if (entries.size() > 1) {
      size_t bytes;
      record(entries, "MEMCPY_IN_FUSION_BUFFER",
             [&] { MemcpyInFusionBuffer(entries, input, output, bytes); });
    }
    if (response.prescale_factor() != 1.0) {
      ScaleBuffer(response.prescale_factor(), entries, input, output, (int64_t)count);
      input = output;
    }
    const bool average = response.reduce_op() == hvd::ReduceOp::AVERAGE;
    const double factor = response.postscale_factor() / (average ? size(entries) : 1);
    record_in_group(entries, "HOST_ALLREDUCE", [&](HostGroup& group) {
      return GroupAllreduce(group).run(input, output, count, element, factor,
                                       wire_of(entries, response));
    });
    if (entries.size() > 1) {
      record(entries, "MEMCPY_OUT_FUSION_BUFFER", [&] { MemcpyOutFusionBuffer(output, entries); });
    }
    return hvd::Status::OK();
  }

 private:
  static constexpr const char* kInt8Mark = "hvdkit.int8.";

  // The same on all ranks: they negotiate names and dtypes.
  static Wire wire_of(const Entries& entries, const hvd::Response& response) {
    bool int8 = entries.size() == 1 && entries[0].tensor->dtype() == hvd::HOROVOD_FLOAT32 &&
                response.tensor_names()[0].find(kInt8Mark) != std::string::npos;
    return int8 ? Wire::kInt8 : Wire::kElements;
  }
};

class HostReducescatter : public HostOperation<hvd::ReducescatterOp> {
 public:
  using HostOperation::HostOperation;

  bool Enabled(const hvd::ParameterManager&, const Entries& entries,
               const hvd::Response&) const override {
    Element element;
    return serves(entries) && element_of(entries[0].tensor->dtype(), element);
  }

  hvd::Status Execute(Entries& entries, const hvd::Response& response) override {
    WaitForData(entries);
    auto& first = entries[0];
    Element element = Element::kFloat32;
    element_of(first.tensor->dtype(), element);
    const auto shapes = ComputeOutputShapes(entries, size(entries));
    std::vector<size_t> counts;
    for (auto& of_rank : shapes) {
      counts.push_back(0);
      for (auto& shape : of_rank) {
        counts.back() += (size_t)shape.num_elements();
      }
    }
    const Parts parts(std::move(counts));
    const void* input = first.tensor->data();
    void* output = const_cast<void*>(first.output->data());
    std::vector<char> outputs;
    if (entries.size() > 1 || response.prescale_factor() != 1.0) {
      void* buffer;
      size_t bytes;
      record(entries, "MEMCPY_IN_FUSION_BUFFER", [&] {
        MemcpyInFusionBuffer(entries, shapes, size_of(element), buffer, bytes);
      });
      if (response.prescale_factor() != 1.0) {
        ScaleBuffer(response.prescale_factor(), entries, buffer, buffer, (int64_t)parts.total());
      }
      input = buffer;
    }
    if (entries.size() > 1) {
      // The other ranks read the fusion buffer meanwhile.
      size_t bytes = 0;
      for (auto& entry : entries) {
        bytes += (size_t)entry.output->size();
      }
      outputs.resize(bytes);
      output = outputs.data();
    }
    record_in_group(entries, "HOST_REDUCESCATTER", [&](HostGroup& group) {
      // The factor of an average is in the response.
      return GroupReducescatter(group).run(input, output, parts, element,
                                           response.postscale_factor());
    });
    if (entries.size() > 1) {
      record(entries, "MEMCPY_OUT_FUSION_BUFFER", [&] { MemcpyOutFusionBuffer(output, entries); });
    }
    return hvd::Status::OK();
  }
};

class HostAllgather : public HostOperation<hvd::AllgatherOp> {
 public:
  using HostOperation::HostOperation;

  bool Enabled(const hvd::ParameterManager&, const Entries& entries,
               const hvd::Response& response) const override {
    return entries.size() == 1 && serves(entries) &&
           GroupAllgather(*groups(entries).back()).serves(parts(entries[0], response).total());
  }

  hvd::Status Execute(Entries& entries, const hvd::Response& response) override {
    WaitForData(entries);
    auto& entry = entries[0];
    auto& group = *groups(entries).back();
    int64_t** unused = nullptr;
    hvd::Status status;
    group.guarded([&] { status = AllocateOutput(entries, response, unused); });
    if (!status.ok()) {
      // Otherwise the other ranks would take this rank's next tensor for this one.
      group.progress().abandon();
      return status;
    }
    record(entries, "HOST_ALLGATHER", [&] {
      GroupAllgather(group).run(entry.tensor->data(), const_cast<void*>(entry.output->data()),
                                parts(entry, response));
    });
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

class HostAlltoall : public HostOperation<hvd::AlltoallOp> {
 public:
  using HostOperation::HostOperation;

  bool Enabled(const hvd::ParameterManager&, const Entries& entries,
               const hvd::Response&) const override {
    return serves(entries);
  }

  hvd::Status Execute(Entries& entries, const hvd::Response&) override {
    WaitForData(entries);
    auto& entry = entries[0];
    auto& group = *groups(entries).back();
    std::vector<int64_t> begins, other_begins, sent, received;
    hvd::Status status;
    group.guarded([&] {
      status = PrepareOutputAndParams(entry, begins, other_begins, sent, received);
    });
    if (!status.ok()) {
      group.progress().abandon();
      return status;
    }
    record(entries, "HOST_ALLTOALL", [&] {
      GroupAlltoall(group).run(entry.tensor->data(), parts(entry, sent),
                               const_cast<void*>(entry.output->data()), parts(entry, received));
    });
    return hvd::Status::OK();
  }

 private:
  static Parts parts(const hvd::TensorTableEntry& entry, const std::vector<int64_t>& elements) {
    std::vector<size_t> bytes;
    for (int64_t count : elements) {
      bytes.push_back((size_t)count * (size_t)hvd::DataType_Size(entry.tensor->dtype()));
    }
    return Parts(std::move(bytes));
  }
};

// Makes `Host` the operation that is asked first.
template <typename Host, typename Operation>
void put_first(std::vector<std::shared_ptr<Operation>>& operations, hvd::HorovodGlobalState* state,
               const std::shared_ptr<HostCollectives>& collectives) {
  operations.insert(operations.begin(), std::make_shared<Host>(state, collectives));
}

}  // namespace hvdkit

#endif  // HVDKIT_HOST_OPERATIONS_H
