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

// What a rank sends to all ranks before the ranks of each host connect.
struct RankInfo {
  static constexpr uint64_t kVersion = 6;
  uint64_t version = kVersion;
  uint64_t host = 0;     // a hash of the boot id and the network namespace
  uint64_t socket = 0;   // the name of the rank's socket
  uint64_t secret = 0;   // proves that a connection is of this job
  uint64_t flat_reason = 0;  // a FlatReason
};

// Why a rank cannot share memory with the other ranks of its host.
enum FlatReason : uint64_t { kNone, kRequested, kNoMemory, kNoSocket, kNotConnected, kCannotRead };

class HostPeers {
 public:
  using Clock = std::chrono::steady_clock;
  // An allreduce of the words, in place: their bitwise or.
  using Exchange = std::function<void(std::vector<long long>&)>;

  // `ranks` are the global ranks of the group, and `rank` is the index of this one. `arena`: whether the other
  // ranks of the host may also map this rank's arena, and write to it. Only for groups of one thread, because a
  // failure of any of them makes the arena private.
  HostPeers(std::vector<int> ranks, int rank, std::chrono::milliseconds timeout, bool arena)
      : ranks_(std::move(ranks)), rank_(rank), size_((int)ranks_.size()), timeout_(timeout), arena_(arena) {}

  HostPeers(const HostPeers&) = delete;
  HostPeers& operator=(const HostPeers&) = delete;
  ~HostPeers() { disconnect(); }

  // Connects the ranks of each host. A collective. Returns "", or the reason why no ranks share memory,
  // the same on all ranks; then each rank counts as a host of its own. `flat` is why this rank cannot share
  // memory, and `detail` says more about it. `exchange` may throw.
  std::string connect(const Exchange& exchange, FlatReason flat = kNone, std::string detail = "") {
    RankInfo own;
    own.flat_reason = flat;
    if (!flat && size_ > 1) {
      prepare(own, detail);
    }
    auto all = gather(own, exchange);
    for (int rank = 0; rank < size_; ++rank) {
      same_version_ = same_version_ && all[rank].version == own.version;
    }
    for (int rank = 0; rank < size_; ++rank) {
      if (all[rank].flat_reason) {
        return fall_back(reason(rank, (FlatReason)all[rank].flat_reason, detail));
      }
      if (all[rank].version != own.version) {
        return fall_back(name(rank) + " has another version of the engine");
      }
    }
    if (size_ == 1) {
      return fall_back("there is one rank");
    }
    find_hosts(all);
    if (max_local_size_ == 1) {
      return fall_back("each rank is on a host of its own");
    }
    // Before the others get the board: they may leave the group before this rank does.
    boards_[(size_t)local_rank_]->users = (uint32_t)members().size();
    shared_ = true;
    // A second exchange, because a rank may have failed to connect.
    ConnectResult mine;
    try {
      connect_local_ranks(all);
    } catch (const std::runtime_error& error) {
      detail = error.what();
      mine.flat_reason = kNotConnected;
    }
    mine.cannot_read = !mine.flat_reason && !can_read();
    if (mine.cannot_read && (hosts_.size() > 1 || !arena_)) {
      // Otherwise the ranks of one host could read a tensor, and those of another host could not.
      mine.flat_reason = kCannotRead;
    }
    auto results = gather(mine, exchange);
    readable_ = true;
    for (int rank = 0; rank < size_; ++rank) {
      if (results[rank].flat_reason) {
        return fall_back(reason(rank, (FlatReason)results[rank].flat_reason, detail));
      }
      readable_ = readable_ && !results[rank].cannot_read;
    }
    return "";
  }

  // Instead of `connect`: makes each rank a host of its own. Not a collective.
  void separate() {
    hosts_.clear();
    for (int rank = 0; rank < size_; ++rank) {
      hosts_.push_back({rank});
    }
    host_ = (size_t)rank_;
    place(0, own_board_);
    min_local_size_ = max_local_size_ = 1;
    readable_ = true;
  }

