// The rendezvous of a Gloo mesh in two requests per rank. Part of hvdkit (Apache-2.0).
//
// Every rank of a mesh has a listening address for each other rank. It gives all of them to the
// launcher's server in one PUT. One GET then waits until all ranks have done so, and returns the
// addresses at which this rank is expected. The server is hvdkit/rendezvous/server.py, the state behind it
// hvdkit/rendezvous/mesh.py.

#ifndef HVDKIT_MESH_RENDEZVOUS_H
#define HVDKIT_MESH_RENDEZVOUS_H

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace hvdkit {

// One request of HTTP/1.0 over a connection of its own.
class HttpRequest {
 public:
  using Clock = std::chrono::steady_clock;

  struct Answer {
    int status;
    std::string body;
  };

  HttpRequest(const std::string& host, int port, Clock::time_point deadline)
      : host_(host), port_(std::to_string(port)), deadline_(deadline) {}

  ~HttpRequest() {
    if (socket_ >= 0) {
      close(socket_);
    }
  }

  HttpRequest(const HttpRequest&) = delete;
  HttpRequest& operator=(const HttpRequest&) = delete;

  // Throws std::runtime_error if no complete answer arrives before the deadline.
  Answer perform(const std::string& method, const std::string& path, const std::string& key,
                 const char* body, size_t length) {
    connect_to_server();
    std::ostringstream head;
    head << method << " " << path << " HTTP/1.0\r\n"
         << "Authorization: Bearer " << key << "\r\n"
         << "Content-Length: " << length << "\r\n\r\n";
    const std::string lines = head.str();
    send_all(lines.data(), lines.size());
    send_all(body, length);
    return parsed(received());
  }

 private:
  void connect_to_server() {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (int error = getaddrinfo(host_.c_str(), port_.c_str(), &hints, &found)) {
      throw std::runtime_error(host_ + ": " + gai_strerror(error));
    }
    int error = 0;
    for (addrinfo* each = found; each != nullptr && socket_ < 0; each = each->ai_next) {
      socket_ = socket(each->ai_family, each->ai_socktype | SOCK_CLOEXEC, each->ai_protocol);
      if (socket_ < 0) {
        error = errno;
        continue;
      }
      limit_time();
      if (connect(socket_, each->ai_addr, each->ai_addrlen) != 0) {
        error = errno;
        close(socket_);
        socket_ = -1;
      }
    }
    freeaddrinfo(found);
    if (socket_ < 0) {
      fail("connect", error);
    }
  }

  // Lets the next call on the socket fail at the deadline.
  void limit_time() {
    auto left =
        std::chrono::duration_cast<std::chrono::microseconds>(deadline_ - Clock::now()).count();
    left = std::max<decltype(left)>(left, 1000);
    timeval value{static_cast<time_t>(left / 1000000), static_cast<suseconds_t>(left % 1000000)};
    setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &value, sizeof value);
    setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &value, sizeof value);
  }

  void send_all(const char* data, size_t length) {
    while (length > 0) {
      limit_time();
      ssize_t sent = send(socket_, data, length, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) {
        continue;
      }
      if (sent < 0) {
        fail("send", errno);
      }
      data += sent;
      length -= static_cast<size_t>(sent);
    }
  }

  std::string received() {
    std::string answer;
    std::vector<char> piece(1 << 16);
    for (;;) {
      limit_time();
      ssize_t got = recv(socket_, piece.data(), piece.size(), 0);
      if (got < 0 && errno == EINTR) {
        continue;
      }
      if (got < 0) {
        fail("recv", errno);
      }
      if (got == 0) {
        return answer;
      }
      answer.append(piece.data(), static_cast<size_t>(got));
    }
  }

  Answer parsed(const std::string& answer) {
    const size_t end = answer.find("\r\n\r\n");
    const size_t status = answer.find(' ');
    const std::string name = "\r\nContent-Length: ";
    const size_t length = answer.find(name);
    if (answer.compare(0, 5, "HTTP/") != 0 || end == std::string::npos || status > end) {
      throw std::runtime_error("the connection to " + host_ + ":" + port_ + " broke");
    }
    Answer result{std::atoi(answer.c_str() + status), answer.substr(end + 4)};
    if (length < end &&
        std::strtoull(answer.c_str() + length + name.size(), nullptr, 10) != result.body.size()) {
      throw std::runtime_error("the connection to " + host_ + ":" + port_ + " broke");
    }
    return result;
  }

  [[noreturn]] void fail(const char* call, int error) {
    const bool late = error == EAGAIN || error == EINPROGRESS;
    throw std::runtime_error(host_ + ":" + port_ + ": " + call + ": " +
                             (late ? "no answer in time" : std::strerror(error)));
  }

  const std::string host_;
  const std::string port_;
  const Clock::time_point deadline_;
  int socket_ = -1;
};

