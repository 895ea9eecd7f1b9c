// SPDX-License-Identifier: Apache-2.0
#include "torch/launch.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "replay/first_line.h"
#include "torch/bounded_store.h"

namespace shardplan::executor {
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

// A variable's number; `otherwise` where it is not set.
Result<std::int64_t> NumberIn(const char* name, std::int64_t otherwise, std::int64_t least,
                              std::int64_t greatest) {
  const char* text = std::getenv(name);
  if (text == nullptr) return otherwise;
  const std::string_view digits = text;
  std::int64_t number = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const bool whole = error == std::errc() && end == digits.data() + digits.size();
  if (whole && number >= least && number <= greatest) return number;
  return std::unexpected(Error{
      .code = ErrorCode::kUsage,
      .message = fmt::format("the environment's {} cannot be", name),
      .found = fmt::format("\"{}\"", digits),
      .expected = least == greatest ? fmt::format("{}", least) : fmt::format("{} to {}", least, greatest)});
}

}  // namespace

Result<std::optional<RankEnvironment>> ReadRankEnvironment() {
  if (std::getenv("RANK") == nullptr || std::getenv("WORLD_SIZE") == nullptr) return std::nullopt;
  constexpr std::int64_t kMostRanks = 1 << 30;
  const Result<std::int64_t> world_size = NumberIn("WORLD_SIZE", 1, 1, kMostRanks);
  if (!world_size) return std::unexpected(world_size.error());
  const Result<std::int64_t> rank = NumberIn("RANK", 0, 0, *world_size - 1);
  if (!rank) return std::unexpected(rank.error());
  const Result<std::int64_t> local_rank = NumberIn("LOCAL_RANK", *rank, 0, kMostRanks);
  if (!local_rank) return std::unexpected(local_rank.error());
  const Result<std::int64_t> port = NumberIn("MASTER_PORT", 29500, 0, 65535);
  if (!port) return std::unexpected(port.error());
  RankEnvironment environment;
  environment.rank = *rank;
  environment.world_size = *world_size;
  environment.local_rank = *local_rank;
  environment.master_port = static_cast<std::uint16_t>(*port);
  if (const char* address = std::getenv("MASTER_ADDR")) environment.master_address = address;
  if (const char* restart = std::getenv("TORCHELASTIC_RESTART_COUNT")) environment.restart = restart;
  const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  environment.started_here = std::getenv("SHARDPLAN_RUN_CHILD") != nullptr;
  environment.store_is_served =
      environment.started_here || (agent != nullptr && std::string(agent) == "True");
  return environment;
}

bool IsLoopback(const std::string& host) {
  const Addresses addresses = Resolve(host, 0);
  return addresses && IsLoopbackAddress(*addresses->ai_addr);
}

bool ServesStore(const RankEnvironment& environment) {
  return environment.rank == 0 && !environment.store_is_served;
}

Result<c10::intrusive_ptr<c10d::TCPStore>> ServeStore() {
  const std::string host = "127.0.0.1";
  c10d::TCPStoreOptions options;
  options.port = 0;  // any free one
  options.isServer = true;
  options.waitWorkers = false;
  try {
    ListenOnLoopback(host, options);
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  } catch (const std::exception& exception) {
    return MakeError(ErrorCode::kEnvironment, FirstLine(exception));
  }
}

Result<c10::intrusive_ptr<c10d::Store>> MeetAtStore(const RankEnvironment& environment,
                                                    std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = environment.master_port;
  options.isServer = ServesStore(environment);
  options.waitWorkers = false;
  options.timeout = timeout;
  try {
    if (options.isServer) ListenOnLoopback(environment.master_address, options);
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    c10::intrusive_ptr<c10d::Store> store =
        ConnectWithin(timeout, [host = environment.master_address, options, deadline] {
          if (!options.isServer) AwaitServer(host, options.port, deadline);
          return c10::make_intrusive<c10d::TCPStore>(host, options);
        });
    if (!environment.restart) return store;
    return c10::make_intrusive<c10d::PrefixStore>("shardplan/attempt/" + *environment.restart, store);
  } catch (const std::exception& exception) {
    const std::string who =
        environment.store_is_served || environment.rank == 0 ? "" : "rank 0 did not arrive: ";
    return MakeError(ErrorCode::kEnvironment,
                     fmt::format("{}the store at {}:{} cannot be reached: {}", who,
                                 environment.master_address, environment.master_port, FirstLine(exception)));
  }
}

}  // namespace shardplan::executor
