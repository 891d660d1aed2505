// Allreduce that knows which ranks share a host. Part of hvdkit (Apache-2.0).
//
// Within a host nothing goes through sockets. Each rank sums one slice of the tensor. If the tensors of all ranks are in their arenas
// (host_memory.h), which all ranks of the host have mapped, a rank adds its slice of all tensors and
// writes the sum into all of them. Otherwise it reads the slices of the others with process_vm_readv,
// and afterwards their sums. Sums are taken in the order of the ranks, so that the result does not
// depend on which rank computes it.
//
// Between hosts, each slice is reduced by ranks with the same place on their hosts: each host gets one
// part of the sums of all hosts, adds them in the order of the hosts, and sends the result to all. So
// every host sends and receives 2 (n - 1) / n of the tensor over n hosts, whatever the number of its
// ranks. A ring of all ranks sends more as soon as a host has several: its neighbours in the ring are on
// other hosts. See BlueConnect (https://arxiv.org/abs/1908.11645) and Open MPI's coll/han. Chunks are
// pipelined, so that a host adds the next one while the network has the last.
//
// Open MPI's coll/xhc and MPICH's release-gather synchronize in the same way: by counters in shared
// memory that only their owner writes.

#ifndef HVDKIT_HOST_GROUP_H
#define HVDKIT_HOST_GROUP_H

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "hvdkit_host_memory.h"
#include "hvdkit_host_network.h"
#include "hvdkit_host_sums.h"

namespace hvdkit {

// One rank's part of what all ranks tell each other before they connect.
struct Introduction {
  static constexpr uint64_t kVersion = 1;
  uint64_t version = kVersion;
  uint64_t host = 0;     // a hash of the boot id and the network namespace
  uint64_t socket = 0;   // the name of the rank's socket
  uint64_t secret = 0;   // proves that a connection is of this job
  uint64_t refused = 0;  // a Refusal
};

// Why a rank takes part in flat collectives only.
enum Refusal : uint64_t { kNone, kRequested, kNoMemory, kNoSocket, kNotConnected, kCannotRead };

class HostGroup {
 public:
  using Clock = std::chrono::steady_clock;
  // Replaces the words of all ranks by their bitwise or, which every rank gets.
  using Exchange = std::function<void(std::vector<long long>&)>;

  // `network` connects this rank with all others; null where it cannot be used for this.
  HostGroup(int rank, int size, std::chrono::milliseconds timeout, std::unique_ptr<Network> network)
      : rank_(rank), size_(size), timeout_(timeout), network_(std::move(network)) {}

  HostGroup(const HostGroup&) = delete;
  HostGroup& operator=(const HostGroup&) = delete;
  ~HostGroup() { disconnect(); }

  // Connects the ranks. All ranks call it, and all get the same answer: "" or why they stay with flat
  // collectives. `exchange` may throw.
  std::string connect(bool flat, const Exchange& exchange) {
    Introduction own;
    std::string detail;
    if (flat) {
      own.refused = kRequested;
    } else if (size_ > 1) {
      own = introduce(detail);
    }
    auto all = gather(own, exchange);
    for (int rank = 0; rank < size_; ++rank) {
      if (all[rank].refused) {
        return withdraw(reason(rank, (Refusal)all[rank].refused, detail));
      }
      if (all[rank].version != own.version) {
        return withdraw("rank " + std::to_string(rank) + " has another version of the engine");
      }
    }
    if (size_ == 1) {
      return "there is one rank";
    }
    find_hosts(all);
    if (most_ == 1) {
      return withdraw("each rank is on a host of its own");
    }
    if (hosts_.size() > 1 && !network_) {
      return withdraw("the ranks are on several hosts, and the controller is MPI");
    }
    // A second exchange, because a rank may have failed to connect.
    Verdict mine;
    try {
      meet(all);
    } catch (const std::runtime_error& error) {
      detail = error.what();
      mine.refused = kNotConnected;
    }
    mine.cannot_read = !mine.refused && !can_read(all);
    if (mine.cannot_read && hosts_.size() > 1) {
      // Otherwise a tensor might be within reach on one host, and not on another one.
      mine.refused = kCannotRead;
    }
    auto verdicts = gather(mine, exchange);
    readable_ = true;
    for (int rank = 0; rank < size_; ++rank) {
      if (verdicts[rank].refused) {
        return withdraw(reason(rank, (Refusal)verdicts[rank].refused, detail));
      }
      readable_ = readable_ && !verdicts[rank].cannot_read;
    }
    Arena::instance().share(true);
    connected_.store(true);
    return "";
  }

