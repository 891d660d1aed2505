// The ranks of a job by host, and the connections between those of one host. Part of hvdkit
// (Apache-2.0).

#ifndef HVDKIT_HOST_PEERS_H
#define HVDKIT_HOST_PEERS_H

#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "hvdkit_host_memory.h"

namespace hvdkit {

// One rank's part of what all ranks tell each other before they connect.
struct Introduction {
  static constexpr uint64_t kVersion = 2;
  uint64_t version = kVersion;
  uint64_t host = 0;     // a hash of the boot id and the network namespace
  uint64_t socket = 0;   // the name of the rank's socket
  uint64_t secret = 0;   // proves that a connection is of this job
  uint64_t refused = 0;  // a Refusal
};

// Why a rank shares no memory with the others of its host.
enum Refusal : uint64_t { kNone, kRequested, kNoMemory, kNoSocket, kNotConnected, kCannotRead };

class HostPeers {
 public:
  using Clock = std::chrono::steady_clock;
  // Replaces the words of all ranks by their bitwise or, which every rank gets.
  using Exchange = std::function<void(std::vector<long long>&)>;

  HostPeers(int rank, int size, std::chrono::milliseconds timeout)
      : rank_(rank), size_(size), timeout_(timeout) {}

  HostPeers(const HostPeers&) = delete;
  HostPeers& operator=(const HostPeers&) = delete;
  ~HostPeers() { disconnect(); }

