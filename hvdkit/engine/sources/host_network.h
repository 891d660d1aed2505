// Messages between ranks of different hosts. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_HOST_NETWORK_H
#define HVDKIT_HOST_NETWORK_H

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>

namespace hvdkit {

// Messages to or from these ranks of the group have not arrived, or those of some of them.
class NetworkError : public std::runtime_error {
 public:
  NetworkError(std::set<int> ranks, const std::string& problem)
      : std::runtime_error(problem), ranks(std::move(ranks)) {}

  const std::set<int> ranks;
};

// Sends and receives slices of one contiguous buffer.
class Channel {
 public:
  virtual ~Channel() = default;

  // Start to send or receive `bytes` bytes at `offset`. Messages between two ranks with the same tag
  // arrive in order. The memory must not be used for anything else before `wait` has returned.
  virtual void send(int rank, uint32_t tag, size_t offset, size_t bytes) = 0;
  virtual void receive(int rank, uint32_t tag, size_t offset, size_t bytes) = 0;

  // Waits until all messages are sent and received. Throws NetworkError if a connection breaks or a rank
  // does not answer. Long messages are sent in pieces: a slow network is no reason to stop waiting.
  // Calls `progress` after pieces, at least once in the time in which a rank must answer.
  virtual void wait(const std::function<void()>& progress) = 0;

 protected:
  static constexpr size_t kPiece = 16 << 20;  // bytes

  // Calls call(offset, bytes) for the pieces of a message.
  template <typename Call>
  static void for_pieces(size_t offset, size_t bytes, Call call) {
    for (size_t done = 0; done < bytes; done += kPiece) {
      call(offset + done, bytes - done < kPiece ? bytes - done : kPiece);
    }
  }
};

class Network {
 public:
  virtual ~Network() = default;
  virtual std::unique_ptr<Channel> channel(void* memory, size_t bytes) = 0;

  // Lets all waits end with an error. Any thread may call it.
  virtual void abort() {}
};

// For a group whose ranks are all on one host.
class NoNetwork : public Network {
 public:
  std::unique_ptr<Channel> channel(void*, size_t) override { return std::make_unique<NoChannel>(); }

 private:
  struct NoChannel : Channel {
    void send(int, uint32_t, size_t, size_t) override { throw std::logic_error("the group has no network"); }
    void receive(int, uint32_t, size_t, size_t) override { throw std::logic_error("the group has no network"); }
    void wait(const std::function<void()>&) override {}
  };
};

}  // namespace hvdkit

#endif  // HVDKIT_HOST_NETWORK_H
