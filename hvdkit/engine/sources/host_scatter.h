// Reducescatter and allgather in two levels, like host_allreduce.h; alltoall. Part of hvdkit (Apache-2.0).
//
// Each rank owns one part of a tensor, of any size. Reducescatter: a rank sums its part over the ranks of
// its host. For an owner on another host, the rank with the same local rank sums the part over this host,
// and sends the sum to the owner. The owner adds the sums of all hosts in the order of the hosts.
// Allgather: a rank sends its part to the rank with the same local rank on each other host; the other
// ranks of that host read it from there. So over n hosts each host sends and receives (n - 1) / n of the
// tensor. Alltoall: each rank reads its parts from the ranks of its host, and sends parts to the ranks of other
// hosts. Broadcast, barrier.
//
// The sums are those of host_allreduce.h, bit by bit.

#ifndef HVDKIT_HOST_SCATTER_H
#define HVDKIT_HOST_SCATTER_H

#include <memory>
#include <numeric>
#include <vector>

#include "hvdkit_host_group.h"
#include "hvdkit_host_sums.h"

namespace hvdkit {

// The parts of a tensor that the ranks own, in elements or bytes.
class Parts {
 public:
  explicit Parts(std::vector<size_t> counts) : counts_(std::move(counts)), begins_(counts_.size()) {
    std::partial_sum(counts_.begin(), counts_.end() - 1, begins_.begin() + 1);
  }

  size_t count(int rank) const { return counts_[(size_t)rank]; }
  size_t begin(int rank) const { return begins_[(size_t)rank]; }
  const size_t* begins() const { return begins_.data(); }
  size_t ranks() const { return counts_.size(); }
  size_t total() const { return begins_.back() + counts_.back(); }

 private:
  std::vector<size_t> counts_, begins_;
};

class GroupReducescatter {
 public:
  explicit GroupReducescatter(HostGroup& group)
      : group_(group), peers_(group.peers()), progress_(group.progress()) {}

  // Computes output = factor x (sum of this rank's part of the inputs of all ranks). The output does not
  // overlap the input. If the other ranks cannot read a rank's memory, does nothing and returns false on
  // all ranks. Throws std::exception if a rank has died or does not answer.
  bool run(const void* input, void* output, const Parts& parts, Element element, double factor,
           Reduction reduction = Reduction::kSum) {
    const size_t size = size_of(element), bytes = parts.total() * size;
    const Slice own{parts.begin(group_.rank()), parts.count(group_.rank())};
    auto posts = group_.post(input, bytes, output, group_.offset_of(input, bytes));
    const bool on_boards = HostGroup::all_on_boards(posts);
    if (!on_boards && !HostGroup::all_in_arenas(posts) && !peers_.readable()) {
      return false;
    }
    group_.guarded([&] {
      const Job job{posts, element, size, reduction};
      if (peers_.hosts() > 1) {
        reduce_between_hosts(job, parts, own, output, factor);
      } else {
        add_on_host(job, own, output, factor);
      }
      // Until then, the others read the input of this rank.
      if (!on_boards) {
        progress_.synchronize();
      }
    });
    return true;
  }

 private:
  struct Slice {
    size_t begin, count;
  };

  struct Job {
    const HostGroup::Posts& posts;
    Element element;
    size_t size;  // of an element
    Reduction reduction;
  };

  // Sums a slice of the inputs over the ranks of this host.
  void add_on_host(const Job& job, Slice slice, void* output, double factor) {
    const size_t chunk = HostGroup::kChunk / job.size;
    std::vector<const void*> inputs(peers_.size());
    for (size_t done = 0; done < slice.count; done += chunk) {
      const size_t n = std::min(chunk, slice.count - done);
      progress_.check();
      for (size_t i = 0; i < peers_.size(); ++i) {
        inputs[i] = group_.input(job.posts, i, (slice.begin + done) * job.size, n * job.size);
      }
      sum_to_all(job.element, inputs, {(char*)output + done * job.size}, n, factor, job.reduction);
    }
  }

  char* own_input(const Job& job) const {
    return (char*)job.posts[(size_t)peers_.local_rank()].input;
  }

  // The sums for one rank of another host, while they are being sent.
  struct Parcel {
    std::vector<char> sums;  // if this host has several ranks; otherwise, its input is sent
    std::unique_ptr<Channel> channel;
  };

