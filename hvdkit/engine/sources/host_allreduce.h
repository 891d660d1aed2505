// Allreduce in two levels: within hosts in shared memory, between hosts over the network. Part of hvdkit
// (Apache-2.0).
//
// Within a host, no data are sent through sockets. Each rank sums one slice of the tensor. If the tensors
// of all ranks are in their arenas (host_memory.h), which all ranks of the host have mapped, a rank sums
// its slice of all tensors and writes the sum into all of them. Otherwise the rank reads the slices of
// the other ranks with process_vm_readv, and then the sums of the other slices. The ranks' values are
// added in the order of the ranks, so the result does not depend on the rank that computes it.
//
// Between hosts, each slice is reduced by the ranks with the same local rank: each host receives one part
// of the sums of all hosts, adds these sums in the order of the hosts, and sends the result to all hosts.
// So over n hosts every host sends and receives 2 (n - 1) / n of the tensor, whatever the number of its
// ranks. A ring over R ranks sends 2 (R - 1) / R of the tensor through each host's link, which is more if
// hosts have several ranks. See BlueConnect (https://arxiv.org/abs/1908.11645) and Open MPI's coll/han.
// Chunks are pipelined: a host sums the next chunk while the network transfers the last one.
//
// With Wire::kInt8 the parts and the results are sent as blocks of 8-bit integers (int8_blocks.h). The
// host that computes a result also decodes its own blocks, so all ranks get the same bits.

#ifndef HVDKIT_HOST_ALLREDUCE_H
#define HVDKIT_HOST_ALLREDUCE_H

#include <memory>
#include <vector>

#include "hvdkit_host_group.h"
#include "hvdkit_host_sums.h"
#include "hvdkit_int8_blocks.h"

namespace hvdkit {

class GroupAllreduce {
 public:
  explicit GroupAllreduce(HostGroup& group)
      : group_(group), peers_(group.peers()), progress_(group.progress()) {}

  // Whether `run` can be called for a tensor of this size. The same on all ranks.
  bool serves(size_t bytes) const { return peers_.hosts() == 1 || bytes >= HostGroup::kMinTwoLevelBytes; }

  // Computes output = factor x (sum of the inputs of all ranks). The output may be the input. If the
  // other ranks cannot read a rank's memory, does nothing and returns false on all ranks; never if
  // memory outside of the arenas can be read.
  // Throws std::exception if a rank has died or does not answer.
  bool run(const void* input, void* output, size_t count, Element element, double factor,
           Wire wire, Reduction reduction = Reduction::kSum) {
    const size_t bytes = count * size_of(element);
    // Sums are written into the inputs of the other ranks.
    const bool in_place = input == output;
    auto posts = group_.post(input, bytes, output, in_place ? group_.offset_of(output, bytes) : Board::kElsewhere);
    if (HostGroup::all_on_boards(posts)) {
      // Each rank adds up all of them.
      std::vector<const void*> inputs(peers_.size());
      for (size_t i = 0; i < peers_.size(); ++i) {
        inputs[i] = group_.input(posts, i, 0, bytes);
      }
      sum_to_all(element, inputs, {output}, count, factor, reduction);
      return true;
    }
    const bool shared = HostGroup::all_in_arenas(posts);
    if (!shared && !peers_.readable()) {
      return false;
    }
    group_.guarded([&] { reduce({posts, shared, element, size_of(element), factor, wire, reduction}, count); });
    return true;
  }

 private:
  // One allreduce.
  struct Job {
    const HostGroup::Posts& posts;
    bool shared;  // all tensors are in arenas
    Element element;
    size_t size;  // of an element
    double factor;
    Wire wire;
    Reduction reduction;

    // Of `count` elements, sent to another host.
    size_t wire_bytes(size_t count) const {
      return wire == Wire::kInt8 ? int8_bytes(count) : count * size;
    }
  };

  struct Slice {
    size_t begin, count;
  };

  // The slice of a rank of this host, in elements. Ranks beyond the number of those on the smallest
  // host have none.
  Slice slice(const Job& job, size_t member, size_t count) const {
    if (member >= peers_.min_local_size()) {
      return {count, 0};
    }
    return part(job, count, member, peers_.min_local_size());
  }

  // Part `index` of `parts` of `count` elements. It begins with a block of int8_blocks.h, and so with a
  // cache line: no two ranks write to one.
  static Slice part(const Job& job, size_t count, size_t index, size_t parts) {
    const size_t line = kBlock * sizeof(float) / job.size;
    const size_t lines = (count + line - 1) / line;
    size_t begin = std::min(count, lines * index / parts * line);
    size_t end = std::min(count, lines * (index + 1) / parts * line);
    return {begin, end - begin};
  }

