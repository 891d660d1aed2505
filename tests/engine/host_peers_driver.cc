// Connects processes as the ranks of one host, and prints why they do not share memory, or "".
//
//   host_peers_driver RANKS SOFT HARD: with these limits of open files; not as root

#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "hvdkit_host_allreduce.h"

struct Exchange {
  std::atomic<int> arrived, phase;
  std::atomic<long long> words[1 << 16];
};

static void barrier(Exchange& exchange, int size) {
  const int phase = exchange.phase.load();
  if (exchange.arrived.fetch_add(1) + 1 == size) {
    exchange.arrived = 0;
    exchange.phase = phase + 1;
  }
  while (exchange.phase.load() == phase) {
    usleep(100);
  }
}

static int connect(Exchange& exchange, int rank, int size) {
  hvdkit::HostGroup group(rank, size, std::chrono::seconds(60), nullptr);
  auto reason = group.connect(false, [&](std::vector<long long>& words) {
    barrier(exchange, size);
    for (size_t i = 0; i < words.size(); ++i) {
      exchange.words[i] |= words[i];
    }
    barrier(exchange, size);
    for (size_t i = 0; i < words.size(); ++i) {
      words[i] = exchange.words[i];
    }
    barrier(exchange, size);
    if (rank == 0) {
      for (size_t i = 0; i < words.size(); ++i) {
        exchange.words[i] = 0;
      }
    }
    barrier(exchange, size);
  });
  if (rank == 0) {
    std::printf("%s\n", reason.c_str());
    std::fflush(stdout);
  }
  rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  return !reason.empty() || files.rlim_cur == files.rlim_max;
}

int main(int, char** arguments) {
  const int size = std::atoi(arguments[1]);
  const rlimit files{(rlim_t)std::atoi(arguments[2]), (rlim_t)std::atoi(arguments[3])};
  if (setrlimit(RLIMIT_NOFILE, &files) != 0 || (geteuid() == 0 && setuid(65534) != 0)) {
    std::perror("setrlimit, setuid");
    return 2;
  }
  auto& exchange = *(Exchange*)mmap(nullptr, sizeof(Exchange), PROT_READ | PROT_WRITE,
                                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  for (int rank = 0; rank < size; ++rank) {
    if (fork() == 0) {
      _exit(connect(exchange, rank, size));
    }
  }
  int failed = 0, status;
  while (wait(&status) > 0) {
    failed += status != 0;
  }
  return failed != 0;
}