  void reduce_between_hosts(const Job& job, const Parts& parts, Slice own, void* output,
                            double factor) {
    const size_t bytes = own.count * job.size;
    std::vector<char> received(bytes * peers_.hosts());
    auto arrivals = group_.network().channel(received.data(), received.size());
    peers_.for_other_hosts([&](size_t host) {
      const int from = peers_.partner(host, (size_t)peers_.local_rank());
      arrivals->receive(from, kTag, host * bytes, bytes);
    });
    std::vector<Parcel> parcels;
    peers_.for_other_hosts([&](size_t host) {
      for (int owner : peers_.served_by(host, (size_t)peers_.local_rank())) {
        parcels.emplace_back();
        auto& parcel = parcels.back();
        const size_t size = parts.count(owner) * job.size;
        void* sums = own_input(job) + parts.begin(owner) * job.size;
        if (peers_.size() > 1) {
          parcel.sums.resize(size);
          sums = parcel.sums.data();
          add_on_host(job, {parts.begin(owner), parts.count(owner)}, sums, 1.0);
        }
        parcel.channel = group_.network().channel(sums, size);
        parcel.channel->send(owner, kTag, 0, size);
      }
    });
    add_on_host(job, own, received.data() + peers_.host() * bytes, 1.0);
    group_.wait(*arrivals);
    std::vector<const void*> inputs(peers_.hosts());
    for (size_t host = 0; host < peers_.hosts(); ++host) {
      inputs[host] = received.data() + host * bytes;
    }
    sum_to_all(job.element, inputs, {output}, own.count, factor, job.reduction);
    for (auto& parcel : parcels) {
      group_.wait(*parcel.channel);
    }
  }

  static constexpr uint32_t kTag = 1 << 13;  // GroupAllreduce uses smaller tags

  HostGroup& group_;
  HostPeers& peers_;
  HostProgress& progress_;
};

class GroupAllgather {
 public:
  explicit GroupAllgather(HostGroup& group)
      : group_(group), peers_(group.peers()), progress_(group.progress()) {}

  // Whether `run` can be called for so many bytes in all. The same on all ranks.
  bool serves(size_t bytes) const {
    return peers_.readable() && (peers_.hosts() == 1 || bytes >= HostGroup::kMinTwoLevelBytes);
  }

  // Writes the inputs of all ranks one after the other to the output. `parts` are in bytes. The input may be
  // this rank's part of the output.
  // Throws std::exception if a rank has died or does not answer.
  void run(const void* input, void* output, const Parts& parts) {
    const int rank = group_.rank();
    auto posts = group_.post(input, parts.count(rank), output);
    group_.guarded([&] {
      auto at = [&](int owner) { return (char*)output + parts.begin(owner); };
      auto arrivals = group_.network().channel(output, parts.total());
      auto departures = group_.network().channel(const_cast<void*>(input), parts.count(rank));
      peers_.for_other_hosts([&](size_t host) {
        for (int owner : peers_.served_by(host, (size_t)peers_.local_rank())) {
          arrivals->receive(owner, kTag, parts.begin(owner), parts.count(owner));
        }
        departures->send(peers_.partner(host, (size_t)peers_.local_rank()), kTag, 0, parts.count(rank));
      });
      if (at(rank) != input) {
        std::memcpy(at(rank), input, parts.count(rank));
      }
      for (size_t step = 1; step < peers_.size(); ++step) {
        const size_t i = ((size_t)peers_.local_rank() + step) % peers_.size();
        const int owner = peers_.rank_of(i);
        group_.copy(posts, i, at(owner), 0, parts.count(owner));
      }
      group_.wait(*arrivals);
      if (!HostGroup::all_on_boards(posts)) {
        progress_.synchronize();
      }
      if (peers_.hosts() > 1) {
        read_from_others(posts, output, parts);
        group_.wait(*departures);
        // Until then, the others read the output of this rank.
        progress_.synchronize();
      }
    });
  }

 private:
  // Reads, from the other ranks of this host, the parts that they have received from other hosts.
  void read_from_others(const HostGroup::Posts& posts, void* output, const Parts& parts) {
    for (size_t step = 1; step < peers_.size(); ++step) {
      const size_t i = ((size_t)peers_.local_rank() + step) % peers_.size();
      peers_.for_other_hosts([&](size_t host) {
        for (int owner : peers_.served_by(host, i)) {
          if (parts.count(owner)) {
            group_.read(i, (char*)output + parts.begin(owner), posts[i].output + parts.begin(owner),
                        parts.count(owner));
          }
        }
      });
    }
  }

  static constexpr uint32_t kTag = (1 << 13) + 1;

  HostGroup& group_;
  HostPeers& peers_;
  HostProgress& progress_;
};

class GroupAlltoall {
 public:
  explicit GroupAlltoall(HostGroup& group) : group_(group), peers_(group.peers()) {}

