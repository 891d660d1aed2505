// `Network` over a communicator of MPI. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_MPI_NETWORK_H
#define HVDKIT_MPI_NETWORK_H

#include <time.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "mpi.h"

#include "hvdkit_host_network.h"

namespace hvdkit {

class MpiChannel : public Channel {
 public:
  MpiChannel(MPI_Comm communicator, void* memory, std::chrono::milliseconds timeout)
      : communicator_(communicator), memory_(static_cast<char*>(memory)), timeout_(timeout) {}

  // Only after an error: MPI must no longer write to the memory.
  ~MpiChannel() override {
    for (auto& request : requests_) {
      if (request != MPI_REQUEST_NULL) {
        MPI_Cancel(&request);
        MPI_Request_free(&request);
      }
    }
  }

  void send(int rank, uint32_t tag, size_t offset, size_t bytes) override {
    for_pieces(offset, bytes, [&](size_t at, size_t count) {
      auto& request = add(rank);
      check(MPI_Isend(memory_ + at, (int)count, MPI_BYTE, rank, (int)tag, communicator_, &request));
    });
  }

  void receive(int rank, uint32_t tag, size_t offset, size_t bytes) override {
    for_pieces(offset, bytes, [&](size_t at, size_t count) {
      auto& request = add(rank);
      check(MPI_Irecv(memory_ + at, (int)count, MPI_BYTE, rank, (int)tag, communicator_, &request));
    });
  }

  void wait() override {
    auto begin = std::chrono::steady_clock::now();
    long pause = 1000;  // nanoseconds
    const int count = (int)requests_.size();
    std::vector<int> indices(requests_.size());
    while (true) {
      int done = 0;  // MPI_UNDEFINED: no request is pending
      check(MPI_Testsome(count, requests_.data(), &done, indices.data(), MPI_STATUSES_IGNORE));
      if (done == MPI_UNDEFINED) {
        break;
      }
      if (done > 0) {
        begin = std::chrono::steady_clock::now();
        continue;
      }
      if (std::chrono::steady_clock::now() - begin > timeout_) {
        throw NetworkError(pending(), "no message for " + std::to_string(timeout_.count() / 1000) +
                                          " s (HOROVOD_GLOO_TIMEOUT_SECONDS)");
      }
      // MPI_Waitall would keep a core busy that the backward pass needs.
      const timespec time{0, pause};
      nanosleep(&time, nullptr);
      pause = std::min(pause * 2, 100000L);
    }
    requests_.clear();
    ranks_.clear();
  }

 private:
  MPI_Request& add(int rank) {
    requests_.emplace_back(MPI_REQUEST_NULL);
    ranks_.push_back(rank);
    return requests_.back();
  }

  std::set<int> pending() const {
    std::set<int> ranks;
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] != MPI_REQUEST_NULL) {
        ranks.insert(ranks_[i]);
      }
    }
    return ranks;
  }

  static void check(int status) {
    if (status != MPI_SUCCESS) {
      throw std::runtime_error("MPI has failed to send between hosts, see its own message");
    }
  }

  const MPI_Comm communicator_;
  char* const memory_;
  const std::chrono::milliseconds timeout_;
  std::vector<MPI_Request> requests_;
  std::vector<int> ranks_;  // of the requests
};

// Messages of other code cannot be mistaken for those of this network: it has a communicator of its
// own. All ranks create and destroy it together.
class MpiNetwork : public Network {
 public:
  MpiNetwork(MPI_Comm world, std::chrono::milliseconds timeout) : timeout_(timeout) {
    MPI_Comm_dup(world, &communicator_);
  }
  ~MpiNetwork() override { MPI_Comm_free(&communicator_); }
  MpiNetwork(const MpiNetwork&) = delete;
  MpiNetwork& operator=(const MpiNetwork&) = delete;

  std::unique_ptr<Channel> channel(void* memory, size_t) override {
    return std::make_unique<MpiChannel>(communicator_, memory, timeout_);
  }

 private:
  const std::chrono::milliseconds timeout_;
  MPI_Comm communicator_ = MPI_COMM_NULL;
};

}  // namespace hvdkit

#endif  // HVDKIT_MPI_NETWORK_H
