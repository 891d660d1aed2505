// Allreduce between the ranks of one host, without copies through sockets. Part of hvdkit (Apache-2.0).
//
// Each rank sums one slice of the tensor. If the tensors of all ranks are in their arenas
// (host_memory.h), which all ranks of the host have mapped, a rank adds its slice of all tensors and
// writes the sum into all of them. Otherwise it reads the slices of the others with process_vm_readv,
// and afterwards their sums. Sums are taken in the order of the ranks, so that the result does not
// depend on which rank computes it.
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
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "hvdkit_host_memory.h"
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
enum Refusal : uint64_t { kNone, kRequested, kNoMemory, kNoSocket, kNotConnected };

class HostGroup {
 public:
  using Clock = std::chrono::steady_clock;
  // Replaces the words of all ranks by their bitwise or, which every rank gets.
  using Exchange = std::function<void(std::vector<long long>&)>;

  HostGroup(int rank, int size, std::chrono::milliseconds timeout)
      : rank_(rank), size_(size), timeout_(timeout), peers_(size, -1), boards_(size), pids_(size) {}

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
      if (all[rank].host != own.host) {
        return withdraw("the ranks are on several hosts");
      }
    }
    if (size_ == 1) {
      return "there is one rank";
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
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_ && boards_[rank]) {
        munmap(boards_[rank], Arena::instance().capacity());
      }
      boards_[rank] = nullptr;
      close_file(peers_[rank]);
    }
    close_file(listener_);
  }

  bool connected() const { return connected_.load(); }

  // Whether memory outside of the arenas can be read, too.
  bool readable() const { return readable_; }

  // Computes output = factor x (sum of the inputs of all ranks). The output may be the input. Returns
  // false on all ranks, and does nothing, where the memory of a rank is not within reach.
  // Throws std::runtime_error where a rank has died or does not answer.
  bool allreduce(const void* input, void* output, size_t count, Element element, double factor) {
    size_t bytes = count * size_of(element);
    if (bytes <= kSmall) {
      small(input, output, count, element, factor);
      return true;
    }
    Board& own = *boards_[rank_];
    auto& post = own.posts[operation_ & 1];
    post.offset = input == output ? Arena::instance().offset_of(output, bytes) : Board::kElsewhere;
    post.input = (uint64_t)input;
    post.output = (uint64_t)output;
    std::vector<Board::Post> posts(size_);
    advance();
    bool shared = true;
    for (int rank = 0; rank < size_; ++rank) {
      await(rank);
      posts[rank] = boards_[rank]->posts[operation_ & 1];
      shared = shared && posts[rank].offset != Board::kElsewhere;
    }
    ++operation_;
    if (shared) {
      add_in_place(posts, count, element, factor);
    } else if (readable_) {
      read_and_add(posts, count, element, factor);
    }
    return shared || readable_;
  }

 private:
  struct Verdict {
    uint64_t refused = 0, cannot_read = 0;
  };

  struct Hello {
    uint64_t secret;
    int64_t rank;
    uint64_t capacity;
    uint64_t board;  // the address in the sender's process
  };

  struct Slice {
    size_t begin, count;
  };

  // The slice of a rank, in elements: whole cache lines, so that no two ranks write to one.
  Slice slice(int rank, size_t count, Element element) const {
    size_t line = 64 / size_of(element);
    size_t lines = (count + line - 1) / line;
    size_t begin = std::min(count, lines * (size_t)rank / size_ * line);
    size_t end = std::min(count, lines * ((size_t)rank + 1) / size_ * line);
    return {begin, end - begin};
  }

  // A tensor of at most kSmall bytes: each rank adds up the boards of all.
  void small(const void* input, void* output, size_t count, Element element, double factor) {
    size_t at = operation_++ & 1;
    std::memcpy(boards_[rank_]->small[at], input, count * size_of(element));
    advance();
    std::vector<const void*> inputs(size_);
    for (int rank = 0; rank < size_; ++rank) {
      await(rank);
      inputs[rank] = boards_[rank]->small[at];
    }
    sum_to_all(element, inputs, {output}, count, factor);
  }

  void add_in_place(const std::vector<Board::Post>& posts, size_t count, Element element,
                    double factor) {
    auto own = slice(rank_, count, element);
    const size_t chunk = (256 << 10) / size_of(element);
    std::vector<const void*> inputs(size_);
    std::vector<void*> outputs(size_);
    for (size_t done = 0; done < own.count; done += chunk) {
      check();
      for (int rank = 0; rank < size_; ++rank) {
        outputs[rank] = (char*)boards_[rank] + posts[rank].offset +
                        (own.begin + done) * size_of(element);
        inputs[rank] = outputs[rank];
      }
      sum_to_all(element, inputs, outputs, std::min(chunk, own.count - done), factor);
    }
    synchronize();
  }

  void read_and_add(const std::vector<Board::Post>& posts, size_t count, Element element,
                    double factor) {
    const size_t size = size_of(element);
    const size_t chunk = kChunk / size;
    scratch_.resize(kChunk * (size_ - 1));
    auto own = slice(rank_, count, element);
    std::vector<const void*> inputs(size_);
    for (size_t done = 0; done < own.count; done += chunk) {
      size_t n = std::min(chunk, own.count - done), at = (own.begin + done) * size;
      char* free = scratch_.data();
      for (int rank = 0; rank < size_; ++rank) {
        if (rank == rank_) {
          inputs[rank] = (char*)posts[rank].input + at;
        } else {
          read(rank, free, posts[rank].input + at, n * size);
          inputs[rank] = free;
          free += kChunk;
        }
      }
      sum_to_all(element, inputs, {(char*)posts[rank_].output + at}, n, factor);
    }
    synchronize();
    for (int step = 1; step < size_; ++step) {
      int rank = (rank_ + step) % size_;
      auto theirs = slice(rank, count, element);
      for (size_t done = 0; done < theirs.count; done += chunk) {
        size_t n = std::min(chunk, theirs.count - done), at = (theirs.begin + done) * size;
        read(rank, (char*)posts[rank_].output + at, posts[rank].output + at, n * size);
      }
    }
    synchronize();
  }

  void read(int rank, void* into, uint64_t from, size_t bytes) {
    check();
    iovec local{into, bytes}, remote{(void*)from, bytes};
    ssize_t got = process_vm_readv(pids_[rank], &local, 1, &remote, 1, 0);
    if (got != (ssize_t)bytes) {
      fail(rank, got < 0 && errno == ESRCH ? "has ended"
                                           : std::string("cannot be read: ") + std::strerror(errno));
    }
  }

  // -- Waiting -------------------------------------------------------------------------------------

  static long futex(std::atomic<uint32_t>& word, int operation, uint32_t value,
                    const timespec* time) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, time, nullptr, 0);
  }

  void advance() {
    Board& own = *boards_[rank_];
    ++step_;
    own.progress.store(step_);
    if (own.waiters.load() > 0) {
      futex(own.progress, FUTEX_WAKE, INT32_MAX, nullptr);
    }
  }

  // Waits until all ranks have done as many steps as this one.
  void synchronize() {
    advance();
    for (int rank = 0; rank < size_; ++rank) {
      await(rank);
    }
  }

  bool reached(int rank) const { return (int32_t)(boards_[rank]->progress.load() - step_) >= 0; }

  void await(int rank) {
    if (reached(rank)) {
      return;
    }
    auto begin = Clock::now();
    if (spin_) {
      // Longer than a switch between threads takes, but not so long that others miss the core.
      while (Clock::now() - begin < std::chrono::microseconds(20)) {
        if (reached(rank)) {
          return;
        }
      }
    }
    Board& board = *boards_[rank];
    const timespec pause{0, 20 * 1000 * 1000};
    while (true) {
      board.waiters.fetch_add(1);
      uint32_t seen = board.progress.load();
      if ((int32_t)(seen - step_) < 0) {
        futex(board.progress, FUTEX_WAIT, seen, &pause);
      }
      board.waiters.fetch_sub(1);
      if (reached(rank)) {
        return;
      }
      check();
      for (int other = 0; other < size_; ++other) {
        if (other != rank_ && closed(other) && !reached(other)) {
          fail(other, "has ended");
        }
      }
      if (Clock::now() - begin > timeout_) {
        fail(rank, "has not answered for " + std::to_string(timeout_.count() / 1000) +
                       " s (HOROVOD_GLOO_TIMEOUT_SECONDS)");
      }
    }
  }

  bool closed(int rank) const {
    pollfd file{peers_[rank], POLLRDHUP, 0};
    return poll(&file, 1, 0) > 0 && (file.revents & (POLLRDHUP | POLLHUP | POLLERR));
  }

  // Throws where a rank has failed, so that no rank waits for one that has given up.
  void check() {
    for (int rank = 0; rank < size_; ++rank) {
      if (boards_[rank]->failed.load()) {
        fail(rank, "has failed in an earlier or in this collective");
      }
    }
  }

  [[noreturn]] void fail(int rank, const std::string& what) {
    Board& own = *boards_[rank_];
    own.failed.store(1);
    futex(own.progress, FUTEX_WAKE, INT32_MAX, nullptr);
    throw std::runtime_error("allreduce in shared memory: rank " + std::to_string(rank) + " " + what);
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
    boards_[rank_] = &Arena::instance().board();
    boards_[rank_]->token[0] = own.socket;
    boards_[rank_]->token[1] = own.secret;
    // Open MPI asks for this, too: Yama lets no process read another one that is not its child.
    if (content_of("/proc/sys/kernel/yama/ptrace_scope").substr(0, 1) == "1") {
      prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    }
    cpu_set_t cores;
    spin_ = sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) >= size_;
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
      default:
        text += "cannot reach the other ranks of its host";
    }
    return rank == rank_ && !detail.empty() ? text + " (" + detail + ")" : text;
  }

  std::string withdraw(const std::string& why) {
    disconnect();
    return why;
  }

  // Connects to the ranks below this one, and lets those above connect. Throws std::runtime_error.
  void meet(const std::vector<Introduction>& all) {
    // Sooner than the exchange gives up in which the other ranks wait.
    auto deadline = Clock::now() + std::min<Clock::duration>(timeout_ / 2, std::chrono::seconds(10));
    for (int rank = 0; rank < rank_; ++rank) {
      socklen_t length;
      auto address = address_of(all[rank].socket, length);
      peers_[rank] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
      limit(peers_[rank], deadline);
      if (peers_[rank] < 0 || ::connect(peers_[rank], (sockaddr*)&address, length) != 0) {
        throw std::runtime_error("connect to rank " + std::to_string(rank) + ": " +
                                 std::strerror(errno));
      }
      pids_[rank] = owner_of(peers_[rank]);
      if (pids_[rank] < 0) {
        throw std::runtime_error("rank " + std::to_string(rank) + " belongs to another user");
      }
      send_hello(peers_[rank], all[rank].secret);
    }
    for (int missing = size_ - 1 - rank_; missing > 0;) {
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
                   hello.secret == all[rank_].secret && hello.rank > rank_ && hello.rank < size_ &&
                   peers_[hello.rank] < 0;
      if (!known) {
        close_file(file);
        close_file(arena);
        continue;
      }
      int rank = (int)hello.rank;
      peers_[rank] = file;
      pids_[rank] = pid;
      map(rank, hello, arena, all);
      send_hello(file, all[rank].secret);
      --missing;
    }
    for (int rank = 0; rank < rank_; ++rank) {
      int arena = -1;
      Hello hello{};
      if (!receive_hello(peers_[rank], hello, arena) || hello.secret != all[rank_].secret) {
        close_file(arena);
        throw std::runtime_error("rank " + std::to_string(rank) + " has not answered");
      }
      map(rank, hello, arena, all);
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
    Hello hello{secret, rank_, Arena::instance().capacity(), (uint64_t)boards_[rank_]};
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

  void map(int rank, const Hello& hello, int arena, const std::vector<Introduction>& all) {
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
    boards_[rank] = static_cast<Board*>(base);
    addresses_.resize(size_);
    addresses_[rank] = hello.board;
    if (boards_[rank]->token[0] != all[rank].socket || boards_[rank]->token[1] != all[rank].secret) {
      throw std::runtime_error("the memory of rank " + std::to_string(rank) + " is another one's");
    }
  }

  // Whether this rank may read the memory of all others. Containers and Yama may forbid it.
  bool can_read(const std::vector<Introduction>& all) const {
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == rank_) {
        continue;
      }
      uint64_t token[2] = {};
      iovec local{token, sizeof token}, remote{(void*)addresses_[rank], sizeof token};
      if (pids_[rank] <= 0 ||
          process_vm_readv(pids_[rank], &local, 1, &remote, 1, 0) != (ssize_t)sizeof token ||
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

  static constexpr size_t kChunk = 256 << 10;

  const int rank_, size_;
  const std::chrono::milliseconds timeout_;
  std::atomic<bool> connected_{false};
  bool readable_ = false, spin_ = false;
  int listener_ = -1;
  uint32_t step_ = 0;
  size_t operation_ = 0;
  std::vector<int> peers_;              // connections; -1 for this rank
  std::vector<Board*> boards_;          // the mapped arenas, which begin with the boards
  std::vector<pid_t> pids_;
  std::vector<uint64_t> addresses_;     // of the boards, in the other processes
  std::vector<char> scratch_;
};

}  // namespace hvdkit

#endif  // HVDKIT_HOST_GROUP_H
