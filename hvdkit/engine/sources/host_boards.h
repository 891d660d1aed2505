// The control data of groups, in memory that the processes of a host share. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_HOST_BOARDS_H
#define HVDKIT_HOST_BOARDS_H

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>

#include <linux/memfd.h>

namespace hvdkit {

// Calls a system function again while signals interrupt it.
template <typename Call>
auto restarted(Call call) -> decltype(call()) {
  decltype(call()) result;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

inline void close_file(int& file) {
  if (file >= 0) {
    close(file);
    file = -1;
  }
}

// A number that no other process knows; never 0.
inline uint64_t draw() {
  std::random_device device;
  return ((uint64_t)device() << 32 | device()) | 1;
}

// Creates an anonymous file for shared memory (memfd), which has no name that could be left behind and does not
// count against the size of /dev/shm. Returns -1 with a reason if there is no shared memory.
inline int new_memory_file(const char* name, std::string& problem) {
  rlimit limit;
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    problem = "the address space is limited (ulimit -v)";
    return -1;
  }
  int file = (int)syscall(SYS_memfd_create, name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0) {
    problem = std::string("memfd_create: ") + std::strerror(errno);
  }
  return file;
}

// Inputs up to this size, in bytes, are copied to the board: then the ranks of a host wait for each other once.
constexpr size_t kMaxBoardBytes = 64 << 10;

// A rank's control data in one group: its progress, and its current tensor or the tensor's addresses. The other
// ranks of the host read it.
struct Board {
  // One tensor. `offset` is the input's offset in the rank's arena, kOnBoard or kElsewhere. `call` tells
  // collectives apart: see HostGroup::expect.
  struct Post {
    uint64_t offset, input, output;
    uint64_t call[2];
  };
  static constexpr uint64_t kElsewhere = ~0ull, kOnBoard = kElsewhere - 1;

  alignas(64) std::atomic<uint32_t> progress;  // a futex
  std::atomic<uint32_t> waiters;               // threads that sleep until `progress` changes
  std::atomic<uint32_t> beats;                 // changes while the rank sums or sends
  std::atomic<uint32_t> failed;                // 0, or why the rank has failed: see HostProgress
  std::atomic<uint32_t> users;                 // ranks that have not left the group, this one included
  // Two of each: a rank may post its next tensor while another rank still reads the previous one.
  alignas(64) Post posts[2];
  alignas(64) char small[2][kMaxBoardBytes];
};
static_assert(ATOMIC_INT_LOCK_FREE == 2, "atomic<uint32_t> must be lock-free: processes share it");

// The memory file of another process. All groups with that process share one mapping.
class Mapping {
 public:
  // Takes the file. Returns null if it does not have `bytes` bytes that stay, or cannot be mapped.
  static std::shared_ptr<Mapping> of(int file, size_t bytes) {
    static auto& known = *new std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Mapping>>;
    static auto& mutex = *new std::mutex;
    std::lock_guard<std::mutex> guard(mutex);
    std::shared_ptr<Mapping> mapping;
    struct stat facts;
    const int seals = fcntl(file, F_GET_SEALS);
    if (fstat(file, &facts) == 0 && (uint64_t)facts.st_size == bytes && seals >= 0 && (seals & F_SEAL_SHRINK)) {
      for (auto each = known.begin(); each != known.end();) {
        each = each->second.expired() ? known.erase(each) : std::next(each);
      }
      auto& same = known[{facts.st_dev, facts.st_ino}];
      mapping = same.lock();
      if (!mapping) {
        void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
        if (base != MAP_FAILED) {
          madvise(base, bytes, MADV_DONTDUMP);
          // A forked child does not use it.
          madvise(base, bytes, MADV_DONTFORK);
          mapping.reset(new Mapping(static_cast<char*>(base), bytes));
          same = mapping;
        }
      }
    }
    close(file);
    return mapping;
  }