  void reduce(const Job& job, size_t count) {
    auto own = slice(job, (size_t)peers_.local_rank(), count);
    if (peers_.hosts() > 1) {
      reduce_between_hosts(job, own);
    } else {
      for_chunks(job, own, [&](size_t begin, size_t n) {
        add_on_host(job, begin, n, job.factor, job.shared);
      });
    }
    progress_.synchronize();
    if (job.shared) {
      return;
    }
    // The others cannot write to this rank's memory: it reads their sums.
    for (size_t step = 1; step < peers_.size(); ++step) {
      size_t i = ((size_t)peers_.local_rank() + step) % peers_.size();
      for_chunks(job, slice(job, i, count), [&](size_t begin, size_t n) {
        group_.read(i, own_output(job, begin), job.posts[i].output + begin * job.size, n * job.size);
      });
    }
    progress_.synchronize();
  }

  template <typename Call>
  static void for_chunks(const Job& job, Slice slice, Call call) {
    const size_t chunk = kChunk / job.size;
    for (size_t done = 0; done < slice.count; done += chunk) {
      call(slice.begin + done, std::min(chunk, slice.count - done));
    }
  }

  char* own_output(const Job& job, size_t begin) const {
    return (char*)job.posts[(size_t)peers_.local_rank()].output + begin * job.size;
  }

  // Adds a chunk of the tensors of this host, into the own output, or into all of them.
  void add_on_host(const Job& job, size_t begin, size_t n, double factor, bool to_all) {
    progress_.check();
    std::vector<const void*> inputs(peers_.size());
    std::vector<void*> outputs;
    for (size_t i = 0; i < peers_.size(); ++i) {
      inputs[i] = group_.input(job.posts, i, begin * job.size, n * job.size);
      if (to_all) {
        outputs.push_back(in_arena(job, i, begin));
      }
    }
    if (!to_all) {
      outputs = {own_output(job, begin)};
    }
    if (inputs.size() > 1 || factor != 1.0 || inputs[0] != outputs[0]) {
      sum_to_all(job.element, inputs, outputs, n, factor, job.reduction);
    }
  }

  char* in_arena(const Job& job, size_t member, size_t begin) const {
    return group_.in_arena(member, job.posts[member].offset) + begin * job.size;
  }

  // -- Between hosts -------------------------------------------------------------------------------

  // A chunk in flight.
  struct Flight {
    size_t number = 0, begin = 0, count = 0;
    char* received = nullptr;   // this host's part of the sums of the others, in their order
    std::vector<char> encoded;  // the chunk as it is sent, if that is not the output itself
    std::unique_ptr<Channel> sums, parts, results;
  };

  void reduce_between_hosts(const Job& job, Slice own) {
    const size_t chunk = chunk_bytes(job) / job.size;
    const size_t chunks = (own.count + chunk - 1) / chunk;
    Flight flights[kFlights];
    auto flight_of = [&](size_t k) -> Flight& { return flights[k % kFlights]; };
    for (size_t k = 0; k < chunks + 2 * kLag; ++k) {
      if (k < chunks) {
        auto& flight = flight_of(k);
        flight.number = k;
        flight.begin = own.begin + k * chunk;
        flight.count = std::min(chunk, own.count - k * chunk);
        send_sums(job, flight);
      }
      if (k >= kLag && k - kLag < chunks) {
        send_results(job, flight_of(k - kLag));
      }
      if (k >= 2 * kLag) {
        receive_results(job, flight_of(k - 2 * kLag));
      }
    }
  }

  // A host's part of a chunk, relative to the chunk's begin.
  Slice part_of(const Job& job, const Flight& flight, size_t host) const {
    return part(job, flight.count, host, peers_.hosts());
  }

  // Where an element of the chunk is on the wire. Parts begin with a block.
  char* on_wire(const Job& job, Flight& flight, size_t begin) const {
    return wire_memory(job, flight) + job.wire_bytes(begin);
  }

  char* wire_memory(const Job& job, Flight& flight) const {
    return job.wire == Wire::kInt8 ? flight.encoded.data() : own_output(job, flight.begin);
  }

  // Calls call(host, part of the host) for the other hosts, beginning after this one.
  template <typename Call>
  void for_others(const Job& job, const Flight& flight, Call call) const {
    peers_.for_other_hosts([&](size_t host) { call(host, part_of(job, flight, host)); });
  }

  static uint32_t tag(const Flight& flight, uint32_t phase) {
    return (uint32_t)(flight.number % 4096) * 2 + phase;
  }

  // Adds the chunk on this host, and sends each other host its part of it.
  void send_sums(const Job& job, Flight& flight) {
    for_chunks(job, {flight.begin, flight.count}, [&](size_t begin, size_t n) {
      add_on_host(job, begin, n, 1.0, false);
    });
    if (job.wire == Wire::kInt8) {
      flight.encoded.resize(job.wire_bytes(flight.count));
      for_others(job, flight, [&](size_t, Slice theirs) {
        int8_encode(on_wire(job, flight, theirs.begin),
                    (const float*)own_output(job, flight.begin + theirs.begin), theirs.count);
      });
    }
    const size_t bytes = job.wire_bytes(part_of(job, flight, peers_.host()).count);
    flight.received = group_.buffer(peers_.size() + flight.number % kFlights, bytes * peers_.hosts());
    flight.sums = group_.network().channel(wire_memory(job, flight), job.wire_bytes(flight.count));
    flight.parts = group_.network().channel(flight.received, bytes * peers_.hosts());
    flight.results = group_.network().channel(wire_memory(job, flight), job.wire_bytes(flight.count));
    for_others(job, flight, [&](size_t host, Slice theirs) {
      const int rank = peers_.counterpart(host);
      flight.parts->receive(rank, tag(flight, 0), host * bytes, bytes);
      flight.sums->send(rank, tag(flight, 0), job.wire_bytes(theirs.begin),
                        job.wire_bytes(theirs.count));
    });
  }

