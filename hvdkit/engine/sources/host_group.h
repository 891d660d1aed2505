// The ranks of a process set by host, and their access to each other's memory. Part of hvdkit
// (Apache-2.0).

#ifndef HVDKIT_HOST_GROUP_H
#define HVDKIT_HOST_GROUP_H

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hvdkit_host_network.h"
#include "hvdkit_host_peers.h"
#include "hvdkit_host_progress.h"

namespace hvdkit {

// What is sent between hosts: the elements, or blocks of 8-bit integers. Only for float32.
enum class Wire { kElements, kInt8 };

class HostGroup {
 public:
  // `ranks` are the global ranks of the group, and `rank` is the index of this one. `network` connects
  // this rank with all others. `arena`: see HostPeers.
  HostGroup(std::vector<int> ranks, int rank, std::chrono::milliseconds timeout, bool arena,
            std::unique_ptr<Network> network)
      : peers_(std::move(ranks), rank, timeout, arena), progress_(peers_, timeout), network_(std::move(network)) {}

  HostGroup(const HostGroup&) = delete;
  HostGroup& operator=(const HostGroup&) = delete;

  // To be connected before the first collective. The collectives can be called if all ranks have the same version.
  HostPeers& peers() { return peers_; }
  HostProgress& progress() { return progress_; }
  Network& network() { return *network_; }
  void set_network(std::unique_ptr<Network> network) { network_ = std::move(network); }

  // Sets the group that serves what this one cannot; for ranks that cannot read each other's memory.
  void set_fallback(std::unique_ptr<HostGroup> fallback) { fallback_ = std::move(fallback); }
  HostGroup* fallback() const { return fallback_.get(); }

  // Describes the next collective, so that the ranks of a host get an error if they have called different ones.
  // `name` returns the text of a description.
  using Call = std::array<uint64_t, 2>;
  void expect(const Call& call, std::string (*name)(const Call&)) {
    call_ = call;
    name_ = name;
  }

  // This rank's number in the group.
  int rank() const { return peers_.rank_of((size_t)peers_.local_rank()); }

  // Waits for the messages of a channel. The ranks that wait for this one see that it has not stopped.
  void wait(Channel& channel) {
    try {
      channel.wait([this] { progress_.check(); });
    } catch (const NetworkError& error) {
      // At once: the end of the channels may take some time.
      progress_.fail(error);
    }
  }

  // The offset in this rank's arena, or kElsewhere if the memory is not in the arena.
  uint64_t offset_of(const void* memory, size_t bytes) const {
    return peers_.share_arenas() ? Arena::instance().offset_of(memory, bytes) : Board::kElsewhere;
  }

  // Publishes the addresses of a tensor to the other ranks of this host. Returns those of all ranks.
  std::vector<Board::Post> post(const void* input, void* output, uint64_t offset) {
    const size_t at = operation_++ & 1;
    own_board().posts[at] = {offset, (uint64_t)input, (uint64_t)output, {call_[0], call_[1]}};
    return exchange(at);
  }

  // Copies at most kMaxBoardBytes to this rank's board. Returns the addresses of the copies of all ranks
  // of this host. They are valid until the collective after the next one.
  std::vector<const void*> post_small(const void* input, size_t bytes) {
    const size_t at = operation_++ & 1;
    own_board().posts[at] = {Board::kElsewhere, 0, 0, {call_[0], call_[1]}};
    std::memcpy(own_board().small[at], input, bytes);
    exchange(at);
    std::vector<const void*> inputs(peers_.size());
    for (size_t i = 0; i < peers_.size(); ++i) {
      inputs[i] = peers_.board(i).small[at];
    }
    return inputs;
  }

  static bool all_in_arenas(const std::vector<Board::Post>& posts) {
    return std::all_of(posts.begin(), posts.end(),
                       [](const Board::Post& post) { return post.offset != Board::kElsewhere; });
  }

  char* in_arena(size_t member, uint64_t offset) const {
    return peers_.arena(member) + offset;
  }

  // Copies memory of another rank of this host.
  void read(size_t member, void* into, uint64_t from, size_t bytes) {
    progress_.check();
    const int problem = peers_.read(member, into, from, bytes);
    if (problem == ESRCH) {
      progress_.fail(member, HostProgress::kEnded);
    } else if (problem) {
      progress_.fail(member, std::string("cannot be read: ") + std::strerror(problem));
    }
  }

  // Memory for received messages. It is kept, because the first use of new memory takes as long as a sum.
  char* buffer(size_t number, size_t bytes) {
    buffers_.resize(std::max(buffers_.size(), number + 1));
    auto& buffer = buffers_[number];
    if (buffer.bytes < bytes) {
      buffer = {std::unique_ptr<char[]>(new char[bytes]), bytes};
    }
    return buffer.memory.get();
  }

  // Calls `call`. If it throws, the other ranks of the host stop waiting for this one.
  template <typename Call>
  void guarded(Call call) {
    try {
      call();
    } catch (const NetworkError& error) {
      progress_.fail(error);
    } catch (const std::exception& error) {
      progress_.abandon();
      throw;
    }
  }

  // Bytes. The chunks of one sum fit into the cache.
  static constexpr size_t kChunk = 256 << 10;
  // Bytes. Between hosts, a ring over all ranks is faster for smaller tensors.
  static constexpr size_t kMinTwoLevelBytes = 64 << 10;

 private:
  // Waits until all ranks of the host have posted a tensor.
  std::vector<Board::Post> exchange(size_t at) {
    progress_.advance();
    std::vector<Board::Post> posts(peers_.size());
    try {
      progress_.check();
      for (size_t i = 0; i < peers_.size(); ++i) {
        progress_.await(i);
        posts[i] = peers_.board(i).posts[at];
        compare(i, at);
      }
    } catch (const std::runtime_error&) {
      // Another rank may have found it first, and have failed.
      for (size_t i = 0; i < peers_.size(); ++i) {
        if (progress_.reached(i)) {
          compare(i, at);
        }
      }
      throw;
    }
    return posts;
  }

  void compare(size_t member, size_t at) {
    const auto& post = peers_.board(member).posts[at];
    const Call call{post.call[0], post.call[1]};
    if (call != call_ && name_) {
      progress_.fail(member, "has called " + name_(call) + ", and this rank " + name_(call_) +
                     ". All ranks of a group must call the same collectives in the same order.",
                     HostProgress::kDiffers);
    }
  }

  Board& own_board() const { return peers_.board((size_t)peers_.local_rank()); }

  HostPeers peers_;
  HostProgress progress_;
  std::unique_ptr<Network> network_;
  std::unique_ptr<HostGroup> fallback_;
  Call call_{};
  std::string (*name_)(const Call&) = nullptr;
  size_t operation_ = 0;
  struct Buffer {
    std::unique_ptr<char[]> memory;
    size_t bytes = 0;
  };
  std::vector<Buffer> buffers_;
};

}  // namespace hvdkit

#endif  // HVDKIT_HOST_GROUP_H
