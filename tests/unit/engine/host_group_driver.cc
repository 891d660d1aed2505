// Collectives of five ranks on two hosts over a network that sends and receives as late as it may.
//
//   host_group_driver sums SEED ROUNDS: compares all collectives with the right values
//   host_group_driver host SEED ROUNDS: the same, with all ranks on one host
//   host_group_driver slow: a gather that takes longer than the timeout, in slow pieces
//
// Needs root, for the second host.

#include <sched.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "hvdkit_host_allreduce.h"
#include "hvdkit_host_scatter.h"
#include "rank_processes.h"

using namespace hvdkit;

constexpr int kRanks = 5, kOnFirstHost = 2, kMessages = 1 << 16;
static const std::vector<int> kAll{0, 1, 2, 3, 4};

// The messages from one rank to another.
struct Link {
  struct Message {
    uint32_t tag;
    bool taken;
    size_t at, bytes;
  };
  std::atomic<int> sent;
  Message messages[kMessages];
  char content[(size_t)400 << 20];
};

struct Job {
  Job* second;  // for the messages of a second group
  Exchange exchange;
  std::atomic<uint64_t> hashes[kRanks];
  Link links[kRanks][kRanks];
};

[[noreturn]] static void fail(const char* problem) {
  std::printf("%s\n", problem);
  std::fflush(stdout);
  _exit(1);
}

// A thread reads the memory of each message at a random later time. A slow network also sleeps between
// the pieces that it receives.
class LateNetwork : public Network {
 public:
  LateNetwork(Job& job, int rank, unsigned seed, int sleep)
      : job_(job), rank_(rank), random_(seed), sleep_(sleep), sender_([this] { send_all(); }) {}
  ~LateNetwork() override {
    ended_ = true;
    sender_.join();
  }

  std::unique_ptr<Channel> channel(void* memory, size_t bytes) override {
    return std::make_unique<LateChannel>(*this, (char*)memory, bytes);
  }

 private:
  struct Send {
    int to;
    uint32_t tag;
    const char* from;
    size_t bytes;
    std::atomic<int>* pending;  // of its channel
  };

  struct Receive {
    int from;
    uint32_t tag;
    char* to;
    size_t bytes;
  };

  class LateChannel : public Channel {
   public:
    LateChannel(LateNetwork& network, char* memory, size_t bytes)
        : network_(network), memory_(memory), bytes_(bytes) {}
    ~LateChannel() override {
      if (sends_ || !receives_.empty()) {
        fail("a channel is destroyed before all its messages have arrived");
      }
    }

    void send(int rank, uint32_t tag, size_t offset, size_t bytes) override {
      for_pieces(offset, bytes, [&](size_t at, size_t size) {
        check(at, size);
        ++sends_;
        std::lock_guard<std::mutex> guard(network_.mutex_);
        network_.sends_.push_back({rank, tag, memory_ + at, size, &sends_});
      });
    }

    void receive(int rank, uint32_t tag, size_t offset, size_t bytes) override {
      for_pieces(offset, bytes, [&](size_t at, size_t size) {
        check(at, size);
        receives_.push_back({rank, tag, memory_ + at, size});
      });
    }

    void wait(const std::function<void()>& progress) override {
      while (sends_ || !receives_.empty()) {
        if (!receives_.empty() && network_.take(receives_.front())) {
          receives_.pop_front();
          usleep((useconds_t)network_.sleep_);
          progress();
        }
        usleep(10);
      }
    }

   private:
    void check(size_t at, size_t size) {
      if (at + size > bytes_) {
        fail("a message is not in the memory of its channel");
      }
    }

    LateNetwork& network_;
    char* const memory_;
    const size_t bytes_;
    std::atomic<int> sends_{0};
    std::deque<Receive> receives_;
  };

  void send_all() {
    while (!ended_) {
      usleep(random_() % 4 ? 10 : 500);
      std::unique_lock<std::mutex> lock(mutex_);
      if (sends_.empty()) {
        continue;
      }
      const Send send = sends_.front();
      sends_.pop_front();
      lock.unlock();
      auto& link = job_.links[rank_][send.to];
      const int number = link.sent.load();
      auto& message = link.messages[number];
      message = {send.tag, false, used_[send.to], send.bytes};
      if (number + 1 == kMessages || message.at + message.bytes > sizeof link.content) {
        fail("too many messages for this driver");
      }
      std::memcpy(link.content + message.at, send.from, send.bytes);
      used_[send.to] += send.bytes;
      link.sent = number + 1;
      --*send.pending;
    }
  }

