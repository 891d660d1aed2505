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

  // Describes the next collective, so that ranks get an error if they have called different ones. `name` returns
  // the text of a description. To be called for all collectives of a group, or for none.
  using Call = std::array<uint64_t, 2>;
  void expect(const Call& call, std::string (*name)(const Call&)) {
    call_ = call;
    name_ = name;
  }

  // This rank's number in the group.
  int rank() const { return peers_.rank_of((size_t)peers_.local_rank()); }

  // Waits for the messages of a channel. The ranks that wait for this one see that it has not stopped.
  void wait(Channel& channel) {
    compare_hosts();
    wait_only(channel);
  }

  // The offset in this rank's arena, or kElsewhere if the memory is not in the arena.
  uint64_t offset_of(const void* memory, size_t bytes) const {
    return peers_.share_arenas() ? Arena::instance().offset_of(memory, bytes) : Board::kElsewhere;
  }

  // What each rank of this host has posted.
  using Posts = std::vector<Board::Post>;

  // Publishes a tensor to the other ranks of this host: the input itself if it is small and all ranks of the group
  // are on this host; otherwise its address. Returns what all ranks have posted. Inputs on boards are valid until
  // the collective after the next one; other memory until the next `synchronize`.
  Posts post(const void* input, size_t bytes, void* output, uint64_t offset = Board::kElsewhere) {
    const size_t at = operation_++ & 1;
    auto& board = own_board();
    if (peers_.hosts() == 1 && bytes <= kMaxBoardBytes) {
      offset = Board::kOnBoard;
      std::copy_n((const char*)input, bytes, board.small[at]);
    } else if (peers_.hosts() > 1 && name_) {
      send_call();
    }
    board.posts[at] = {offset, (uint64_t)input, (uint64_t)output, {call_[0], call_[1]}};
    return exchange(at);
  }

  // Waits for the calls of other hosts, and compares them with this rank's. To be called before a message of the
  // collective is used.
  void compare_hosts() {
    if (!call_channel_) {
      return;
    }
    const auto channel = std::move(call_channel_);
    wait_only(*channel);
    for (size_t i = 0; i < senders_.size(); ++i) {
      compare(senders_[i], calls_[i + 1], calls_[0]);
    }
  }

  static bool all_on_boards(const Posts& posts) {
    return std::all_of(posts.begin(), posts.end(),
                       [](const Board::Post& post) { return post.offset == Board::kOnBoard; });
  }

  static bool all_in_arenas(const Posts& posts) {
    return std::all_of(posts.begin(), posts.end(),
                       [](const Board::Post& post) { return post.offset < Board::kOnBoard; });
  }

  char* in_arena(size_t member, uint64_t offset) const {
    return peers_.arena(member) + offset;
  }

  // Returns at most kChunk bytes of the input of a rank of this host: its memory, or a copy that is valid until the
  // next call for this rank.
  const void* input(const Posts& posts, size_t member, size_t at, size_t bytes) {
    if (const char* memory = mapped(posts, member)) {
      return memory + at;
    }
    char* copy = buffer(member, kChunk);
    read(member, copy, posts[member].input + at, bytes);
    return copy;
  }

  // Copies a part of the input of a rank of this host.
  void copy(const Posts& posts, size_t member, void* into, size_t at, size_t bytes) {
    if (const char* memory = mapped(posts, member)) {
      std::memmove(into, memory + at, bytes);
    } else if (bytes) {
      read(member, into, posts[member].input + at, bytes);
    }
  }

  // Copies memory of another rank of this host.
  void read(size_t member, void* into, uint64_t from, size_t bytes) {
    progress_.check();
    const int problem = peers_.read(member, into, from, bytes);
    if (problem == ESRCH) {
      progress_.fail(member, HostProgress::kEnded);
    } else if (problem) {
      progress_.fail_for(peers_.rank_of(member), std::string("cannot be read: ") + std::strerror(problem));
    }
  }

  // Memory for copies and received messages. It is kept, because the first use of new memory takes as long as a
  // sum. The first numbers belong to `input`.
  char* buffer(size_t number, size_t bytes) {
    buffers_.resize(std::max(buffers_.size(), number + 1));
    auto& buffer = buffers_[number];
    if (buffer.bytes < bytes) {
      buffer = {std::unique_ptr<char[]>(new char[bytes]), bytes};
    }
    return buffer.memory.get();
  }

  // Calls `call`, which ends a collective. If it throws, the other ranks of the host stop waiting for this one.
  template <typename Call>
  void guarded(Call call) {
    try {
      call();
      compare_hosts();
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
  Posts exchange(size_t at) {
    progress_.advance();
    Posts posts(peers_.size());
    try {
      progress_.check();
      for (size_t i = 0; i < peers_.size(); ++i) {
        progress_.await(i);
        posts[i] = peers_.board(i).posts[at];
        if (posts[i].offset == Board::kOnBoard) {
          posts[i].input = (uint64_t)peers_.board(i).small[at];
        }
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

  // The input of a rank of this host, if it is mapped in this process; otherwise null.
  const char* mapped(const Posts& posts, size_t member) const {
    const auto& post = posts[member];
    if (post.offset < Board::kOnBoard) {
      return in_arena(member, post.offset);
    }
    return post.offset == Board::kOnBoard || (int)member == peers_.local_rank() ? (const char*)post.input : nullptr;
  }

  void compare(size_t member, size_t at) {
    const auto& post = peers_.board(member).posts[at];
    compare(peers_.rank_of(member), {post.call[0], post.call[1]}, call_);
  }

  void compare(int rank, const Call& call, const Call& own) {
    if (call != own && name_) {
      progress_.fail_for(rank, "has called " + name_(call) + ", and this rank " + name_(own) +
                         ". All ranks of a group must call the same collectives in the same order.",
                         HostProgress::kDiffers);
    }
  }

  // Starts to exchange the call with ranks of other hosts. The messages precede those of the collective.
  void send_call() {
    std::vector<int> senders;
    peers_.for_other_hosts([&](size_t host) {
      const auto served = peers_.served_by(host, (size_t)peers_.local_rank());
      senders.insert(senders.end(), served.begin(), served.end());
    });
    calls_.assign(senders.size() + 1, call_);
    call_channel_ = network_->channel(calls_.data(), calls_.size() * sizeof(Call));
    peers_.for_other_hosts([&](size_t host) {
      call_channel_->send(peers_.partner(host, (size_t)peers_.local_rank()), kCallTag, 0, sizeof(Call));
    });
    for (size_t i = 0; i < senders.size(); ++i) {
      call_channel_->receive(senders[i], kCallTag, (i + 1) * sizeof(Call), sizeof(Call));
    }
    senders_ = std::move(senders);
  }

  void wait_only(Channel& channel) {
    try {
      channel.wait([this] { progress_.check(); });
    } catch (const NetworkError& error) {
      // At once: the end of the channels may take some time.
      progress_.fail(error);
    }
  }

  Board& own_board() const { return peers_.board((size_t)peers_.local_rank()); }

  HostPeers peers_;
  HostProgress progress_;
  std::unique_ptr<Network> network_;
  std::unique_ptr<HostGroup> fallback_;
  Call call_{};
  std::string (*name_)(const Call&) = nullptr;
  static constexpr uint32_t kCallTag = (1 << 13) + 5;
  std::vector<Call> calls_;  // of this rank and of `senders_`
  std::vector<int> senders_;
  std::unique_ptr<Channel> call_channel_;
  size_t operation_ = 0;
  struct Buffer {
    std::unique_ptr<char[]> memory;
    size_t bytes = 0;
  };
  std::vector<Buffer> buffers_;
};

}  // namespace hvdkit

#endif  // HVDKIT_HOST_GROUP_H
