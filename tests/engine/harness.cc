// Real processes as the ranks of one or two hosts, with the engine's headers but without Horovod. Each
// command prints what is wrong, and fails then.
//
//   harness peers RANKS SOFT HARD STRANGERS  connects, with these limits of open files; not as root
//   harness ends ROUNDS                      kills a rank during allreduces
//   harness stops                            stops a rank that writes a sum, and continues it after the error
//   harness hosts ROUNDS                     all collectives on two hosts; as root
//   harness record FOLDER                    records an error while an older record is still written
//   harness reserve                          allocates memory while signals interrupt large requests
//   harness threads FOLDER SECONDS           uses the arena, the recorder and the arrivals in many threads

#include <dirent.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include "hvdkit_buckets.h"
#include "hvdkit_host_allreduce.h"
#include "hvdkit_host_scatter.h"
#include "hvdkit_recorder.h"

using namespace hvdkit;

// The memory of all processes.
struct Shared {
  std::atomic<int> arrived, phase, state;
  std::atomic<long long> words[1 << 16];
  std::atomic<uint64_t> hashes[8];
};

static Shared* shared;

template <typename T>
static T* shared_memory(size_t count) {
  return (T*)mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static void barrier(int size) {
  const int phase = shared->phase.load();
  if (shared->arrived.fetch_add(1) + 1 == size) {
    shared->arrived = 0;
    shared->phase = phase + 1;
  }
  while (shared->phase.load() == phase) {
    usleep(100);
  }
}

static void await_state(int state) {
  while (shared->state.load() < state) {
    usleep(100);
  }
}

// The exchange of `HostGroup::connect`. Calls `between` on rank 0 when all words are there.
template <typename Between>
static HostPeers::Exchange exchange(int rank, int size, Between between) {
  return [=](std::vector<long long>& words) {
    barrier(size);
    for (size_t i = 0; i < words.size(); ++i) {
      shared->words[i] |= words[i];
    }
    barrier(size);
    if (rank == 0) {
      between();
    }
    for (size_t i = 0; i < words.size(); ++i) {
      words[i] = shared->words[i];
    }
    barrier(size);
    if (rank == 0) {
      for (size_t i = 0; i < words.size(); ++i) {
        shared->words[i] = 0;
      }
    }
    barrier(size);
  };
}

static HostPeers::Exchange exchange(int rank, int size) {
  return exchange(rank, size, [] {});
}

// Waits for all children. Returns 1 if one has failed.
static int wait_for_children() {
  int failed = 0, status;
  while (wait(&status) > 0) {
    failed |= status != 0;
  }
  return failed;
}

// A group of ranks that need no network.
static std::unique_ptr<HostGroup> connected(int rank, int size, int seconds) {
  auto group =
      std::make_unique<HostGroup>(rank, size, std::chrono::seconds(seconds), nullptr);
  const auto reason = group->connect(false, exchange(rank, size));
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

static void connect_strangers(int size, int strangers) {
  constexpr size_t words = sizeof(RankInfo) / sizeof(long long);
  for (int rank = 0; rank < size; ++rank) {
    long long own[words];
    std::copy_n(&shared->words[words * (size_t)rank], words, own);
    RankInfo info;
    std::memcpy(static_cast<void*>(&info), own, sizeof info);
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
  HostGroup group(rank, size, std::chrono::seconds(60), nullptr);
  bool first = true;
  const auto reason = group.connect(false, exchange(rank, size, [&] {
    if (first) {
      connect_strangers(size, strangers);
    }
    first = false;
  }));
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
  return wait_for_children();
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
    wait_for_children();
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

// ---- hosts

constexpr int kRanks = 5;  // 2 on one host, 3 on the other
constexpr int kMessages = 60000;
constexpr size_t kBox = 600 << 20;  // bytes

struct Message {
  uint32_t tag, taken;
  size_t offset, bytes;
};

// All messages from one rank to another.
struct Box {
  std::atomic<uint32_t> sent;
  Message messages[kMessages];
};

static Box* boxes;
static char* contents;
static size_t written[kRanks];
static uint32_t first_open[kRanks];

// A network of shared memory.
class MemoryChannel : public Channel {
 public:
  MemoryChannel(int own, void* memory) : own_(own), memory_((char*)memory) {}

  void send(int rank, uint32_t tag, size_t offset, size_t bytes) override {
    for_pieces(offset, bytes, [&](size_t at, size_t size) {
      Box& box = boxes[own_ * kRanks + rank];
      const uint32_t i = box.sent;
      if (i >= kMessages || written[rank] + size > kBox) {
        std::abort();
      }
      std::memcpy(content(own_, rank) + written[rank], memory_ + at, size);
      box.messages[i] = {tag, 0, written[rank], size};
      written[rank] += size;
      ++box.sent;
    });
  }

  void receive(int rank, uint32_t tag, size_t offset, size_t bytes) override {
    for_pieces(offset, bytes, [&](size_t at, size_t size) {
      expected_.push_back({rank, tag, at, size});
    });
  }

  void wait() override {
    for (auto& each : expected_) {
      while (!take(each)) {
        usleep(20);
      }
    }
    expected_.clear();
  }

 private:
  struct Expected {
    int rank;
    uint32_t tag;
    size_t offset, bytes;
  };

  static char* content(int from, int to) { return contents + (size_t)(from * kRanks + to) * kBox; }

  bool take(const Expected& each) {
    Box& box = boxes[each.rank * kRanks + own_];
    uint32_t& open = first_open[each.rank];
    for (uint32_t i = open, end = box.sent; i < end; ++i) {
      Message& message = box.messages[i];
      if (message.taken || message.tag != each.tag) {
        open += message.taken && i == open;
        continue;
      }
      if (message.bytes != each.bytes) {
        std::abort();
      }
      std::memcpy(memory_ + each.offset, content(each.rank, own_) + message.offset, each.bytes);
      message.taken = 1;
      return true;
    }
    return false;
  }

  const int own_;
  char* const memory_;
  std::vector<Expected> expected_;
};

class MemoryNetwork : public Network {
 public:
  explicit MemoryNetwork(int own) : own_(own) {}
  std::unique_ptr<Channel> channel(void* memory, size_t) override {
    return std::make_unique<MemoryChannel>(own_, memory);
  }

 private:
  const int own_;
};

class HostsRank {
 public:
  explicit HostsRank(int rank)
      : rank_(rank), group_(rank, kRanks, std::chrono::seconds(60), std::make_unique<MemoryNetwork>(rank)) {}

  int run(int rounds) {
    const auto reason = group_.connect(false, exchange(rank_, kRanks));
    expect(reason.empty() && group_.peers().hosts() == 2, reason.c_str(), -1);
    std::mt19937 random(3);
    for (int round = 0; round < rounds && !wrong_; ++round) {
      const size_t count = 16384 + random() % 300000;
      float* const arena = random() % 2 ? arena_floats(count) : nullptr;
      std::vector<float> heap(arena ? 0 : count);
      float* const memory = arena ? arena : heap.data();
      allreduce(round, memory, count);
      scatter_and_gather(round, memory, count);
      if (arena) {
        Arena::instance().release(arena);
      }
    }
    return wrong_;
  }

 private:
  void expect(bool right, const char* what, int round) {
    if (!right) {
      std::printf("rank %d, round %d: %s\n", rank_, round, what);
      std::fflush(stdout);
      wrong_ = true;
    }
  }

  static float value(size_t i, int rank, int round, float scale) {
    return (float)((int)((i * 2654435761u + (size_t)rank * 40503u + (size_t)round) >> 7) % 2001 - 1000) / scale;
  }

  void allreduce(int round, float* memory, size_t count) {
    const bool int8 = round % 2;
    const float scale = int8 ? 997.0f : 1.0f;
    for (size_t i = 0; i < count; ++i) {
      memory[i] = value(i, rank_, round, scale);
    }
    GroupAllreduce allreduce(group_);
    if (!allreduce.serves(count * sizeof(float))) {
      return;
    }
    allreduce.run(memory, memory, count, Element::kFloat32, 1.0, int8 ? Wire::kInt8 : Wire::kElements);
    uint64_t hash = 14695981039346656037ull;
    for (size_t i = 0; i < count; ++i) {
      float expected = 0;
      for (int rank = 0; rank < kRanks; ++rank) {
        expected += value(i, rank, round, scale);
      }
      if (std::fabs(memory[i] - expected) > (int8 ? 0.12f : 0.0f)) {
        expect(false, "a wrong sum", round);
        break;
      }
      uint32_t bits;
      std::memcpy(&bits, memory + i, sizeof bits);
      hash = (hash ^ bits) * 1099511628211ull;
    }
    shared->hashes[rank_] = hash;
    barrier(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      expect(shared->hashes[rank] == hash, "other bits than another rank", round);
    }
    barrier(kRanks);
  }

  // Parts of different size; one is empty.
  void scatter_and_gather(int round, float* memory, size_t count) {
    auto input = [&](size_t i, int rank) { return (float)((i * 13 + (size_t)rank * 3 + (size_t)round) % 500); };
    auto sum = [&](size_t i) {
      float total = 0;
      for (int rank = 0; rank < kRanks; ++rank) {
        total += input(i, rank);
      }
      return total;
    };
    for (size_t i = 0; i < count; ++i) {
      memory[i] = input(i, rank_);
    }
    std::vector<size_t> counts;
    size_t left = count;
    for (int rank = 0; rank < kRanks; ++rank) {
      counts.push_back(rank == kRanks - 1 ? left : rank == round % kRanks ? 0 : left / 3);
      left -= counts.back();
    }
    const Parts parts(counts);
    const size_t own = parts.count((size_t)rank_);
    std::vector<float> part(own + 1, -1.0f), all(count + 1, -1.0f);
    GroupReducescatter(group_).run(memory, part.data(), parts, Element::kFloat32, 1.0);
    for (size_t i = 0; i < own; ++i) {
      if (part[i] != sum(parts.begin((size_t)rank_) + i)) {
        expect(false, "a wrong part", round);
        break;
      }
    }
    for (auto& each : counts) {
      each *= sizeof(float);
    }
    GroupAllgather(group_).run(part.data(), all.data(), Parts(counts));
    for (size_t i = 0; i < count; ++i) {
      if (all[i] != sum(i)) {
        expect(false, "a wrong gathered number", round);
        break;
      }
    }
    expect(part[own] == -1 && all[count] == -1, "a write behind the end", round);
  }

  const int rank_;
  HostGroup group_;
  bool wrong_ = false;
};

static int hosts(int rounds) {
  boxes = shared_memory<Box>(kRanks * kRanks);
  contents = shared_memory<char>(kRanks * kRanks * kBox);
  for (int rank = 0; rank < kRanks; ++rank) {
    if (fork() == 0) {
      _exit(HostsRank(rank).run(rounds));
    }
    // The engine tells hosts apart by their network namespaces.
    if (rank == 1 && unshare(CLONE_NEWNET) != 0) {
      std::perror("unshare");
      return 2;
    }
  }
  return wait_for_children();
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
  shared = shared_memory<Shared>(1);
  if (command == "peers") {
    return peers(number(2), {(rlim_t)number(3), (rlim_t)number(4)}, number(5));
  }
  if (command == "ends") {
    return ends(number(2));
  }
  if (command == "stops") {
    return stops();
  }
  if (command == "hosts") {
    return hosts(number(2));
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