  void disconnect() {
    if (process_ != getpid()) {
      return;  // a forked child has none of it
    }
    for (int& file : files_) {
      Boards::instance().close_connection(file);
    }
    close_file(listener_);
    if (shared_) {
      for (auto* board : boards_) {
        if (board) {
          board->users.fetch_sub(1);
        }
      }
    } else if (slot_ >= 0) {
      Boards::instance().board((size_t)slot_).users = 0;
    }
    shared_ = false;
    slot_ = -1;
    boards_.clear();
    maps_.clear();
  }

  // For messages to people, who know global ranks.
  std::string name(int rank) const { return "rank " + std::to_string(ranks_[(size_t)rank]); }

  // Whether the ranks of a host share memory. If not, each rank counts as a host of its own.
  bool shared() const { return shared_; }

  // The setting of the time in which a rank must answer.
  const char* timeout_setting() const { return arena_ ? "HOROVOD_GLOO_TIMEOUT_SECONDS" : "the timeout of the group"; }

  // Whether the ranks of a host have mapped each other's arenas.
  bool share_arenas() const { return shared_ && arena_; }

  // Whether ranks of a host can also read each other's memory outside of the arenas.
  bool readable() const { return readable_; }

  // Whether all ranks have the same version of these sources. The same on all ranks.
  bool same_version() const { return same_version_; }

  size_t size() const { return boards_.size(); }  // ranks of this host
  int local_rank() const { return local_rank_; }  // the index of this rank among them
  int rank_of(size_t member) const { return members()[member]; }
  // The reverse of `rank_of`; `size` for a rank of another host.
  size_t member_of(int rank) const {
    return (size_t)(std::find(members().begin(), members().end(), rank) - members().begin());
  }
  size_t hosts() const { return hosts_.size(); }
  size_t host() const { return host_; }      // this host
  // The fewest and the most ranks of a host.
  size_t min_local_size() const { return min_local_size_; }
  size_t max_local_size() const { return max_local_size_; }

  // The ranks of each host, in the order in which their sums are added.
  const std::vector<std::vector<int>>& ranks_by_host() const { return hosts_; }

  // The rank of another host with the same local rank. Only for local ranks below `min_local_size`.
  int counterpart(size_t host) const { return hosts_[host][(size_t)local_rank_]; }

  // The rank of another host that communicates for local rank `member` of this host.
  int partner(size_t host, size_t member) const {
    return hosts_[host][member % hosts_[host].size()];
  }

  // The ranks of another host for which local rank `member` of this host communicates.
  std::vector<int> served_by(size_t host, size_t member) const {
    std::vector<int> ranks;
    for (size_t place = member; place < hosts_[host].size(); place += size()) {
      ranks.push_back(hosts_[host][place]);
    }
    return ranks;
  }

  // Calls call(host) for the other hosts, in the order of their numbers, beginning after this one.
  template <typename Call>
  void for_other_hosts(Call call) const {
    for (size_t step = 1; step < hosts_.size(); ++step) {
      call((host_ + step) % hosts_.size());
    }
  }

  Board& board(size_t member) const { return *boards_[member]; }

  // The memory of a rank's arena.
  char* arena(size_t member) const { return arenas_[member]; }

  // Whether the host has a core for each of its ranks.
  bool enough_cores() const { return enough_cores_; }

  // Whether a rank of the host has ended.
  bool ended(size_t member) const {
    pollfd file{files_[member], POLLRDHUP, 0};
    return poll(&file, 1, 0) > 0 && (file.revents & (POLLRDHUP | POLLHUP | POLLERR));
  }

  // Copies another rank's memory. Returns 0 or the error's number; ESRCH if the rank has ended.
  int read(size_t member, void* into, uint64_t from, size_t bytes) const {
    // The kernel copies at most 2 GiB in one call.
    for (size_t done = 0; done < bytes;) {
      iovec local{(char*)into + done, bytes - done}, remote{(char*)from + done, bytes - done};
      ssize_t got = process_vm_readv(pids_[member], &local, 1, &remote, 1, 0);
      if (got <= 0) {
        return got < 0 ? errno : EFAULT;
      }
      done += (size_t)got;
    }
    return 0;
  }

 private:
  struct ConnectResult {
    uint64_t flat_reason = 0, cannot_read = 0;
  };

  struct Handshake {
    uint64_t secret;
    int64_t member;
    uint64_t boards;    // the address of the boards in the sender's process
    uint64_t slot;      // the number of the sender's board
    uint64_t capacity;  // bytes of its arena; 0 if it is not sent
  };