  bool take(const Receive& receive) {
    auto& link = job_.links[receive.from][rank_];
    int& first = first_[receive.from];
    for (int number = first; number < link.sent.load(); ++number) {
      auto& message = link.messages[number];
      if (message.taken) {
        first += number == first;
      } else if (message.tag == receive.tag) {
        if (message.bytes != receive.bytes) {
          fail("a message has another size than its receive");
        }
        std::memcpy(receive.to, link.content + message.at, message.bytes);
        message.taken = true;
        return true;
      }
    }
    return false;
  }

  Job& job_;
  const int rank_;
  std::mt19937 random_;
  const int sleep_;  // microseconds
  std::mutex mutex_;
  std::deque<Send> sends_;
  size_t used_[kRanks] = {};
  int first_[kRanks] = {};
  std::atomic<bool> ended_{false};
  std::thread sender_;  // the last member: it uses the others
};

static float value(size_t i, int rank, int round) {
  return (float)((int)((i * 2654435761u + (unsigned)(rank * 40503 + round)) >> 7) % 2001 - 1000);
}

static float total(size_t i, int round) {
  float sum = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    sum += value(i, rank, round);
  }
  return sum;
}

// Parts of any size, some of them empty, the same on all ranks.
static std::vector<size_t> parts_of(size_t count, std::mt19937& random) {
  std::vector<size_t> parts;
  for (int rank = 0; rank < kRanks; ++rank) {
    parts.push_back(rank == kRanks - 1 ? count : random() % 3 ? count / 3 : 0);
    count -= parts.back();
  }
  return parts;
}

static Parts in_bytes(std::vector<size_t> counts) {
  for (auto& count : counts) {
    count *= sizeof(float);
  }
  return Parts(counts);
}

// All ranks have the same bits.
static void check_bits(Job& job, int rank, const float* numbers, size_t count) {
  uint64_t hash = 14695981039346656037ull;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, numbers + i, sizeof bits);
    hash = (hash ^ bits) * 1099511628211ull;
  }
  job.hashes[rank] = hash;
  job.exchange.barrier();
  for (auto& other : job.hashes) {
    if (other != hash) {
      fail("the bits of an allreduce differ");
    }
  }
  job.exchange.barrier();
}

static void check_broadcast(HostGroup& group, int rank, int round, size_t count) {
  const int root = round % kRanks;
  std::vector<float> tensor(count);
  for (size_t i = 0; i < count; ++i) {
    tensor[i] = value(i, rank, round);
  }
  GroupBroadcast(group).run(tensor.data(), count * sizeof(float), root);
  for (size_t i = 0; i < count; ++i) {
    if (tensor[i] != value(i, root, round)) {
      fail("a broadcast is wrong");
    }
  }
  GroupBarrier(group).run();
  std::vector<float> least(count);
  for (size_t i = 0; i < count; ++i) {
    least[i] = value(i, rank, round);
  }
  GroupAllreduce(group).run(least.data(), least.data(), count, Element::kFloat32, 1.0, Wire::kElements,
                            Reduction::kMin);
  for (size_t i = 0; i < count; ++i) {
    float right = value(i, 0, round);
    for (int other = 1; other < kRanks; ++other) {
      right = std::min(right, value(i, other, round));
    }
    if (least[i] != right) {
      fail("a minimum is wrong");
    }
  }
}

static void connect(Job& job, HostGroup& group, int rank) {
  auto reason = group.peers().connect(
      [&](std::vector<long long>& words) { job.exchange.combine(words, rank); });
  if (!reason.empty()) {
    fail(reason.c_str());
  }
}

static void check_round(Job& job, HostGroup& group, int rank, int round, std::mt19937& random) {
  const size_t count = 1 + random() % (random() % 2 ? 40000 : 400);
  const bool arena = random() % 2;
  auto* tensor = arena ? (float*)Arena::instance().allocate(count * sizeof(float)) : nullptr;
  const bool allocated = tensor;
  std::vector<float> heap(count), output(count + 1, -1);
  tensor = allocated ? tensor : heap.data();
  auto fill = [&] {
    for (size_t i = 0; i < count; ++i) {
      tensor[i] = value(i, rank, round);
    }
  };
  fill();
  GroupAllreduce reduce(group);
  if (reduce.serves(count * sizeof(float))) {
    // The blocks of Wire::kInt8 are rounded.
    for (auto wire : {Wire::kElements, Wire::kInt8}) {
      fill();
      reduce.run(tensor, tensor, count, Element::kFloat32, 0.5, wire);
      for (size_t i = 0; i < count; ++i) {
        const float right = total(i, round) * 0.5f;
        if (wire == Wire::kElements ? tensor[i] != right : std::fabs(tensor[i] - right) > 100) {
          fail("an allreduce is wrong");
        }
      }
      check_bits(job, rank, tensor, count);
    }
  }
  fill();
  const auto counts = parts_of(count, random);
  const Parts parts(counts);
  const size_t begin = parts.begin(rank), own = parts.count(rank);
  GroupReducescatter(group).run(tensor, output.data(), parts, Element::kFloat32, 1.0);
  for (size_t i = 0; i < own; ++i) {
    if (output[i] != total(begin + i, round)) {
      fail("a reducescatter is wrong");
    }
  }
  std::vector<float> gathered(count + 1, -1);
  if (GroupAllgather(group).serves(count * sizeof(float))) {
    GroupAllgather(group).run(output.data(), gathered.data(), in_bytes(counts));
    for (size_t i = 0; i < count; ++i) {
      if (gathered[i] != total(i, round)) {
        fail("an allgather is wrong");
      }
    }
  }
  // Every rank divides its tensor in the same way: rank r receives part r of each.
  std::vector<float> exchanged(own * kRanks + 1, -1);
  GroupAlltoall(group).run(tensor, in_bytes(counts), exchanged.data(),
                           in_bytes(std::vector<size_t>(kRanks, own)));
  for (size_t i = 0; i < own * kRanks; ++i) {
    if (exchanged[i] != value(begin + i % own, (int)(i / own), round)) {
      fail("an alltoall is wrong");
    }
  }
  check_broadcast(group, rank, round, count);
  if (gathered[count] != -1 || exchanged[own * kRanks] != -1 || output[own] != -1) {
    fail("a collective has written too much");
  }
  if (allocated) {
    Arena::instance().release(tensor);
  }
}

