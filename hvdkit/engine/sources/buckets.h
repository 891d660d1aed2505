// Names of hvdkit's buckets, and a sleep of the background thread that ends when one is enqueued. Part of
// hvdkit (Apache-2.0).

#ifndef HVDKIT_BUCKETS_H
#define HVDKIT_BUCKETS_H

#include <cctype>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

namespace hvdkit {

// Buckets are called `hvdkit.x`. The frameworks add a prefix: `allreduce.hvdkit.x`.
inline bool is_bucket(const std::string& name) {
  auto at = name.find("hvdkit.");
  return at != std::string::npos && (at == 0 || !std::isalnum((unsigned char)name[at - 1]));
}

// Wakes the background thread between two cycles when a tensor has been enqueued.
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

  // Sleeps until a bucket is enqueued; or, after another tensor was enqueued, until the end of the current
  // cycle, so that tensors can be fused; but at most until `latest`.
  void await_tensor(Clock::time_point last_cycle, Clock::duration cycle, Clock::time_point latest) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_until(lock, latest, [&] { return tensor_; });
    if (tensor_ && cycle > Clock::duration::zero()) {
      auto passed = (Clock::now() - last_cycle) / cycle;
      changed_.wait_until(lock, last_cycle + (passed + 1) * cycle, [&] { return bucket_; });
    }
  }

  // To be called before the background thread reads its queue.
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

}  // namespace hvdkit

#endif  // HVDKIT_BUCKETS_H
