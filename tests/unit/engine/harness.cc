// Real processes as the ranks of a host, with the engine's headers but without Horovod. Each command
// prints what is wrong, and fails then.
//
//   harness peers RANKS SOFT HARD STRANGERS  connects, with these limits of open files; not as root
//   harness ends ROUNDS                      kills a rank during allreduces
//   harness stops                            stops a rank that writes a sum, and continues it after the error
//   harness record FOLDER                    records an error while an older record is still written
//   harness reserve                          allocates memory while signals interrupt large requests
//   harness threads FOLDER SECONDS           uses the arena, the recorder and the arrivals in many threads

#include <dirent.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "hvdkit_buckets.h"
#include "hvdkit_host_allreduce.h"
#include "hvdkit_recorder.h"
#include "rank_processes.h"

using namespace hvdkit;

// The memory of all processes.
struct Shared {
  Exchange exchange;
  std::atomic<int> state;
};

static Shared* shared;

static void await_state(int state) {
  while (shared->state.load() < state) {
    usleep(100);
  }
}

// The group of all ranks, without a network.
static std::unique_ptr<HostGroup> group_of(int rank, int size, int seconds) {
  std::vector<int> ranks((size_t)size);
  std::iota(ranks.begin(), ranks.end(), 0);
  shared->exchange.size = size;
  return std::make_unique<HostGroup>(ranks, rank, std::chrono::seconds(seconds), true, nullptr);
}

static std::unique_ptr<HostGroup> connected(int rank, int size, int seconds) {
  auto group = group_of(rank, size, seconds);
  Arena::instance().renew((size_t)size);
  const auto reason = group->peers().connect(
      [rank](std::vector<long long>& words) { shared->exchange.combine(words, rank); });
  Arena::instance().share(true);
  if (!reason.empty()) {
    std::printf("rank %d: no shared memory: %s\n", rank, reason.c_str());
    _exit(1);
  }
  return group;
}

static float* arena_floats(size_t count) {
  return (float*)Arena::instance().allocate(count * sizeof(float));
}

// ---- peers

static void connect_strangers(const std::vector<long long>& words, int size, int strangers) {
  for (int rank = 0; rank < size; ++rank) {
    RankInfo info;
    std::memcpy(static_cast<void*>(&info), &words[sizeof info / sizeof words[0] * (size_t)rank], sizeof info);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const int length = std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1,
                                     "hvdkit-%016llx", (unsigned long long)info.socket);
    for (int i = 0; i < strangers; ++i) {
      const int file = socket(AF_UNIX, SOCK_SEQPACKET, 0);
      if (connect(file, (sockaddr*)&address,
                  (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + (size_t)length)) != 0) {
        std::perror("connect");
        _exit(1);
      }
    }
  }
}

static int connect_ranks(int rank, int size, int strangers) {
  auto group = group_of(rank, size, 60);
  bool first = true;
  Arena::instance().renew((size_t)size);
  const auto reason = group->peers().connect([&](std::vector<long long>& words) {
    shared->exchange.combine(words, rank);
    if (first && rank == 0) {
      connect_strangers(words, size, strangers);
    }
    first = false;
    shared->exchange.barrier();
  });
  if (rank == 0 && !reason.empty()) {
    std::printf("%s\n", reason.c_str());
    std::fflush(stdout);
  }
  rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  return !reason.empty() || files.rlim_cur == files.rlim_max;
}

static int peers(int size, const rlimit& files, int strangers) {
  if (setrlimit(RLIMIT_NOFILE, &files) != 0 || (geteuid() == 0 && setuid(65534) != 0)) {
    std::perror("setrlimit, setuid");
    return 2;
  }
  for (int rank = 0; rank < size; ++rank) {
    if (fork() == 0) {
      _exit(connect_ranks(rank, size, strangers));
    }
  }
  return wait_for_all() != 0;
}

// ---- ends

static int sum_until_error(int rank, int size, bool arena) {
  auto group = connected(rank, size, 5);
  const size_t most = 300000;
  std::vector<float> heap(most);
  float* const memory = arena ? arena_floats(most) : heap.data();
  try {
    for (int i = 0;; ++i) {
      const size_t count = i % 3 == 0 ? 64 : most;
      std::fill(memory, memory + most, (float)rank + 1);
      if (i == 20) {
        shared->state = 1;
      }
      GroupAllreduce(*group).run(memory, memory, count, Element::kFloat32, 1.0, Wire::kElements);
      const float expected = (float)(size * (size + 1) / 2);
      if (!std::all_of(memory, memory + count, [&](float x) { return x == expected; })) {
        std::printf("rank %d: a wrong sum\n", rank);
        std::fflush(stdout);
        return 1;
      }
    }
  } catch (const std::exception& error) {
    if (!std::strstr(error.what(), "rank 1 has ended")) {
      std::printf("rank %d: %s\n", rank, error.what());
      std::fflush(stdout);
      return 1;
    }
    return 0;
  }
}

