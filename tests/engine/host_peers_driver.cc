// Connects processes as the ranks of one host, and prints why they do not share memory, or "".
//
//   host_peers_driver RANKS SOFT HARD: with these limits of open files; not as root

#include <sys/resource.h>

#include <cstdlib>

#include "hvdkit_host_allreduce.h"
#include "rank_processes.h"

static int connect(Exchange& exchange, int rank) {
  hvdkit::HostGroup group(rank, exchange.size, std::chrono::seconds(60), nullptr);
  auto reason = group.connect(
      false, [&](std::vector<long long>& words) { exchange.combine(words, rank); });
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
  auto& exchange = share<Exchange>();
  exchange.size = size;
  for (int rank = 0; rank < size; ++rank) {
    if (fork() == 0) {
      _exit(connect(exchange, rank));
    }
  }
  return wait_for_all() != 0;
}