  // Sends to each rank its part of the input, and writes the parts that arrive one after the other to the
  // output, which does not overlap the input. Parts are in bytes. To be called if ranks can read each other's
  // memory. Throws std::exception if a rank has died or does not answer.
  void run(const void* input, const Parts& sent, void* output, const Parts& received) {
    const int rank = group_.rank();
    // On a board, the begins of the parts precede the input.
    const size_t head = sent.ranks() * sizeof(size_t), bytes = head + sent.total();
    std::vector<char> both;
    if (bytes <= kMaxBoardBytes) {
      both.resize(bytes);
      std::copy_n((const char*)sent.begins(), head, both.data());
      std::copy_n((const char*)input, sent.total(), both.data() + head);
    }
    auto posts = group_.post(peers_.hosts() > 1 || both.empty() ? input : both.data(), bytes,
                             const_cast<size_t*>(sent.begins()));
    group_.guarded([&] {
      auto departures = group_.network().channel(const_cast<void*>(input), sent.total());
      auto arrivals = group_.network().channel(output, received.total());
      peers_.for_other_hosts([&](size_t host) {
        for (int other : peers_.ranks_by_host()[host]) {
          arrivals->receive(other, kTag, received.begin(other), received.count(other));
          departures->send(other, kTag, sent.begin(other), sent.count(other));
        }
      });
      std::memcpy((char*)output + received.begin(rank), (const char*)input + sent.begin(rank),
                  sent.count(rank));
      for (size_t step = 1; step < peers_.size(); ++step) {
        const size_t i = ((size_t)peers_.local_rank() + step) % peers_.size();
        const int from = peers_.rank_of(i);
        if (received.count(from)) {
          size_t begin;
          if (posts[i].offset == Board::kOnBoard) {
            group_.copy(posts, i, &begin, (size_t)rank * sizeof begin, sizeof begin);
            begin += head;
          } else {
            group_.read(i, &begin, posts[i].output + (size_t)rank * sizeof begin, sizeof begin);
          }
          group_.copy(posts, i, (char*)output + received.begin(from), begin, received.count(from));
        }
      }
      group_.wait(*arrivals);
      group_.wait(*departures);
      // Until then, the others read the input of this rank.
      if (!HostGroup::all_on_boards(posts)) {
        group_.progress().synchronize();
      }
    });
  }

 private:
  static constexpr uint32_t kTag = (1 << 13) + 2;

  HostGroup& group_;
  HostPeers& peers_;
};

class GroupBroadcast {
 public:
  explicit GroupBroadcast(HostGroup& group) : group_(group), peers_(group.peers()) {}

  // Copies the memory of rank `root` to all ranks: to one rank of each host over the network, and from there to
  // the others. To be called if ranks can read each other's memory. Throws std::exception if a rank has died or
  // does not answer.
  void run(void* memory, size_t bytes, int root) {
    const auto& hosts = peers_.ranks_by_host();
    size_t root_host = 0;
    while (std::find(hosts[root_host].begin(), hosts[root_host].end(), root) == hosts[root_host].end()) {
      ++root_host;
    }
    const int source = root_host == peers_.host() ? root : hosts[peers_.host()][0];
    const bool has_data = group_.rank() == source;
    auto posts = group_.post(has_data ? memory : nullptr, has_data ? bytes : 0, nullptr);
    group_.guarded([&] {
      auto channel = group_.network().channel(memory, bytes);
      if (group_.rank() == root) {
        peers_.for_other_hosts([&](size_t host) { channel->send(hosts[host][0], kTag, 0, bytes); });
      } else if (has_data) {
        channel->receive(root, kTag, 0, bytes);
      }
      group_.wait(*channel);
      // The source has the data only then.
      if (peers_.host() != root_host) {
        group_.progress().synchronize();
      }
      if (!has_data) {
        group_.copy(posts, peers_.member_of(source), memory, 0, bytes);
      }
      if (!HostGroup::all_on_boards(posts)) {
        group_.progress().synchronize();
      }
    });
  }

 private:
  static constexpr uint32_t kTag = (1 << 13) + 3;

  HostGroup& group_;
  HostPeers& peers_;
};

class GroupBarrier {
 public:
  explicit GroupBarrier(HostGroup& group) : group_(group), peers_(group.peers()) {}

  // Waits until all ranks have called it. Throws std::exception if a rank has died or does not answer.
  void run() {
    group_.post(nullptr, 0, nullptr);
    if (peers_.hosts() == 1) {
      return;
    }
    group_.guarded([&] {
      if (peers_.local_rank() == 0) {
        std::vector<char> bytes(peers_.hosts());
        auto channel = group_.network().channel(bytes.data(), bytes.size());
        peers_.for_other_hosts([&](size_t host) {
          channel->send(peers_.ranks_by_host()[host][0], kTag, peers_.host(), 1);
          channel->receive(peers_.ranks_by_host()[host][0], kTag, host, 1);
        });
        group_.wait(*channel);
      }
      group_.progress().synchronize();
    });
  }

 private:
  static constexpr uint32_t kTag = (1 << 13) + 4;

  HostGroup& group_;
  HostPeers& peers_;
};

}  // namespace hvdkit

#endif  // HVDKIT_HOST_SCATTER_H
