// Memory that the ranks of a host share. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_HOST_MEMORY_H
#define HVDKIT_HOST_MEMORY_H

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>

#include "hvdkit_host_boards.h"

namespace hvdkit {

// The shared memory of this process, from which buckets are allocated.
//
// The address space is reserved at once. Pages are reserved when they are allocated: if the system had no page at
// the first access, the process would end with SIGBUS.
class Arena {
 public:
  // Never destroyed: tensors may outlive the static objects at the process's end.
  static Arena& instance() {
    static auto* arena = new Arena;
    return *arena;
  }

  // Replaces the memory by new memory with the same content at the same addresses, so that processes
  // that have mapped the old memory can no longer change it. Returns "", or the reason why shared
  // memory is not available.
  std::string renew(size_t ranks) {
    std::lock_guard<std::mutex> guard(mutex_);
    shared_ = false;
    size_t capacity = capacity_ ? capacity_ : capacity_for(ranks);
    std::string problem;
    int file = new_memory_file("hvdkit", problem);
    if (file < 0) {
      return problem;
    }
    problem = fill(file, capacity);
    if (!problem.empty()) {
      close(file);
      return problem;
    }
    if (file_ >= 0) {
      close(file_);
    }
    file_ = file;
    private_ = false;
    // Do not allocate or release blocks while the process forks.
    static const int registered = pthread_atfork([] { instance().mutex_.lock(); },
                                                 [] { instance().mutex_.unlock(); },
                                                 [] { instance().in_child(); });
    (void)registered;
    return "";
  }

  int file() const { return file_; }
  size_t capacity() const { return capacity_; }
  char* base() const { return base_; }

  // Sets whether the other ranks have mapped the memory. `allocate` returns memory only if they have.
  void share(bool shared) {
    std::lock_guard<std::mutex> guard(mutex_);
    shared_ = shared;
  }

  // Makes the blocks private, with the same content at the same addresses, so that processes that have mapped
  // the memory can no longer change them. `renew` shares them again. Other threads of this process may use the
  // blocks meanwhile.
  void detach() {
    std::lock_guard<std::mutex> guard(mutex_);
    shared_ = false;
    if (private_) {
      return;
    }
    private_ = true;
    for (auto& block : used_) {
      char* const begin = base_ + block.first;
      // Not at the final address: a failed `mmap` would leave a hole there.
      void* const copy = mmap(nullptr, block.second, PROT_READ | PROT_WRITE, MAP_PRIVATE, file_,
                              (off_t)block.first);
      if (copy == MAP_FAILED ||
          mremap(copy, block.second, block.second, MREMAP_MAYMOVE | MREMAP_FIXED, begin) == MAP_FAILED) {
        std::fprintf(stderr, "hvdkit: no private memory for %zu bytes of gradients (%s). A failed rank may still "
                     "change them.\n", block.second, std::strerror(errno));
        continue;
      }
      for (size_t at = 0; at < block.second; at += page()) {
        make_private(begin + at);
      }
      discard(file_, block.first, block.second);
    }
  }

  // Returns zeroed memory of whole pages, or null if there is none.
  void* allocate(size_t bytes) {
    if (child_.load() || bytes == 0) {
      return nullptr;
    }
    std::lock_guard<std::mutex> guard(mutex_);
    size_t size = pages(bytes);
    for (auto hole = free_.begin(); shared_ && hole != free_.end(); ++hole) {
      if (hole->second < size) {
        continue;
      }
      size_t offset = hole->first;
      if (!reserve(file_, offset, size)) {
        return nullptr;
      }
      size_t rest = hole->second - size;
      free_.erase(hole);
      if (rest) {
        free_[offset + size] = rest;
      }
      used_[offset] = size;
      return base_ + offset;
    }
    return nullptr;
  }

  void release(void* memory) {
    if (child_.load()) {
      return;
    }
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = used_.find((size_t)((char*)memory - base_));
    if (found == used_.end()) {
      return;
    }
    size_t offset = found->first, size = found->second;
    used_.erase(found);
    discard(file_, offset, size);
    if (private_) {
      madvise(memory, size, MADV_DONTNEED);
    }
    auto after = free_.lower_bound(offset);
    if (after != free_.end() && offset + size == after->first) {
      size += after->second;
      after = free_.erase(after);
    }
    if (after != free_.begin()) {
      auto before = std::prev(after);
      if (before->first + before->second == offset) {
        before->second += size;
        return;
      }
    }
    free_[offset] = size;
  }

