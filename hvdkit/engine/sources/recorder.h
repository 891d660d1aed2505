// A flight recorder: the last collectives of this rank, and those that are not complete. Part of hvdkit
// (Apache-2.0).
//
// Every collective of every framework is recorded when it is enqueued and when it ends. `watch` starts a
// thread that writes the record to a file: when a collective fails, when no collective ends for some time
// while others wait, and on request. The thread does not need Python's GIL, so it also works while Python
// hangs. The format of the file is described in hvdkit/faults/records.py.

#ifndef HVDKIT_RECORDER_H
#define HVDKIT_RECORDER_H

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace hvdkit {

class Recorder {
 public:
  // Monotonic, because the time of day may jump. The clock of all processes of a machine.
  using Clock = std::chrono::steady_clock;

  // Never destroyed: the background thread may outlive the static objects at the process's end.
  static Recorder& instance() {
    static auto* recorder = new Recorder;
    return *recorder;
  }

  // Sets the file and line of the next collective that this thread enqueues.
  static void set_line(const std::string& line) { line_of_thread() = line; }

  // Forgets the line, after a call that may have enqueued several tensors.
  static void clear_line() { line_of_thread().clear(); }

  // Records a collective that is enqueued. Returns its number, for `end`.
  uint64_t begin(const std::string& name, int operation, int set, int dtype, uint64_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    const uint64_t number = ++last_;
    open_.emplace(number, Entry{name, count(set, name), operation, set, dtype, bytes, Clock::now(), {},
                                line_of_thread()});
    return number;
  }

  // Records that a collective has ended; `error` is empty after a success.
  void end(uint64_t number, const std::string& error) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = open_.find(number);
    if (found == open_.end()) {
      return;
    }
    found->second.ended = progress_ = Clock::now();
    if (error.empty() && found->second.enqueued > failed_at_) {
      // The script has caught the error, and the ranks have continued.
      error_.clear();
      failed_.clear();
    } else if (!error.empty() && error_.empty()) {
      error_ = error;
      failed_ = found->second.name;
      failed_at_ = progress_;
      // Now, because the process may end before the thread wakes up.
      if (!path_.empty()) {
        const std::string text = json("error");
        write(path_, text, records_);
      }
    }
    if (ring_.size() < kEntries) {
      ring_.push_back(std::move(found->second));
    } else {
      ring_[next_] = std::move(found->second);
      next_ = (next_ + 1) % kEntries;
    }
    open_.erase(found);
  }

  // Counts a collective of the other ranks that begins while this rank is in `join`. Otherwise the numbers of
  // later calls would differ between the ranks.
  void count_in_join(const std::string& name, int set) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto& entry : open_) {
      if (entry.second.set == set && entry.second.name == name) {
        return;  // this rank has enqueued it before `join`
      }
    }
    count(set, name);
  }

  // Records progress: an operation of some ranks begins.
  void operation_begins() {
    std::lock_guard<std::mutex> guard(mutex_);
    progress_ = Clock::now();
  }

  // Sets what the name of a collective stands for, such as the parameters of a bucket.
  void describe(const std::string& name, const std::string& text) {
    std::lock_guard<std::mutex> guard(mutex_);
    labels_[name] = text;
  }

  // Sets the ranks of a process set. The record needs them while the engine's thread, which waits for
  // another rank, holds the lock of the process sets.
  void set_group(int id, const std::vector<int>& ranks) {
    std::lock_guard<std::mutex> guard(mutex_);
    groups_[id] = ranks;
    if (id == 0) {
      // Horovod has started again. Other ranks may be new processes, which count from 1. It has only
      // this process set now.
      calls_.clear();
      names_ = 0;
      unnamed_.clear();
      groups_ = {{0, ranks}};
      ring_.clear();
      next_ = 0;
    }
  }

  // Forgets a process set.
  void remove_group(int id) {
    std::lock_guard<std::mutex> guard(mutex_);
    groups_.erase(id);
    unnamed_.erase(id);
    // A new process set may get the same id.
    auto calls = calls_.find(id);
    if (calls != calls_.end()) {
      names_ -= calls->second.size();
      calls_.erase(calls);
    }
  }

  // Starts to write records to `directory`. A second call replaces the settings of the first.
  //
  //   stall   seconds without the end of a collective after which a record is written
  //   limit   seconds that a collective may wait before the job ends; 0 for no limit
  //   stacks  a file to which a signal handler appends the stacks of all threads; -1 for none
  //   number  the signal of the handler
  void watch(const std::string& directory, int rank, int size, const std::string& host, double stall,
             double limit, int stacks, int number) {
    std::lock_guard<std::mutex> guard(mutex_);
    path_ = directory + "/rank-" + std::to_string(rank) + ".json";
    request_ = directory + "/request";
    rank_ = rank;
    size_ = size;
    host_ = host;
    stall_ = stall;
    limit_ = limit;
    stacks_ = stacks;
    signal_ = number;
    progress_ = Clock::now();
    error_.clear();
    written_ = length_of_stacks();
    struct stat facts;
    requested_ = stat(request_.c_str(), &facts) == 0 ? stamp(facts) : 0;
    if (process_ != getpid()) {
      // Signals of the script's are not for this thread.
      sigset_t all, before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      std::thread([this] { run(); }).detach();
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      process_ = getpid();
    }
  }

  // Ends the writing of records. The collectives are still recorded.
  void unwatch() {
    std::lock_guard<std::mutex> guard(mutex_);
    path_.clear();
  }

 private:
  // Returns the number of this call of the name in the process set; 0 if there are too many names.
  uint64_t count(int set, const std::string& name) {
    auto& calls = calls_[set];
    auto known = calls.find(name);
    if (known != calls.end()) {
      return ++known->second;
    }
    if (is_unnamed(name)) {
      // Of each process set: all its ranks forget the same names.
      auto& unnamed = unnamed_[set];
      unnamed.push_back(name);
      if (unnamed.size() > kUnnamed) {
        names_ -= calls.erase(unnamed.front());
        unnamed.pop_front();
      }
    }
    if (names_ >= kNames) {
      return 0;
    }
    ++names_;
    return calls[name] = 1;
  }

  // Whether the name of a collective has a number in the order of calls, which differs in each call.
  static bool is_unnamed(const std::string& name) {
    const size_t begin = name.rfind("noname.");
    return begin != std::string::npos &&
           name.find_first_not_of("0123456789", begin + 7) == std::string::npos;
  }

  struct Entry {
    std::string name;
    // The number of calls of this name in this process set up to this one; 0 if it was not counted.
    uint64_t call;
    int operation, set, dtype;
    uint64_t bytes;
    Clock::time_point enqueued, ended;
    std::string line;  // the file and line of the call; empty if they are not known
  };

  static std::string& line_of_thread() {
    static thread_local std::string line;
    return line;
  }

  // Scripts may make new names in each step, so the number of counted names is limited.
  static constexpr size_t kEntries = 1000, kNames = 4096;
  // Of the collectives of a process set without a name, only the last ones are counted.
  static constexpr size_t kUnnamed = 1024;
  // In jobs of more ranks than this, only the last entries are written.
  static constexpr int kManyRanks = 64;
  static constexpr size_t kEntriesOfMany = 100;
  static constexpr auto kPeriod = std::chrono::milliseconds(200);

  void run() {
    while (true) {
      std::this_thread::sleep_for(kPeriod);
      std::unique_lock<std::mutex> lock(mutex_);
      if (path_.empty()) {
        continue;
      }
      struct stat facts;
      const uint64_t request = stat(request_.c_str(), &facts) == 0 ? stamp(facts) : 0;
      const char* reason = nullptr;
      // Also an earlier time, after the machine's clock was set back.
      if (request != requested_) {
        requested_ = request;
        reason = "request";
      } else if (stalled()) {
        told_ = progress_;
        reason = "stall";
      } else if (length_of_stacks() > written_) {
        reason = "signal";
      }
      if (!reason) {
        continue;
      }
      const bool signalled = reason[0] == 's' && reason[1] == 'i';
      if (stacks_ >= 0 && !signalled) {
        kill(getpid(), signal_);
      }
      // Time for the handler; and none of the lock for collectives to wait for.
      lock.unlock();
      std::this_thread::sleep_for(kPeriod);
      lock.lock();
      if (!path_.empty()) {
        const std::string path = path_, text = json(reason);
        const uint64_t number = records_;
        // The disk may be slow, and collectives wait for the lock.
        lock.unlock();
        write(path, text, number);
      }
    }
  }

  // Whether a collective waits, none has ended for `stall_` seconds, and this was not reported.
  bool stalled() const {
    if (open_.empty() || stall_ <= 0 || told_ == progress_) {
      return false;
    }
    const auto limit = std::chrono::duration<double>(stall_);
    const auto now = Clock::now();
    return now - progress_ > limit && now - open_.begin()->second.enqueued > limit;
  }

  static uint64_t stamp(const struct stat& facts) {
    return (uint64_t)facts.st_mtim.tv_sec * 1000000000ull + (uint64_t)facts.st_mtim.tv_nsec;
  }

  off_t length_of_stacks() const {
    struct stat facts;
    return stacks_ >= 0 && fstat(stacks_, &facts) == 0 ? facts.st_size : 0;
  }

  // Writes a record to a temporary file, and renames it. Of several threads that write, the newest record stays.
  void write(const std::string& path, const std::string& text, uint64_t number) {
    const std::string draft = path + "." + std::to_string(number) + ".tmp";
    int file = open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0) {
      return;
    }
    size_t done = 0;
    while (done < text.size()) {
      ssize_t wrote = ::write(file, text.data() + done, text.size() - done);
      if (wrote < 0 && errno == EINTR) {
        continue;
      }
      if (wrote <= 0) {
        break;
      }
      done += (size_t)wrote;
    }
    close(file);
    std::lock_guard<std::mutex> guard(rename_mutex_);
    if (done < text.size() || number < renamed_ || rename(draft.c_str(), path.c_str()) != 0) {
      unlink(draft.c_str());
    } else {
      renamed_ = number;
    }
  }

  // The times in the file are times of day, all with one offset to the monotonic clock.
  std::string json(const char* reason) {
    ++records_;
    const int64_t offset = offset_to_time_of_day();
    std::string text = "{\"version\": 1, \"rank\": " + std::to_string(rank_) +
                       ", \"size\": " + std::to_string(size_) + ", \"host\": " + quoted(host_) +
                       ", \"pid\": " + std::to_string(getpid()) + ", \"reason\": " + quoted(reason) +
                       ", \"time\": " + seconds(microseconds(Clock::now()) + offset) +
                       ", \"offset\": " + seconds(offset) + ", \"machine\": " + quoted(machine()) +
                       ", \"limit\": " +
                       std::to_string((long long)limit_) + ", \"error\": " + quoted(error_) +
                       ", \"failed\": " + quoted(failed_) + ", \"groups\": " +
                       groups() + ",\n\"labels\": {";
    const char* separator = "";
    for (auto& label : labels_) {
      text += separator + quoted(label.first) + ": " + quoted(label.second);
      separator = ",\n ";
    }
    text += "},\n\"calls\": {";
    separator = "";
    for (auto& calls : calls_) {
      text += separator + quoted(std::to_string(calls.first)) + ": {";
      separator = "";
      for (auto& entry : calls.second) {
        text += separator + quoted(entry.first) + ": " + std::to_string(entry.second);
        separator = ", ";
      }
      text += "}";
      separator = ",\n ";
    }
    text += "},\n\"open\": [";
    separator = "";
    for (auto& entry : open_) {
      text += separator + json(entry.second, offset);
      separator = ",\n ";
    }
    text += "],\n\"done\": [";
    separator = "";
    // The launcher of a large job reads the records of all ranks.
    const size_t most = size_ > kManyRanks ? kEntriesOfMany : kEntries;
    for (size_t i = ring_.size() - std::min(most, ring_.size()); i < ring_.size(); ++i) {
      text += separator + json(ring_[(next_ + i) % ring_.size()], offset);
      separator = ",\n ";
    }
    return text + "],\n\"stacks\": " + quoted(new_stacks()) + "}\n";
  }

  // The ranks of the process sets: {"0": [0, 1]}.
  std::string groups() const {
    std::string text = "{";
    for (auto& group : groups_) {
      text += (text.size() > 1 ? ", \"" : "\"") + std::to_string(group.first) + "\": [";
      const char* separator = "";
      for (auto rank : group.second) {
        text += separator + std::to_string(rank);
        separator = ", ";
      }
      text += "]";
    }
    return text + "}";
  }

  static std::string json(const Entry& entry, int64_t offset) {
    return "{\"name\": " + quoted(entry.name) + ", \"call\": " + std::to_string(entry.call) +
           ", \"operation\": " + std::to_string(entry.operation) +
           ", \"set\": " + std::to_string(entry.set) + ", \"dtype\": " + std::to_string(entry.dtype) +
           ", \"bytes\": " + std::to_string(entry.bytes) + ", \"enqueued\": " +
           seconds(microseconds(entry.enqueued) + offset) + ", \"ended\": " +
           (entry.ended == Clock::time_point() ? "null"
                                               : seconds(microseconds(entry.ended) + offset)) +
           (entry.line.empty() ? "" : ", \"line\": " + quoted(entry.line)) + "}";
  }

  // What the signal handler has written since the last record, at most the last 100 kB: the main thread
  // comes last.
  std::string new_stacks() {
    const off_t length = length_of_stacks();
    std::string text((size_t)std::min<off_t>(std::max<off_t>(length - written_, 0), 100000), '\0');
    ssize_t got = text.empty() ? 0 : pread(stacks_, &text[0], text.size(), length - (off_t)text.size());
    text.resize(got > 0 ? (size_t)got : 0);
    written_ = length;
    return text;
  }

  template <typename Time>
  static int64_t microseconds(Time time) {
    return std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch()).count();
  }

  // The microseconds since 1970, minus those of the monotonic clock.
  static int64_t offset_to_time_of_day() {
    int64_t offset = 0, shortest = INT64_MAX;
    // Between two clocks, the thread may have to wait for the processor.
    for (int i = 0; i < 5; ++i) {
      const int64_t before = microseconds(Clock::now());
      const int64_t now = microseconds(std::chrono::system_clock::now());
      const int64_t after = microseconds(Clock::now());
      if (after - before < shortest) {
        shortest = after - before;
        offset = now - (before + after) / 2;
      }
    }
    return offset;
  }

  // The id of the running kernel, whose monotonic clock this process reads; empty if unknown.
  static std::string machine() {
    char text[64];
    int file = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (file < 0) {
      return "";
    }
    ssize_t got = read(file, text, sizeof text);
    close(file);
    std::string id(text, got > 0 ? (size_t)got : 0);
    while (!id.empty() && id.back() == '\n') {
      id.pop_back();
    }
    return id;
  }

  // Microseconds as seconds. Never negative: the offset is large.
  static std::string seconds(int64_t since) {
    char text[40];
    std::snprintf(text, sizeof text, "%lld.%06lld", (long long)since / 1000000,
                  (long long)since % 1000000);
    return text;
  }

  // A string of JSON. Names and paths are in UTF-8.
  static std::string quoted(const std::string& text) {
    std::string result = "\"";
    for (unsigned char c : text) {
      if (c == '"' || c == '\\') {
        result += '\\';
        result += (char)c;
      } else if (c < 0x20 || c == 0x7f) {
        char code[8];
        std::snprintf(code, sizeof code, "\\u%04x", c);
        result += code;
      } else {
        result += (char)c;
      }
    }
    return result + "\"";
  }

  std::mutex mutex_;
  uint64_t last_ = 0;
  std::map<uint64_t, Entry> open_;  // by number, so the oldest is first
  std::vector<Entry> ring_;
  size_t next_ = 0;
  // The number of calls, by process set and name.
  std::map<int, std::unordered_map<std::string, uint64_t>> calls_;
  size_t names_ = 0;
  // The names of the last calls without a name, oldest first, by process set.
  std::map<int, std::deque<std::string>> unnamed_;
  std::map<std::string, std::string> labels_;
  std::map<int, std::vector<int>> groups_;
  Clock::time_point progress_, told_, failed_at_;
  std::string path_, request_, host_, error_, failed_;
  int rank_ = 0, size_ = 0, stacks_ = -1, signal_ = 0;
  pid_t process_ = 0;
  double stall_ = 0, limit_ = 0;
  off_t written_ = 0;
  uint64_t requested_ = 0;
  uint64_t records_ = 0;  // the number of the last record
  std::mutex rename_mutex_;
  uint64_t renamed_ = 0;  // the number of the last record that was renamed
};

}  // namespace hvdkit

#endif  // HVDKIT_RECORDER_H