  void disconnect() {
    connected_.store(false);
    Arena::instance().share(false);
    Arena::instance().close_in_child(nullptr);
    for (size_t i = 0; i < boards_.size(); ++i) {
      if ((int)i != here_ && boards_[i]) {
        munmap(boards_[i], Arena::instance().capacity());
      }
      boards_[i] = nullptr;
      close_file(peers_[i]);
    }
    close_file(listener_);
  }

  bool connected() const { return connected_.load(); }

  // Whether memory outside of the arenas can be read, too.
  bool readable() const { return readable_; }

  size_t hosts() const { return hosts_.size(); }

  // Computes output = factor x (sum of the inputs of all ranks). The output may be the input. Returns
  // false on all ranks, and does nothing, where the memory of a rank is not within reach.
  // Throws std::runtime_error where a rank has died or does not answer.
  bool allreduce(const void* input, void* output, size_t count, Element element, double factor) {
    size_t bytes = count * size_of(element);
    if (hosts_.size() > 1 && bytes < kSmallest) {
      return false;
    }
    if (bytes <= kSmall) {
      small(input, output, count, element, factor);
      return true;
    }
    Board& own = *boards_[here_];
    auto& post = own.posts[operation_ & 1];
    post.offset = input == output ? Arena::instance().offset_of(output, bytes) : Board::kElsewhere;
    post.input = (uint64_t)input;
    post.output = (uint64_t)output;
    std::vector<Board::Post> posts(boards_.size());
    advance();
    bool shared = true;
    for (size_t i = 0; i < boards_.size(); ++i) {
      await(i);
      posts[i] = boards_[i]->posts[operation_ & 1];
      shared = shared && posts[i].offset != Board::kElsewhere;
    }
    ++operation_;
    if (!shared && !readable_) {
      return false;
    }
    try {
      reduce(posts, shared, count, element, factor);
    } catch (const std::exception& error) {
      // Whatever it was: the other ranks of the host must not wait for this one.
      abandon();
      throw;
    }
    return true;
  }

 private:
  struct Verdict {
    uint64_t refused = 0, cannot_read = 0;
  };

  struct Hello {
    uint64_t secret;
    int64_t member;
    uint64_t capacity;
    uint64_t board;  // the address in the sender's process
  };

  struct Slice {
    size_t begin, count;
  };

  // The slice of a rank of this host, in elements: whole cache lines, so that no two ranks write to one.
  // Ranks beyond the number of those on the smallest host have none.
  Slice slice(size_t member, size_t count, Element element) const {
    if (member >= slices_) {
      return {count, 0};
    }
    return part(count, size_of(element), member, slices_);
  }

  // Part `index` of `parts` of `count` elements.
  static Slice part(size_t count, size_t size, size_t index, size_t parts) {
    size_t line = 64 / size;
    size_t lines = (count + line - 1) / line;
    size_t begin = std::min(count, lines * index / parts * line);
    size_t end = std::min(count, lines * (index + 1) / parts * line);
    return {begin, end - begin};
  }

