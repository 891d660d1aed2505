// Waiting between the ranks of one host. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_HOST_PROGRESS_H
#define HVDKIT_HOST_PROGRESS_H

#include <linux/futex.h>
#include <time.h>

#include <chrono>
#include <stdexcept>
#include <string>

#include "hvdkit_host_peers.h"

namespace hvdkit {

// Counts the steps of each rank of the host. The counters are in shared memory, and only their owner
// writes them, as in Open MPI's coll/xhc and in MPICH's release-gather. Every call that waits throws
// std::runtime_error if a rank has died or does not answer.
class HostProgress {
 public:
  using Clock = std::chrono::steady_clock;

  HostProgress(const HostPeers& peers, std::chrono::milliseconds timeout)
      : peers_(peers), timeout_(timeout) {}

  // Ends a step of this rank.
  void advance() {
    Board& own = peers_.board((size_t)peers_.local_rank());
    ++step_;
    own.progress.store(step_);
    if (own.waiters.load() > 0) {
      futex(own.progress, FUTEX_WAKE, INT32_MAX, nullptr);
    }
  }

  // Ends a step, and waits until all ranks of the host have ended as many.
  void synchronize() {
    advance();
    for (size_t i = 0; i < peers_.size(); ++i) {
      await(i);
    }
  }

  // Waits until another rank has done as many steps as this one.
  void await(size_t member) {
    wait_for(member);
    // A failed rank may advance after it has set `failed`; those steps do not count.
    if (peers_.board(member).failed.load()) {
      fail(member, kFailed);
    }
  }

  // Throws if a rank of the host has failed, so that no rank waits for a failed one.
  void check() {
    for (size_t i = 0; i < peers_.size(); ++i) {
      if (peers_.board(i).failed.load()) {
        fail(i, kFailed);
      }
    }
  }

  [[noreturn]] void fail(size_t member, const std::string& what) {
    abandon();
    throw std::runtime_error("collective in shared memory: rank " +
                             std::to_string(peers_.rank_of(member)) + " " + what);
  }

  // Marks this rank as failed, for the other ranks of the host.
  void abandon() {
    Board& own = peers_.board((size_t)peers_.local_rank());
    own.failed.store(1);
    // A stopped rank may continue later and still write to this rank's memory: allocate no tensor there.
    Arena::instance().share(false);
    futex(own.progress, FUTEX_WAKE, INT32_MAX, nullptr);
  }

 private:
  static constexpr const char* kFailed = "has failed in an earlier or in this collective";

  static long futex(std::atomic<uint32_t>& word, int operation, uint32_t value,
                    const timespec* time) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, time, nullptr, 0);
  }

  void wait_for(size_t member) {
    if (reached(member)) {
      return;
    }
    auto begin = Clock::now();
    Clock::duration waited{};
    if (peers_.enough_cores()) {
      // Longer than a context switch, but not so long that other threads starve.
      while (Clock::now() - begin < std::chrono::microseconds(20)) {
        if (reached(member)) {
          return;
        }
      }
    }
    Board& board = peers_.board(member);
    const timespec pause{0, 20 * 1000 * 1000};
    while (true) {
      board.waiters.fetch_add(1);
      uint32_t seen = board.progress.load();
      if ((int32_t)(seen - step_) < 0) {
        futex(board.progress, FUTEX_WAIT, seen, &pause);
      }
      board.waiters.fetch_sub(1);
      if (reached(member)) {
        return;
      }
      check();
      for (size_t other = 0; other < peers_.size(); ++other) {
        if ((int)other != peers_.local_rank() && peers_.ended(other) && !reached(other)) {
          fail(other, "has ended");
        }
      }
      // While the whole job is suspended (SIGSTOP, a sleeping laptop), time passes for all ranks.
      auto now = Clock::now();
      waited += std::min<Clock::duration>(now - begin, std::chrono::milliseconds(500));
      begin = now;
      if (waited > timeout_) {
        fail(member, "has not answered for " + std::to_string(timeout_.count() / 1000) +
                         " s (HOROVOD_GLOO_TIMEOUT_SECONDS)");
      }
    }
  }

  bool reached(size_t member) const {
    return (int32_t)(peers_.board(member).progress.load() - step_) >= 0;
  }

  const HostPeers& peers_;
  const std::chrono::milliseconds timeout_;
  uint32_t step_ = 0;
};

}  // namespace hvdkit

#endif  // HVDKIT_HOST_PROGRESS_H
