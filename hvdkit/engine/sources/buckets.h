// How Horovod treats hvdkit's buckets: what they are called, how the background thread sleeps until
// one arrives, and the threads that carry them out over Gloo. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_BUCKETS_H
#define HVDKIT_BUCKETS_H

#include <atomic>
#include <cctype>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace hvdkit {

// Buckets are called `hvdkit.x`. The frameworks put a prefix of their own before a name:
// `allreduce.hvdkit.x`.
inline bool is_bucket(const std::string& name) {
  auto at = name.find("hvdkit.");
  return at != std::string::npos && (at == 0 || !std::isalnum((unsigned char)name[at - 1]));
}

// Tells the background thread, between two cycles, that a tensor has been handed in.
class Arrivals {
 public:
  using Clock = std::chrono::steady_clock;

  // Never destroyed: the background thread may outlive the static objects at the process's end.
  static Arrivals& instance() {
    static auto* arrivals = new Arrivals;
    return *arrivals;
  }

  void notify(const std::string& name) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      tensor_ = true;
      bucket_ = bucket_ || is_bucket(name);
    }
    changed_.notify_one();
  }

  // End the background thread's sleep at once.
  void wake() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      tensor_ = bucket_ = true;
    }
    changed_.notify_one();
  }

  // Sleep until the next cycle begins, or a bucket arrives.
  void await_cycle(Clock::time_point next_cycle) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_until(lock, next_cycle, [&] { return bucket_; });
  }

  // Sleep until a bucket arrives, or until the cycle after another tensor has arrived: it can then
  // be fused with what arrives by then. Not longer than until `latest`.
  void await_tensor(Clock::time_point last_cycle, Clock::duration cycle, Clock::time_point latest) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_until(lock, latest, [&] { return tensor_; });
    if (tensor_ && cycle > Clock::duration::zero()) {
      auto passed = (Clock::now() - last_cycle) / cycle;
      changed_.wait_until(lock, last_cycle + (passed + 1) * cycle, [&] { return bucket_; });
    }
  }

  // To be called before the background thread looks for what has arrived.
  void forget() {
    std::lock_guard<std::mutex> guard(mutex_);
    tensor_ = bucket_ = false;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool tensor_ = false;
  bool bucket_ = false;
};

// Threads that carry out one collective each, beside the background thread. They begin in the order
// in which it handed the collectives in, which is the same on all ranks: the oldest one that is not
// done is therefore in some thread's hands on every rank, and comes to its end.
//
// All but `fail` is for the background thread alone.
class BucketThreads {
 public:
  // Never destroyed, because its threads may be running when the process ends.
  static BucketThreads& instance() {
    static auto* threads = new BucketThreads;
    return *threads;
  }

  // The tag of the next collective: the same on all ranks, never 0, which all others have.
  uint32_t next_tag() {
    tag_ = tag_ == UINT32_MAX ? 1 : tag_ + 1;
    return tag_;
  }

  void add(std::function<void()> collective) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (idle_ <= queue_.size() && threads_.size() < COUNT) {
        threads_.emplace_back([this] { work(); });
      }
      queue_.push_back(std::move(collective));
    }
    changed_.notify_one();
  }

  // Whether something that was added is not done.
  bool busy() {
    std::lock_guard<std::mutex> guard(mutex_);
    return running_ > 0 || !queue_.empty();
  }

  // One of the collectives has failed: so that the background thread ends too.
  void fail(const std::string& why) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (!failed_) {
        why_ = why;
      }
      failed_ = true;
    }
    Arrivals::instance().wake();
  }

  void throw_if_failed() {
    if (failed_) {
      std::lock_guard<std::mutex> guard(mutex_);
      throw std::runtime_error(why_);
    }
  }

  // Wait for all that was added, end the threads, and be as new.
  void finish() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) {
      thread.join();
    }
    threads_.clear();
    ending_ = failed_ = false;
    tag_ = 0;
  }

 private:
  // One more brings nothing, and each takes memory bandwidth from the others.
  static constexpr size_t COUNT = 2;

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      ++idle_;
      changed_.wait(lock, [&] { return ending_ || !queue_.empty(); });
      --idle_;
      if (queue_.empty()) {
        return;
      }
      auto collective = std::move(queue_.front());
      queue_.pop_front();
      ++running_;
      lock.unlock();
      collective();
      collective = nullptr;
      lock.lock();
      --running_;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  size_t running_ = 0;
  bool ending_ = false;
  std::atomic_bool failed_{false};
  std::string why_;
  uint32_t tag_ = 0;
};

}  // namespace hvdkit

#endif  // HVDKIT_BUCKETS_H
