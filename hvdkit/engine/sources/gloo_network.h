// `Network` over the connections of a Gloo context. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_GLOO_NETWORK_H
#define HVDKIT_GLOO_NETWORK_H

#include <memory>

#include "gloo/context.h"
#include "gloo/transport/unbound_buffer.h"

#include "hvdkit_host_network.h"

namespace hvdkit {

class GlooChannel : public Channel {
 public:
  GlooChannel(gloo::Context& context, void* memory, size_t bytes)
      : buffer_(context.createUnboundBuffer(memory, bytes)), timeout_(context.getTimeout()) {}

  void send(int rank, uint32_t tag, size_t offset, size_t bytes) override {
    if (bytes) {
      buffer_->send(rank, slot(tag), offset, bytes);
      ++sends_;
    }
  }

  void receive(int rank, uint32_t tag, size_t offset, size_t bytes) override {
    if (bytes) {
      buffer_->recv(rank, slot(tag), offset, bytes);
      ++receives_;
    }
  }

  void wait() override {
    for (; sends_; --sends_) {
      buffer_->waitSend(timeout_);
    }
    for (; receives_; --receives_) {
      buffer_->waitRecv(timeout_);
    }
  }

 private:
  // Gloo's own collectives have prefixes up to 8.
  static uint64_t slot(uint32_t tag) { return (uint64_t)0x48 << 56 | (uint64_t)tag << 24; }

  const std::unique_ptr<gloo::transport::UnboundBuffer> buffer_;
  const std::chrono::milliseconds timeout_;
  int sends_ = 0, receives_ = 0;
};

class GlooNetwork : public Network {
 public:
  explicit GlooNetwork(std::shared_ptr<gloo::Context> context) : context_(std::move(context)) {}

  std::unique_ptr<Channel> channel(void* memory, size_t bytes) override {
    return std::make_unique<GlooChannel>(*context_, memory, bytes);
  }

 private:
  const std::shared_ptr<gloo::Context> context_;
};

}  // namespace hvdkit

#endif  // HVDKIT_GLOO_NETWORK_H