static int ends(int rounds) {
  std::mt19937 random(1);
  int failed = 0;
  for (int round = 0; round < rounds; ++round) {
    shared->state = 0;
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.push_back(fork());
      if (ranks.back() == 0) {
        _exit(sum_until_error(rank, 3, round % 2));
      }
    }
    await_state(1);
    usleep(random() % 30000);
    kill(ranks[1], SIGKILL);
    for (int rank : {0, 2}) {
      int status;
      waitpid(ranks[(size_t)rank], &status, 0);
      failed |= status != 0;
    }
    wait_for_all();
  }
  return failed;
}

// ---- stops

// States: 1: the writing rank may be continued, 2: it has been continued, 3: rank 0 has looked.
static int sum_with_a_stopped_rank(int rank) {
  auto group = connected(rank, 2, 1);
  const size_t count = 16 << 20;
  float *const memory = arena_floats(count), *const kept = arena_floats(1000);
  std::fill(memory, memory + count, (float)rank + 1);
  std::fill(kept, kept + 1000, 7.0f);
  const uint64_t offset = group->offset_of(memory, count * sizeof(float));
  if (rank == 1) {
    // The second half of the sum is written by this rank.
    auto* const other = (volatile float*)group->in_arena(0, offset) + count / 8 * 5;
    std::thread([other] {
      while (*other != 3.0f) {
      }
      kill(getpid(), SIGSTOP);
    }).detach();
  }
  try {
    for (int i = 0; i < 2; ++i) {
      GroupAllreduce(*group).run(memory, memory, count, Element::kFloat32, 1.0, Wire::kElements);
    }
    std::printf("rank %d: no error\n", rank);
    std::fflush(stdout);
    return 1;
  } catch (const std::exception&) {
  }
  if (rank == 1) {
    await_state(3);
    return 0;
  }
  std::fill(memory, memory + count, 42.0f);
  shared->state = 1;
  await_state(2);
  usleep(200000);
  const auto renewed = Arena::instance().renew(2);
  const auto changed = count - (size_t)std::count(memory, memory + count, 42.0f);
  const bool lost = std::count(kept, kept + 1000, 7.0f) != 1000;
  shared->state = 3;
  if (changed || lost || !renewed.empty()) {
    std::printf("%zu numbers have changed after the error%s %s\n", changed,
                lost ? ", and others were lost" : "", renewed.c_str());
    std::fflush(stdout);
  }
  return changed || lost || !renewed.empty();
}

static int stops() {
  pid_t ranks[2];
  for (int rank : {0, 1}) {
    ranks[rank] = fork();
    if (ranks[rank] == 0) {
      _exit(sum_with_a_stopped_rank(rank));
    }
  }
  int failed = 0, status;
  do {
    waitpid(ranks[1], &status, WUNTRACED);
    if (WIFSTOPPED(status)) {
      await_state(1);
      kill(ranks[1], SIGCONT);
      shared->state = 2;
    }
  } while (!WIFEXITED(status) && !WIFSIGNALED(status));
  failed |= status != 0;
  waitpid(ranks[0], &status, 0);
  return failed | (status != 0);
}

// ---- record

static std::atomic<bool> slow_disk{false};
static thread_local bool is_main = false;

// A slow disk: another thread waits with the rest of its record for the error.
extern "C" ssize_t write(int file, const void* bytes, size_t count) {
  if (!is_main && file > 2 && count > 65536) {
    count = 65536;
  } else if (!is_main && file > 2 && count > 1000) {
    while (slow_disk) {
      usleep(100);
    }
  }
  return syscall(SYS_write, file, bytes, count);
}

static bool has_draft(const std::string& folder) {
  bool found = false;
  DIR* directory = opendir(folder.c_str());
  while (dirent* entry = readdir(directory)) {
    found |= std::strstr(entry->d_name, ".tmp") != nullptr;
  }
  closedir(directory);
  return found;
}

