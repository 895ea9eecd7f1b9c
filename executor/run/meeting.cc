// SPDX-License-Identifier: Apache-2.0
#include "meeting.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>

#include "shardplan/executor/bounded_store.h"

namespace shardplan::run {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses Resolve(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) found = nullptr;
  return {found, &freeaddrinfo};
}

bool IsLoopbackAddress(const sockaddr& address) {
  if (address.sa_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  if (address.sa_family != AF_INET) return false;
  return (ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24) == 127;
}

// A socket that listens at the address alone. c10d binds to every interface unless it is given a socket.
int Listen(const addrinfo& address, const std::string& host) {
  const int listening = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (listening >= 0) (void)setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (listening >= 0 && bind(listening, address.ai_addr, address.ai_addrlen) == 0 &&
      listen(listening, SOMAXCONN) == 0) {
    return listening;
  }
  const int error = errno;
  if (listening >= 0) (void)close(listening);
  throw std::runtime_error(fmt::format("no store can be served on {}: {}", host, std::strerror(error)));
}

std::uint16_t PortOf(int listening) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  (void)getsockname(listening, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

void ListenOnLoopback(const std::string& host, c10d::TCPStoreOptions& options) {
  const Addresses addresses = Resolve(host, options.port);
  if (!addresses || !IsLoopbackAddress(*addresses->ai_addr)) return;
  options.masterListenFd = Listen(*addresses, host);
  options.port = PortOf(*options.masterListenFd);
}

bool Accepts(const std::string& host, std::uint16_t port) {
  const Addresses addresses = Resolve(host, port);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const int tried = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool accepts = tried >= 0 && connect(tried, address->ai_addr, address->ai_addrlen) == 0;
    if (tried >= 0) (void)close(tried);
    if (accepts) return true;
  }
  return false;
}

// Until somebody listens there: c10d prints stack traces while it waits for that.
void AwaitServer(const std::string& host, std::uint16_t port,
                 std::chrono::steady_clock::time_point deadline) {
  while (!Accepts(host, port)) {
    if (std::chrono::steady_clock::now() >= deadline) throw std::runtime_error("nobody listens there");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace

bool IsLoopback(const std::string& host) {
  const Addresses addresses = Resolve(host, 0);
  return addresses && IsLoopbackAddress(*addresses->ai_addr);
}

c10::intrusive_ptr<c10d::TCPStore> ServeStore() {
  const std::string host = "127.0.0.1";
  c10d::TCPStoreOptions options;
  options.port = 0;  // any free one
  options.isServer = true;
  options.waitWorkers = false;
  ListenOnLoopback(host, options);
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

c10::intrusive_ptr<c10d::Store> Connect(const RunOptions& options, const RankEnvironment& environment) {
  const std::chrono::seconds timeout(options.timeout_s);
  c10d::TCPStoreOptions store;
  store.port = environment.master_port;
  store.isServer = ServesStore(environment);
  store.waitWorkers = false;
  store.timeout = timeout;
  if (store.isServer) ListenOnLoopback(environment.master_address, store);
  try {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    return executor::ConnectWithin(timeout, [host = environment.master_address, store, deadline] {
      if (!store.isServer) AwaitServer(host, store.port, deadline);
      return c10::make_intrusive<c10d::TCPStore>(host, store);
    });
  } catch (const std::exception& exception) {
    const std::string what = exception.what();
    const std::string who =
        environment.store_is_served || environment.rank == 0 ? "" : "rank 0 did not arrive: ";
    throw std::runtime_error(fmt::format("{}the store at {}:{} cannot be reached: {}", who,
                                         environment.master_address, environment.master_port,
                                         what.substr(0, what.find('\n'))));
  }
}

bool ServesStore(const RankEnvironment& environment) {
  return environment.rank == 0 && !environment.store_is_served;
}

}  // namespace shardplan::run