// Two groups of the same ranks at once. The ranks of the second one do not map the arenas.
static void check_sums(Job& job, int rank, unsigned seed, int rounds) {
  Arena::instance().renew(kRanks);
  std::vector<std::unique_ptr<HostGroup>> groups;
  for (unsigned number = 0; number < 2; ++number) {
    auto& own = number ? *job.second : job;
    auto network = std::make_unique<LateNetwork>(own, rank, (seed + number) * 100 + (unsigned)rank, 0);
    groups.push_back(std::make_unique<HostGroup>(kAll, rank, std::chrono::seconds(60), number == 0,
                                                 std::move(network)));
    connect(job, *groups.back(), rank);
    Arena::instance().share(true);
  }
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; ++round) {
    auto& group = *groups[(size_t)round % 2];
    if (round % 2) {
      group.expect({1, (uint64_t)round}, [](const HostGroup::Call&) { return std::string("a call"); });
    }
    check_round(job, group, rank, round, random);
  }
}

static void check_separate(Job& job, int rank, unsigned seed, int rounds) {
  HostGroup group(kAll, rank, std::chrono::seconds(60), true,
                  std::make_unique<LateNetwork>(job, rank, seed * 100 + (unsigned)rank, 0));
  group.peers().separate();
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; ++round) {
    check_round(job, group, rank, round, random);
  }
}

// Rank 3 sends 6 pieces, which take longer than the timeout and the 5 s for the ranks of the same host.
static void check_slow(Job& job, int rank) {
  HostGroup group(kAll, rank, std::chrono::seconds(1), true,
                  std::make_unique<LateNetwork>(job, rank, 1, 1300000));
  Arena::instance().renew(kRanks);
  connect(job, group, rank);
  const size_t bytes = 6 << 24;
  std::vector<char> input(rank == 3 ? bytes : 1, 7), output(bytes);
  GroupAllgather(group).run(input.data(), output.data(), Parts({0, 0, 0, bytes, 0}));
  if (output.front() != 7 || output.back() != 7) {
    fail("the gather is wrong");
  }
}

static int run(Job& job, int rank, char** arguments) {
  try {
    if (std::strcmp(arguments[1], "slow") == 0) {
      check_slow(job, rank);
    } else if (std::strcmp(arguments[1], "separate") != 0) {
      check_sums(job, rank, (unsigned)std::atoi(arguments[2]), std::atoi(arguments[3]));
    } else {
      check_separate(job, rank, (unsigned)std::atoi(arguments[2]), std::atoi(arguments[3]));
    }
  } catch (const std::exception& error) {
    std::printf("rank %d: %s\n", rank, error.what());
    std::fflush(stdout);
    return 1;
  }
  return 0;
}

int main(int, char** arguments) {
  auto& job = share<Job>();
  job.exchange.size = kRanks;
  job.second = &share<Job>();
  const int on_first_host = std::strcmp(arguments[1], "host") == 0 ? kRanks : kOnFirstHost;
  for (int rank = 0; rank < on_first_host; ++rank) {
    if (fork() == 0) {
      _exit(run(job, rank, arguments));
    }
  }
  if (unshare(CLONE_NEWNET) != 0) {
    std::perror("unshare");
    return 1;
  }
  for (int rank = on_first_host; rank < kRanks; ++rank) {
    if (fork() == 0) {
      _exit(run(job, rank, arguments));
    }
  }
  return wait_for_all() != 0;
}