static int record(const std::string& folder) {
  is_main = slow_disk = true;
  auto& recorder = Recorder::instance();
  recorder.set_group(0, {0, 1});
  recorder.watch(folder, 0, 2, "host", 0, 0, -1, 0);
  for (int i = 0; i < 500; ++i) {
    recorder.end(recorder.begin(std::string(2000, 'x') + std::to_string(i), 0, 0, 0, 4), "");
  }
  std::ofstream(folder + "/request") << "x";
  while (!has_draft(folder)) {
    usleep(10);
  }
  usleep(10000);
  recorder.end(recorder.begin("failing", 0, 0, 0, 4), "failed: peer");
  slow_disk = false;
  while (has_draft(folder)) {
    usleep(100);
  }
  usleep(50000);
  _exit(0);  // the recorder's thread continues
}

// ---- reserve

static std::atomic<bool> interrupted{false}, full{false};
static std::atomic<int> interruptions{0}, reserved{0};

extern "C" int fallocate(int file, int mode, off_t offset, off_t length) {
  // As older kernels do, if a signal comes during a long call.
  if (interrupted && mode == 0 && length > 64 << 20) {
    if (++interruptions > 1000) {
      std::printf("a request of %lld bytes never ends\n", (long long)length);
      std::fflush(stdout);
      _exit(1);
    }
    errno = EINTR;
    return -1;
  }
  if (full && mode == 0 && ++reserved == 3) {
    errno = ENOSPC;
    return -1;
  }
  return (int)syscall(SYS_fallocate, file, mode, offset, length);
}

static int reserve() {
  auto& arena = Arena::instance();
  const auto reason = arena.renew(2);
  arena.share(true);
  interrupted = true;
  const size_t bytes = 200 << 20;
  auto* const memory = (char*)arena.allocate(bytes);
  struct stat before, after;
  fstat(arena.file(), &before);
  full = true;
  void* const second = arena.allocate(bytes);
  fstat(arena.file(), &after);
  if (!reason.empty() || !memory || second || after.st_blocks != before.st_blocks) {
    std::printf("%s %p %p %lld %lld\n", reason.c_str(), (void*)memory, second, (long long)before.st_blocks,
                (long long)after.st_blocks);
    return 1;
  }
  return 0;
}

// ---- threads

static int threads(const std::string& folder, int seconds) {
  auto& arena = Arena::instance();
  arena.renew(2);
  arena.share(true);
  auto& recorder = Recorder::instance();
  recorder.set_group(0, {0, 1});
  recorder.watch(folder, 0, 2, "host", 0.3, 0, -1, 0);
  std::atomic<bool> ended{false};
  std::vector<std::thread> all;
  for (unsigned number = 0; number < 3; ++number) {
    all.emplace_back([&, number] {
      std::mt19937 random(number);
      while (!ended) {
        const size_t bytes = 4096 * (1 + random() % 50);
        if (auto* memory = (char*)arena.allocate(bytes)) {
          memory[0] = memory[bytes - 1] = 1;
          if (arena.offset_of(memory, bytes) == Board::kElsewhere) {
            std::abort();
          }
          arena.release(memory);
        }
        Recorder::set_line("train.py:1");
        recorder.end(recorder.begin("name " + std::to_string(random() % 20), 0, number % 2, 0, 4),
                     random() % 50 ? "" : "failed");
        recorder.describe("a", "b");
        Arrivals::instance().notify("hvdkit.x");
      }
    });
  }
  all.emplace_back([&] {
    while (!ended) {
      Arrivals::instance().forget();
      const auto now = std::chrono::steady_clock::now();
      Arrivals::instance().await_tensor(now, std::chrono::microseconds(100), now + std::chrono::milliseconds(1));
    }
  });
  int failed = 0;
  for (int i = 0; i < seconds; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      _exit(arena.allocate(10) ? 1 : 0);
    }
    int status;
    waitpid(child, &status, 0);
    failed |= status != 0;
    sleep(1);
  }
  ended = true;
  for (auto& thread : all) {
    thread.join();
  }
  _exit(failed);  // the recorder's thread continues
}

int main(int count, char** arguments) {
  const std::string command = count > 1 ? arguments[1] : "";
  auto number = [&](int i) { return std::atoi(arguments[i]); };
  shared = &share<Shared>();
  if (command == "peers") {
    return peers(number(2), {(rlim_t)number(3), (rlim_t)number(4)}, number(5));
  }
  if (command == "ends") {
    return ends(number(2));
  }
  if (command == "stops") {
    return stops();
  }
  if (command == "record") {
    return record(arguments[2]);
  }
  if (command == "reserve") {
    return reserve();
  }
  if (command == "threads") {
    return threads(arguments[2], number(3));
  }
  return 2;
}