  // A tensor of at most kSmall bytes: each rank adds up the boards of all.
  void small(const void* input, void* output, size_t count, Element element, double factor) {
    size_t at = operation_++ & 1;
    std::memcpy(boards_[here_]->small[at], input, count * size_of(element));
    advance();
    std::vector<const void*> inputs(boards_.size());
    for (size_t i = 0; i < boards_.size(); ++i) {
      await(i);
      inputs[i] = boards_[i]->small[at];
    }
    sum_to_all(element, inputs, {output}, count, factor);
  }

  // One allreduce of this rank.
  struct Job {
    const std::vector<Board::Post>& posts;
    bool shared;  // all tensors are in arenas
    size_t size;  // of an element
    Element element;
    double factor;
  };

  void reduce(const std::vector<Board::Post>& posts, bool shared, size_t count, Element element,
              double factor) {
    Job job{posts, shared, size_of(element), element, factor};
    auto own = slice(here_, count, element);
    if (hosts_.size() > 1) {
      reduce_between_hosts(job, own);
    } else {
      for_chunks(own, job.size, [&](size_t begin, size_t n) {
        add_on_host(job, begin, n, factor, shared);
      });
    }
    synchronize();
    if (shared) {
      return;
    }
    // The others cannot write to this rank's memory: it reads their sums.
    for (size_t step = 1; step < boards_.size(); ++step) {
      size_t i = (here_ + step) % boards_.size();
      for_chunks(slice(i, count, element), job.size, [&](size_t begin, size_t n) {
        read(i, (char*)posts[here_].output + begin * job.size, posts[i].output + begin * job.size,
             n * job.size);
      });
    }
    synchronize();
  }

  template <typename Call>
  static void for_chunks(Slice slice, size_t size, Call call) {
    for (size_t done = 0; done < slice.count; done += kChunk / size) {
      call(slice.begin + done, std::min(kChunk / size, slice.count - done));
    }
  }

  char* own_output(const Job& job, size_t begin) const {
    return (char*)job.posts[here_].output + begin * job.size;
  }

  // Adds a chunk of the tensors of this host, into the own output, or into all of them.
  void add_on_host(const Job& job, size_t begin, size_t n, double factor, bool to_all) {
    std::vector<const void*> inputs(boards_.size());
    std::vector<void*> outputs{own_output(job, begin)};
    if (job.shared) {
      check();
      for (size_t i = 0; i < boards_.size(); ++i) {
        inputs[i] = in_arena(job, i, begin);
      }
      if (to_all) {
        outputs.clear();
        for (size_t i = 0; i < boards_.size(); ++i) {
          outputs.push_back(in_arena(job, i, begin));
        }
      }
    } else {
      scratch_.resize(kChunk * boards_.size());
      for (size_t i = 0; i < boards_.size(); ++i) {
        if ((int)i == here_) {
          inputs[i] = (char*)job.posts[i].input + begin * job.size;
        } else {
          char* copy = scratch_.data() + kChunk * i;
          read(i, copy, job.posts[i].input + begin * job.size, n * job.size);
          inputs[i] = copy;
        }
      }
    }
    sum_to_all(job.element, inputs, outputs, n, factor);
  }

  char* in_arena(const Job& job, size_t member, size_t begin) const {
    return (char*)boards_[member] + job.posts[member].offset + begin * job.size;
  }

  // -- Between hosts -------------------------------------------------------------------------------

  // A chunk on its way.
  struct Flight {
    size_t begin = 0, count = 0;
    std::vector<char> received;  // the parts of the other hosts, in their order
    std::unique_ptr<Channel> sums, parts, results;
  };