// One rank's part in the rendezvous of one mesh.
class MeshRendezvous {
 public:
  // The server at `host` and `port` (IPv4, IPv6 or a name) knows the mesh as `scope`.
  MeshRendezvous(const std::string& host, int port, const std::string& key,
                 const std::string& scope, int rank, int size)
      : host_(host), port_(port), key_(key), rank_(rank), size_(size) {
    std::random_device random;
    std::ostringstream path;
    // Two components, scope and key, as the server of `horovodrun` requires.
    path << "/mesh/" << size << "." << std::hex << random() << random() << std::dec << "." << rank
         << "." << scope;
    path_ = path.str();
  }

  // Gives the server this rank's addresses (`size - 1` of equal length, in the order of the other
  // ranks), and puts into `theirs` the addresses of the others that are meant for this rank, in
  // the same order.
  //
  // Returns false if the server does not support such requests: `horovodrun` has a server of its own.
  // Throws std::runtime_error if the server cannot be reached, or not all ranks have sent addresses.
  bool exchange(const std::vector<char>& own, std::chrono::milliseconds timeout,
                std::vector<std::vector<char>>& theirs) {
    const auto deadline = Clock::now() + timeout;
    auto answer = put(own, deadline);
    if (answer.status == 200) {
      answer = get(deadline);
    }
    if (answer.status == 404 || answer.status == 405 || answer.status == 501) {
      return false;
    }
    if (answer.status != 200 || answer.body.size() != own.size()) {
      throw std::runtime_error("rendezvous at " + host_ + ":" + std::to_string(port_) + ": " +
                               (answer.body.empty() || answer.status == 200
                                    ? "status " + std::to_string(answer.status)
                                    : answer.body));
    }
    const size_t width = own.size() / static_cast<size_t>(size_ - 1);
    theirs.clear();
    for (size_t at = 0; at < answer.body.size(); at += width) {
      theirs.emplace_back(answer.body.begin() + at, answer.body.begin() + at + width);
    }
    return true;
  }

 private:
  using Clock = HttpRequest::Clock;

  HttpRequest::Answer put(const std::vector<char>& own, Clock::time_point deadline) {
    return repeated(deadline, [&] {
      return HttpRequest(host_, port_, deadline)
          .perform("PUT", path_, key_, own.data(), own.size());
    });
  }

  HttpRequest::Answer get(Clock::time_point deadline) {
    return repeated(deadline, [&] {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
      const std::string path = path_ + "?" + std::to_string(std::max<long long>(left, 0));
      // 10 s longer than the server: its timeout answer names the missing ranks.
      return HttpRequest(host_, port_, deadline + std::chrono::seconds(10))
          .perform("GET", path, key_, nullptr, 0);
    });
  }

  // The requests may be repeated: the path has a number that only this attempt has.
  template <typename Request>
  HttpRequest::Answer repeated(Clock::time_point deadline, Request request) {
    auto pause = std::chrono::milliseconds(50);
    for (;;) {
      try {
        return request();
      } catch (const std::runtime_error& error) {
        if (Clock::now() + pause >= deadline) {
          throw std::runtime_error(std::string("rendezvous: ") + error.what());
        }
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::milliseconds(1000));
    }
  }

  const std::string host_;
  const int port_;
  const std::string key_;
  const int rank_;
  const int size_;
  std::string path_;
};

}  // namespace hvdkit

#endif  // HVDKIT_MESH_RENDEZVOUS_H
