// Messages between ranks of different hosts. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_HOST_NETWORK_H
#define HVDKIT_HOST_NETWORK_H

#include <cstddef>
#include <cstdint>
#include <memory>

namespace hvdkit {

// Sends and receives slices of one contiguous buffer.
class Channel {
 public:
  virtual ~Channel() = default;

  // Start to send or receive `bytes` bytes at `offset`. Messages between two ranks with the same tag
  // arrive in order. The memory must not be used for anything else before `wait` has returned.
  virtual void send(int rank, uint32_t tag, size_t offset, size_t bytes) = 0;
  virtual void receive(int rank, uint32_t tag, size_t offset, size_t bytes) = 0;

  // Waits until all messages are sent and received. Throws std::exception if a connection breaks or a
  // rank does not answer.
  virtual void wait() = 0;
};

class Network {
 public:
  virtual ~Network() = default;
  virtual std::unique_ptr<Channel> channel(void* memory, size_t bytes) = 0;
};

}  // namespace hvdkit

#endif  // HVDKIT_HOST_NETWORK_H