  void reduce_between_hosts(const Job& job, Slice own) {
    const size_t chunk = kNetworkChunk / job.size;
    const size_t chunks = (own.count + chunk - 1) / chunk;
    // The thread of another rank may have to wait for a core. So several chunks are on their way.
    constexpr size_t kLag = 2;
    Flight flights[2 * kLag + 1];
    auto flight_of = [&](size_t k) -> Flight& { return flights[k % (2 * kLag + 1)]; };
    for (size_t k = 0; k < chunks + 2 * kLag; ++k) {
      if (k < chunks) {
        auto& flight = flight_of(k);
        flight.begin = own.begin + k * chunk;
        flight.count = std::min(chunk, own.count - k * chunk);
        send_sums(job, flight, k);
      }
      if (k >= kLag && k - kLag < chunks) {
        send_results(job, flight_of(k - kLag), k - kLag);
      }
      if (k >= 2 * kLag) {
        receive_results(job, flight_of(k - 2 * kLag));
      }
    }
  }

  // The rank of another host that reduces the same slice.
  int counterpart(size_t host) const { return hosts_[host][(size_t)here_]; }

  static uint32_t tag(size_t chunk, uint32_t phase) { return (uint32_t)(chunk % 4096) * 2 + phase; }

  // Adds the chunk on this host, and sends each other host its part of it.
  void send_sums(const Job& job, Flight& flight, size_t chunk) {
    for_chunks({flight.begin, flight.count}, job.size, [&](size_t begin, size_t n) {
      add_on_host(job, begin, n, 1.0, false);
    });
    const Slice own = part(flight.count, job.size, host_, hosts_.size());
    const size_t bytes = own.count * job.size;
    flight.received.resize(bytes * hosts_.size());
    char* memory = own_output(job, flight.begin);
    flight.sums = network_->channel(memory, flight.count * job.size);
    flight.parts = network_->channel(flight.received.data(), flight.received.size());
    flight.results = network_->channel(memory, flight.count * job.size);
    for (size_t step = 1; step < hosts_.size(); ++step) {
      size_t host = (host_ + step) % hosts_.size();
      auto theirs = part(flight.count, job.size, host, hosts_.size());
      flight.parts->receive(counterpart(host), tag(chunk, 0), host * bytes, bytes);
      flight.sums->send(counterpart(host), tag(chunk, 0), theirs.begin * job.size,
                        theirs.count * job.size);
    }
  }

  // Adds this host's part of the chunk over all hosts, and sends the result to all.
  void send_results(const Job& job, Flight& flight, size_t chunk) {
    flight.parts->wait();
    // The parts are sent from where the results of the other hosts will be.
    flight.sums->wait();
    check();
    const Slice own = part(flight.count, job.size, host_, hosts_.size());
    const size_t bytes = own.count * job.size;
    char* mine = own_output(job, flight.begin + own.begin);
    std::vector<const void*> inputs(hosts_.size());
    for (size_t host = 0; host < hosts_.size(); ++host) {
      inputs[host] = host == host_ ? mine : flight.received.data() + host * bytes;
    }
    sum_to_all(job.element, inputs, {mine}, own.count, job.factor);
    for (size_t step = 1; step < hosts_.size(); ++step) {
      size_t host = (host_ + step) % hosts_.size();
      auto theirs = part(flight.count, job.size, host, hosts_.size());
      flight.results->receive(counterpart(host), tag(chunk, 1), theirs.begin * job.size,
                              theirs.count * job.size);
      flight.results->send(counterpart(host), tag(chunk, 1), own.begin * job.size, bytes);
    }
  }

  // Copies the chunk to the other ranks of this host.
  void receive_results(const Job& job, Flight& flight) {
    flight.results->wait();
    check();
    for (size_t i = 0; job.shared && i < boards_.size(); ++i) {
      if ((int)i != here_) {
        std::memcpy(in_arena(job, i, flight.begin), own_output(job, flight.begin),
                    flight.count * job.size);
      }
    }
  }

  void read(size_t member, void* into, uint64_t from, size_t bytes) {
    check();
    iovec local{into, bytes}, remote{(void*)from, bytes};
    ssize_t got = process_vm_readv(pids_[member], &local, 1, &remote, 1, 0);
    if (got != (ssize_t)bytes) {
      fail(member, got < 0 && errno == ESRCH ? "has ended"
                                           : std::string("cannot be read: ") + std::strerror(errno));
    }
  }

