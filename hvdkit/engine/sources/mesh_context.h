// A Gloo context whose ranks find each other in two requests. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_MESH_CONTEXT_H
#define HVDKIT_MESH_CONTEXT_H

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "gloo/common/error.h"
#include "gloo/context.h"
#include "gloo/transport/address.h"
#include "gloo/transport/context.h"
#include "gloo/transport/device.h"
#include "gloo/transport/pair.h"

#include "mesh_rendezvous.h"

namespace hvdkit {

class MeshContext : public gloo::Context {
 public:
  MeshContext(int rank, int size, std::chrono::milliseconds timeout) : gloo::Context(rank, size) {
    setTimeout(timeout);
  }

  // Connects this rank with all others. Returns false if the server has no such rendezvous.
  // Throws gloo::IoException.
  bool connect(const std::string& host, int port, const std::string& key, const std::string& scope,
               std::shared_ptr<gloo::transport::Device>& device) {
    return connect(device, [&](const std::vector<char>& own, std::vector<std::vector<char>>& theirs) {
      try {
        return MeshRendezvous(host, port, key, scope, rank, size).exchange(own, getTimeout(), theirs);
      } catch (const std::runtime_error& error) {
        GLOO_THROW_IO_EXCEPTION(error.what());
      }
    });
  }

  // The same. `exchange(own, theirs)` gives this rank's addresses to the others, one for each in the order of the
  // ranks, and gets those that are meant for this rank. It may return false, for no rendezvous.
  template <typename Exchange>
  bool connect(std::shared_ptr<gloo::transport::Device> device, Exchange exchange) {
    auto pairs = device->createContext(rank, size);
    pairs->setTimeout(getTimeout());
    std::vector<int> others;
    std::vector<char> own;
    for (int other = 0; other < size; ++other) {
      if (other != rank) {
        others.push_back(other);
        const auto address = pairs->createPair(other)->address().bytes();
        own.insert(own.end(), address.begin(), address.end());
      }
    }
    if (!others.empty()) {
      std::vector<std::vector<char>> theirs;
      if (!exchange(own, theirs)) {
        return false;
      }
      for (size_t i = 0; i < others.size(); ++i) {
        pairs->getPair(others[i])->connect(theirs[i]);
      }
    }
    device_ = device;
    transportContext_ = std::move(pairs);
    return true;
  }
};

}  // namespace hvdkit

#endif  // HVDKIT_MESH_CONTEXT_H
