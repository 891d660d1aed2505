// `Network` over a communicator of MPI. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_MPI_NETWORK_H
#define HVDKIT_MPI_NETWORK_H

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
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

  // Messages are pending only after an error. Then MPI must no longer write to the memory. A receive is
  // cancelled, unless its message has begun to arrive: MPI can only receive the rest of it. If the sender
  // has stopped, MPI may write to the memory whenever the sender continues. An error would then leave memory
  // that changes later, so this process ends instead. MPI does not tell a stopped sender from a slow one:
  // a time decides how the job ends, but not what the memory contains.
  // MPI cannot cancel a send. Its request stays as it is. The receiver has not answered either, or has an
  // error of its own, and this job cannot continue.
  ~MpiChannel() override {
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] != MPI_REQUEST_NULL && received_[i]) {
        MPI_Cancel(&requests_[i]);
      }
    }
    const auto begin = std::chrono::steady_clock::now();
    for (size_t i = 0; i < requests_.size(); ++i) {
      int done = requests_[i] == MPI_REQUEST_NULL || !received_[i];
      while (!done && MPI_Test(&requests_[i], &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) {
        if (std::chrono::steady_clock::now() - begin > kCancelTime) {
          std::fprintf(stderr, "hvdkit: another rank has stopped within a message over MPI. This process ends, "
                               "because the rest of the message could overwrite its memory.\n");
          MPI_Abort(communicator_, 1);
        }
        sleep(100000);
      }
    }
  }

  void send(int rank, uint32_t tag, size_t offset, size_t bytes) override {
    for_pieces(offset, bytes, [&](size_t at, size_t count) {
      auto& request = add(rank, false);
      check(MPI_Isend(memory_ + at, (int)count, MPI_BYTE, rank, (int)tag, communicator_, &request));
    });
  }

  void receive(int rank, uint32_t tag, size_t offset, size_t bytes) override {
    for_pieces(offset, bytes, [&](size_t at, size_t count) {
      auto& request = add(rank, true);
      check(MPI_Irecv(memory_ + at, (int)count, MPI_BYTE, rank, (int)tag, communicator_, &request));
    });
  }

  void wait(const std::function<void()>& progress) override {
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
        progress();
        continue;
      }
      if (std::chrono::steady_clock::now() - begin > timeout_) {
        throw NetworkError(pending(), "no message for " + std::to_string(timeout_.count() / 1000) +
                                          " s (HOROVOD_GLOO_TIMEOUT_SECONDS)");
      }
      // MPI_Waitall would keep a core busy that the backward pass needs.
      sleep(pause);
      pause = std::min(pause * 2, 100000L);
    }
    requests_.clear();
    ranks_.clear();
    received_.clear();
  }

 private:
  static constexpr std::chrono::seconds kCancelTime{10};

  static void sleep(long nanoseconds) {
    const timespec time{0, nanoseconds};
    nanosleep(&time, nullptr);
  }

  MPI_Request& add(int rank, bool received) {
    requests_.emplace_back(MPI_REQUEST_NULL);
    ranks_.push_back(rank);
    received_.push_back(received);
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
  // Of the requests:
  std::vector<int> ranks_;
  std::vector<bool> received_;  // receives; the others are sends
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