  // The offset of memory that `allocate` returned, or kElsewhere if other ranks have not mapped it.
  uint64_t offset_of(const void* memory, size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto* at = static_cast<const char*>(memory);
    if (!base_ || private_ || at < base_ || at >= base_ + capacity_) {
      return Board::kElsewhere;
    }
    size_t offset = (size_t)(at - base_);
    auto next = used_.upper_bound(offset);
    if (next == used_.begin()) {
      return Board::kElsewhere;
    }
    auto owner = std::prev(next);
    bool inside = offset + bytes <= owner->first + owner->second;
    return inside ? offset : Board::kElsewhere;
  }

 private:
  static size_t page() {
    static const size_t size = (size_t)sysconf(_SC_PAGESIZE);
    return size;
  }

  static size_t pages(size_t bytes) { return (bytes + page() - 1) / page() * page(); }

  // Bytes. In older kernels, a signal undoes a call of `fallocate`, so a call must end between two ticks of
  // a timer.
  static constexpr size_t kReserved = 64 << 20;

  // Allocates the pages of a part of the file. After an error, `errno` is that of `fallocate`.
  static bool reserve(int file, size_t offset, size_t size) {
    for (size_t done = 0; done < size; done += kReserved) {
      const size_t step = std::min(kReserved, size - done);
      if (restarted([&] { return fallocate(file, 0, (off_t)(offset + done), (off_t)step); }) != 0) {
        const int error = errno;
        discard(file, offset, done);
        errno = error;
        return false;
      }
    }
    return true;
  }

  // A page of a private mapping is a page of the file until this process writes to it.
  static void make_private(char* at) {
    char value = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(at, &value, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }

  // Frees the pages of a part of the file.
  static void discard(int file, size_t offset, size_t size) {
    restarted([&] {
      return fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)size);
    });
  }

  // Address space is free, but each rank maps the memory of all ranks of its host.
  static size_t capacity_for(size_t ranks) {
    size_t memory = (size_t)sysconf(_SC_PHYS_PAGES) * page();
    return pages(std::min({memory, (size_t)256 << 30, ((size_t)32 << 40) / std::max<size_t>(ranks, 1)}));
  }

  std::string fill(int file, size_t capacity) {
    auto failed = [](const char* call) { return std::string(call) + ": " + std::strerror(errno); };
    if (ftruncate(file, (off_t)capacity) != 0) {
      return failed("ftruncate");
    }
    for (auto& block : used_) {
      if (!reserve(file, block.first, block.second)) {
        return failed("fallocate");
      }
      for (size_t done = 0; done < block.second;) {
        ssize_t wrote = restarted([&] {
          return pwrite(file, base_ + block.first + done, block.second - done,
                        (off_t)(block.first + done));
        });
        if (wrote < 0) {
          return failed("pwrite");
        }
        done += (size_t)wrote;
      }
    }
    if (fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      return failed("F_ADD_SEALS");
    }
    void* base = mmap(base_, capacity, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_NORESERVE | (base_ ? MAP_FIXED : 0), file, 0);
    if (base == MAP_FAILED) {
      return failed("mmap");
    }
    madvise(base, capacity, MADV_DONTDUMP);
    madvise(base, capacity, MADV_HUGEPAGE);
    madvise(base, capacity, MADV_DONTFORK);
    if (!base_) {
      base_ = static_cast<char*>(base);
      capacity_ = capacity;
      free_[0] = capacity;
    }
    return "";
  }

  // A forked child, such as a worker of a DataLoader, must not change the gradients of its parent.
  // Only the blocks in use are mapped, because a system without overcommit counts private memory at
  // once. A child of the child inherits the child's mappings.
  void in_child() {
    if (child_.exchange(true)) {
      mutex_.unlock();
      return;
    }
    for (auto& block : used_) {
      if (!private_) {
        mmap(base_ + block.first, block.second, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file_,
             (off_t)block.first);
      }
    }
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::atomic<bool> child_{false};
  bool shared_ = false, private_ = false;
  int file_ = -1;
  char* base_ = nullptr;
  size_t capacity_ = 0;
  std::map<size_t, size_t> free_, used_;  // offset -> bytes, whole pages
};

}  // namespace hvdkit

#endif  // HVDKIT_HOST_MEMORY_H