  // Adds this host's part of the chunk over all hosts, and sends the result to all.
  void send_results(const Job& job, Flight& flight) {
    group_.wait(*flight.parts);
    // The results of the other hosts will overwrite the memory that is being sent.
    group_.wait(*flight.sums);
    progress_.check();
    const Slice own = part_of(job, flight, peers_.host());
    const size_t bytes = job.wire_bytes(own.count);
    if (job.wire == Wire::kInt8) {
      add_blocks(job, flight, own, bytes);
    } else {
      char* mine = own_output(job, flight.begin + own.begin);
      std::vector<const void*> inputs(peers_.hosts());
      for (size_t host = 0; host < peers_.hosts(); ++host) {
        inputs[host] = host == peers_.host() ? mine : flight.received + host * bytes;
      }
      sum_to_all(job.element, inputs, {mine}, own.count, job.factor, job.reduction);
    }
    for_others(job, flight, [&](size_t host, Slice theirs) {
      const int rank = peers_.counterpart(host);
      flight.results->receive(rank, tag(flight, 1), job.wire_bytes(theirs.begin),
                              job.wire_bytes(theirs.count));
      flight.results->send(rank, tag(flight, 1), job.wire_bytes(own.begin), bytes);
    });
  }

  // Adds the received blocks to the own part of the chunk, and encodes the sums. Some blocks at a time,
  // which stay in the cache.
  void add_blocks(const Job& job, Flight& flight, Slice own, size_t bytes) {
    constexpr size_t kStep = 8 * kBlock;
    decoded_.resize(kStep * peers_.hosts());
    std::vector<const void*> inputs(peers_.hosts());
    for (size_t done = 0; done < own.count; done += kStep) {
      const size_t n = std::min(kStep, own.count - done);
      auto* mine = (float*)own_output(job, flight.begin + own.begin + done);
      for (size_t host = 0; host < peers_.hosts(); ++host) {
        float* decoded = decoded_.data() + kStep * host;
        inputs[host] = host == peers_.host() ? mine : decoded;
        if (host != peers_.host()) {
          int8_decode(decoded, flight.received + host * bytes + int8_bytes(done), n);
        }
      }
      sum_to_all(job.element, inputs, {mine}, n, job.factor);
      char* result = on_wire(job, flight, own.begin + done);
      int8_encode(result, mine, n);
      int8_decode(mine, result, n);
    }
  }

  // Copies the chunk to the other ranks of this host.
  void receive_results(const Job& job, Flight& flight) {
    group_.wait(*flight.results);
    progress_.check();
    if (job.wire == Wire::kInt8) {
      for_others(job, flight, [&](size_t, Slice theirs) {
        int8_decode((float*)own_output(job, flight.begin + theirs.begin),
                    on_wire(job, flight, theirs.begin), theirs.count);
      });
    }
    for (size_t i = 0; job.shared && i < peers_.size(); ++i) {
      if ((int)i != peers_.local_rank()) {
        std::memcpy(in_arena(job, i, flight.begin), own_output(job, flight.begin),
                    flight.count * job.size);
      }
    }
  }

  // Bytes. A chunk of a sum stays in the cache.
  static constexpr size_t kChunk = HostGroup::kChunk;
  // Of a slice; each host sends two parts of it. 128 KB to 1 MB make no difference at 1 Gbit/s.
  static constexpr size_t kNetworkChunk = 512 << 10, kInt8Chunk = 2 << 20;
  // If each host has one rank, there are no sums within hosts to compute meanwhile. If these ranks share
  // cores, each chunk costs more than the network.
  static constexpr size_t kSingleRankChunk = 8 << 20;
  // Keep several chunks in flight: the thread of another rank may have to wait for a core.
  static constexpr size_t kLag = 2, kFlights = 2 * kLag + 1;

  size_t chunk_bytes(const Job& job) const {
    if (job.wire == Wire::kInt8) {
      return kInt8Chunk;
    }
    return peers_.max_local_size() == 1 ? kSingleRankChunk : kNetworkChunk;
  }

  HostGroup& group_;
  HostPeers& peers_;
  HostProgress& progress_;
  std::vector<float> decoded_;
};

}  // namespace hvdkit

#endif  // HVDKIT_HOST_ALLREDUCE_H
