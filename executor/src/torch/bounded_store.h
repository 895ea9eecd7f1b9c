// SPDX-License-Identifier: Apache-2.0
// A store that answers in time or not at all.
//
// [Note: stores that never answer]
// c10d's TCPStore has a timeout for what is waited for, and none for the answer itself: with the server's
// process stopped, or its machine gone, `check`, `set`, and the `get` of a key that is there read a socket
// for ever. Nothing the executor calls may do that. A call that is not over in time cannot be ended from
// outside either, so it runs in a thread that is given up together with the store.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace shardplan::executor {

// Asked while a call is waited for: why it is no use to wait any longer.
using GiveUp = std::function<std::optional<std::string>()>;

// `store`, of which every call is over within `limit`, or within the call's own timeout if it has one. A call
// that is not throws, and so does every call after it, at once. `give_up` may be null.
c10::intrusive_ptr<c10d::Store> MakeBoundedStore(c10::intrusive_ptr<c10d::Store> store,
                                                 std::chrono::milliseconds limit, GiveUp give_up = nullptr);

// The result of `connect`. Throws when it takes longer than `limit`.
c10::intrusive_ptr<c10d::Store> ConnectWithin(std::chrono::milliseconds limit,
                                              std::function<c10::intrusive_ptr<c10d::Store>()> connect);

}  // namespace shardplan::executor
