// Many ranks' part in a rendezvous, as threads of one process: what the engine's client does,
// without sockets between the ranks.
//
//   mesh_rendezvous_driver HOST PORT KEY SCOPE SIZE FIRST LAST SECONDS
//
// Plays the ranks from FIRST to before LAST. The address at which rank a listens for rank b is
// made of both, so that each rank can tell whether it got the right ones. With KEY `-` the ranks
// make the requests of Horovod's own client instead, for comparison.

#include "../../../hvdkit/engine/sources/mesh_rendezvous.h"

#include <atomic>
#include <cstdio>
#include <mutex>

namespace {

constexpr size_t kWidth = 136;  // bytes of an address of Gloo's

std::vector<char> address(int at, int of) {
  std::vector<char> bytes(kWidth, '\0');
  std::snprintf(bytes.data(), bytes.size(), "%d listens for %d", at, of);
  return bytes;
}

// Asks for all values of all other ranks, one after the other, as gloo/rendezvous/context.cc does.
bool one_by_one(const std::string& host, int port, const std::string& scope, int rank, int size,
                const std::vector<char>& own, std::chrono::milliseconds timeout) {
  const auto deadline = hvdkit::HttpRequest::Clock::now() + timeout;
  auto request = [&](const std::string& method, const std::string& key,
                     const std::vector<char>& body = {}) {
    hvdkit::HttpRequest one(host, port, deadline);
    return one.perform(method, "/" + scope + "/" + key, "", body.data(), body.size());
  };
  request("PUT", "rank_" + std::to_string(rank), {'h'});
  for (int other = 0; other < rank; ++other) {
    request("GET", "rank_" + std::to_string(other));
  }
  request("PUT", std::to_string(rank), own);
  bool right = true;
  for (int other = 0; other < size; ++other) {
    if (other != rank) {
      while (request("GET", std::to_string(other)).status != 200) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      const std::string all = request("GET", std::to_string(other)).body;
      const size_t at = (rank - (rank > other)) * kWidth;
      const auto expected = address(other, rank);
      right = right && all.substr(at, kWidth) == std::string(expected.begin(), expected.end());
    }
  }
  return right;
}

}  // namespace

int main(int, char** argv) {
  const std::string host = argv[1], key = argv[3], scope = argv[4];
  const int port = std::atoi(argv[2]), size = std::atoi(argv[5]);
  const std::chrono::milliseconds timeout(1000 * std::atoi(argv[8]));
  std::atomic<int> wrong{0};
  std::mutex print;
  std::vector<std::thread> ranks;
  for (int rank = std::atoi(argv[6]); rank < std::atoi(argv[7]); ++rank) {
    ranks.emplace_back([&, rank] {
      std::vector<char> own;
      for (int other = 0; other < size; ++other) {
        if (other != rank) {
          const auto bytes = address(rank, other);
          own.insert(own.end(), bytes.begin(), bytes.end());
        }
      }
      try {
        if (key == "-") {
          wrong += !one_by_one(host, port, scope, rank, size, own, timeout);
          return;
        }
        hvdkit::MeshRendezvous rendezvous(host, port, key, scope, rank, size);
        std::vector<std::vector<char>> theirs;
        bool right = rendezvous.exchange(own, timeout, theirs) &&
                     theirs.size() == static_cast<size_t>(size - 1);
        for (int other = 0; right && other < size; ++other) {
          if (other != rank) {
            right = theirs[other - (other > rank)] == address(other, rank);
          }
        }
        wrong += !right;
      } catch (const std::exception& error) {
        std::lock_guard<std::mutex> lock(print);
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        ++wrong;
      }
    });
  }
  for (auto& rank : ranks) {
    rank.join();
  }
  return wrong == 0 ? 0 : 1;
}
