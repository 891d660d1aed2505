// Processes that are the ranks of a job, for drivers of the engine's headers.

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <vector>

// What the processes share. `share` makes one before they are forked.
struct Exchange {
  int size;  // ranks
  std::atomic<int> arrived, phase;
  std::atomic<long long> words[1 << 16];

  // Waits for all ranks.
  void barrier() {
    const int now = phase.load();
    if (arrived.fetch_add(1) + 1 == size) {
      arrived = 0;
      phase = now + 1;
    }
    while (phase.load() == now) {
      usleep(100);
    }
  }

  // The bitwise or of the words of all ranks, in place.
  void combine(std::vector<long long>& own, int rank) {
    barrier();
    for (size_t i = 0; i < own.size(); ++i) {
      words[i] |= own[i];
    }
    barrier();
    for (size_t i = 0; i < own.size(); ++i) {
      own[i] = words[i];
    }
    barrier();
    for (size_t i = 0; rank == 0 && i < own.size(); ++i) {
      words[i] = 0;
    }
    barrier();
  }
};

// Zeroed memory that later processes share.
template <typename T>
T& share() {
  return *(T*)mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// Returns how many processes of this one have failed.
inline int wait_for_all() {
  int failed = 0, status;
  while (wait(&status) > 0) {
    failed += status != 0;
  }
  return failed;
}