  // What a rank sends to another one of its host.
  struct Letter {
    Handshake handshake{};
    int boards = -1, arena = -1;
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

  void prepare(RankInfo& own, std::string& detail) {
    own.host = hash(content_of("/proc/sys/kernel/random/boot_id") + link_of("/proc/self/ns/net"));
    own.socket = draw();
    own.secret = draw();
    slot_ = Boards::instance().take(detail);
    if (slot_ < 0) {
      own.flat_reason = kNoMemory;
      return;
    }
    // Yama allows a process to read only its children. Open MPI sets this, too.
    if (content_of("/proc/sys/kernel/yama/ptrace_scope").substr(0, 1) == "1") {
      prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    }
    listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    socklen_t length;
    auto address = address_of(own.socket, length);
    if (listener_ < 0 || bind(listener_, (sockaddr*)&address, length) != 0 ||
        listen(listener_, SOMAXCONN) != 0) {
      detail = std::string("Unix socket: ") + std::strerror(errno);
      own.flat_reason = kNoSocket;
    }
  }

  // The address of an abstract socket: a name in the network namespace, without a file.
  static sockaddr_un address_of(uint64_t name, socklen_t& length) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    int written = std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "hvdkit-%016llx",
                                (unsigned long long)name);
    length = (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + written);
    return address;
  }

  std::string reason(int rank, FlatReason reason_code, const std::string& detail) const {
    std::string text = name(rank) + " ";
    switch (reason_code) {
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

  std::string fall_back(const std::string& why) {
    disconnect();
    separate();
    return why;
  }

  const std::vector<int>& members() const { return hosts_[host_]; }

  // Groups the ranks by host: hosts in the order of their first ranks, ranks in order.
  void find_hosts(const std::vector<RankInfo>& all) {
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
    min_local_size_ = max_local_size_ = members().size();
    for (auto& ranks : hosts_) {
      min_local_size_ = std::min(min_local_size_, ranks.size());
      max_local_size_ = std::max(max_local_size_, ranks.size());
    }
    place((int)member_of(rank_), Boards::instance().board((size_t)slot_));
  }

  void place(int local_rank, Board& board) {
    local_rank_ = local_rank;
    files_.assign(members().size(), -1);
    boards_.assign(members().size(), nullptr);
    arenas_.assign(members().size(), nullptr);
    pids_.assign(members().size(), 0);
    addresses_.assign(members().size(), 0);
    boards_[local_rank_] = &board;
    arenas_[local_rank_] = Arena::instance().base();
    cpu_set_t cores;
    enough_cores_ = sched_getaffinity(0, sizeof cores, &cores) == 0 &&
                    (size_t)CPU_COUNT(&cores) >= members().size();
  }

  // Raises the limit of open files to the most that is permitted, for its lifetime. The system counts
  // files that were sent and not yet received against it, for all processes of the user together. With
  // the usual limit of 1024, 48 ranks could not connect.
  class ManyFiles {
   public:
    ManyFiles() {
      if (getrlimit(RLIMIT_NOFILE, &before_) == 0) {
        rlimit most = before_;
        most.rlim_cur = most.rlim_max;
        raised_ = setrlimit(RLIMIT_NOFILE, &most) == 0;
      }
    }
    ~ManyFiles() {
      if (raised_) {
        setrlimit(RLIMIT_NOFILE, &before_);
      }
    }
    ManyFiles(const ManyFiles&) = delete;
    ManyFiles& operator=(const ManyFiles&) = delete;

   private:
    rlimit before_{};
    bool raised_ = false;
  };

  // Connects to the lower local ranks, and accepts the connections of the higher ones. Throws
  // std::runtime_error.
  void connect_local_ranks(const std::vector<RankInfo>& all) {
    const ManyFiles many_files;
    // Earlier than the timeout of the exchange in which the other ranks wait.
    auto deadline = Clock::now() + std::min<Clock::duration>(timeout_ / 2, std::chrono::seconds(10));
    for (int i = 0; i < local_rank_; ++i) {
      int rank = members()[i];
      socklen_t length;
      auto address = address_of(all[rank].socket, length);
      files_[i] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
      if (files_[i] < 0) {
        throw std::runtime_error(std::string("socket: ") + std::strerror(errno));
      }
      Boards::instance().add_connection(files_[i]);
      limit(files_[i], deadline);
      // An interrupted connect to a Unix socket has not begun, and can be repeated.
      if (restarted([&] { return ::connect(files_[i], (sockaddr*)&address, length); }) != 0) {
        throw std::runtime_error("connect to " + name(rank) + ": " + std::strerror(errno));
      }
      pids_[i] = owner_of(files_[i]);
      if (pids_[i] < 0) {
        throw std::runtime_error(name(rank) + " belongs to another user");
      }
      send_handshake(files_[i], all[rank].secret);
    }
    // Every process of the network namespace can connect. Accept only ranks of this job, and wait for the
    // handshakes of all connections at once.
    Unproven unproven(listener_);
    for (size_t missing = members().size() - 1 - (size_t)local_rank_; missing > 0;) {
      auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      if (left.count() <= 0) {
        throw std::runtime_error(std::to_string(missing) + " ranks have not connected");
      }
      const int file = unproven.next((int)left.count());
      if (file >= 0) {
        missing -= admit(file, deadline, all);
      }
    }
    for (int i = 0; i < local_rank_; ++i) {
      Letter letter;
      if (!receive(files_[i], letter) || letter.handshake.secret != all[rank_].secret) {
        close_letter(letter);
        throw std::runtime_error(name(members()[i]) + " has not answered");
      }
      map((size_t)i, letter);
    }
    close_file(listener_);
  }

  // The connections to a listening socket that have not sent anything yet.
  class Unproven {
   public:
    explicit Unproven(int listener) : polled_{{listener, POLLIN, 0}} {}
    Unproven(const Unproven&) = delete;
    Unproven& operator=(const Unproven&) = delete;
    ~Unproven() {
      while (polled_.size() > 1) {
        close(take(1));
      }
    }

    // Returns a connection that has sent something; -1 after the timeout, a signal or a new connection.
    int next(int timeout) {
      if (poll(polled_.data(), polled_.size(), timeout) <= 0) {
        return -1;
      }
      for (size_t i = 1; i < polled_.size(); ++i) {
        if (polled_[i].revents) {
          return take(i);
        }
      }
      const int file = accept4(polled_[0].fd, nullptr, nullptr, SOCK_CLOEXEC);
      if (file >= 0) {
        if (polled_.size() > kMost) {
          close(take(1));
        }
        polled_.push_back({file, POLLIN, 0});
      } else if (errno != EINTR && errno != EAGAIN && errno != ECONNABORTED) {
        throw std::runtime_error(std::string("accept: ") + std::strerror(errno));
      }
      return -1;
    }

   private:
    static constexpr size_t kMost = 64;  // the next connection replaces the oldest

    int take(size_t i) {
      const int file = polled_[i].fd;
      polled_.erase(polled_.begin() + (std::ptrdiff_t)i);
      return file;
    }

    std::vector<pollfd> polled_;  // the listening socket, and the connections, oldest first
  };

  // Reads the handshake of a connection. Returns whether it belongs to a rank of this job; if not, closes it.
  bool admit(int file, Clock::time_point deadline, const std::vector<RankInfo>& all) {
    Letter letter;
    const Handshake& handshake = letter.handshake;
    limit(file, deadline);
    const pid_t pid = owner_of(file);
    if (!(pid >= 0 && receive(file, letter) && handshake.secret == all[rank_].secret &&
          handshake.member > local_rank_ && handshake.member < (int64_t)members().size() &&
          files_[handshake.member] < 0)) {
      close_file(file);
      close_letter(letter);
      return false;
    }
    const size_t i = (size_t)handshake.member;
    files_[i] = file;
    Boards::instance().add_connection(file);
    pids_[i] = pid;
    map(i, letter);
    send_handshake(file, all[members()[i]].secret);
    return true;
  }

  static void limit(int file, Clock::time_point deadline) {
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    long ms = std::max<long>((long)left.count(), 1);
    timeval time{ms / 1000, ms % 1000 * 1000};
    setsockopt(file, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
    setsockopt(file, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
  }

  // Returns the process id of the peer; 0 if the peer is in another process namespace, -1 if it
  // belongs to another user.
  static pid_t owner_of(int file) {
    ucred owner{};
    socklen_t length = sizeof owner;
    bool known = getsockopt(file, SOL_SOCKET, SO_PEERCRED, &owner, &length) == 0;
    return known && owner.uid == geteuid() ? owner.pid : -1;
  }

  void send_handshake(int file, uint64_t secret) {
    auto& boards = Boards::instance();
    auto& arena = Arena::instance();
    Handshake handshake{secret, local_rank_, (uint64_t)boards.base(), (uint64_t)slot_, arena_ ? arena.capacity() : 0};
    const int files[2] = {boards.file(), arena.file()};
    const size_t bytes = sizeof(int) * (arena_ ? 2 : 1);
    iovec content{&handshake, sizeof handshake};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof files)] = {};
    msghdr message{};
    message.msg_iov = &content;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(header), files, bytes);
    if (restarted([&] { return sendmsg(file, &message, MSG_NOSIGNAL); }) != (ssize_t)sizeof handshake) {
      throw std::runtime_error(std::string("sendmsg: ") + std::strerror(errno));
    }
  }

  static bool receive(int file, Letter& letter) {
    int files[2] = {-1, -1};
    iovec content{&letter.handshake, sizeof letter.handshake};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof files)] = {};
    msghdr message{};
    message.msg_iov = &content;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    ssize_t got = restarted([&] { return recvmsg(file, &message, MSG_CMSG_CLOEXEC); });
    cmsghdr* header = got < 0 ? nullptr : CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
      std::memcpy(files, CMSG_DATA(header), std::min(sizeof files, header->cmsg_len - CMSG_LEN(0)));
    }
    letter.boards = files[0];
    letter.arena = files[1];
    return got == (ssize_t)sizeof letter.handshake && files[0] >= 0 &&
           (files[1] >= 0) == (letter.handshake.capacity > 0);
  }

  static void close_letter(Letter& letter) {
    close_file(letter.boards);
    close_file(letter.arena);
  }

  void map(size_t member, const Letter& letter) {
    auto boards = Mapping::of(letter.boards, Boards::kBytes);
    auto arena = letter.arena < 0 ? nullptr : Mapping::of(letter.arena, letter.handshake.capacity);
    if (!boards || letter.handshake.slot >= Boards::kSlots || (!arena && letter.arena >= 0)) {
      throw std::runtime_error("the memory of " + name(members()[member]) + " cannot be mapped");
    }
    boards_[member] = &Boards::board_in(boards->base(), letter.handshake.slot);
    arenas_[member] = arena ? arena->base() : nullptr;
    addresses_[member] = letter.handshake.boards;
    tokens_[member] = Boards::token_in(boards->base());
    maps_.push_back(std::move(boards));
    maps_.push_back(std::move(arena));
  }

  // Whether this rank may read the memory of all others. Containers and Yama may forbid it.
  bool can_read() const {
    for (size_t i = 0; i < boards_.size(); ++i) {
      uint64_t token = 0;
      if ((int)i != local_rank_ &&
          (pids_[i] <= 0 || read(i, &token, addresses_[i], sizeof token) != 0 || token != tokens_.at(i))) {
        return false;
      }
    }
    return true;
  }

  const std::vector<int> ranks_;
  const int rank_, size_;
  const std::chrono::milliseconds timeout_;
  const bool arena_;
  const pid_t process_ = getpid();
  bool shared_ = false, readable_ = false, same_version_ = true, enough_cores_ = false;
  int slot_ = -1;  // of the own board
  int listener_ = -1;
  std::vector<std::vector<int>> hosts_;  // the ranks of each host
  size_t host_ = 0;
  int local_rank_ = 0;
  size_t min_local_size_ = 1, max_local_size_ = 1;
  Board own_board_{};                    // if no ranks share memory
  // Of the ranks of this host:
  std::vector<int> files_;               // connections; -1 for this rank
  std::vector<Board*> boards_;
  std::vector<char*> arenas_;
  std::vector<pid_t> pids_;
  std::vector<uint64_t> addresses_;      // of the boards, in the other processes
  std::map<size_t, uint64_t> tokens_;    // of the boards
  std::vector<std::shared_ptr<Mapping>> maps_;
};

}  // namespace hvdkit

#endif  // HVDKIT_HOST_PEERS_H
