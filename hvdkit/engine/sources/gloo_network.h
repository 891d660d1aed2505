// `Network` over the connections of a Gloo context. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_GLOO_NETWORK_H
#define HVDKIT_GLOO_NETWORK_H

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <set>

#include "gloo/context.h"
#include "gloo/transport/unbound_buffer.h"

#include "hvdkit_host_network.h"

namespace hvdkit {

// The buffers of a context that may be waited for.
class GlooBuffers {
 public:
  using Buffer = gloo::transport::UnboundBuffer;

  void add(Buffer* buffer) {
    std::lock_guard<std::mutex> guard(mutex_);
    check();
    buffers_.insert(buffer);
  }

  void remove(Buffer* buffer) {
    std::lock_guard<std::mutex> guard(mutex_);
    buffers_.erase(buffer);
  }

  void abort() {
    std::lock_guard<std::mutex> guard(mutex_);
    aborted_ = true;
    for (auto* buffer : buffers_) {
      buffer->abortWaitSend();
      buffer->abortWaitRecv();
    }
  }

  void check() const {
    if (aborted_) {
      throw std::runtime_error("collective over the network: this rank has ended the group");
    }
  }

 private:
  std::mutex mutex_;
  std::set<Buffer*> buffers_;
  std::atomic<bool> aborted_{false};
};

class GlooChannel : public Channel {
 public:
  GlooChannel(gloo::Context& context, std::shared_ptr<GlooBuffers> buffers, void* memory, size_t bytes)
      : buffers_(std::move(buffers)), buffer_(context.createUnboundBuffer(memory, bytes)),
        timeout_(context.getTimeout()) {
    buffers_->add(buffer_.get());
  }

  ~GlooChannel() override { buffers_->remove(buffer_.get()); }

  void send(int rank, uint32_t tag, size_t offset, size_t bytes) override {
    for_pieces(offset, bytes, [&](size_t at, size_t size) {
      sends_.insert(rank);
      named([&] { buffer_->send(rank, slot(tag), at, size); });
    });
  }

  void receive(int rank, uint32_t tag, size_t offset, size_t bytes) override {
    for_pieces(offset, bytes, [&](size_t at, size_t size) {
      receives_.insert(rank);
      named([&] { buffer_->recv(rank, slot(tag), at, size); });
    });
  }

  void wait(const std::function<void()>& progress) override {
    // Each message has the whole timeout.
    int rank = -1;
    while (!sends_.empty()) {
      named([&] { buffer_->waitSend(&rank, timeout_); });
      buffers_->check();
      sends_.erase(sends_.find(rank));
      progress();
    }
    while (!receives_.empty()) {
      named([&] { buffer_->waitRecv(&rank, timeout_); });
      buffers_->check();
      receives_.erase(receives_.find(rank));
      progress();
    }
  }

 private:
  // Adds the ranks to errors of Gloo, which do not name them.
  template <typename Call>
  void named(Call call) {
    try {
      call();
    } catch (const std::exception& error) {
      std::set<int> ranks(sends_.begin(), sends_.end());
      ranks.insert(receives_.begin(), receives_.end());
      throw NetworkError(std::move(ranks), error.what());
    }
  }

  // Gloo's own collectives have prefixes up to 8.
  static uint64_t slot(uint32_t tag) { return (uint64_t)0x48 << 56 | (uint64_t)tag << 24; }

  const std::shared_ptr<GlooBuffers> buffers_;
  const std::unique_ptr<gloo::transport::UnboundBuffer> buffer_;
  const std::chrono::milliseconds timeout_;
  std::multiset<int> sends_, receives_;  // the ranks of pending messages
};

class GlooNetwork : public Network {
 public:
  explicit GlooNetwork(std::shared_ptr<gloo::Context> context) : context_(std::move(context)) {}

  std::unique_ptr<Channel> channel(void* memory, size_t bytes) override {
    return std::make_unique<GlooChannel>(*context_, buffers_, memory, bytes);
  }

  void abort() override { buffers_->abort(); }

 private:
  const std::shared_ptr<gloo::Context> context_;
  const std::shared_ptr<GlooBuffers> buffers_ = std::make_shared<GlooBuffers>();
};

}  // namespace hvdkit

#endif  // HVDKIT_GLOO_NETWORK_H
