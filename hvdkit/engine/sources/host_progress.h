// Waiting between the ranks of one host. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_HOST_PROGRESS_H
#define HVDKIT_HOST_PROGRESS_H

#include <linux/futex.h>
#include <time.h>

#include <chrono>
#include <stdexcept>
#include <string>

#include "hvdkit_host_network.h"
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

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

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
    // A rank that has failed after an earlier `await` has made its memory private, and others may have
    // read zeros there.
    check_members();
  }

  // Waits until another rank has done as many steps as this one.
  void await(size_t member) {
    wait_for(member);
    // A failed rank may advance after it has set `failed`; those steps do not count.
    check_member(member);
  }

  bool reached(size_t member) const {
    return (int32_t)(peers_.board(member).progress.load() - step_) >= 0;
  }

  // To be called between chunks. Throws if a rank of the host has failed, so that no rank waits for a
  // failed one, and tells the ranks that wait for this one that it has not stopped.
  void check() {
    Board& own = peers_.board((size_t)peers_.local_rank());
    own.beats.store(own.beats.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    check_members();
  }

  // Why a rank of this host has failed.
  enum Cause : uint32_t {
    kFailed,  // an exception
    kEnded,   // its process has ended
    kSilent,  // it has not answered in time
    kLost,    // a message from it is missing
    kAlone,   // messages from several ranks are missing
    kDiffers,  // it has called another collective
    kAborted,  // its user has ended the group
  };

  [[noreturn]] void fail(size_t member, Cause cause) {
    const int rank = peers_.rank_of(member);
    abandon(rank, cause);
    throw std::runtime_error(prefix() + description(rank, cause));
  }

  // The same, because of a rank of any host.
  [[noreturn]] void fail_for(int rank, const std::string& what, Cause cause = kFailed) {
    abandon(rank, cause);
    throw std::runtime_error(prefix() + peers_.name(rank) + " " + what);
  }

  // Marks this rank as failed, for the other ranks of the host. Any thread may call it.
  void abandon(Cause cause = kFailed) { abandon(peers_.rank_of((size_t)peers_.local_rank()), cause); }

  // The same, because of another rank.
  void abandon(int rank, Cause cause) { abandon((uint32_t)(rank + 1) * kCauses + cause); }

  // The same, because messages are missing.
  [[noreturn]] void fail(const NetworkError& error) {
    // A rank that has failed closes its connections, too.
    check_members();
    for (int rank : error.ranks) {
      const size_t member = peers_.member_of(rank);
      if (member < peers_.size() && peers_.ended(member)) {
        fail(member, kEnded);
      }
    }
    if (error.ranks.size() == 1) {
      abandon(*error.ranks.begin(), kLost);
    } else {
      abandon(peers_.rank_of((size_t)peers_.local_rank()), kAlone);
    }
    std::string text = "collective over the network, waiting for ";
    const char* separator = "";
    for (int rank : error.ranks) {
      text += separator + peers_.name(rank);
      separator = ", ";
    }
    throw std::runtime_error(text + ": " + error.what());
  }

 private:
  static constexpr uint32_t kCauses = 7;

  std::string prefix() const {
    return peers_.shared() ? "collective in shared memory: " : "collective over the network: ";
  }

  void abandon(uint32_t failure) {
    Board& own = peers_.board((size_t)peers_.local_rank());
    if (!own.failed.load()) {
      own.failed.store(failure);
    }
    futex(own.progress, FUTEX_WAKE, INT32_MAX, nullptr);
    // A stopped rank may continue later, and still write to this rank's memory.
    if (peers_.share_arenas()) {
      Arena::instance().detach();
    }
  }

  void check_members() {
    for (size_t i = 0; i < peers_.size(); ++i) {
      check_member(i);
    }
  }

  void check_member(size_t member) {
    const uint32_t failure = peers_.board(member).failed.load();
    if (!failure) {
      return;
    }
    abandon(failure);
    const int rank = (int)(failure / kCauses) - 1, reporter = peers_.rank_of(member);
    std::string text = prefix() + description(rank, (Cause)(failure % kCauses));
    if (rank != reporter) {
      text += ", reported by " + peers_.name(reporter);
    }
    throw std::runtime_error(text);
  }

  std::string description(int rank, Cause cause) const {
    const std::string text = peers_.name(rank);
    switch (cause) {
      case kEnded:
        return text + " has ended";
      case kSilent:
        return text + " has not answered for " + std::to_string(timeout_.load().count() / 1000) +
               " s (" + peers_.timeout_setting() + ")";
      case kLost:
        // Ranks that share no memory may be on the same host.
        return "no message from " + text +
               (peers_.shared() && peers_.member_of(rank) == peers_.size() ? ", which is on another host" : "");
      case kAlone:
        return text + " has not got the messages of several ranks";
      case kDiffers:
        return text + " has called another collective";
      case kAborted:
        return text + " has ended the group";
      default:
        return text + " has failed in an earlier or in this collective";
    }
  }

  // Between hosts, a rank detects after `timeout_` that a rank of another host is silent. Wait a little
  // longer for it, so that the silent rank is reported and not the waiting one.
  Clock::duration patience() const {
    const auto timeout = timeout_.load();
    return peers_.hosts() > 1 ? timeout + std::chrono::seconds(5) : Clock::duration(timeout);
  }

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
    uint32_t beats = board.beats.load();
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
      check_members();
      for (size_t other = 0; other < peers_.size(); ++other) {
        if ((int)other != peers_.local_rank() && peers_.ended(other) && !reached(other)) {
          fail(other, kEnded);
        }
      }
      // While the whole job is suspended (SIGSTOP, a sleeping laptop), time passes for all ranks.
      auto now = Clock::now();
      waited += std::min<Clock::duration>(now - begin, std::chrono::milliseconds(500));
      begin = now;
      if (board.beats.load() != beats) {
        beats = board.beats.load();
        waited = {};
      }
      if (waited > patience()) {
        fail(member, kSilent);
      }
    }
  }

  const HostPeers& peers_;
  std::atomic<std::chrono::milliseconds> timeout_;
  uint32_t step_ = 0;
};

}  // namespace hvdkit

#endif  // HVDKIT_HOST_PROGRESS_H