  // -- Waiting -------------------------------------------------------------------------------------

  static long futex(std::atomic<uint32_t>& word, int operation, uint32_t value,
                    const timespec* time) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, time, nullptr, 0);
  }

  void advance() {
    Board& own = *boards_[here_];
    ++step_;
    own.progress.store(step_);
    if (own.waiters.load() > 0) {
      futex(own.progress, FUTEX_WAKE, INT32_MAX, nullptr);
    }
  }

  // Waits until all ranks of the host have done as many steps as this one.
  void synchronize() {
    advance();
    for (size_t i = 0; i < boards_.size(); ++i) {
      await(i);
    }
  }

  bool reached(size_t member) const {
    return (int32_t)(boards_[member]->progress.load() - step_) >= 0;
  }

  void await(size_t member) {
    if (reached(member)) {
      return;
    }
    auto begin = Clock::now();
    Clock::duration waited{};
    if (spin_) {
      // Longer than a switch between threads takes, but not so long that others miss the core.
      while (Clock::now() - begin < std::chrono::microseconds(20)) {
        if (reached(member)) {
          return;
        }
      }
    }
    Board& board = *boards_[member];
    const timespec pause{0, 20 * 1000 * 1000};
    while (true) {
      board.waiters.fetch_add(1);
      uint32_t seen = board.progress.load();
      if ((int32_t)(seen - step_) < 0) {
        futex(board.progress, FUTEX_WAIT, seen, &pause);
      }
      board.waiters.fetch_sub(1);
      if (reached(member)) {
        return;
      }
      check();
      for (size_t other = 0; other < boards_.size(); ++other) {
        if ((int)other != here_ && closed(other) && !reached(other)) {
          fail(other, "has ended");
        }
      }
      // While the whole job is suspended (SIGSTOP, a sleeping laptop), time passes for all ranks.
      auto now = Clock::now();
      waited += std::min<Clock::duration>(now - begin, std::chrono::milliseconds(500));
      begin = now;
      if (waited > timeout_) {
        fail(member, "has not answered for " + std::to_string(timeout_.count() / 1000) +
                         " s (HOROVOD_GLOO_TIMEOUT_SECONDS)");
      }
    }
  }

  bool closed(size_t member) const {
    pollfd file{peers_[member], POLLRDHUP, 0};
    return poll(&file, 1, 0) > 0 && (file.revents & (POLLRDHUP | POLLHUP | POLLERR));
  }

  // Throws where a rank of the host has failed, so that no rank waits for one that has given up.
  void check() {
    for (size_t i = 0; i < boards_.size(); ++i) {
      if (boards_[i]->failed.load()) {
        fail(i, "has failed in an earlier or in this collective");
      }
    }
  }

  [[noreturn]] void fail(size_t member, const std::string& what) {
    abandon();
    throw std::runtime_error("allreduce in shared memory: rank " +
                             std::to_string(members()[member]) + " " + what);
  }

  // Tells the other ranks of the host that this one takes no further part.
  void abandon() {
    Board& own = *boards_[here_];
    own.failed.store(1);
    futex(own.progress, FUTEX_WAKE, INT32_MAX, nullptr);
  }

  // -- Connecting ----------------------------------------------------------------------------------

  static uint64_t hash(const std::string& text) {  // FNV-1a
    uint64_t value = 14695981039346656037ull;
    for (unsigned char c : text) {
      value = (value ^ c) * 1099511628211ull;
    }
    return value;
  }

  static std::string content_of(const char* path) {
    char text[256] = {};
    if (FILE* file = std::fopen(path, "r")) {
      size_t length = std::fread(text, 1, sizeof text - 1, file);
      std::fclose(file);
      return std::string(text, length);
    }
    return "";
  }

  static std::string link_of(const char* path) {
    char text[256];
    ssize_t length = readlink(path, text, sizeof text);
    return length < 0 ? "" : std::string(text, (size_t)length);
  }

  static uint64_t draw() {
    std::random_device device;
    return ((uint64_t)device() << 32 | device()) | 1;
  }

  template <typename T>
  std::vector<T> gather(const T& own, const Exchange& exchange) const {
    constexpr size_t words = sizeof(T) / sizeof(long long);
    std::vector<long long> all(words * size_, 0);
    std::memcpy(&all[words * rank_], &own, sizeof(T));
    exchange(all);
    std::vector<T> parts(size_);
    std::memcpy(static_cast<void*>(parts.data()), all.data(), sizeof(T) * size_);
    return parts;
  }

  Introduction introduce(std::string& detail) {
    Introduction own;
    own.host = hash(content_of("/proc/sys/kernel/random/boot_id") + link_of("/proc/self/ns/net"));
    own.socket = draw();
    own.secret = draw();
    detail = Arena::instance().renew(size_);
    if (!detail.empty()) {
      own.refused = kNoMemory;
      return own;
    }
    auto& board = Arena::instance().board();
    board.token[0] = own.socket;
    board.token[1] = own.secret;
    // Open MPI asks for this, too: Yama lets no process read another one that is not its child.
    if (content_of("/proc/sys/kernel/yama/ptrace_scope").substr(0, 1) == "1") {
      prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    }
    listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    socklen_t length;
    auto address = address_of(own.socket, length);
    if (listener_ < 0 || bind(listener_, (sockaddr*)&address, length) != 0 ||
        listen(listener_, SOMAXCONN) != 0) {
      detail = std::string("Unix socket: ") + std::strerror(errno);
      own.refused = kNoSocket;
    }
    return own;
  }

  // An abstract socket: a name in the network namespace, with no file behind it.
  static sockaddr_un address_of(uint64_t name, socklen_t& length) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    int written = std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "hvdkit-%016llx",
                                (unsigned long long)name);
    length = (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + written);
    return address;
  }

  std::string reason(int rank, Refusal refusal, const std::string& detail) const {
    std::string text = "rank " + std::to_string(rank) + " ";
    switch (refusal) {
      case kRequested:
        return text + "has HVDKIT_COLLECTIVES=flat";
      case kNoMemory:
        text += "has no shared memory";
        break;
      case kNoSocket:
        text += "has no Unix socket";
        break;
      case kCannotRead:
        text += "cannot read the memory of the other ranks of its host";
        break;
      default:
        text += "cannot reach the other ranks of its host";
    }
    return rank == rank_ && !detail.empty() ? text + " (" + detail + ")" : text;
  }

  std::string withdraw(const std::string& why) {
    disconnect();
    return why;
  }

  const std::vector<int>& members() const { return hosts_[host_]; }

  // Groups the ranks by host: hosts in the order of their first ranks, ranks in order.
  void find_hosts(const std::vector<Introduction>& all) {
    hosts_.clear();
    std::map<uint64_t, size_t> known;
    for (int rank = 0; rank < size_; ++rank) {
      auto found = known.emplace(all[rank].host, hosts_.size());
      if (found.second) {
        hosts_.emplace_back();
      }
      hosts_[found.first->second].push_back(rank);
    }
    host_ = known[all[rank_].host];
    here_ = (int)(std::find(members().begin(), members().end(), rank_) - members().begin());
    slices_ = most_ = members().size();
    for (auto& ranks : hosts_) {
      slices_ = std::min(slices_, ranks.size());
      most_ = std::max(most_, ranks.size());
    }
    peers_.assign(members().size(), -1);
    boards_.assign(members().size(), nullptr);
    pids_.assign(members().size(), 0);
    addresses_.assign(members().size(), 0);
    boards_[here_] = &Arena::instance().board();
    cpu_set_t cores;
    spin_ = sched_getaffinity(0, sizeof cores, &cores) == 0 &&
            (size_t)CPU_COUNT(&cores) >= members().size();
  }

  // Connects to the ranks of the host below this one, and lets those above connect. Throws
  // std::runtime_error.
  void meet(const std::vector<Introduction>& all) {
    // Sooner than the exchange gives up in which the other ranks wait.
    auto deadline = Clock::now() + std::min<Clock::duration>(timeout_ / 2, std::chrono::seconds(10));
    for (int i = 0; i < here_; ++i) {
      int rank = members()[i];
      socklen_t length;
      auto address = address_of(all[rank].socket, length);
      peers_[i] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
      limit(peers_[i], deadline);
      if (peers_[i] < 0 || ::connect(peers_[i], (sockaddr*)&address, length) != 0) {
        throw std::runtime_error("connect to rank " + std::to_string(rank) + ": " +
                                 std::strerror(errno));
      }
      pids_[i] = owner_of(peers_[i]);
      if (pids_[i] < 0) {
        throw std::runtime_error("rank " + std::to_string(rank) + " belongs to another user");
      }
      send_hello(peers_[i], all[rank].secret);
    }
    for (size_t missing = members().size() - 1 - (size_t)here_; missing > 0;) {
      pollfd waiting{listener_, POLLIN, 0};
      auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      if (left.count() <= 0 || poll(&waiting, 1, (int)left.count()) < 0) {
        throw std::runtime_error(std::to_string(missing) + " ranks have not connected");
      }
      int file = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (file < 0) {
        continue;
      }
      int arena = -1;
      Hello hello{};
      limit(file, deadline);
      // Every process of the network namespace can connect. Only ranks of this job are let in.
      pid_t pid = owner_of(file);
      bool known = pid >= 0 && receive_hello(file, hello, arena) &&
                   hello.secret == all[rank_].secret && hello.member > here_ &&
                   hello.member < (int64_t)members().size() && peers_[hello.member] < 0;
      if (!known) {
        close_file(file);
        close_file(arena);
        continue;
      }
      size_t i = (size_t)hello.member;
      peers_[i] = file;
      pids_[i] = pid;
      map(i, hello, arena, all);
      send_hello(file, all[members()[i]].secret);
      --missing;
    }
    for (int i = 0; i < here_; ++i) {
      int arena = -1;
      Hello hello{};
      if (!receive_hello(peers_[i], hello, arena) || hello.secret != all[rank_].secret) {
        close_file(arena);
        throw std::runtime_error("rank " + std::to_string(members()[i]) + " has not answered");
      }
      map((size_t)i, hello, arena, all);
    }
    close_file(listener_);
    Arena::instance().close_in_child(&peers_);
  }

  static void limit(int file, Clock::time_point deadline) {
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    long ms = std::max<long>((long)left.count(), 1);
    timeval time{ms / 1000, ms % 1000 * 1000};
    setsockopt(file, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
    setsockopt(file, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
  }

  // Returns the process at the other end, 0 where it is in another namespace of processes, and -1
  // where it is another user's.
  static pid_t owner_of(int file) {
    ucred owner{};
    socklen_t length = sizeof owner;
    bool known = getsockopt(file, SOL_SOCKET, SO_PEERCRED, &owner, &length) == 0;
    return known && owner.uid == geteuid() ? owner.pid : -1;
  }

  void send_hello(int file, uint64_t secret) {
    Hello hello{secret, here_, Arena::instance().capacity(), (uint64_t)boards_[here_]};
    iovec content{&hello, sizeof hello};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &content;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    int arena = Arena::instance().file();
    std::memcpy(CMSG_DATA(header), &arena, sizeof arena);
    if (sendmsg(file, &message, MSG_NOSIGNAL) != (ssize_t)sizeof hello) {
      throw std::runtime_error(std::string("sendmsg: ") + std::strerror(errno));
    }
  }

  static bool receive_hello(int file, Hello& hello, int& arena) {
    iovec content{&hello, sizeof hello};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &content;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    ssize_t got = recvmsg(file, &message, MSG_CMSG_CLOEXEC);
    cmsghdr* header = got < 0 ? nullptr : CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
      std::memcpy(&arena, CMSG_DATA(header), sizeof arena);
    }
    return got == (ssize_t)sizeof hello && arena >= 0;
  }

  void map(size_t member, const Hello& hello, int arena, const std::vector<Introduction>& all) {
    const int rank = members()[member];
    struct stat facts;
    int seals = fcntl(arena, F_GET_SEALS);
    bool fits = fstat(arena, &facts) == 0 && (uint64_t)facts.st_size == hello.capacity &&
                hello.capacity == Arena::instance().capacity() && seals >= 0 &&
                (seals & F_SEAL_SHRINK);
    void* base = MAP_FAILED;
    if (fits) {
      base = mmap(nullptr, hello.capacity, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, arena, 0);
    }
    close(arena);
    if (base == MAP_FAILED) {
      throw std::runtime_error("the memory of rank " + std::to_string(rank) + " cannot be mapped");
    }
    madvise(base, hello.capacity, MADV_DONTDUMP);
    // A forked child has no use for it.
    madvise(base, hello.capacity, MADV_DONTFORK);
    boards_[member] = static_cast<Board*>(base);
    addresses_[member] = hello.board;
    if (boards_[member]->token[0] != all[rank].socket ||
        boards_[member]->token[1] != all[rank].secret) {
      throw std::runtime_error("the memory of rank " + std::to_string(rank) + " is another one's");
    }
  }

  // Whether this rank may read the memory of all others. Containers and Yama may forbid it.
  bool can_read(const std::vector<Introduction>& all) const {
    for (size_t i = 0; i < boards_.size(); ++i) {
      if ((int)i == here_) {
        continue;
      }
      const int rank = members()[i];
      uint64_t token[2] = {};
      iovec local{token, sizeof token}, remote{(void*)addresses_[i], sizeof token};
      if (pids_[i] <= 0 ||
          process_vm_readv(pids_[i], &local, 1, &remote, 1, 0) != (ssize_t)sizeof token ||
          token[0] != all[rank].socket || token[1] != all[rank].secret) {
        return false;
      }
    }
    return true;
  }

  static void close_file(int& file) {
    if (file >= 0) {
      close(file);
      file = -1;
    }
  }

  // Bytes. A chunk of a sum stays in the cache.
  static constexpr size_t kChunk = 256 << 10;
  // Of a slice; each host sends two parts of it. 128 KB to 1 MB make no difference at 1 Gbit/s.
  static constexpr size_t kNetworkChunk = 512 << 10;
  // Between hosts, smaller tensors take less time in a ring of all ranks.
  static constexpr size_t kSmallest = 64 << 10;

  const int rank_, size_;
  const std::chrono::milliseconds timeout_;
  const std::unique_ptr<Network> network_;
  std::atomic<bool> connected_{false};
  bool readable_ = false, spin_ = false;
  int listener_ = -1;
  uint32_t step_ = 0;
  size_t operation_ = 0;
  std::vector<std::vector<int>> hosts_;  // the ranks of each host
  size_t host_ = 0;                      // this host
  int here_ = 0;                         // the place of this rank among those of its host
  size_t slices_ = 1, most_ = 1;         // the fewest and the most ranks of a host
  // Of the ranks of this host:
  std::vector<int> peers_;           // connections; -1 for this rank
  std::vector<Board*> boards_;       // the mapped arenas, which begin with the boards
  std::vector<pid_t> pids_;
  std::vector<uint64_t> addresses_;  // of the boards, in the other processes
  std::vector<char> scratch_;
};

}  // namespace hvdkit

#endif  // HVDKIT_HOST_GROUP_H