  ~Mapping() {
    if (process_ == getpid()) {
      munmap(base_, bytes_);
    }
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* base() const { return base_; }

 private:
  Mapping(char* base, size_t bytes) : base_(base), bytes_(bytes) {}

  char* const base_;
  const size_t bytes_;
  const pid_t process_ = getpid();
};

// The boards of this process, one for each of its groups, in one memory file; and the connections of its groups.
//
// A board is reused when all ranks of the host have left its group: a rank may still wait in the last
// collective when another one has left.
class Boards {
 public:
  static constexpr size_t kPage = 4096, kSlots = 4096, kSlotBytes = (sizeof(Board) + kPage - 1) / kPage * kPage;
  static constexpr size_t kBytes = kPage + kSlots * kSlotBytes;

  // Never destroyed, as Arena.
  static Boards& instance() {
    static auto* boards = new Boards;
    return *boards;
  }

  // Returns the number of a free board, or -1 with a reason.
  int take(std::string& problem) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!base_ && !open(problem)) {
      return -1;
    }
    size_t slot = 0;
    while (slot < reserved_ && board(slot).users.load() != 0) {
      ++slot;
    }
    if (slot == kSlots) {
      problem = "this process has " + std::to_string(kSlots) + " groups";
      return -1;
    }
    if (slot == reserved_) {
      // If the system had no page at the first access, the process would end with SIGBUS.
      if (!reserve(kPage + slot * kSlotBytes, kSlotBytes)) {
        problem = std::string("fallocate: ") + std::strerror(errno);
        return -1;
      }
      ++reserved_;
    }
    Board& own = board(slot);
    // Not `waiters`: it is 0 when nobody waits.
    own.progress = own.beats = own.failed = 0;
    own.users = 1;
    return (int)slot;
  }

  Board& board(size_t slot) const { return board_in(base_, slot); }
  static Board& board_in(char* base, size_t slot) {
    return *reinterpret_cast<Board*>(base + kPage + slot * kSlotBytes);
  }

  int file() const { return file_; }

  // A number at the beginning of the file that identifies it.
  char* base() const { return base_; }
  static uint64_t token_in(const char* base) { return *reinterpret_cast<const uint64_t*>(base); }

  // A forked child closes the connections: the other ranks detect the parent's death by their end.
  void add_connection(int file) {
    std::lock_guard<std::mutex> guard(mutex_);
    connections_.insert(file);
  }

  void close_connection(int& file) {
    std::lock_guard<std::mutex> guard(mutex_);
    connections_.erase(file);
    close_file(file);
  }

 private:
  bool open(std::string& problem) {
    int file = new_memory_file("hvdkit-groups", problem);
    if (file < 0) {
      return false;
    }
    file_ = file;
    void* base = MAP_FAILED;
    if (ftruncate(file, kBytes) == 0 && reserve(0, kPage) &&
        fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0) {
      base = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    }
    if (base == MAP_FAILED) {
      problem = std::string("memory of groups: ") + std::strerror(errno);
      close_file(file_);
      return false;
    }
    madvise(base, kBytes, MADV_DONTDUMP);
    madvise(base, kBytes, MADV_DONTFORK);
    base_ = static_cast<char*>(base);
    *reinterpret_cast<uint64_t*>(base_) = draw();
    static const int registered = pthread_atfork([] { instance().mutex_.lock(); },
                                                 [] { instance().mutex_.unlock(); },
                                                 [] { instance().in_child(); });
    (void)registered;
    return true;
  }

  bool reserve(size_t offset, size_t bytes) const {
    return restarted([&] { return fallocate(file_, 0, (off_t)offset, (off_t)bytes); }) == 0;
  }

  // The child has none of the groups. It may make new ones.
  void in_child() {
    for (int file : connections_) {
      close(file);
    }
    connections_.clear();
    close_file(file_);
    base_ = nullptr;
    reserved_ = 0;
    mutex_.unlock();
  }

  std::mutex mutex_;
  int file_ = -1;
  char* base_ = nullptr;
  size_t reserved_ = 0;  // boards that have memory
  std::set<int> connections_;
};

}  // namespace hvdkit

#endif  // HVDKIT_HOST_BOARDS_H