  // Connects the ranks of each host. All ranks call it, and all get the same answer: "", or why no
  // ranks share memory. Then each rank counts as a host of its own. `exchange` may throw.
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
      same_version_ = same_version_ && all[rank].version == own.version;
    }
    for (int rank = 0; rank < size_; ++rank) {
      if (all[rank].refused) {
        return separate(reason(rank, (Refusal)all[rank].refused, detail));
      }
      if (all[rank].version != own.version) {
        return separate("rank " + std::to_string(rank) + " has another version of the engine");
      }
    }
    if (size_ == 1) {
      return separate("there is one rank");
    }
    find_hosts(all);
    if (most_ == 1) {
      return separate("each rank is on a host of its own");
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
        return separate(reason(rank, (Refusal)verdicts[rank].refused, detail));
      }
      readable_ = readable_ && !verdicts[rank].cannot_read;
    }
    Arena::instance().share(true);
    shared_ = true;
    return "";
  }

  void disconnect() {
    shared_ = false;
    Arena::instance().share(false);
    Arena::instance().close_in_child(nullptr);
    for (size_t i = 0; i < boards_.size(); ++i) {
      if ((int)i != here_ && boards_[i]) {
        munmap(boards_[i], capacities_[i]);
      }
      boards_[i] = nullptr;
      close_file(files_[i]);
    }
    close_file(listener_);
  }

  // Whether the ranks of a host share memory. If not, each rank counts as a host of its own.
  bool shared() const { return shared_; }

  // Whether memory outside of the arenas can be read, too.
  bool readable() const { return readable_; }

  // Whether all ranks have the same version of these sources.
  bool same_version() const { return same_version_; }

  size_t size() const { return boards_.size(); }  // ranks of this host
  int here() const { return here_; }              // the place of this rank among them
  int rank_of(size_t member) const { return members()[member]; }
  size_t hosts() const { return hosts_.size(); }
  size_t host() const { return host_; }      // this host
  size_t slices() const { return slices_; }  // the fewest ranks of a host

  // The rank with this one's place on another host. Only for places below `slices`.
  int counterpart(size_t host) const { return hosts_[host][(size_t)here_]; }

  // The rank of another host that serves the one with the place `member` on this host.
  int partner(size_t host, size_t member) const {
    return hosts_[host][member % hosts_[host].size()];
  }

  // The ranks of another host whose partner here has the place `member`.
  std::vector<int> served_by(size_t host, size_t member) const {
    std::vector<int> ranks;
    for (size_t place = member; place < hosts_[host].size(); place += size()) {
      ranks.push_back(hosts_[host][place]);
    }
    return ranks;
  }

  // Calls call(host) for the other hosts, beginning after this one.
  template <typename Call>
  void for_other_hosts(Call call) const {
    for (size_t step = 1; step < hosts_.size(); ++step) {
      call((host_ + step) % hosts_.size());
    }
  }

  // The first bytes of a rank's memory, which its arena follows.
  Board& board(size_t member) const { return *boards_[member]; }

  // Whether the host has a core for each of its ranks.
  bool enough_cores() const { return enough_cores_; }

  // Whether a rank of the host has ended.
  bool ended(size_t member) const {
    pollfd file{files_[member], POLLRDHUP, 0};
    return poll(&file, 1, 0) > 0 && (file.revents & (POLLRDHUP | POLLHUP | POLLERR));
  }

  // Copies another rank's memory. Returns "" or what is wrong.
  std::string read(size_t member, void* into, uint64_t from, size_t bytes) const {
    // The kernel copies at most 2 GiB in one call.
    for (size_t done = 0; done < bytes;) {
      iovec local{(char*)into + done, bytes - done}, remote{(char*)from + done, bytes - done};
      ssize_t got = process_vm_readv(pids_[member], &local, 1, &remote, 1, 0);
      if (got <= 0) {
        return got < 0 && errno == ESRCH ? "has ended"
                                         : std::string("cannot be read: ") + std::strerror(errno);
      }
      done += (size_t)got;
    }
    return "";
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

  // Makes each rank a host of its own.
  std::string separate(const std::string& why) {
    disconnect();
    hosts_.clear();
    for (int rank = 0; rank < size_; ++rank) {
      hosts_.push_back({rank});
    }
    host_ = (size_t)rank_;
    place(0, own_board_);
    slices_ = most_ = 1;
    readable_ = true;
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
    int here = (int)(std::find(members().begin(), members().end(), rank_) - members().begin());
    slices_ = most_ = members().size();
    for (auto& ranks : hosts_) {
      slices_ = std::min(slices_, ranks.size());
      most_ = std::max(most_, ranks.size());
    }
    place(here, Arena::instance().board());
  }

  void place(int here, Board& board) {
    here_ = here;
    files_.assign(members().size(), -1);
    boards_.assign(members().size(), nullptr);
    pids_.assign(members().size(), 0);
    addresses_.assign(members().size(), 0);
    capacities_.assign(members().size(), 0);
    boards_[here_] = &board;
    cpu_set_t cores;
    enough_cores_ = sched_getaffinity(0, sizeof cores, &cores) == 0 &&
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
      files_[i] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
      if (files_[i] < 0) {
        throw std::runtime_error(std::string("socket: ") + std::strerror(errno));
      }
      limit(files_[i], deadline);
      // An interrupted connect to a Unix socket has not begun, and can be repeated.
      if (restarted([&] { return ::connect(files_[i], (sockaddr*)&address, length); }) != 0) {
        throw std::runtime_error("connect to rank " + std::to_string(rank) + ": " +
                                 std::strerror(errno));
      }
      pids_[i] = owner_of(files_[i]);
      if (pids_[i] < 0) {
        throw std::runtime_error("rank " + std::to_string(rank) + " belongs to another user");
      }
      send_hello(files_[i], all[rank].secret);
    }
    for (size_t missing = members().size() - 1 - (size_t)here_; missing > 0;) {
      pollfd waiting{listener_, POLLIN, 0};
      auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      if (left.count() <= 0) {
        throw std::runtime_error(std::to_string(missing) + " ranks have not connected");
      }
      if (poll(&waiting, 1, (int)left.count()) <= 0) {
        continue;  // the time is over, or a signal came
      }
      int file = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (file < 0) {
        if (errno == EINTR || errno == EAGAIN || errno == ECONNABORTED) {
          continue;
        }
        throw std::runtime_error(std::string("accept: ") + std::strerror(errno));
      }
      int arena = -1;
      Hello hello{};
      limit(file, deadline);
      // Every process of the network namespace can connect. Only ranks of this job are let in.
      pid_t pid = owner_of(file);
      bool known = pid >= 0 && receive_hello(file, hello, arena) &&
                   hello.secret == all[rank_].secret && hello.member > here_ &&
                   hello.member < (int64_t)members().size() && files_[hello.member] < 0;
      if (!known) {
        close_file(file);
        close_file(arena);
        continue;
      }
      size_t i = (size_t)hello.member;
      files_[i] = file;
      pids_[i] = pid;
      map(i, hello, arena, all);
      send_hello(file, all[members()[i]].secret);
      --missing;
    }
    for (int i = 0; i < here_; ++i) {
      int arena = -1;
      Hello hello{};
      if (!receive_hello(files_[i], hello, arena) || hello.secret != all[rank_].secret) {
        close_file(arena);
        throw std::runtime_error("rank " + std::to_string(members()[i]) + " has not answered");
      }
      map((size_t)i, hello, arena, all);
    }
    close_file(listener_);
    Arena::instance().close_in_child(&files_);
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
    if (restarted([&] { return sendmsg(file, &message, MSG_NOSIGNAL); }) != (ssize_t)sizeof hello) {
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
    ssize_t got = restarted([&] { return recvmsg(file, &message, MSG_CMSG_CLOEXEC); });
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
                hello.capacity >= sizeof(Board) && seals >= 0 && (seals & F_SEAL_SHRINK);
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
    capacities_[member] = hello.capacity;
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

  const int rank_, size_;
  const std::chrono::milliseconds timeout_;
  bool shared_ = false, readable_ = false, same_version_ = true, enough_cores_ = false;
  int listener_ = -1;
  std::vector<std::vector<int>> hosts_;  // the ranks of each host
  size_t host_ = 0;
  int here_ = 0;
  size_t slices_ = 1, most_ = 1;         // the fewest and the most ranks of a host
  Board own_board_{};                    // of a rank that shares no memory
  // Of the ranks of this host:
  std::vector<int> files_;               // connections; -1 for this rank
  std::vector<Board*> boards_;
  std::vector<pid_t> pids_;
  std::vector<uint64_t> addresses_;      // of the boards, in the other processes
  std::vector<size_t> capacities_;       // bytes that are mapped
};

}  // namespace hvdkit

#endif  // HVDKIT_HOST_PEERS_H
