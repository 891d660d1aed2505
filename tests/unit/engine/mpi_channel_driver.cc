// Two ranks over MPI. Rank 1 stops within a message for some seconds. Rank 0 gives up earlier, and uses
// its memory for something else, which must not change.
//
//   mpi_channel_driver SECONDS

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "hvdkit_host_group.h"
#include "hvdkit_mpi_network.h"

int main(int count, char** arguments) {
  MPI_Init(&count, &arguments);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::vector<char> memory(12 << 20, 1);
  long changed = 0;
  {
    hvdkit::MpiNetwork network(MPI_COMM_WORLD, std::chrono::seconds(1));
    auto channel = network.channel(memory.data(), memory.size());
    MPI_Sendrecv_replace(&changed, 1, MPI_LONG, 1 - rank, 1, 1 - rank, 1, MPI_COMM_WORLD,
                         MPI_STATUS_IGNORE);  // connects the ranks
    if (rank == 0) {
      channel->receive(1, 3, 0, memory.size());
      MPI_Barrier(MPI_COMM_WORLD);
      try {
        channel->wait([] {});
      } catch (const hvdkit::NetworkError& error) {
        std::printf("waiting for rank %d: %s\n", *error.ranks.begin(), error.what());
        std::fflush(stdout);
      }
      channel.reset();
      std::fill(memory.begin(), memory.end(), 42);
    } else {
      MPI_Barrier(MPI_COMM_WORLD);
      channel->send(0, 3, 0, memory.size());
      sleep((unsigned)std::atoi(arguments[1]));  // without progress of MPI
      channel->wait([] {});
    }
    MPI_Barrier(MPI_COMM_WORLD);
    changed = rank == 0 ? (long)memory.size() - std::count(memory.begin(), memory.end(), 42) : 0;
  }
  MPI_Finalize();
  if (rank == 0) {
    std::printf("%ld bytes were changed\n", changed);
  }
  return changed != 0;
}
