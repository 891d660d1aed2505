// Horovod's operation for hvdkit's buckets in the memory of one host. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_HOST_ALLREDUCE_H
#define HVDKIT_HOST_ALLREDUCE_H

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hvdkit_host_group.h"
#if HAVE_GLOO
#include "hvdkit_gloo_network.h"
#endif
#if HAVE_MPI
#include "hvdkit_mpi_network.h"
#endif
#include "ops/collective_operations.h"

namespace hvdkit {

namespace hvd = horovod::common;

// Reduces the tensors of the global process set if a host has several of its ranks, and passes tensors
// out of its reach to the operation that would reduce them otherwise. Tensors with kInt8Mark in their
// names are sent between hosts as blocks of 8-bit integers; then every rank may be on a host of its own.
class HostAllreduce : public hvd::AllreduceOp {
 public:
  HostAllreduce(hvd::HorovodGlobalState* state, std::vector<std::shared_ptr<hvd::AllreduceOp>> flat)
      : hvd::AllreduceOp(state), flat_(std::move(flat)) {}

  // Connects the ranks. All ranks call it, at the end of the initialization.
  void connect() {
    auto& controller = *global_state_->global_controller;
    const char* seconds = std::getenv("HOROVOD_GLOO_TIMEOUT_SECONDS");
    const char* collectives = std::getenv("HVDKIT_COLLECTIVES");
    const std::chrono::seconds timeout(seconds ? std::max(std::atol(seconds), 1L) : 30);
    std::unique_ptr<HostGroup> group(
        new HostGroup(controller.GetRank(), controller.GetSize(), timeout, network(timeout)));
    auto reason = group->connect(collectives && std::string(collectives) == "flat",
                                 [&](std::vector<long long>& words) {
                                   controller.CrossRankBitwiseOr(words, (int)words.size());
                                 });
    std::lock_guard<std::mutex> guard(mutex_);
    group_ = std::move(group);
    flat_reason_ = reason;
  }

  // Ends the connections, before those end that they use.
  void disconnect() {
    std::lock_guard<std::mutex> guard(mutex_);
    group_.reset();
    flat_reason_ = "Horovod is not initialized";
  }

  // Why all collectives are flat; "" if buckets are reduced in the memory of the host.
  std::string flat_reason() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return flat_reason_;
  }

  // Whether tensors with kInt8Mark in their names are sent as blocks of 8-bit integers.
  bool has_int8() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return group_ && group_->serves(Wire::kInt8);
  }

  bool Enabled(const hvd::ParameterManager&, const std::vector<hvd::TensorTableEntry>& entries,
               const hvd::Response& response) const override {
    // The same on all ranks: it depends on the response and on what they agreed about in `connect`.
    hvd::ReduceOp op = response.reduce_op();
    Element element;
    return group_ && group_->serves(wire_of(entries, response)) && entries[0].device == CPU_DEVICE_ID &&
           entries[0].process_set_id == 0 &&
           (op == hvd::ReduceOp::SUM || op == hvd::ReduceOp::AVERAGE) &&
           (group_->readable() || (entries.size() == 1 && response.prescale_factor() == 1.0)) &&
           element_of(entries[0].tensor->dtype(), element);
  }

  hvd::Status Execute(std::vector<hvd::TensorTableEntry>& entries,
                      const hvd::Response& response) override {
    WaitForData(entries);
    auto& timeline = global_state_->timeline;
    auto& first = entries[0];
    Element element = Element::kFloat32;
    element_of(first.tensor->dtype(), element);
    const size_t count = (size_t)NumElements(entries);
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
    double factor = response.postscale_factor();
    if (response.reduce_op() == hvd::ReduceOp::AVERAGE) {
      factor /= global_state_->global_controller->GetSize();
    }
    timeline.ActivityStartAll(entries, "HOST_ALLREDUCE");
    bool done = group_->allreduce(input, output, count, element, factor,
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

  std::unique_ptr<Network> network(std::chrono::milliseconds timeout) const {
    auto& global = global_state_->process_set_table.Get(0);
#if HAVE_MPI
    if (global_state_->control_operation == hvd::LibType::MPI) {
      return std::unique_ptr<Network>(
          new MpiNetwork(global.mpi_context.GetMPICommunicator(hvd::Communicator::GLOBAL), timeout));
    }
#endif
#if HAVE_GLOO
    return std::unique_ptr<Network>(new GlooNetwork(global.gloo_context.ctx));
#endif
  }

  hvd::Status flat(std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response) {
    for (auto& operation : flat_) {
      if (operation->Enabled(global_state_->parameter_manager, entries, response)) {
        return operation->Execute(entries, response);
      }
    }
    throw std::logic_error("no allreduce is enabled for " + entries[0].tensor_name);
  }

  static bool element_of(hvd::DataType type, Element& element) {
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

  const std::vector<std::shared_ptr<hvd::AllreduceOp>> flat_;
  std::unique_ptr<HostGroup> group_;
  mutable std::mutex mutex_;
  std::string flat_reason_ = "Horovod is not initialized";
};

}  // namespace hvdkit

#endif  // HVDKIT_HOST_ALLREDUCE_H
